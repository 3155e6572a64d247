"""What leaves a tier: pushed out, cleared, dropped or never finished; it is counted, and is not to
come back from its medium.

    a slot of our own medium ──▶ transport.forget     a key of a store ──▶ deleted, for everyone
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from kvcore.index import BlockIndex, Evicted, Reservation
from kvcore.index.slots import slot_runs
from kvcore.manager.base import HOST, Transport
from kvcore.manager.lower_tiers import LowerTiers
from kvcore.telemetry.metrics import Metrics

__all__ = ["Invalidation"]

_log = logging.getLogger("kvcore.manager")

MAX_CLEARED = 16
"""Namespaces of a tier of which it is known that they were cleared; of more, all were."""


class Invalidation:
    """Takes blocks out of the index, and out of what lies below it. The manager's thread only; no
    call does I/O."""

    def __init__(
        self,
        index: BlockIndex,
        transport: Transport,
        tiers: LowerTiers,
        metrics: Metrics,
    ) -> None:
        self._index = index
        self._transport = transport
        self._stores = tiers.lookups  # the tiers that other hosts write to
        self._metrics = metrics
        bindings = tiers.bindings.values()
        self._recorders = {
            tier.name: tier.record_clear for tier in bindings if tier.record_clear is not None
        }
        self._cleared: dict[str, dict[bytes | None, None]] = {}  # namespaces, by tier
        self.not_taken: dict[str, list[int]] = {}
        """By tier: slots of other engines' stores whose blocks did not fit into the index."""

    def clear(self, namespace: bytes | None = None, tier: str | None = None) -> int:
        """`KVManager.clear`."""
        gone = self._index.removal.clear(namespace, tier)
        for name, blocks in gone.items():
            self._count_cleared(name, blocks)
            if name in self._stores:
                self._stores[name].delete([block.key for block in blocks])
        for name in self._index.tiers:
            if name != HOST and name not in self._stores and tier in (None, name):
                if name in self._recorders:
                    self._record_clear(name, namespace)
                slots = [block.slot for block in gone.get(name, ())]
                slots += self._index.admin.free_slots(name) + self.not_taken.pop(name, [])
                self._transport.forget(name, slot_runs(slots))
        count = sum(map(len, gone.values()))
        _log.info("cleared blocks=%d namespace=%s", count, namespace and namespace.hex())
        return count

    def _record_clear(self, tier: str, namespace: bytes | None) -> None:
        cleared = self._cleared.setdefault(tier, {})
        if namespace is None or len(cleared) == MAX_CLEARED:
            cleared.clear()
            namespace = None
        cleared[namespace] = None
        self._recorders[tier](namespace)

    def discard(self, tier: str, keys: Sequence[bytes]) -> int:
        """Take blocks of a chain out of one tier, from its end on, as far as nothing else needs
        them (`Evictions.evict_blocks`); returns how many."""
        return self._remove(tier, self._index.evictions.evict_blocks(tier, keys))

    def drop(self, tier: str, keys: Iterable[bytes]) -> int:
        """Take blocks, and all that stand on them, out of one tier; from a store for everyone.
        Returns how many."""
        return self._remove(tier, self._index.removal.drop_subtrees(tier, keys))

    def set_quota(
        self, tier: str, tenant: str, namespaces: Iterable[bytes], blocks: int | None
    ) -> int:
        """`Admin.set_quota`; returns how many blocks it evicted. A store keeps them."""
        evicted = self._index.admin.set_quota(tier, tenant, namespaces, blocks)
        self.count_evicted(tier, evicted)
        return len(evicted)

    def lose(self, tier: str, key: bytes) -> None:
        """A block that could not be had as it was written, and all that stand on it, are gone."""
        lost = self._index.removal.drop_subtree(tier, key)
        if lost:
            self._metrics.lost(tier, len(lost))
        if tier in self._stores:
            self._stores[tier].absent(key)

    def forget_dropped(self, reservation: Reservation) -> None:
        """Blocks that were cleared or dropped while they were written have just been written.

        A store removes what was cleared alone. What stood on a block that was lost, or that could
        not be written, is as good as ever there, and serves whoever writes that block again.
        """
        tier, live = reservation.tier, reservation.live
        if tier == HOST or live == len(reservation):
            return
        if tier in self._stores:
            if reservation.revoked:
                self._stores[tier].delete(reservation.keys[live:])
        else:
            for namespace in self._cleared.get(tier, ()):
                self._recorders[tier](
                    namespace
                )  # what was being written may be younger than the clear
            self._transport.forget(tier, slot_runs(reservation.slots[live:]))

    def count_evicted(self, tier: str, evicted: Sequence[Evicted]) -> None:
        """Count blocks that were evicted for lack of room; a slot needs nothing else."""
        if evicted:
            self._metrics.evicted(tier, len(evicted))

    def _count_cleared(self, tier: str, blocks: Sequence[Evicted]) -> None:
        if blocks:
            self._metrics.cleared(tier, len(blocks))

    def _remove(self, tier: str, blocks: list[Evicted]) -> int:
        """Count blocks that left the index on request, and remove them from their medium."""
        self._count_cleared(tier, blocks)
        if tier in self._stores:
            self._stores[tier].delete([block.key for block in blocks])
        elif tier != HOST and blocks:
            self._transport.forget(tier, slot_runs(block.slot for block in blocks))
        return len(blocks)
