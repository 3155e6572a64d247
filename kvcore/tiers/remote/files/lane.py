"""A lane: registered memory, and the NIXL agent that moves it to files and back.

NIXL's POSIX backend has one queue an agent, and an error may end whatever else is in it. So each
lane has an agent, one call uses it at a time, and after an error it gets another.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from kvcore.errors import TierError, TierUnavailable
from kvcore.tiers.pages import Pages
from kvcore.tiers.remote.nixl import DONE, LANE_NBYTES, RUNNING, NixlAgent, pauses, say

_ADVICE = (
    "POSIX is in every NIXL; GDS and GDS_MT need NVIDIA's GPUDirect Storage (libcufile) on this "
    "machine"
)
_numbers = itertools.count()


class Span(NamedTuple):
    """An open file, all of whose ``nbytes`` are, or will be, ``start`` bytes into the lane."""

    fd: int
    start: int
    nbytes: int


class FileAgent(NixlAgent):
    """Moves ``memory`` to files and back. One thread at a time."""

    def __init__(self, backend: str, memory: Pages | None = None) -> None:
        """Raises UnsupportedError without NIXL, TierUnavailable without its backend."""
        super().__init__(f"kvcore-files-{os.getpid()}-{next(_numbers)}", backend, _ADVICE)
        if memory is not None:
            self._address = memory.address
            try:
                self._register(memory)
            except self._errors as error:
                raise TierUnavailable(f"NIXL registers no memory: {say(error)}") from error

    def move(self, operation: str, spans: Sequence[Span]) -> str:
        """READ or WRITE files. Blocks until that has ended, however long it takes; returns NIXL's
        word for how."""
        agent = self._agent
        try:
            files = agent.register_memory([(0, s.nbytes, s.fd, "") for s in spans], "FILE")
        except self._errors as error:
            return say(error)
        try:
            return self._move(operation, spans)
        except self._errors as error:
            return say(error)
        finally:
            with suppress(*self._errors):
                agent.deregister_memory(files)

    def _move(self, operation: str, spans: Sequence[Span]) -> str:
        agent = self._agent
        handle = agent.initialize_xfer(
            operation,
            agent.get_xfer_descs([(self._address + s.start, s.nbytes, 0) for s in spans], "DRAM"),
            agent.get_xfer_descs([(0, s.nbytes, s.fd) for s in spans], "FILE"),
            self.name,
        )
        state = self._state(handle, post=True)
        for pause in pauses():
            if state != RUNNING:
                break
            time.sleep(pause)
            state = self._state(handle)
        self._release(handle)
        return state


class Lane:
    """``view`` is its memory. Whoever has it, one thread at a time, may use all of it."""

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._memory: Pages | None = None
        self._agent: FileAgent | None = None

    def room(self, nbytes: int) -> memoryview:
        """``nbytes`` of memory that `move` reads or fills. Raises TierUnavailable where the system
        has none."""
        if self._memory is None or self._memory.view.nbytes < nbytes:
            self.close()
            self._memory = Pages(max(nbytes, LANE_NBYTES), huge=False)
        return self._memory.view[:nbytes]

    def move(self, operation: str, spans: Sequence[Span]) -> list[TierError | None]:
        """READ files into the memory, or WRITE them from it; what became of each. Blocks until all
        have ended. Raises TierUnavailable where NIXL does not start."""
        if not spans:
            return []
        if self._agent is None:
            self._agent = FileAgent(self._backend, self._memory)
        state = self._agent.move(operation, spans)
        if state == DONE:
            return [None] * len(spans)
        self._agent = None
        if len(spans) == 1:
            return [TierUnavailable(f"NIXL's {operation} of a file failed: {state}")]
        return [error for span in spans for error in self.move(operation, [span])]

    def close(self) -> None:
        """Give everything back. Idempotent."""
        self._agent = None  # before the memory that it has registered
        if self._memory is not None:
            self._memory.close()
            self._memory = None
