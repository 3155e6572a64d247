"""Quotas: how many blocks of a tier a tenant may have, and which of its blocks are evicted first.

A *tenant* is a name for one or more namespaces: a salt, with each LoRA it uses. The index knows
only namespaces. A quota counts the blocks of all namespaces of a tenant, including pinned,
unpublished and evicting ones.

    a tenant with a quota stores n blocks
      1. its own leaves are evicted, least wanted first, until n more fit its quota or none is left
      2. blocks that still do not fit are not stored
      3. room in the tier itself is made in the order of the policy, as for all tenants

A tenant at its quota therefore takes nothing from others, and one below it takes as much as it
grows by. A quota is a ceiling, not a guarantee: blocks within it may be evicted in the order of the
policy. One quota can be of all namespaces that no other quota names, however many there are. A tier
without quotas does not use this module.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from typing import NamedTuple, Protocol

from kvcore.errors import ConfigError
from kvcore.index.policy.base import EvictionPolicy

__all__ = ["Quota", "RationedPolicy", "Share"]


class Quota(NamedTuple):
    """The number of blocks that a tenant has in a tier, and its limit."""

    used: int
    limit: int
    namespaces: frozenset[bytes]


class _Leaves:
    """A `kvcore.index.policy.base.LeafHeap` whose size is that of its content."""

    __slots__ = ("_entries", "_live", "_score")

    def __init__(self, score: Callable[[int], int], nodes: Iterable[int]) -> None:
        self._score = score
        self._live = set(nodes)
        self._compact()

    def add(self, node: int) -> None:
        self._live.add(node)
        heappush(self._entries, (self._score(node), node))
        if len(self._entries) > 2 * len(self._live) + 64:
            self._compact()

    def discard(self, node: int) -> None:
        self._live.discard(node)

    def pop(self) -> int | None:
        """Remove and return the node of least score; None if empty."""
        entries = self._entries
        while self._live:
            score, node = entries[0]
            if node not in self._live:
                heappop(entries)
            elif self._score(node) > score:
                heapreplace(entries, (self._score(node), node))
            else:
                heappop(entries)
                self._live.remove(node)
                return node
        return None

    def nodes(self) -> set[int]:
        return self._live

    def _compact(self) -> None:
        self._entries = [(self._score(node), node) for node in self._live]
        heapify(self._entries)


class NodeSpaces(Protocol):
    """The namespaces of an index's nodes (`kvcore.index.tables.NodeTable`).

    ``space[node]`` is a number, ``space_names`` maps numbers to namespaces, and ``space_ids`` maps
    namespaces to numbers.
    """

    space: array[int]
    space_ids: dict[bytes, int]
    space_names: list[bytes]


class Share:
    """A tenant's part of one tier: ``used`` and ``limit`` in blocks, ``leaves`` may be evicted.

    ``namespaces`` is empty for the share of all that no other share names.
    """

    __slots__ = ("leaves", "limit", "namespaces", "used")

    def __init__(
        self, namespaces: frozenset[bytes], limit: int, used: int, leaves: _Leaves
    ) -> None:
        self.namespaces = namespaces
        self.limit = limit
        self.used = used
        self.leaves = leaves


class RationedPolicy(EvictionPolicy):
    """Wraps a tier's policy, ``inner``, and keeps each tenant's leaves beside it.

    The inner policy decides as it would alone. In use only while the tier has a quota. Leader
    thread only.
    """

    name = "rationed"

    def __init__(self, inner: EvictionPolicy, nodes: NodeSpaces) -> None:
        super().__init__(inner.capacity, inner.recency)
        self.inner = inner
        self.shares: dict[str, Share] = {}
        self.watches_blocks = inner.watches_blocks  # type: ignore[misc]  # same as the inner one
        self._nodes = nodes
        self._owners: dict[bytes, Share] = {}
        self._rest: Share | None = None

    # -- quotas ---------------------------------------------------------------------------------

    def grant(
        self, tenant: str, namespaces: frozenset[bytes], limit: int, held: Sequence[int]
    ) -> None:
        """Set a tenant's quota to ``limit`` blocks. O(tier).

        Without ``namespaces`` it is the quota of all that no other tenant has. ``held`` are all
        nodes in the tier. Raises ConfigError if a namespace belongs to another tenant.
        """
        for other, share in self.shares.items():
            if other != tenant and share.namespaces & namespaces:
                raise ConfigError(f"tenant {tenant!r} and {other!r} are the same: use one name")
        self.lift(tenant, held)
        share = Share(namespaces, limit, 0, _Leaves(self.inner.order, ()))
        self.shares[tenant] = share
        self._owners.update(dict.fromkeys(namespaces, share))
        if not namespaces:
            self._rest = share
        self._recount(held, share, self._rest)

    def lift(self, tenant: str, held: Sequence[int]) -> None:
        """Remove a tenant's quota, if it has one. O(tier)."""
        share = self.shares.pop(tenant, None)
        if share is None:
            return
        if share is self._rest:
            self._rest = None
        for namespace in share.namespaces:
            del self._owners[namespace]
        self._recount(held, self._rest)

    def _recount(self, held: Sequence[int], *shares: Share | None) -> None:
        names, spaces = self._nodes.space_names, self._nodes.space
        for share in shares:
            if share is not None:
                mine = {at for at, name in enumerate(names) if self.share_of(name) is share}
                share.used = sum(spaces[node] in mine for node in held)
                leaves = (node for node in self.inner.evictable() if spaces[node] in mine)
                share.leaves = _Leaves(self.inner.order, leaves)

    def share_of(self, namespace: bytes) -> Share | None:
        """Return the share that a namespace counts towards, or None."""
        return self._owners.get(namespace, self._rest)

    def entered(self, nodes: Iterable[int]) -> None:
        """Count blocks that were given slots."""
        for node in nodes:
            if (share := self._of(node)) is not None:
                share.used += 1

    def gone(self, node: int) -> None:
        """Count a block that left the tier, before its node is reused."""
        if (share := self._of(node)) is not None:
            share.used -= 1

    def check_integrity(self, held: Sequence[int]) -> None:
        """Assert that every share is counted right. ``held`` are all nodes in the tier."""
        used = dict.fromkeys(self.shares, 0)
        leaves: dict[str, set[int]] = {tenant: set() for tenant in self.shares}
        names = {id(share): tenant for tenant, share in self.shares.items()}
        for node in held:
            if (share := self._of(node)) is not None:
                used[names[id(share)]] += 1
        for node in self.inner.evictable():
            if (share := self._of(node)) is not None:
                leaves[names[id(share)]].add(node)
        for tenant, share in self.shares.items():
            assert share.used == used[tenant], f"tenant {tenant} has {used[tenant]} blocks"
            assert share.leaves.nodes() == leaves[tenant], f"leaves of tenant {tenant}"

    def _of(self, node: int) -> Share | None:
        return self.share_of(self._nodes.space_names[self._nodes.space[node]])

    # -- a policy -------------------------------------------------------------------------------

    def stored(self, node: int, key: bytes) -> None:
        self.inner.stored(node, key)

    def touch(self, node: int) -> None:
        self.inner.touch(node)

    def set_priority(self, node: int, priority: int, ttl: float | None = None) -> None:
        self.inner.set_priority(node, priority, ttl)

    def order(self, node: int) -> int:
        return self.inner.order(node)

    def add(self, node: int) -> None:
        self.inner.add(node)
        if (share := self._of(node)) is not None:
            share.leaves.add(node)

    def remove(self, node: int) -> None:
        self.inner.remove(node)
        if (share := self._of(node)) is not None:
            share.leaves.discard(node)

    def victim(self) -> int | None:
        node = self.inner.victim()
        if node is not None and (share := self._of(node)) is not None:
            share.leaves.discard(node)
        return node

    def forget(self, node: int, key: bytes, parent: int, *, evicted: bool) -> None:
        self.inner.forget(node, key, parent, evicted=evicted)

    def evictable(self) -> Iterable[int]:
        return self.inner.evictable()
