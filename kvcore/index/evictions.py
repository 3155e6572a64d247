"""Eviction of blocks from a tier: at once, or in two steps around a demotion."""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.index.state import IndexState
from kvcore.index.tables import EVICTING, PUBLISHED, ROOT, TierTable
from kvcore.index.values import Evicted, Eviction
from kvcore.model.keys import ROOT_PARENT


class Evictions:
    """Evicts leaves in the order of each tier's policy. Leader thread only."""

    def __init__(self, state: IndexState) -> None:
        self._state = state
        self._nodes = state.nodes

    def evict(self, tier: str, count: int) -> list[Evicted]:
        """Evict up to ``count`` blocks at once, in the order of the tier's policy."""
        table = self._state.table(tier)
        evicted: list[Evicted] = []
        while len(evicted) < count and (node := table.policy.victim()) is not None:
            evicted.append(self._evict(table, node))
        self._state.notify_removed(table, evicted)
        return evicted

    def evict_blocks(self, tier: str, keys: Sequence[bytes]) -> list[Evicted]:
        """Evict the blocks of a chain from its last block backwards.

        Stops at the first block that is pinned, not published, or has other children.
        """
        table, evicted = self._state.table(tier), []
        for key in reversed(keys):
            node = self._nodes.keys.get(key)
            if node is None or not table.is_evictable(node):
                if node is not None and table.holds(node):
                    break
                continue
            table.policy.remove(node)
            evicted.append(self._evict(table, node))
        self._state.notify_removed(table, evicted)
        return evicted

    def begin(self, tier: str, count: int) -> Eviction:
        """Choose up to ``count`` victims and stop matching them, but keep their slots.

        For a demotion: copy ``blocks`` to another tier, then call `finish` (or `cancel`).
        """
        table, eviction = self._state.table(tier), Eviction(tier)
        while len(eviction.nodes) < count and (node := table.policy.victim()) is not None:
            eviction.blocks.append(self._state.evicted(table, node))
            eviction.nodes.append(node)
            self._leave(table, node, eviction.blocks[-1].key)
            table.state[node] = EVICTING
            table.evicting[node] = eviction
            table.leaving.add(eviction)
        self._state.notify_removed(table, eviction.blocks)
        return eviction

    def finish(self, eviction: Eviction) -> list[Evicted]:
        """Free the slots of an eviction.

        Returns the blocks that left the tier, without those that `reserve` kept or that were
        dropped meanwhile.
        """
        table, left = self._state.table(eviction.tier), []
        for node, block in zip(eviction.nodes, eviction.blocks, strict=True):
            if table.evicting.get(node) is eviction:
                del table.evicting[node]
                self._state.vacate(table, node)
                left.append(block)
        table.pool.free_all(eviction.parked)
        table.leaving.discard(eviction)
        eviction.nodes, eviction.blocks, eviction.parked = [], [], []
        return left

    def cancel(self, eviction: Eviction) -> None:
        """Publish the blocks again, or free those whose parent has left meanwhile."""
        table = self._state.table(eviction.tier)
        for node, block in zip(reversed(eviction.nodes), reversed(eviction.blocks), strict=True):
            parent = ROOT if block.parent == ROOT_PARENT else self._nodes.keys.get(block.parent)
            if table.evicting.get(node) is eviction and parent is not None:
                self._keep(table, node, parent)  # if it cannot be kept, `finish` frees it
        self.finish(eviction)

    def make_room(self, table: TierTable, count: int) -> list[Evicted]:
        """Evict until ``count`` slots are free or no block is evictable."""
        evicted = []
        while table.pool.num_free < count and (node := table.policy.victim()) is not None:
            evicted.append(self._evict(table, node))
        self._state.notify_removed(table, evicted)
        return evicted

    def within_quota(
        self, table: TierTable, count: int, namespace: bytes
    ) -> tuple[int, list[Evicted]]:
        """Evict leaves of the namespace's tenant until ``count`` new blocks fit its quota.

        Returns how many of them the tenant may store, and the evicted blocks.
        """
        share = None if table.quotas is None else table.quotas.share_of(namespace)
        if share is None:
            return count, []
        evicted = []
        while share.used + count > share.limit and (node := share.leaves.pop()) is not None:
            table.policy.remove(node)
            evicted.append(self._evict(table, node))
        self._state.notify_removed(table, evicted)
        return min(count, max(0, share.limit - share.used)), evicted

    def rescue(
        self, table: TierTable, keys: Sequence[bytes], begin: int, stop: int
    ) -> tuple[int, int]:
        """Publish blocks [begin, stop) of a prompt again as far as they are being evicted.

        Returns the new ``begin`` and ``stop``. The range ends before the first block that is
        being evicted and cannot be kept.
        """
        find = self._nodes.keys.get
        while begin < stop:
            node = find(keys[begin])
            parent = self._nodes.keys[keys[begin - 1]] if begin else ROOT
            if node is None or not self._keep(table, node, parent):
                break
            begin += 1
        for index in range(begin, stop):
            node = find(keys[index])
            if node is not None and table.state[node] == EVICTING:
                return begin, index
        return begin, stop

    def _keep(self, table: TierTable, node: int, parent: int) -> bool:
        """Publish a block that is being evicted again, if its parent is published."""
        rooted = parent == ROOT or table.state[parent] == PUBLISHED
        if table.state[node] != EVICTING or not rooted:
            return False
        del table.evicting[node]
        self._nodes.parent[node] = parent
        table.add_child(parent)
        table.state[node] = PUBLISHED
        self._state.notify(True, table, (self._nodes.key(node),), self._nodes.parent_key(node))
        table.policy.stored(node, self._nodes.key(node))
        table.policy.add(node)
        return True

    def _evict(self, table: TierTable, node: int) -> Evicted:
        block = self._state.evicted(table, node)
        self._leave(table, node, block.key)
        self._state.vacate(table, node)
        return block

    def _leave(self, table: TierTable, node: int, key: bytes) -> None:
        """Detach a victim from its parent, which inherits the time of its last use."""
        parent = self._nodes.parent[node]
        table.policy.forget(node, key, parent, evicted=True)
        if parent != ROOT:
            self._nodes.recency.inherit(parent, node)
            table.drop_child(parent)
