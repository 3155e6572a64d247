"""The tables that all parts of the index share, and the steps that several parts take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter

from kvcore.errors import ConfigError, KVCoreError
from kvcore.index.tables import NONE, PUBLISHED, RESERVED, NodeTable, TierTable
from kvcore.index.values import Event, Evicted, TierSpec
from kvcore.model.keys import ROOT_PARENT

_key_of = itemgetter(Evicted._fields.index("key"))


class IndexState:
    """Nodes, the table of each tier (nearest first) and the observer of an index."""

    def __init__(self, tiers: Sequence[TierSpec]) -> None:
        names = [spec.name for spec in tiers]
        if not names or len(set(names)) != len(names):
            raise ConfigError(f"an index needs one or more tiers of different names, got {names}")
        self.nodes = NodeTable(sum(spec.num_slots for spec in tiers))
        self.tables = tuple(TierTable(spec, self.nodes.recency) for spec in tiers)
        self.by_name = {table.name: table for table in self.tables}
        self.observer: Callable[[Event], object] | None = None

    def table(self, tier: str) -> TierTable:
        """Return the table of a tier; `ConfigError` if there is no such tier."""
        try:
            return self.by_name[tier]
        except KeyError:
            raise ConfigError(f"no tier {tier!r}: there are {', '.join(self.by_name)}") from None

    def published(self, table: TierTable, key: bytes) -> int:
        """Return the node of a published block; `KVCoreError` if it is not published there."""
        node = self.nodes.keys.get(key)
        if node is None or table.state[node] != PUBLISHED:
            raise KVCoreError(
                f"block {key.hex()} is not published in tier {table.name!r}: match again and pin "
                "before using its slot"
            )
        return node

    def is_held(self, node: int) -> bool:
        """Return True if a block, and so its ancestors, is in some tier and not being evicted."""
        return any(RESERVED <= table.state[node] <= PUBLISHED for table in self.tables)

    def depth(self, table: TierTable, keys: Sequence[bytes], least: int) -> int:
        """Count the leading blocks in the states ``least`` .. PUBLISHED, by bisection.

        The last block but one is tried first: a request that decodes lacks only its last block.
        """
        find, state = self.nodes.keys.get, table.state
        low, high = 0, len(keys)
        middle = max(high - 1, 1)
        while low < high:
            node = find(keys[middle - 1])
            if node is not None and least <= state[node] <= PUBLISHED:
                low = middle
            else:
                high = middle - 1
            middle = (low + high + 1) // 2
        return low

    def evicted(self, table: TierTable, node: int) -> Evicted:
        """Describe a block that leaves a tier, while the tier still holds it."""
        nodes = self.nodes
        namespace = nodes.space_names[nodes.space[node]]
        return Evicted(nodes.key(node), table.slot[node], nodes.parent_key(node), namespace)

    def vacate(self, table: TierTable, node: int) -> None:
        """Free the slot of a block and remove the block from the tier."""
        table.pool.free(table.slot[node])
        self.remove(table, node)

    def remove(self, table: TierTable, node: int) -> None:
        """Remove a block from a tier, and free its node if no other tier holds it."""
        table.state[node] = NONE
        if table.quotas is not None:
            table.quotas.gone(node)
        for other in self.tables:
            if other.state[node] != NONE:
                return
        self.nodes.free(node)

    def reserve_nodes(self, count: int) -> None:
        """Grow all columns until ``count`` nodes are free."""
        while self.nodes.num_free < count:
            grown = self.nodes.grow()
            for table in self.tables:
                table.grow(grown)

    def notify(self, stored: bool, table: TierTable, keys: Iterable[bytes], parent: bytes) -> None:
        """Tell the observer that blocks are published, or no longer. One call for each change."""
        if self.observer is not None:
            change = (stored, table.name, tuple(keys), parent)
            self.observer(tuple.__new__(Event, change))  # half the time of `Event(*change)`

    def notify_removed(self, table: TierTable, blocks: Sequence[Evicted]) -> None:
        """Tell the observer that blocks are no longer published."""
        if blocks and self.observer is not None:
            self.notify(False, table, map(_key_of, blocks), ROOT_PARENT)
