"""Removal of blocks from a tier although they may be pinned or being written."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvcore.index.lifecycle import Lifecycle
from kvcore.index.state import IndexState
from kvcore.index.tables import EVICTING, NONE, PUBLISHED, ROOT, TierTable
from kvcore.index.values import Evicted


class Removal:
    """Drops subtrees and clears namespaces. Leader thread only; every call is O(index)."""

    def __init__(self, state: IndexState, lifecycle: Lifecycle) -> None:
        self._state = state
        self._nodes = state.nodes
        self._tables = state.tables
        self._lifecycle = lifecycle

    def invalidate(self, tier: str, key: bytes) -> list[Evicted]:
        """Remove a block whose bytes are bad, and all its descendants, from a tier.

        Returns the blocks that were published. Pinned blocks are removed as well: they stop
        matching at once, and their slots are freed with the last pin. Reservations among them are
        cut short, and the slots cut off are freed at their `commit` or `abort`. About 0.1 s for a
        million blocks.
        """
        table = self._state.table(tier)
        node = self._nodes.keys.get(key)
        if node is None or not table.holds(node):
            return []
        return self._detach(table, self._below(table, [node]))

    def delete(self, tier: str, keys: Iterable[bytes]) -> list[Evicted]:
        """Remove several blocks and their descendants on request, as `invalidate` does.

        Reservations that lose blocks are marked ``revoked``.
        """
        table = self._state.table(tier)
        found = (self._nodes.keys.get(key) for key in keys)
        tops = [node for node in found if node is not None and table.holds(node)]
        gone = self._detach(table, self._below(table, tops)) if tops else []
        self._revoke(table)
        return gone

    def clear(
        self, namespace: bytes | None = None, tier: str | None = None
    ) -> dict[str, list[Evicted]]:
        """Remove all blocks, or those of a namespace or a tier, as `delete` does.

        Returns the blocks that were published, by tier.
        """
        space = self._nodes.space_ids.get(namespace) if namespace is not None else None
        tables = self._tables if tier is None else (self._state.table(tier),)
        if namespace is not None and space is None:
            for table in tables:
                self._revoke(table)
            return {}
        dropped = {}
        for table in tables:
            chosen = np.frombuffer(table.state, dtype=np.uint8) != NONE
            if space is not None:
                chosen &= np.frombuffer(self._nodes.space, dtype=np.uint32) == space
            dropped[table.name] = self._detach(table, np.flatnonzero(chosen).tolist())
            self._revoke(table)
        return dropped

    def slots_in_flight(self, tier: str) -> list[int]:
        """Return the slots of a tier to which removed blocks are still being written."""
        return [
            slot
            for reservation in self._state.table(tier).open
            if reservation.revoked and not reservation.filled
            for slot in reservation.slots[reservation.live :].tolist()
        ]

    def _below(self, table: TierTable, tops: list[int]) -> list[int]:
        """Return nodes and all their descendants in a tier, by pointer jumping.

        O(index * log depth).
        """
        state = np.frombuffer(table.state, dtype=np.uint8)
        held = (state > NONE) & (state < EVICTING)
        everyone = np.arange(len(state))
        up = np.where(held, np.frombuffer(self._nodes.parent, dtype=np.int32), everyone)
        up = np.where(up == ROOT, everyone, up)
        up[tops] = tops
        while not np.array_equal(further := up[up], up):
            up = further
        found: list[int] = np.flatnonzero(held & np.isin(up, tops)).tolist()
        return found

    def _revoke(self, table: TierTable) -> None:
        """Mark the reservations in flight that have lost blocks as revoked.

        Which blocks a reservation lost earlier is no longer known, so they count as cleared too.
        """
        for reservation in table.open:
            reservation.revoked |= reservation.live < len(reservation)

    def _detach(self, table: TierTable, nodes: list[int]) -> list[Evicted]:
        """Remove a set of nodes closed under descendants; returns those that were published."""
        inside = {node for node in nodes if table.holds(node)}
        self._park_leaving(table, nodes)
        for reservation in list(table.open):
            alive = reservation.nodes[: reservation.live]
            first = next((i for i, node in enumerate(alive) if node in inside), None)
            if first is not None:
                self._lifecycle.cut(table, reservation, first)
        inside = {node for node in inside if table.state[node] == PUBLISHED}
        for node in inside:
            if table.is_evictable(node):
                table.policy.remove(node)
        self._doom_pins(table, inside)
        blocks = [self._state.evicted(table, node) for node in inside]
        self._state.notify_removed(table, blocks)
        self._hand_up(table, inside)
        for node in inside:
            if table.slot[node] not in table.retained:
                table.pool.free(table.slot[node])
            table.policy.forget(node, self._nodes.key(node), ROOT, evicted=False)
            table.children[node] = 0
            self._state.remove(table, node)
        return blocks

    def _park_leaving(self, table: TierTable, nodes: Iterable[int]) -> None:
        for node in nodes:
            eviction = table.evicting.pop(node, None)
            if eviction is not None:
                eviction.parked.append(table.slot[node])
                self._state.remove(table, node)

    def _doom_pins(self, table: TierTable, inside: set[int]) -> None:
        """Retain the slots that pins inside protect, and move the pins to the nearest ancestor."""
        for node in [node for node in table.pins if node in inside]:
            slots, above = [], node
            while above in inside:
                slots.append(table.slot[above])
                above = self._nodes.parent[above]
            for pin in table.pins.pop(node):
                pin.node = above
                pin.doomed += tuple(slots)
                if above != ROOT:
                    table.pins.setdefault(above, set()).add(pin)
                for slot in slots:
                    table.retained[slot] = table.retained.get(slot, 0) + 1

    def _hand_up(self, table: TierTable, inside: set[int]) -> None:
        """Detach removed nodes from parents that stay, which inherit the latest use."""
        for node in inside:
            parent = self._nodes.parent[node]
            if parent != ROOT and parent not in inside:
                self._nodes.recency.inherit(parent, max(inside, key=self._nodes.recency.stamp))
                table.drop_child(parent)
