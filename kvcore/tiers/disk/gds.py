"""Reads of a data file straight into device memory, by GPUDirect Storage through NIXL.

A region in host memory is read by NIXL's POSIX backend instead. A NIXL agent serves one thread at a
time, and an error may end everything in its queue. Each caller therefore takes an idle agent, and
an agent that has failed is not used again.

GPUDirect Storage knows a file and a region once in a process. It refuses the second registration of
a descriptor, and what one agent deregisters is gone for all. Its backends therefore have one agent
at a time, for which callers wait: GDS_MT has threads of its own. An agent that has failed is closed
before the next one starts.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple

from kvcore.errors import TierUnavailable, UnsupportedError
from kvcore.memory.device_region import DeviceRegion
from kvcore.memory.nixl import DONE, FileAgent, FileSpan
from kvcore.tiers.disk.files import DataFile

__all__ = ["BACKENDS", "DirectReader", "Pick", "open_direct"]

_log = logging.getLogger("kvcore.tiers.disk")

BACKENDS = {"VRAM": ("GDS_MT", "GDS"), "DRAM": ("POSIX",)}
"""NIXL's backends by the kind of memory, the best first."""
_ALONE = frozenset({"GDS_MT", "GDS"})
"""Backends of which a process has one agent for a file."""


class Pick(NamedTuple):
    """A slot of the file, and the slot of the region (``place``) that it is read into."""

    slot: int
    place: int


class DirectReader:
    """Reads slots of ``data`` into ``region``. Thread-safe.

    ``agent`` is the first agent. It and all later ones use ``backend``.
    """

    def __init__(
        self, data: DataFile, region: DeviceRegion, backend: str, agent: FileAgent
    ) -> None:
        self.backend = backend
        self._data = data
        self.region = region
        self._lock = threading.Lock()
        self._turn = threading.Lock() if backend in _ALONE else nullcontext()
        self._idle = [agent]

    def read(self, picks: Sequence[Pick]) -> list[str | None]:
        """Read slots. Return None for each that was read, and the reason for each that was not.

        Blocks until all have ended, however long it takes, because the reads write to the region
        until then.
        """
        if not picks:
            return []
        try:
            with self._data.descriptor() as fd:
                return self._read(fd, picks)
        except (OSError, TierUnavailable, UnsupportedError) as error:
            return [str(error)] * len(picks)

    def close(self) -> None:
        """Release the agents, before the file and the region. No read may be under way."""
        with self._lock:
            idle, self._idle = self._idle, []
        for agent in idle:
            agent.close()

    def _read(self, fd: int, picks: Sequence[Pick]) -> list[str | None]:
        size = self.region.slot_nbytes
        spans = [FileSpan(fd, pick.place * size, size, pick.slot * size) for pick in picks]
        state = self._move(spans)
        if state == DONE:
            return [None] * len(picks)
        if len(picks) == 1:
            return [state]
        return [error for pick in picks for error in self._read(fd, [pick])]

    def _move(self, spans: Sequence[FileSpan]) -> str:
        """Read spans with an agent that nobody else uses, and return NIXL's word for the outcome.

        Raises as `start_agent` does.
        """
        with self._turn:
            with self._lock:
                agent = self._idle.pop() if self._idle else None
            agent = agent or start_agent(self.backend, self._data, self.region)
            state = agent.move("READ", spans)
            if state == DONE:
                with self._lock:
                    self._idle.append(agent)
            else:
                agent.close()
            return state


def start_agent(backend: str, data: DataFile, region: DeviceRegion) -> FileAgent:
    """Start an agent over the region and the file.

    Raises UnsupportedError without NIXL, and TierUnavailable if the backend does not start.
    """
    agent = FileAgent(backend, region.memory)
    try:
        with data.descriptor() as fd:
            agent.keep(fd, data.limit)
    except (OSError, TierUnavailable):
        agent.close()
        raise
    return agent


def open_direct(data: DataFile, region: DeviceRegion) -> DirectReader | None:
    """Return a reader; None if no backend starts, and the reasons are logged."""
    reasons = []
    for backend in BACKENDS[region.memory.kind]:
        try:
            return DirectReader(data, region, backend, start_agent(backend, data, region))
        except (OSError, TierUnavailable, UnsupportedError) as error:  # noqa: PERF203 - two tries
            reasons.append(str(error))
    _log.warning(
        "disk.to_device: blocks go through host memory all the same, for %s", "; ".join(reasons)
    )
    return None
