"""S3-FIFO: a small queue that filters, a main queue that keeps, and a ghost queue."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from kvcore.errors import ConfigError
from kvcore.index.policy.base import EvictionPolicy, LeafHeap, Recency, fit
from kvcore.index.policy.ghost import Ghost

__all__ = ["S3FIFO"]

_MAX_USES = 3


class S3FIFO(EvictionPolicy):
    """Evicts blocks that are used only once through the small queue (Yang et al., SOSP 2023).

    A new block enters the small queue, or the main queue if the ghost has its key. At the end of
    the small queue a block moves to the main queue if it was used more than once since, and is
    evicted otherwise. The main queue is a FIFO with a second chance for each use, at most three.
    The queues hold leaves. ``small_share`` is the share of the leaves above which the small queue
    gives the victim.
    """

    name = "s3fifo"
    watches_blocks = True

    def __init__(self, capacity: int, recency: Recency, small_share: float = 0.1) -> None:
        super().__init__(capacity, recency)
        if not 0.0 < small_share < 1.0:
            raise ConfigError(f"small_share must lie between 0 and 1, got {small_share}")
        self.small_share = small_share
        self._clock = 0
        self._entered = array("q")  # place in the queue: time of entry
        self._uses = bytearray()
        self._in_main = bytearray()
        self._small = LeafHeap(self._entered_at)
        self._main = LeafHeap(self._entered_at)
        self._ghost = Ghost(capacity)

    def stored(self, node: int, key: bytes) -> None:
        fit(node, self._entered, self._uses, self._in_main)
        self._enter(node)
        self._uses[node] = 0
        self._in_main[node] = self._ghost.take(key)

    def touch(self, node: int) -> None:
        fit(node, self._entered, self._uses, self._in_main)
        self._uses[node] = min(_MAX_USES, self._uses[node] + 1)

    def add(self, node: int) -> None:
        fit(node, self._entered, self._uses, self._in_main)
        (self._main if self._in_main[node] else self._small).add(node)

    def remove(self, node: int) -> None:
        self._small.discard(node)
        self._main.discard(node)

    def victim(self) -> int | None:
        while self._small or self._main:
            node = self._from_small() if self._small_is_full() else self._from_main()
            if node is not None:
                return node
        return None

    def forget(self, node: int, key: bytes, parent: int, *, evicted: bool) -> None:
        fit(max(node, parent), self._entered, self._uses, self._in_main)
        if evicted and not self._in_main[node]:
            self._ghost.put(key)
        if parent >= 0:
            self._entered[parent] = max(self._entered[parent], self._entered[node])
            self._uses[parent] = max(self._uses[parent], self._uses[node])
            self._in_main[parent] |= self._in_main[node]
        self._entered[node] = self._uses[node] = self._in_main[node] = 0
        self._small.lowered(node)
        self._main.lowered(node)

    def evictable(self) -> Iterable[int]:
        return [*self._small.nodes(), *self._main.nodes()]

    def _small_is_full(self) -> bool:
        small, main = len(self._small), len(self._main)
        return bool(small) and (not main or small > self.small_share * (small + main))

    def _from_small(self) -> int | None:
        node = self._small.pop()
        assert node is not None
        if self._uses[node] <= 1:
            return node
        self._uses[node] = 0
        self._in_main[node] = 1
        self._enter(node)
        self._main.add(node)
        return None

    def _from_main(self) -> int | None:
        node = self._main.pop()
        assert node is not None
        if not self._uses[node]:
            return node
        self._uses[node] -= 1
        self._enter(node)
        self._main.add(node)
        return None

    def _enter(self, node: int) -> None:
        self._clock += 1
        self._entered[node] = self._clock

    def _entered_at(self, node: int) -> int:
        return self._entered[node]
