"""The life of a block from `Lifecycle.reserve` until it is published or given up."""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.errors import FormatError, KVCoreError
from kvcore.index.evictions import Evictions
from kvcore.index.state import IndexState
from kvcore.index.tables import FILLED, PUBLISHED, RESERVED, ROOT, TierTable
from kvcore.index.values import Pin, Reservation
from kvcore.model.keys import KEY_BYTES


class Lifecycle:
    """Reserves slots, publishes what was written, and gives up the rest. Leader thread only."""

    def __init__(self, state: IndexState, evictions: Evictions) -> None:
        self._state = state
        self._nodes = state.nodes
        self._evictions = evictions

    def reserve(
        self, tier: str, keys: Sequence[bytes], start: int, stop: int, namespace: bytes
    ) -> Reservation:
        """Allocate slots for the blocks [start, stop) of a prompt that a tier does not hold yet.

        Raises `KVCoreError` if the tier does not hold all blocks before ``start`` (see
        `BlockIndex.held`). To make room, the tier's policy evicts leaves of other prompts. If the
        namespace's tenant has a quota, its own leaves are evicted first (`kvcore.index.quotas`).
        If that is not enough, the reservation is shorter than requested and may be empty. It also
        ends before a key that comes twice, or is held on another block: the keys are then no chain
        (see `BlockIndex.is_chain`). A block that is being evicted is published again instead of
        stored twice. Nothing is visible until `commit`. The caller must call `commit` or `abort`
        exactly once, unless the reservation is empty.
        """
        table = self._state.table(tier)
        stop = min(stop, len(keys))
        begin = self._state.depth(table, keys[:stop], RESERVED)
        if table.evicting:
            begin, stop = self._evictions.rescue(table, keys, begin, stop)
        if begin < start:
            raise KVCoreError(
                f"blocks [{start}, {stop}) cannot be stored in tier {tier!r}: it holds only "
                f"{begin} blocks of this prompt, so reserve from {begin} or skip the rest"
            )
        if any(len(key) != KEY_BYTES for key in keys[begin:stop]):
            raise FormatError(f"keys are {KEY_BYTES} bytes long: make them with KeyChain")
        parent = self._nodes.keys[keys[begin - 1]] if begin else ROOT
        reservation = Reservation(tier, begin, parent)
        if begin >= stop:
            return reservation
        table.add_child(parent)  # so that make_room cannot evict it
        wanted, reservation.evicted = self._evictions.within_quota(table, stop - begin, namespace)
        reservation.evicted += self._evictions.make_room(table, wanted)
        count = min(wanted, table.pool.num_free)
        if not count:
            table.drop_child(parent)
            return reservation
        reservation.keys = list(keys[begin : begin + count])
        reservation.slots = table.pool.allocate(count)
        reservation.nodes = self._place(table, reservation, namespace)
        reservation.live = len(reservation.nodes)
        if reservation.live < count:
            self._leave_rest(table, reservation)
        if not reservation.live:
            table.drop_child(parent)
            return reservation
        table.open.add(reservation)
        if parent != ROOT and table.state[parent] != PUBLISHED:
            table.dependents.setdefault(parent, []).append(reservation)
        return reservation

    def commit(self, reservation: Reservation, failed_from: int | None = None) -> None:
        """Publish a reservation whose bytes have been written.

        ``failed_from`` is the index in the prompt of the first block that could not be written:
        this block and all after it are given up. Blocks whose parent is not published yet are
        published together with it.
        """
        table = self._state.table(reservation.tier)
        good = len(reservation)
        if failed_from is not None:
            good = min(good, max(0, failed_from - reservation.start))
        if not reservation.nodes:
            return
        assert reservation in table.open, "a reservation is committed or aborted once"
        assert not reservation.filled, "a reservation is committed or aborted once"
        self._give_back(table, reservation, reservation.live, len(reservation))  # dropped meanwhile
        reservation.filled = True
        self.cut(table, reservation, good)
        for node in reservation.nodes[: reservation.live]:
            table.state[node] = FILLED
        if not reservation.live:
            table.open.discard(reservation)
        elif reservation.parent == ROOT or table.state[reservation.parent] == PUBLISHED:
            self._publish(table, reservation)

    def abort(self, reservation: Reservation) -> None:
        """Give up a reservation and every reservation on top of it."""
        self.commit(reservation, failed_from=reservation.start)

    def hold(self, reservation: Reservation) -> None:
        """Keep the slots of a reservation from reuse until `release`. Call before `commit`.

        For slots that are still read after the commit. They stay allocated even if their blocks
        are given up, dropped or cleared meanwhile.
        """
        assert not reservation.filled, "a reservation is held before its commit"
        reservation.held = True

    def release(self, reservation: Reservation) -> None:
        """Release a reservation made with `hold`.

        Call exactly once, after `commit` or `abort`, when nothing reads its slots any more.
        """
        table = self._state.table(reservation.tier)
        reservation.held = False
        table.parking.discard(reservation)
        table.pool.free_all(reservation.parked)
        reservation.parked = []
        pin, reservation.pin = reservation.pin, None
        if pin is not None:
            table.unpin(pin)

    def cut(self, table: TierTable, reservation: Reservation, live: int) -> None:
        """Give up nodes[live:] of a reservation and every reservation on top of them.

        The slots of filled reservations are freed at once, those of reservations in flight at
        their `commit` or `abort`, and those of held reservations at `release`.
        """
        cuts = [(reservation, live)]
        for cut, first in cuts:  # the loop appends to it: parents come first
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
                self._close_empty(table, cut)

    def _place(self, table: TierTable, reservation: Reservation, namespace: bytes) -> list[int]:
        """Add the nodes of a reservation, up to a key that stands on another block.

        The parent has already counted its new child.
        """
        keys, parents, nodes = self._nodes.keys, self._nodes.parent, []
        slot_of, state, children = table.slot, table.state, table.children
        parent = reservation.parent
        for key, slot in zip(reservation.keys, reservation.slots.tolist(), strict=True):
            node = keys.get(key)
            if node is None:
                node = self._make_node(key, parent, namespace)
            elif parents[node] != parent and self._state.is_held(node):
                break
            parents[node] = parent
            slot_of[node] = slot
            state[node] = RESERVED
            children[node] = 1
            nodes.append(node)
            parent = node
        if nodes:
            children[parent] = 0
        if table.quotas is not None:
            table.quotas.entered(nodes)
        return nodes

    def _leave_rest(self, table: TierTable, reservation: Reservation) -> None:
        """Shorten a reservation to the nodes that it has."""
        count = len(reservation.nodes)
        table.pool.free_all(reservation.slots[count:].tolist())
        reservation.slots, reservation.keys = reservation.slots[:count], reservation.keys[:count]

    def _make_node(self, key: bytes, parent: int, namespace: bytes) -> int:
        self._state.reserve_nodes(1)
        return self._nodes.make(key, parent, self._nodes.space_of(namespace))

    def _publish(self, table: TierTable, reservation: Reservation) -> None:
        """Publish a filled reservation and the filled reservations that waited for it."""
        stack = [reservation]
        while stack:
            ready = stack.pop()
            table.open.discard(ready)
            nodes = ready.nodes[: ready.live]
            for node in nodes:
                table.state[node] = PUBLISHED
            above = self._nodes.parent_key(nodes[0])
            self._state.notify(True, table, ready.keys[: ready.live], above)
            self._nodes.recency.touch(nodes[-1])
            for node in nodes if table.policy.watches_blocks else nodes[-1:]:
                table.policy.stored(node, self._nodes.key(node))
            if ready.held:
                ready.pin = Pin(table.name, nodes[-1])
                table.pins.setdefault(nodes[-1], set()).add(ready.pin)
            if table.is_evictable(nodes[-1]):
                table.policy.add(nodes[-1])
            if table.dependents:
                for node in nodes:
                    stack += [r for r in table.dependents.pop(node, ()) if r.filled]

    def _give_back(self, table: TierTable, owner: Reservation, start: int, stop: int) -> None:
        """Free slots [start, stop) of a reservation, or park them if it is held."""
        slots = owner.slots[start:stop].tolist()
        if not owner.held:
            table.pool.free_all(slots)
        elif slots:
            owner.parked += slots
            table.parking.add(owner)

    def _withdraw(self, table: TierTable, nodes: list[int]) -> None:
        """Remove unpublished blocks, each the only child of the one before, from a tier."""
        parent = self._nodes.parent[nodes[0]]
        for node in reversed(nodes):
            table.children[node] = 0
            self._state.remove(table, node)
        table.drop_child(parent)

    def _close_empty(self, table: TierTable, reservation: Reservation) -> None:
        """Stop a reservation without blocks from waiting for its parent; if filled, close it."""
        waiting = table.dependents.get(reservation.parent)
        if waiting is not None and reservation in waiting:
            waiting.remove(reservation)
            if not waiting:
                del table.dependents[reservation.parent]
        if reservation.filled:
            table.open.discard(reservation)
