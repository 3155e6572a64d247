"""Reads of a data file into a region on the device: GPUDirect Storage, or POSIX where that is host
memory.

A NIXL agent is for one thread at a time, and an error may end whatever else is in its queue: each
caller takes an idle one, and one that has failed is not used again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import NamedTuple

from kvcore.errors import TierUnavailable, UnsupportedError
from kvcore.memory.device_region import DeviceRegion
from kvcore.memory.nixl import DONE, FileAgent, FileSpan
from kvcore.tiers.disk.files import DataFile

__all__ = ["BACKENDS", "DirectReader", "Pick", "open_direct"]

_log = logging.getLogger("kvcore.tiers.disk")

BACKENDS = {"VRAM": ("GDS_MT", "GDS"), "DRAM": ("POSIX",)}
"""NIXL's, by the kind of memory, the best first."""


class Pick(NamedTuple):
    """A slot of the file, and the slot of the region that it goes to."""

    slot: int
    place: int


class DirectReader:
    """Thread-safe. ``agent`` is the first, of ``backend``, over ``region``."""

    def __init__(
        self, data: DataFile, region: DeviceRegion, backend: str, agent: FileAgent
    ) -> None:
        self.backend = backend
        self._data = data
        self.region = region
        self._lock = threading.Lock()
        self._idle = [agent]

    def read(self, picks: Sequence[Pick]) -> list[str | None]:
        """None for each that was read, else why not. Blocks until all have ended, however long it
        takes: whoever has the places has them until then."""
        if not picks:
            return []
        try:
            with self._data.descriptor() as fd:
                return self._read(fd, picks)
        except (OSError, TierUnavailable, UnsupportedError) as error:
            return [str(error)] * len(picks)

    def close(self) -> None:
        """Nothing may be under way. Before the file and the region."""
        with self._lock:
            self._idle.clear()

    def _read(self, fd: int, picks: Sequence[Pick]) -> list[str | None]:
        size = self.region.slot_nbytes
        spans = [FileSpan(fd, pick.place * size, size, pick.slot * size) for pick in picks]
        with self._lock:
            agent = self._idle.pop() if self._idle else None
        agent = agent or start_agent(self.backend, self._data, self.region)
        state = agent.move("READ", spans)
        if state == DONE:
            with self._lock:
                self._idle.append(agent)
            return [None] * len(picks)
        if len(picks) == 1:
            return [state]
        return [error for pick in picks for error in self._read(fd, [pick])]


def start_agent(backend: str, data: DataFile, region: DeviceRegion) -> FileAgent:
    """Raises UnsupportedError without NIXL, TierUnavailable where the backend does not start."""
    agent = FileAgent(backend, region.memory)
    with data.descriptor() as fd:
        agent.keep(fd, data.limit)
    return agent


def open_direct(data: DataFile, region: DeviceRegion) -> DirectReader | None:
    """None where no backend starts here, which is said in the log."""
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
