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
from kvcore.model.points import PointRows

__all__ = ["MAX_AWAITED", "PendingPrefills"]

MAX_AWAITED = 256
"""Prompts that are waited for at once; one more replaces the oldest."""


class _Wait(NamedTuple):
    blocks: int
    until: float


class PendingPrefills:
    """The promised prompts, by their last key.

    Of a model with resume ``points`` the point behind the promised blocks is waited for, because a
    save brings all of it or nothing. The server's thread only. Nothing blocks.
    """

    def __init__(
        self,
        index: BlockIndex,
        points: PointRows | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._index = index
        self._points = points
        self._clock = clock
        self._waits: dict[bytes, _Wait] = {}  # by the last key of the prompt

    def __len__(self) -> int:
        return len(self._waits)

    def expect(self, keys: Sequence[bytes], promise: Promise) -> None:
        """Remember that ``promise`` covers the first blocks of a prompt.

        It is ignored if the model cannot go on behind them.
        """
        self._waits.pop(keys[-1], None)
        if self._points is not None and not self._points.has(keys, promise.blocks):
            return
        self._waits[keys[-1]] = _Wait(promise.blocks, self._clock() + promise.wait_s)
        if len(self._waits) > MAX_AWAITED:
            del self._waits[next(iter(self._waits))]

    def coming(self, keys: Sequence[bytes], depth: int) -> bool:
        """Return True if promised blocks beyond ``depth`` are arriving in host memory.

        If they are not, the promise is forgotten.
        """
        wait = self._waits.get(keys[-1]) if keys else None
        if wait is None:
            return False
        if self._clock() < wait.until and self._held(keys, wait.blocks) > depth:
            return True
        del self._waits[keys[-1]]
        return False

    def _held(self, keys: Sequence[bytes], blocks: int) -> int:
        """Return how many of the first ``blocks`` host memory holds or is receiving.

        With resume points it is all of them, with the point behind them, or none.
        """
        if self._points is None:
            return self._index.held(HOST, keys[:blocks])
        return blocks * self._index.held(HOST, [self._points.last_row(keys, blocks)])
