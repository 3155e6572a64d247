"""A lane: registered memory, and the NIXL agent that moves it to files and back.

NIXL's POSIX backend has one queue an agent, and an error may end whatever else is in it. So each
lane has an agent, one call uses it at a time, and after an error it gets another.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.errors import TierError, TierUnavailable
from kvcore.memory.hugepages import Pages
from kvcore.memory.nixl import DONE, LANE_NBYTES, FileAgent, FileSpan, Memory

__all__ = ["Lane"]


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

    def move(self, operation: str, spans: Sequence[FileSpan]) -> list[TierError | None]:
        """READ files into the memory, or WRITE them from it; what became of each. Blocks until all
        have ended. Raises TierUnavailable where NIXL does not start."""
        if not spans:
            return []
        if self._agent is None:
            assert self._memory is not None, "spans lie in it"
            self._agent = FileAgent(self._backend, Memory.of(self._memory))
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
