"""Least frequently used, with dynamic ageing."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from kvcore.index.policy.base import EvictionPolicy, LeafHeap, Recency, fit

__all__ = ["LFU"]

_STAMP_BITS = 48


class LFU(EvictionPolicy):
    """Evicts the leaf of least ``uses + age``, and among equals the least recently used.

    ``age`` is the score of the last victim (LFU with dynamic ageing: Arlitt et al., 2000).
    Newcomers start at age + 1, so a block that was popular last week does not stay for ever.
    """

    name = "lfu"

    def __init__(self, capacity: int, recency: Recency) -> None:
        super().__init__(capacity, recency)
        self._age = 0
        self._uses = array("q")
        self._score = array("q")
        self._leaves = LeafHeap(self.order)

    def stored(self, node: int, key: bytes) -> None:
        self.touch(node)

    def touch(self, node: int) -> None:
        fit(node, self._uses, self._score)
        self._uses[node] += 1
        self._score[node] = self._age + self._uses[node]

    def add(self, node: int) -> None:
        fit(node, self._uses, self._score)
        self._leaves.add(node)

    def remove(self, node: int) -> None:
        self._leaves.discard(node)

    def victim(self) -> int | None:
        node = self._leaves.pop()
        if node is not None:
            self._age = max(self._age, self._score[node])
        return node

    def forget(self, node: int, key: bytes, parent: int, *, evicted: bool) -> None:
        fit(max(node, parent), self._uses, self._score)
        if parent >= 0:
            self._uses[parent] = max(self._uses[parent], self._uses[node])
            self._score[parent] = max(self._score[parent], self._score[node])
        self._uses[node] = self._score[node] = 0
        self._leaves.lowered(node)

    def evictable(self) -> Iterable[int]:
        return self._leaves.nodes()

    def order(self, node: int) -> int:
        return self._score[node] << _STAMP_BITS | self.recency.stamps[node]
