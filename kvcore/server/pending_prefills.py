"""Prompts that another engine of the same server promised and is saving here.

A promise is remembered until its blocks are in host memory, no session saves them any more, or its
time is over, whichever comes first. Nothing is pinned meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvcore.index import BlockIndex
from kvcore.manager.base import HOST, Promise

__all__ = ["MAX_AWAITED", "PendingPrefills"]

MAX_AWAITED = 256
"""Prompts that are waited for at once; one more replaces the oldest."""


class _Wait(NamedTuple):
    blocks: int
    until: float


class PendingPrefills:
    """The promised prompts, by their last key.

    The server's thread only. Nothing blocks.
    """

    def __init__(self, index: BlockIndex, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._index = index
        self._clock = clock
        self._waits: dict[bytes, _Wait] = {}  # by the last key of the prompt

    def __len__(self) -> int:
        return len(self._waits)

    def expect(self, keys: Sequence[bytes], promise: Promise) -> None:
        """Remember that ``promise`` covers the first blocks of a prompt."""
        self._waits.pop(keys[-1], None)
        self._waits[keys[-1]] = _Wait(promise.blocks, self._clock() + promise.wait_s)
        if len(self._waits) > MAX_AWAITED:
            del self._waits[next(iter(self._waits))]

    def coming(self, keys: Sequence[bytes], depth: int) -> bool:
        """Return True if more than ``depth`` promised blocks are arriving in host memory.

        If they are not, the promise is forgotten.
        """
        wait = self._waits.get(keys[-1]) if keys else None
        if wait is None:
            return False
        promised = keys[: wait.blocks]
        if self._clock() < wait.until and self._index.held(HOST, promised) > depth:
            return True
        del self._waits[keys[-1]]
        return False
