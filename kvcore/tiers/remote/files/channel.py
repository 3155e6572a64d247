"""A channel: registered memory, and the NIXL agent that transfers it to and from files.

NIXL's POSIX backend has one queue per agent, and an error may abort everything in that queue.
Therefore each channel has its own agent, serves one call at a time, and replaces the agent after an
error.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.errors import TierError, TierUnavailable
from kvcore.memory.hugepages import Pages
from kvcore.memory.nixl import CHANNEL_NBYTES, DONE, FileAgent, FileSpan, Memory

__all__ = ["Channel"]


class Channel:
    """Memory and an agent. One thread at a time may use a channel, and all of its memory."""

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._memory: Pages | None = None
        self._agent: FileAgent | None = None

    def room(self, nbytes: int) -> memoryview:
        """Return ``nbytes`` of memory that `move` reads or fills.

        Raises TierUnavailable if the system has no memory left.
        """
        if self._memory is None or self._memory.view.nbytes < nbytes:
            self.close()
            self._memory = Pages(max(nbytes, CHANNEL_NBYTES), huge=False)
        return self._memory.view[:nbytes]

    def move(self, operation: str, spans: Sequence[FileSpan]) -> list[TierError | None]:
        """READ files into the memory, or WRITE them from it, and return one result per span.

        Blocks until all have ended. Raises TierUnavailable if NIXL does not start.
        """
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
        """Release the agent and the memory. Idempotent."""
        self._agent = None  # before the memory that it has registered
        if self._memory is not None:
            self._memory.close()
            self._memory = None
