"""Priorities with a time to live."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from heapq import heappop, heappush

from kvcore.errors import ConfigError
from kvcore.index.policy.base import EvictionPolicy, LeafHeap, Recency, fit

__all__ = ["Priority"]

_STAMP_BITS = 48


class Priority(EvictionPolicy):
    """Evicts the leaf of lowest priority, and among equals the least recently used.

    Priorities are 0 to 100; a block starts at ``default``. `set_priority` changes one for ``ttl``
    seconds or for good; after that the block falls back to the default. To keep a prefix, give its
    *last* block a priority: its ancestors cannot be evicted before it, and they inherit the higher
    of both priorities when it leaves.
    """

    name = "priority"

    def __init__(
        self,
        capacity: int,
        recency: Recency,
        default: int = 35,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(capacity, recency)
        self.default = _checked(default)
        self._clock = clock
        self._offset = bytearray()  # priority + 1; 0: the default
        self._deadline: dict[int, float] = {}
        self._expiries: list[tuple[float, int]] = []
        self._leaves = LeafHeap(self.order)

    def set_priority(self, node: int, priority: int, ttl: float | None = None) -> None:
        """Give a stored block a priority, for ``ttl`` seconds or (None) until it leaves."""
        fit(node, self._offset)
        self._offset[node] = _checked(priority) + 1
        self._expire_at(node, None if ttl is None else self._clock() + ttl)
        self._leaves.lowered(node)

    def priority_of(self, node: int) -> int:
        """Return the current priority."""
        self._expire()
        return self._current(node)

    def add(self, node: int) -> None:
        fit(node, self._offset)
        self._leaves.add(node)

    def remove(self, node: int) -> None:
        self._leaves.discard(node)

    def victim(self) -> int | None:
        self._expire()
        return self._leaves.pop()

    def forget(self, node: int, key: bytes, parent: int, *, evicted: bool) -> None:
        fit(max(node, parent), self._offset)
        self._expire()
        if parent >= 0 and self._offset[node] and self._current(node) > self._current(parent):
            self._offset[parent] = self._offset[node]
            self._expire_at(parent, self._deadline.get(node))
        self._offset[node] = 0
        self._deadline.pop(node, None)
        self._leaves.lowered(node)

    def evictable(self) -> Iterable[int]:
        return self._leaves.nodes()

    def _current(self, node: int) -> int:
        offset = self._offset[node] if node < len(self._offset) else 0
        return offset - 1 if offset else self.default

    def order(self, node: int) -> int:
        return self._current(node) << _STAMP_BITS | self.recency.stamps[node]

    def _expire_at(self, node: int, deadline: float | None) -> None:
        if deadline is None:
            self._deadline.pop(node, None)
            return
        self._deadline[node] = deadline
        heappush(self._expiries, (deadline, node))
        if len(self._expiries) > 2 * len(self._deadline) + 64:
            self._expiries = sorted((when, which) for which, when in self._deadline.items())

    def _expire(self) -> None:
        now = self._clock()
        while self._expiries and self._expiries[0][0] <= now:
            deadline, node = heappop(self._expiries)
            if self._deadline.get(node) == deadline:
                del self._deadline[node]
                self._offset[node] = 0
                self._leaves.lowered(node)


def _checked(priority: int) -> int:
    if not 0 <= priority <= 100:
        raise ConfigError(f"a priority must be 0 to 100, got {priority}")
    return priority
