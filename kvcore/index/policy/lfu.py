"""Least frequently used, with dynamic ageing."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from kvcore.errors import ConfigError
from kvcore.index.policy.base import EvictionPolicy, LeafHeap, Recency, fit

__all__ = ["LFU"]

_STAMP_BITS = 48
_STAMPS = (1 << _STAMP_BITS) - 1
_SCATTER = 0x9E3779B97F4B
"""The golden ratio's share of 2**48, odd: stamps that follow each other come to lie far apart."""


class LFU(EvictionPolicy):
    """Evicts the leaf of least ``uses + age``, and among equals any one.

    ``age`` is the score of the last victim (LFU with dynamic ageing: Arlitt et al., 2000).
    Newcomers start at age + 1, so a block that was popular last week does not stay for ever.

    Of the uses of a block at most ``max_uses`` count. A conversation of many turns would otherwise
    outlive its end by as many victims of each score.

    Equals are in an order that has nothing to do with their age. If users take turns, and their
    contexts are a little more than the tier, the least recently used context is the one that is
    asked for next. LRU then finds nothing, and this policy a large part.
    """

    name = "lfu"

    def __init__(self, capacity: int, recency: Recency, *, max_uses: int = 4) -> None:
        super().__init__(capacity, recency)
        if max_uses < 1:
            raise ConfigError(f"max_uses must be at least 1, got {max_uses}")
        self._max_uses = max_uses
        self._age = 0
        self._uses = array("q")
        self._score = array("q")
        self._leaves = LeafHeap(self.order)

    def stored(self, node: int, key: bytes) -> None:
        self.touch(node)

    def touch(self, node: int) -> None:
        fit(node, self._uses, self._score)
        self._uses[node] = min(self._uses[node] + 1, self._max_uses)
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
        # A use may lower a block among its equals. The heap then keeps its old place among them.
        scattered = self.recency.stamps[node] * _SCATTER & _STAMPS
        return self._score[node] << _STAMP_BITS | scattered
