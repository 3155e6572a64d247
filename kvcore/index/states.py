"""The state machine of blocks in tiers: what `kvcore.index.BlockIndex` does behind its calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter, itemgetter

import numpy as np
import numpy.typing as npt

from kvcore.errors import ConfigError
from kvcore.index.tables import (
    EVICTING,
    FREE,
    NONE,
    PUBLISHED,
    RESERVED,
    ROOT,
    Event,
    Evicted,
    NodeTable,
    Pin,
    Record,
    Reservation,
    TierSpec,
    TierTable,
)
from kvcore.model.keys import KEY_BYTES, ROOT_PARENT

_key_of = itemgetter(Evicted._fields.index("key"))


def _nowhere(_key: bytes) -> None:
    """`KeyTable.get` of a table that holds nothing."""


class BlockStates:
    """The columns of all tiers, and the steps that keep every tier prefix-closed."""

    def __init__(self, tiers: Sequence[TierSpec]) -> None:
        names = [spec.name for spec in tiers]
        if not names or len(set(names)) != len(names):
            raise ConfigError(f"an index needs one or more tiers of different names, got {names}")
        self._nodes = NodeTable(sum(spec.num_slots for spec in tiers))
        self._tables = tuple(TierTable(spec, self._nodes.recency) for spec in tiers)
        self._observer: Callable[[Event], object] | None = None

    def _key(self, node: int) -> bytes:
        assert self._nodes.parent[node] != FREE, f"node {node} is not in use"
        return self._nodes.keys.key(node)

    def _parent_key(self, node: int) -> bytes:
        parent = self._nodes.parent[node]
        return ROOT_PARENT if parent == ROOT else self._key(parent)

    def _tell(self, stored: bool, table: TierTable, keys: Iterable[bytes], parent: bytes) -> None:
        """Blocks became PUBLISHED, or are that no longer. One call a change, in order."""
        if self._observer is not None:
            change = (stored, table.name, tuple(keys), parent)
            self._observer(tuple.__new__(Event, change))  # as `Event(*change)`, in half the time

    def _tell_gone(self, table: TierTable, blocks: Sequence[Evicted]) -> None:
        if blocks and self._observer is not None:
            self._tell(False, table, map(_key_of, blocks), ROOT_PARENT)

    def _evicted(self, table: TierTable, node: int) -> Evicted:
        namespace = self._nodes.space_names[self._nodes.space[node]]
        return Evicted(self._key(node), table.slot[node], self._parent_key(node), namespace)

    def _make_room(self, table: TierTable, count: int) -> list[Evicted]:
        evicted = []
        while table.pool.num_free < count and (node := table.policy.victim()) is not None:
            evicted.append(self._evict(table, node))
        self._tell_gone(table, evicted)
        return evicted

    def _within_quota(
        self, table: TierTable, count: int, namespace: bytes
    ) -> tuple[int, list[Evicted]]:
        """How many of ``count`` new blocks the namespace's tenant may store, after leaves of its
        own have made room for them; and what those were."""
        share = None if table.quotas is None else table.quotas.share_of(namespace)
        if share is None:
            return count, []
        evicted = []
        while share.used + count > share.limit and (node := share.leaves.pop()) is not None:
            table.policy.remove(node)
            evicted.append(self._evict(table, node))
        self._tell_gone(table, evicted)
        return min(count, max(0, share.limit - share.used)), evicted

    def _evict(self, table: TierTable, node: int) -> Evicted:
        block = self._evicted(table, node)
        self._leave(table, node, block.key)
        self._vacate(table, node)
        return block

    def _leave(self, table: TierTable, node: int, key: bytes) -> None:
        """A victim is a child no more; its history goes up."""
        parent = self._nodes.parent[node]
        table.policy.forget(node, key, parent, evicted=True)
        if parent != ROOT:
            self._nodes.recency.inherit(parent, node)
            table.drop_child(parent)

    def _vacate(self, table: TierTable, node: int) -> None:
        table.pool.free(table.slot[node])
        self._unhold(table, node)

    def _unhold(self, table: TierTable, node: int) -> None:
        table.state[node] = NONE
        if table.quotas is not None:
            table.quotas.gone(node)
        for other in self._tables:
            if other.state[node] != NONE:
                return
        self._nodes.free(node)

    def _place(self, table: TierTable, reservation: Reservation, namespace: bytes) -> list[int]:
        """Enter the blocks of a reservation. The parent has counted its new child already."""
        keys, parents, nodes = self._nodes.keys, self._nodes.parent, []
        slot_of, state, children = table.slot, table.state, table.children
        parent = reservation.parent
        for key, slot in zip(reservation.keys, reservation.slots.tolist(), strict=True):
            node = keys.get(key)
            if node is None:
                node = self._make_node(key, parent, namespace)
            parents[node] = parent
            slot_of[node] = slot
            state[node] = RESERVED
            children[node] = 1
            nodes.append(node)
            parent = node
        children[parent] = 0
        if table.quotas is not None:
            table.quotas.entered(nodes)
        return nodes

    def _make_node(self, key: bytes, parent: int, namespace: bytes) -> int:
        self._make_room_for_nodes(1)
        return self._nodes.make(key, parent, self._nodes.space_of(namespace))

    def _make_room_for_nodes(self, count: int) -> None:
        while self._nodes.num_free < count:
            grown = self._nodes.grow()
            for table in self._tables:
                table.grow(grown)

    def _publish(self, table: TierTable, reservation: Reservation) -> None:
        """Publish a filled reservation and all filled ones that waited for it."""
        stack = [reservation]
        while stack:
            ready = stack.pop()
            table.open.discard(ready)
            nodes = ready.nodes[: ready.live]
            for node in nodes:
                table.state[node] = PUBLISHED
            self._tell(True, table, ready.keys[: ready.live], self._parent_key(nodes[0]))
            self._nodes.recency.touch(nodes[-1])
            for node in nodes if table.policy.watches_blocks else nodes[-1:]:
                table.policy.stored(node, self._key(node))
            if ready.held:
                ready.pin = Pin(table.name, nodes[-1])
                table.pins.setdefault(nodes[-1], set()).add(ready.pin)
            if table.is_evictable(nodes[-1]):
                table.policy.add(nodes[-1])
            if table.dependents:
                for node in nodes:
                    stack += [r for r in table.dependents.pop(node, ()) if r.filled]

    def _cut(self, table: TierTable, reservation: Reservation, live: int) -> None:
        """Give up nodes[live:] of a reservation, and all reservations that stand on them.

        Slots of filled reservations are free at once; those of reservations in flight when their
        owner commits or aborts; those of held ones when they are let go.
        """
        cuts = [(reservation, live)]
        for cut, first in cuts:  # grows while it runs: parents first
            for node in cut.nodes[first : cut.live]:
                cuts += [(above, 0) for above in table.dependents.get(node, ())]
        for cut, first in reversed(cuts):
            gone = cut.nodes[first : cut.live]
            if cut.filled:
                self._give_back(table, cut, first, cut.live)
            if gone:
                cut.live = first
                self._withdraw(table, gone)
            if not cut.live:
                self._stand_alone(table, cut)

    def _give_back(self, table: TierTable, owner: Reservation, start: int, stop: int) -> None:
        """Slots [start, stop) of a reservation hold nothing any more; held ones are still read."""
        slots = owner.slots[start:stop].tolist()
        if not owner.held:
            table.pool.free_all(slots)
        elif slots:
            owner.parked += slots
            table.parking.add(owner)

    def _withdraw(self, table: TierTable, nodes: list[int]) -> None:
        """Take unpublished blocks, each the only child of the one before, out of a tier."""
        parent = self._nodes.parent[nodes[0]]
        for node in reversed(nodes):
            table.children[node] = 0
            self._unhold(table, node)
        table.drop_child(parent)

    def _stand_alone(self, table: TierTable, reservation: Reservation) -> None:
        """A reservation with no block left waits for nobody; filled, it is over."""
        waiting = table.dependents.get(reservation.parent)
        if waiting is not None and reservation in waiting:
            waiting.remove(reservation)
            if not waiting:
                del table.dependents[reservation.parent]
        if reservation.filled:
            table.open.discard(reservation)

    def _rescue(
        self, table: TierTable, keys: Sequence[bytes], begin: int, stop: int
    ) -> tuple[int, int]:
        """Keep leaving blocks that continue what is held; stop before those that do not."""
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
        """Turn a leaving block back into a published one, if its parent is published."""
        rooted = parent == ROOT or table.state[parent] == PUBLISHED
        if table.state[node] != EVICTING or not rooted:
            return False
        del table.evicting[node]
        self._nodes.parent[node] = parent
        table.add_child(parent)
        table.state[node] = PUBLISHED
        self._tell(True, table, (self._key(node),), self._parent_key(node))
        table.policy.stored(node, self._key(node))
        table.policy.add(node)
        return True

    def _below(self, table: TierTable, tops: list[int]) -> list[int]:
        """Nodes and all their descendants in a tier, by pointer jumping: O(index * log depth)."""
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
        """Blocks were cleared. What had left a reservation in flight is known no more by its nodes:
        it counts as cleared too."""
        for reservation in table.open:
            reservation.revoked |= reservation.live < len(reservation)

    def _detach(self, table: TierTable, nodes: list[int]) -> list[Evicted]:
        """Drop a set of nodes that holds all its descendants; returns those that were published."""
        inside = {node for node in nodes if table.holds(node)}
        self._park_leaving(table, nodes)
        for reservation in list(table.open):
            alive = reservation.nodes[: reservation.live]
            first = next((i for i, node in enumerate(alive) if node in inside), None)
            if first is not None:
                self._cut(table, reservation, first)
        inside = {node for node in inside if table.state[node] == PUBLISHED}
        for node in inside:
            if table.is_evictable(node):
                table.policy.remove(node)
        self._doom_pins(table, inside)
        blocks = [self._evicted(table, node) for node in inside]
        self._tell_gone(table, blocks)
        self._hand_up(table, inside)
        for node in inside:
            if table.slot[node] not in table.retained:
                table.pool.free(table.slot[node])
            table.policy.forget(node, self._key(node), ROOT, evicted=False)
            table.children[node] = 0
            self._unhold(table, node)
        return blocks

    def _park_leaving(self, table: TierTable, nodes: Iterable[int]) -> None:
        for node in nodes:
            eviction = table.evicting.pop(node, None)
            if eviction is not None:
                eviction.parked.append(table.slot[node])
                self._unhold(table, node)

    def _doom_pins(self, table: TierTable, inside: set[int]) -> None:
        """Pins inside keep the slots they read, and move up to the nearest block that stays."""
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

    def _release(self, table: TierTable, slots: Iterable[int]) -> None:
        for slot in slots:
            table.retained[slot] -= 1
            if not table.retained[slot]:
                del table.retained[slot]
                table.pool.free(slot)

    def _hand_up(self, table: TierTable, inside: set[int]) -> None:
        """Blocks that stay lose the children that go, and inherit when those were used."""
        for node in inside:
            parent = self._nodes.parent[node]
            if parent != ROOT and parent not in inside:
                self._nodes.recency.inherit(parent, max(inside, key=self._nodes.recency.stamp))
                table.drop_child(parent)

    def _restore(self, table: TierTable, records: Iterable[Record]) -> list[Record]:
        """See `BlockIndex.restore`. Columns are written in bulk; only keys and slots one by one."""
        ranked = sorted(records, key=attrgetter("stamp"), reverse=True)
        dropped = []
        claimed: list[Record] = []
        place: dict[bytes, int] = {}
        find, state = self._nodes.keys.get if len(self._nodes.keys) else _nowhere, table.state
        claim = table.pool.claim
        for record in ranked:  # the latest first: it has its key, and its slot
            key = record.key
            new = key not in place and len(key) == KEY_BYTES
            held = new and (node := find(key)) is not None and state[node] != NONE
            if new and not held and claim(record.slot):
                place[key] = len(claimed)
                claimed.append(record)
            else:
                dropped.append(record)
        above = np.array([place.get(record.parent, ROOT) for record in claimed], dtype=np.int64)
        whole = self._rooted(table, claimed, above)
        for index in np.flatnonzero(~whole).tolist():
            table.pool.free(claimed[index].slot)
            dropped.append(claimed[index])
        renumbered = np.append(np.cumsum(whole) - 1, ROOT)  # ROOT (-1) picks the last: ROOT
        kept = [claimed[index] for index in np.flatnonzero(whole).tolist()]
        self._enter_restored(table, kept, renumbered[above[whole]])
        return dropped

    def _rooted(
        self, table: TierTable, records: Sequence[Record], above: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.bool_]:
        """Which records hang, through others, on a published block or a start; bool a record.

        ``above`` is the place of each record's parent, or ROOT if it is not among the records.
        """
        everyone = np.arange(len(records))
        tops = np.zeros(len(records), dtype=np.bool_)
        for index in np.flatnonzero(above == ROOT).tolist():
            tops[index] = self._may_stand_on(table, records[index].parent)
        up = np.where(above == ROOT, everyone, above)
        for _ in range(len(records).bit_length()):  # doubling: enough for any chain; cycles stay
            up = up[up]
        rooted: npt.NDArray[np.bool_] = tops[up]
        return rooted

    def _may_stand_on(self, table: TierTable, parent: bytes) -> bool:
        node = self._nodes.keys.get(parent)
        published = node is not None and table.state[node] == PUBLISHED
        return parent == ROOT_PARENT or published

    def _nodes_for(self, records: Sequence[Record]) -> list[int]:
        """A node a record: the one that another tier's block has, or a new one."""
        if len(self._nodes.keys):
            found = [self._nodes.keys.get(record.key) for record in records]
        else:
            found = [None] * len(records)
        new = [record for record, node in zip(records, found, strict=True) if node is None]
        self._make_room_for_nodes(len(new))
        made = iter(self._nodes.make_all([r.key for r in new], [r.namespace for r in new]))
        return [next(made) if node is None else node for node in found]

    def _enter_restored(
        self, table: TierTable, records: Sequence[Record], above: npt.NDArray[np.int64]
    ) -> None:
        """Publish records, newest first; ``above`` as for `_rooted`, every record is rooted."""
        made = self._nodes_for(records)
        nodes = np.array(made, dtype=np.int64)
        parents = np.append(nodes, ROOT)[above]
        inside = parents != ROOT
        for index in np.flatnonzero(~inside).tolist():
            if records[index].parent != ROOT_PARENT:
                parents[index] = self._nodes.keys[records[index].parent]
                table.add_child(int(parents[index]))
        np.frombuffer(self._nodes.parent, dtype=np.int32)[nodes] = parents
        np.frombuffer(table.slot, dtype=table.slot.typecode)[nodes] = [r.slot for r in records]
        np.frombuffer(table.state, dtype=np.uint8)[nodes] = PUBLISHED
        children = np.frombuffer(table.children, dtype=np.int32)
        np.add.at(children, parents[inside], 1)
        leaves = children[nodes] == 0
        del children  # a column that is looked at cannot grow
        if table.quotas is not None:
            table.quotas.entered(made)
        self._nodes.recency.restore(nodes[::-1])
        if self._observer is not None:
            for record in records:
                self._tell(True, table, (record.key,), record.parent)
        for index in np.flatnonzero(leaves | table.policy.watches_blocks)[::-1].tolist():
            table.policy.stored(made[index], records[index].key)
            if leaves[index]:
                table.policy.add(made[index])
