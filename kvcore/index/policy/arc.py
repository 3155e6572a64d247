"""Adaptive replacement cache, over the leaves of a prefix tree."""

from __future__ import annotations

from collections.abc import Iterable

from kvcore.index.policy.base import EvictionPolicy, LeafHeap, Recency, fit
from kvcore.index.policy.ghost import Ghost

__all__ = ["ARC"]


class ARC(EvictionPolicy):
    """Balances recency against frequency by its own misses (Megiddo and Modha, FAST 2003).

    ``T1`` holds leaves used once, ``T2`` leaves used again, and ``B1`` and ``B2`` the keys of
    blocks evicted from either. A block stored again while its key is in B1 shows that T1 was too
    small; in B2, that T2 was. The paper's lists hold pages. Here the lists searched for a victim
    hold *leaves* while ghosts are blocks, so the target is kept as T1's share of the leaves, 0 to
    1, and a ghost hit moves it by ``max(1, other ghosts / own ghosts) / capacity``.
    """

    name = "arc"
    watches_blocks = True

    def __init__(self, capacity: int, recency: Recency) -> None:
        super().__init__(capacity, recency)
        self.target = 0.0
        self._frequent = bytearray()  # 1: in T2
        self._once = LeafHeap(recency.stamps.__getitem__)
        self._again = LeafHeap(recency.stamps.__getitem__)
        self._once_ghosts = Ghost(capacity)
        self._again_ghosts = Ghost(capacity)

    def stored(self, node: int, key: bytes) -> None:
        fit(node, self._frequent)
        once, again = self._once_ghosts, self._again_ghosts
        if key in once:
            step = max(1.0, len(again) / len(once)) / self.capacity
            self.target = min(1.0, self.target + step)
            once.take(key)
            self._frequent[node] = 1
        elif key in again:
            step = max(1.0, len(once) / len(again)) / self.capacity
            self.target = max(0.0, self.target - step)
            again.take(key)
            self._frequent[node] = 1

    def touch(self, node: int) -> None:
        fit(node, self._frequent)
        if not self._frequent[node]:
            self._frequent[node] = 1
            if node in self._once:
                self._once.discard(node)
                self._again.add(node)

    def add(self, node: int) -> None:
        fit(node, self._frequent)
        (self._again if self._frequent[node] else self._once).add(node)

    def remove(self, node: int) -> None:
        self._once.discard(node)
        self._again.discard(node)

    def victim(self) -> int | None:
        once, again = len(self._once), len(self._again)
        if once and (not again or once > self.target * (once + again)):
            return self._once.pop()
        return self._again.pop()

    def forget(self, node: int, key: bytes, parent: int, *, evicted: bool) -> None:
        fit(max(node, parent), self._frequent)
        if evicted:
            (self._again_ghosts if self._frequent[node] else self._once_ghosts).put(key)
            if len(self._once_ghosts) + len(self._again_ghosts) > self.capacity:
                self._oldest_ghosts().drop_oldest()
        if parent >= 0 and self._frequent[node]:
            self._frequent[parent] = 1
        self._frequent[node] = 0
        self._once.lowered(node)
        self._again.lowered(node)

    def evictable(self) -> Iterable[int]:
        return [*self._once.nodes(), *self._again.nodes()]

    def _oldest_ghosts(self) -> Ghost:
        """Return the ghost list that exceeds its share; B1's share is what T1 does not use."""
        share = (1.0 - self.target) * self.capacity
        return self._once_ghosts if len(self._once_ghosts) > share else self._again_ghosts
