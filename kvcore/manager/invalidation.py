"""Removal of blocks from a tier: clears, drops, lost blocks and failed writes.

    a slot of our own medium ──▶ transport.invalidate     a key of a store ──▶ deleted, for everyone

Every removal is counted by its cause, and the medium is invalidated, so that a removed block cannot
reappear after a restart.
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


class Invalidation:
    """Removes blocks from the index and from the media of the tiers.

    The manager's thread only. No call does I/O: the workers and the stores' own threads do it.
    """

    def __init__(
        self, index: BlockIndex, transport: Transport, tiers: LowerTiers, metrics: Metrics
    ) -> None:
        self._index = index
        self._transport = transport
        self._stores = tiers.lookups  # the tiers that other hosts write to
        self._metrics = metrics
        bindings = tiers.bindings.values()
        self._records = {tier.name: tier.clears for tier in bindings if tier.clears is not None}
        self.not_taken: dict[str, list[int]] = {}
        """Slots of other engines' stores whose blocks did not fit into the index, by tier."""

    def clear(self, namespace: bytes | None = None, tier: str | None = None) -> int:
        """Remove every block of a namespace or of a tier, or all blocks; see `Manager.clear`."""
        gone = self._index.removal.clear(namespace, tier)
        for name, blocks in gone.items():
            self._count_cleared(name, blocks)
            if name in self._stores:
                self._stores[name].delete([block.key for block in blocks])
        for name in self._index.tiers:
            if name != HOST and name not in self._stores and tier in (None, name):
                if name in self._records:
                    writing = self._index.removal.slots_in_flight(name)
                    self._records[name].cleared(namespace, writing)
                slots = [block.slot for block in gone.get(name, ())]
                slots += self._index.admin.free_slots(name) + self.not_taken.pop(name, [])
                self._transport.invalidate(name, slot_runs(slots))
        count = sum(map(len, gone.values()))
        _log.info("cleared blocks=%d namespace=%s", count, namespace and namespace.hex())
        return count

    def evict(self, tier: str, keys: Sequence[bytes]) -> int:
        """Remove the blocks of a chain from one tier, its last block first.

        Stops at the first block that something else needs (`Evictions.evict_blocks`). Returns the
        number of blocks removed.
        """
        return self._remove(tier, self._index.evictions.evict_blocks(tier, keys))

    def delete(self, tier: str, keys: Iterable[bytes]) -> int:
        """Remove blocks and all their descendants from one tier; from a store, for everyone.

        Returns the number of blocks removed.
        """
        return self._remove(tier, self._index.removal.delete(tier, keys))

    def set_quota(
        self, tier: str, tenant: str, namespaces: Iterable[bytes], blocks: int | None
    ) -> int:
        """Limit a tenant to ``blocks`` of a tier, as `Admin.set_quota` does.

        Returns the number of blocks evicted. A store keeps them.
        """
        evicted = self._index.admin.set_quota(tier, tenant, namespaces, blocks)
        self.count_evicted(tier, evicted)
        return len(evicted)

    def invalidate(self, tier: str, key: bytes) -> None:
        """Remove a block that is corrupt or missing in a tier, and all its descendants."""
        lost = self._index.removal.invalidate(tier, key)
        if lost:
            self._metrics.lost(tier, len(lost))
        if tier in self._stores:
            self._stores[tier].absent(key)

    def invalidate_removed(self, reservation: Reservation) -> None:
        """Invalidate the blocks of a finished write that were removed while it was in flight.

        A store deletes only blocks that were cleared. It keeps descendants of a block that was lost
        or not written: they are intact, and are found again once somebody writes that block.
        """
        tier, live = reservation.tier, reservation.live
        if tier == HOST or live == len(reservation):
            return
        if tier in self._stores:
            if reservation.revoked:
                self._stores[tier].delete(reservation.keys[live:])
        else:
            if reservation.revoked and tier in self._records:
                self._records[tier].landed(reservation.slots[live:].tolist())
            self._transport.invalidate(tier, slot_runs(reservation.slots[live:]))

    def count_evicted(self, tier: str, evicted: Sequence[Evicted]) -> None:
        """Count blocks that were evicted to make room.

        Their media need nothing: the slots are reused, and a store keeps its own blocks.
        """
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
            self._transport.invalidate(tier, slot_runs(block.slot for block in blocks))
        return len(blocks)
