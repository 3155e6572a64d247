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
    """``row`` is the last one of the resume point behind the blocks; None without points."""

    blocks: int
    until: float
    row: bytes | None


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
        row = None
        if self._points is not None:
            if not self._points.has(keys, promise.blocks):
                return
            row = self._points.last_row(keys, promise.blocks)
        self._waits[keys[-1]] = _Wait(promise.blocks, self._clock() + promise.wait_s, row)
        if len(self._waits) > MAX_AWAITED:
            del self._waits[next(iter(self._waits))]

    def coming(self, keys: Sequence[bytes], depth: int) -> bool:
        """Return True if promised blocks beyond ``depth`` are arriving in host memory.

        If they are not, the promise is forgotten.
        """
        wait = self._waits.get(keys[-1]) if keys else None
        if wait is None:
            return False
        if self._clock() < wait.until and self._held(keys, wait) > depth:
            return True
        del self._waits[keys[-1]]
        return False

    def _held(self, keys: Sequence[bytes], wait: _Wait) -> int:
        """Return how many promised blocks host memory holds or is receiving.

        With resume points it is all of them, with the point behind them, or none.
        """
        if wait.row is None:
            return self._index.held(HOST, keys[: wait.blocks])
        return wait.blocks * self._index.held(HOST, [wait.row])
