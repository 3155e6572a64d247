"""Least recently used."""

from __future__ import annotations

from collections.abc import Iterable

from kvcore.index.policy.base import EvictionPolicy, LeafHeap, Recency

__all__ = ["LRU"]


class LRU(EvictionPolicy):
    """Evicts the leaf whose last use, or that of any former descendant, is oldest."""

    name = "lru"

    def __init__(self, capacity: int, recency: Recency) -> None:
        super().__init__(capacity, recency)
        self._leaves = LeafHeap(recency.stamps.__getitem__)

    def add(self, node: int) -> None:
        self._leaves.add(node)

    def remove(self, node: int) -> None:
        self._leaves.discard(node)

    def victim(self) -> int | None:
        return self._leaves.pop()

    def forget(self, node: int, key: bytes, parent: int, *, evicted: bool) -> None:
        self._leaves.lowered(node)

    def evictable(self) -> Iterable[int]:
        return self._leaves.nodes()
