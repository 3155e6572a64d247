"""Which blocks are where: one table of nodes, and for each tier the slots it holds them in.

Every tier holds a *prefix-closed* set: a block is in a tier only if its parent is, or it starts a
prompt. Almost everything cheap here follows from that:

    prompt     b0 ── b1 ── b2 ── b3 ── b4 ── b5        match: binary search a tier, as "held" is
    host       ■     ■     ■     ■     ·     ·                monotone over the keys of a prompt
    disk       ■     ■     ■     ■     ■     ·         pin:   the deepest block protects all before
                                                       evict: leaves only, so no prefix loses its
                                                              middle
Life of a block in a tier:

    (gone) ──reserve──▶ RESERVED ──commit──▶ FILLED ──parent published──▶ PUBLISHED
       ▲                    │ abort, failure    │ parent aborted              │   ▲
       │◀───────────────────┴───────────────────┘               begin_eviction│   │ rescued
       │◀──────────────────────── finish_eviction ── EVICTING ◀───────────────┘───┘
       │◀──────────────────────────── evict, drop_subtree, clear ─────────────┘

Only PUBLISHED blocks are ever matched. Everything here runs on the leader's thread: no locks, no
I/O. Times: match and pin O(log n); reserve, commit, evict O(blocks), a few microseconds each;
`drop_subtree`, `clear`, `list_blocks`, `restore` and `check_integrity` O(index).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from kvcore.errors import ConfigError, FormatError, KVCoreError
from kvcore.index.policy.base import EvictionPolicy
from kvcore.index.quotas import Quota
from kvcore.index.states import BlockStates
from kvcore.index.tables import (
    EVICTING,
    FILLED,
    NONE,
    PUBLISHED,
    RESERVED,
    ROOT,
    BlockInfo,
    Event,
    Evicted,
    Eviction,
    Match,
    Pin,
    Record,
    Reservation,
    Slots,
    TierSpec,
    TierTable,
)
from kvcore.model.keys import KEY_BYTES, ROOT_PARENT

__all__ = [
    "BlockIndex",
    "BlockInfo",
    "Event",
    "Evicted",
    "Eviction",
    "Match",
    "Pin",
    "Quota",
    "Record",
    "Reservation",
    "TierSpec",
]


class BlockIndex(BlockStates):
    """Longest-prefix lookup, slots, pins and block life cycle over all tiers.

    Leader thread only.
    """

    def __init__(self, tiers: Sequence[TierSpec]) -> None:
        """``tiers`` from the nearest to the farthest; `Match.depths` has the same order."""
        super().__init__(tiers)
        self._tiers = {table.name: table for table in self._tables}
        self._user_pins: dict[bytes, list[Pin]] = {}

    # -- lookup ---------------------------------------------------------------------------------

    def match(self, keys: Sequence[bytes]) -> Match:
        """How many leading blocks of a prompt each tier holds, published. Changes nothing."""
        return Match(keys, tuple(self._depth(table, keys, PUBLISHED) for table in self._tables))

    def touch(self, match: Match) -> None:
        """Count a match as a use of the blocks it found. O(tiers): only the deepest is marked."""
        for table, depth in zip(self._tables, match.depths, strict=True):
            node = self._nodes.keys.get(match.keys[depth - 1]) if depth else None
            if node is not None and table.state[node] == PUBLISHED:
                self._nodes.recency.touch(node)
                table.policy.touch(node)

    def held(self, tier: str, keys: Sequence[bytes]) -> int:
        """Leading blocks that are in a tier, reserved and filled ones too: nothing to store."""
        return self._depth(self._table(tier), keys, RESERVED)

    def slots(self, tier: str, keys: Sequence[bytes], start: int, stop: int) -> Slots:
        """Slots of published blocks [start, stop) of a prompt, int64. Pin them first."""
        table, parents = self._table(tier), self._nodes.parent
        count = max(0, stop - start)
        slots = np.empty(count, dtype=np.int64)
        if count:
            node, slot_of, found = self._published(table, keys[stop - 1]), table.slot, []
            for _ in range(count):
                found.append(slot_of[node])
                node = parents[node]
            slots[:] = found[::-1]
        return slots

    def path(self, key: bytes) -> list[bytes]:
        """Keys from the start of the prompt to ``key``: what a demotion must find in the tier."""
        node, keys = self._somewhere(key), []
        while node != ROOT:
            keys.append(self._key(node))
            node = self._nodes.parent[node]
        return keys[::-1]

    def namespace_of(self, key: bytes) -> bytes:
        """Digest of the namespace a block belongs to."""
        return self._nodes.space_names[self._nodes.space[self._somewhere(key)]]

    def is_chain(self, keys: Sequence[bytes], held: int, namespace: bytes) -> bool:
        """Whether ``keys`` can be a prompt's of ``namespace``. O(keys).

        The last of the first ``held``, which a tier has reserved or published, stands on those
        before it, and none of the others is known on another block. For keys that somebody else
        says belong together: to reserve for a chain that is none breaks what this index rests on.
        """
        table, parents = self._nodes.keys, self._nodes.parent
        space = self._nodes.space_ids.get(namespace)
        below, node = [], ROOT
        if held:
            last = table.get(keys[held - 1])
            if last is None or not self._is_held(last):
                return False
            node = last
        while node != ROOT:
            below.append(node)
            node = parents[node]
        if table.pack(np.array(below[::-1], dtype=np.int64)) != b"".join(keys[:held]):
            return False
        nodes = [table.get(key) for key in keys[held:]]
        for known, parent in zip(nodes, [below[0] if below else ROOT, *nodes], strict=False):
            if known is not None and self._is_held(known) and parents[known] != parent:
                return False
        ends = below[:1] + [known for known in nodes if known is not None]
        return all(self._nodes.space[known] == space for known in ends)

    # -- pins -----------------------------------------------------------------------------------

    def pin(self, tier: str, key: bytes) -> Pin:
        """Keep a published block and all before it in this tier until `unpin`. O(log n).

        Raises `KVCoreError` if the block is not published there (any more): match again.
        """
        table = self._table(tier)
        node = self._published(table, key)
        if table.is_evictable(node):
            table.policy.remove(node)
        pin = Pin(tier, node)
        table.pins.setdefault(node, set()).add(pin)
        return pin

    def unpin(self, pin: Pin) -> None:
        """Let go of a pin, once. Blocks that were dropped meanwhile give their slots back now."""
        table, node = self._table(pin.tier), pin.node
        self._release(table, pin.doomed)
        pin.doomed = ()
        if node == ROOT:
            return
        table.pins[node].remove(pin)
        if not table.pins[node]:
            del table.pins[node]
            if table.is_evictable(node):
                table.policy.add(node)

    def pin_prefix(self, keys: Sequence[bytes]) -> int:
        """Pin, for a user, what each tier holds of a prompt now; returns the deepest in blocks.

        Stays until `unpin_prefix` with the same keys (or the same last key). A prompt pinned twice
        is pinned afresh, not twice over.
        """
        match = self.match(keys)
        if not match.depth:
            return 0
        self.unpin_prefix(keys)
        self._user_pins[keys[-1]] = [
            self.pin(table.name, keys[depth - 1])
            for table, depth in zip(self._tables, match.depths, strict=True)
            if depth
        ]
        return match.depth

    def unpin_prefix(self, keys: Sequence[bytes]) -> bool:
        """Undo `pin_prefix`; False if the prompt was not pinned."""
        pins = self._user_pins.pop(keys[-1], None) if keys else None
        for pin in pins or ():
            self.unpin(pin)
        return pins is not None

    # -- reserve, commit, abort -----------------------------------------------------------------

    def reserve(
        self, tier: str, keys: Sequence[bytes], start: int, stop: int, namespace: bytes
    ) -> Reservation:
        """Take slots for those of blocks [start, stop) of a prompt that a tier does not hold yet.

        Blocks before ``start`` must be held (else `KVCoreError`: use `held`). Leaves of other
        prompts are evicted by the tier's policy to make room, where the namespace's tenant has a
        quota its own first (`kvcore.index.quotas`); where that is not enough the reservation is
        shorter than asked for, perhaps empty. A block that was on its way out is
        kept instead of stored again. Nothing is visible until `commit`; who reserves must call
        `commit` or `abort` once, unless the reservation is empty.
        """
        table = self._table(tier)
        stop = min(stop, len(keys))
        begin = self._depth(table, keys[:stop], RESERVED)
        if table.evicting:
            begin, stop = self._rescue(table, keys, begin, stop)
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
        table.add_child(parent)  # so that making room cannot evict it
        wanted, reservation.evicted = self._within_quota(table, stop - begin, namespace)
        reservation.evicted += self._make_room(table, wanted)
        count = min(wanted, table.pool.num_free)
        if not count:
            table.drop_child(parent)
            return reservation
        reservation.keys = list(keys[begin : begin + count])
        reservation.slots = table.pool.allocate(count)
        reservation.nodes = self._place(table, reservation, namespace)
        reservation.live = count
        table.open.add(reservation)
        if parent != ROOT and table.state[parent] != PUBLISHED:
            table.dependents.setdefault(parent, []).append(reservation)
        return reservation

    def commit(self, reservation: Reservation, failed_from: int | None = None) -> None:
        """The bytes of a reservation are in place: publish it, or as much as is good.

        ``failed_from`` is the index in the prompt of the first block that could not be written: it
        and all after it are given up. Blocks whose parent is not published yet wait for it.
        """
        table = self._table(reservation.tier)
        good = len(reservation)
        if failed_from is not None:
            good = min(good, max(0, failed_from - reservation.start))
        if not reservation.nodes:
            return
        assert reservation in table.open, "a reservation is committed or aborted once"
        assert not reservation.filled, "a reservation is committed or aborted once"
        self._give_back(table, reservation, reservation.live, len(reservation))  # dropped meanwhile
        reservation.filled = True
        self._cut(table, reservation, good)
        for node in reservation.nodes[: reservation.live]:
            table.state[node] = FILLED
        if not reservation.live:
            table.open.discard(reservation)
        elif reservation.parent == ROOT or table.state[reservation.parent] == PUBLISHED:
            self._publish(table, reservation)

    def abort(self, reservation: Reservation) -> None:
        """Give a reservation up, with everything reserved on top of it."""
        self.commit(reservation, failed_from=reservation.start)

    def hold(self, reservation: Reservation) -> None:
        """Before the commit: its slots are read after it, too, and nothing else may take them until
        `let_go`, whether its blocks are published, given up, dropped or cleared meanwhile."""
        assert not reservation.filled, "a reservation is held before its commit"
        reservation.held = True

    def let_go(self, reservation: Reservation) -> None:
        """Nothing reads a held reservation's slots any more. After its commit or abort, once."""
        table = self._table(reservation.tier)
        reservation.held = False
        table.parking.discard(reservation)
        table.pool.free_all(reservation.parked)
        reservation.parked = []
        pin, reservation.pin = reservation.pin, None
        if pin is not None:
            self.unpin(pin)

    # -- eviction -------------------------------------------------------------------------------

    def evict(self, tier: str, count: int) -> list[Evicted]:
        """Evict up to ``count`` blocks at once, leaves first, by the tier's policy."""
        table = self._table(tier)
        evicted: list[Evicted] = []
        while len(evicted) < count and (node := table.policy.victim()) is not None:
            evicted.append(self._evict(table, node))
        self._tell_gone(table, evicted)
        return evicted

    def evict_blocks(self, tier: str, keys: Sequence[bytes]) -> list[Evicted]:
        """Evict of a chain's blocks those that may go: from the last one on, until one is pinned,
        unpublished, or has others standing on it."""
        table, evicted = self._table(tier), []
        for key in reversed(keys):
            node = self._nodes.keys.get(key)
            if node is None or not table.is_evictable(node):
                if node is not None and table.holds(node):
                    break
                continue
            table.policy.remove(node)
            evicted.append(self._evict(table, node))
        self._tell_gone(table, evicted)
        return evicted

    def begin_eviction(self, tier: str, count: int) -> Eviction:
        """Choose up to ``count`` blocks to leave and stop matching them, but keep their slots.

        For a demotion: copy ``blocks`` elsewhere, then `finish_eviction` (or `cancel_eviction`).
        """
        table, eviction = self._table(tier), Eviction(tier)
        while len(eviction.nodes) < count and (node := table.policy.victim()) is not None:
            eviction.blocks.append(self._evicted(table, node))
            eviction.nodes.append(node)
            self._leave(table, node, eviction.blocks[-1].key)
            table.state[node] = EVICTING
            table.evicting[node] = eviction
            table.leaving.add(eviction)
        self._tell_gone(table, eviction.blocks)
        return eviction

    def finish_eviction(self, eviction: Eviction) -> list[Evicted]:
        """Free the slots; returns the blocks that really left (not those rescued or dropped)."""
        table, left = self._table(eviction.tier), []
        for node, block in zip(eviction.nodes, eviction.blocks, strict=True):
            if table.evicting.get(node) is eviction:
                del table.evicting[node]
                self._vacate(table, node)
                left.append(block)
        table.pool.free_all(eviction.parked)
        table.leaving.discard(eviction)
        eviction.nodes, eviction.blocks, eviction.parked = [], [], []
        return left

    def cancel_eviction(self, eviction: Eviction) -> None:
        """Keep the blocks after all; those whose parent left meanwhile go."""
        table = self._table(eviction.tier)
        for node, block in zip(reversed(eviction.nodes), reversed(eviction.blocks), strict=True):
            parent = ROOT if block.parent == ROOT_PARENT else self._nodes.keys.get(block.parent)
            if table.evicting.get(node) is eviction and parent is not None:
                self._keep(table, node, parent)  # or not: then it ends below
        self.finish_eviction(eviction)

    # -- bulk -----------------------------------------------------------------------------------

    def drop_subtree(self, tier: str, key: bytes) -> list[Evicted]:
        """Take a block and all after it out of a tier (its bytes are bad); returns what went.

        Pinned ones too: they are found no more at once, and their slots are free for reuse when
        the last pin is gone. Reservations among them are cut; their slots are free when their
        owner commits or aborts. O(index): about 0.1 s for a million blocks.
        """
        table = self._table(tier)
        node = self._nodes.keys.get(key)
        if node is None or not table.holds(node):
            return []
        return self._detach(table, self._below(table, [node]))

    def drop_subtrees(self, tier: str, keys: Iterable[bytes]) -> list[Evicted]:
        """Take several blocks and all after them out of a tier as `drop_subtree` does, because
        somebody wants them gone: reservations that lose any by it are ``revoked``."""
        table = self._table(tier)
        found = (self._nodes.keys.get(key) for key in keys)
        tops = [node for node in found if node is not None and table.holds(node)]
        gone = self._detach(table, self._below(table, tops)) if tops else []
        self._revoke(table)
        return gone

    def clear(
        self, namespace: bytes | None = None, tier: str | None = None
    ) -> dict[str, list[Evicted]]:
        """Drop all blocks (of a namespace, of a tier) as `drop_subtrees` does.

        Returns what went, by tier.
        """
        space = self._nodes.space_ids.get(namespace) if namespace is not None else None
        tables = self._tables if tier is None else (self._table(tier),)
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

    def list_blocks(self, namespace: bytes | None = None) -> list[BlockInfo]:
        """Published blocks (of a namespace), with their slot in each tier that holds them."""
        infos = []
        for node in self._nodes.keys.nodes():
            owner = self._nodes.space_names[self._nodes.space[node]]
            slots = {t.name: t.slot[node] for t in self._tables if t.state[node] == PUBLISHED}
            if slots and namespace in (None, owner):
                infos.append(BlockInfo(self._key(node), self._parent_key(node), owner, slots))
        return infos

    def ends(
        self, tier: str, namespaces: Iterable[bytes] | None = None, prefix: bytes = b""
    ) -> tuple[list[bytes], int]:
        """Of a tier's published blocks (of ``namespaces``, whose keys begin with ``prefix``): the
        keys of those on which no other of them stands, and how many there are in all. O(index)."""
        chosen = np.frombuffer(self._table(tier).state, dtype=np.uint8) == PUBLISHED
        if namespaces is not None:
            known = [self._nodes.space_ids[n] for n in namespaces if n in self._nodes.space_ids]
            chosen &= np.isin(np.frombuffer(self._nodes.space, dtype=np.uint32), known)
        nodes = np.flatnonzero(chosen)
        if prefix:
            keys = np.frombuffer(self._nodes.keys.pack(nodes), dtype=np.uint8)
            begin = keys.reshape(-1, KEY_BYTES)[:, : len(prefix)]
            nodes = nodes[(begin == np.frombuffer(prefix, dtype=np.uint8)).all(axis=1)]
        parents = np.frombuffer(self._nodes.parent, dtype=np.int32)[nodes]
        inner = np.zeros(len(chosen), dtype=np.bool_)
        inner[parents[parents != ROOT]] = True
        return [self._key(node) for node in nodes[~inner[nodes]].tolist()], len(nodes)

    def watch(self, observer: Callable[[Event], object] | None) -> None:
        """Tell ``observer`` of every block that becomes findable or ceases to be, as it happens.

        It is called in the middle of this index's calls and must not call back, `published`
        excepted: what that gives, followed by the events told from then on, is the index.
        """
        self._observer = observer

    def published(self, tier: str) -> tuple[bytes, bytes]:
        """Keys, and in the same order parent keys, of a tier's published blocks, packed.

        O(index), about 20 ms for a million blocks: what `list_blocks` tells, without an object a
        block. A block that starts a prompt has `ROOT_PARENT`.
        """
        state = np.frombuffer(self._table(tier).state, dtype=np.uint8)
        nodes = np.flatnonzero(state == PUBLISHED)
        up = np.frombuffer(self._nodes.parent, dtype=np.int32)[nodes]
        parents = np.frombuffer(self._nodes.keys.pack(up), dtype=f"V{KEY_BYTES}").copy()
        parents[up == ROOT] = ROOT_PARENT
        return self._nodes.keys.pack(nodes), parents.tobytes()

    def restore(self, tier: str, records: Iterable[Record]) -> list[Record]:
        """Publish what a scan found, in any order; later stamps count as used later.

        Returns the records that do not fit, to be dropped from the medium: orphans whose chain of
        ancestors is not complete, keys held already (the latest stamp wins), slots taken or out of
        range. About 4 us a record.
        """
        return self._restore(self._table(tier), records)

    # -- tenants --------------------------------------------------------------------------------

    def set_quota(
        self, tier: str, tenant: str, namespaces: Iterable[bytes], blocks: int | None
    ) -> list[Evicted]:
        """Let a tenant, all of ``namespaces`` together, have at most so many blocks of a tier, or
        (None) as many as anyone. O(tier); see `kvcore.index.quotas` for what it means.

        What is over the quota now is evicted; returns that. What is pinned, or in flight, stays,
        and nothing of the tenant is stored until there is less of it. Raises ConfigError where a
        namespace is another tenant's.
        """
        table = self._table(tier)
        if blocks is None:
            table.lift(tenant)
            return []
        chosen = frozenset(namespaces)
        table.grant(tenant, chosen, blocks, self._nodes)
        return self._within_quota(table, 0, next(iter(chosen)))[1] if chosen else []

    def quotas(self, tier: str) -> dict[str, Quota]:
        """The quotas of a tier, by tenant."""
        quotas = self._table(tier).quotas
        shares = {} if quotas is None else quotas.shares
        return {
            tenant: Quota(share.used, share.limit, share.namespaces)
            for tenant, share in shares.items()
        }

    def usage(self, tier: str) -> dict[bytes, int]:
        """Blocks of a tier by namespace, in any state. O(index), a few ms for a million blocks."""
        state = np.frombuffer(self._table(tier).state, dtype=np.uint8)
        spaces = np.frombuffer(self._nodes.space, dtype=np.uint32)[state != NONE]
        names = self._nodes.space_names
        counts = np.bincount(spaces, minlength=1)
        return {names[space]: int(counts[space]) for space in np.flatnonzero(counts).tolist()}

    # -- occupancy ------------------------------------------------------------------------------

    @property
    def tiers(self) -> tuple[str, ...]:
        """Tier names, nearest first."""
        return tuple(self._tiers)

    def num_slots(self, tier: str) -> int:
        """Blocks a tier can hold."""
        return self._table(tier).pool.num_slots

    def num_free(self, tier: str) -> int:
        """Slots of a tier that are free without evicting."""
        return self._table(tier).pool.num_free

    def free_slots(self, tier: str) -> list[int]:
        """Slots of a tier that hold nothing the index knows of. The medium may: what was dropped,
        or left there by an engine that was killed. O(slots)."""
        return self._table(tier).pool.free_slots()

    def num_used(self, tier: str) -> int:
        """Slots of a tier in use, those reserved, leaving or still pinned after a drop included."""
        return self._table(tier).pool.num_used

    def policy(self, tier: str) -> EvictionPolicy:
        """A tier's eviction policy."""
        table = self._table(tier)
        return table.policy if table.quotas is None else table.quotas.inner

    def set_priority(self, tier: str, key: bytes, priority: int, ttl: float | None = None) -> None:
        """Give a published block (and so its ancestors) a priority, 0 to 100, for ``ttl`` seconds.

        `ConfigError` if the tier's policy knows no priorities.
        """
        table = self._table(tier)
        table.policy.set_priority(self._published(table, key), priority, ttl)

    def __len__(self) -> int:
        """Blocks known, in any state, in any tier."""
        return len(self._nodes.keys)

    def __contains__(self, key: bytes) -> bool:
        """True if a block is published in some tier."""
        node = self._nodes.keys.get(key)
        return node is not None and any(t.state[node] == PUBLISHED for t in self._tables)

    def check_integrity(self) -> None:
        """Assert every invariant of the whole index. O(index), slow: for tests and debugging."""
        for node in self._nodes.check_integrity():
            assert any(table.state[node] != NONE for table in self._tables), "node held nowhere"
        for table in self._tables:
            table.check_integrity(self._nodes)

    # -- inside ---------------------------------------------------------------------------------

    def _table(self, tier: str) -> TierTable:
        try:
            return self._tiers[tier]
        except KeyError:
            raise ConfigError(f"no tier {tier!r}: there are {', '.join(self._tiers)}") from None

    def _published(self, table: TierTable, key: bytes) -> int:
        node = self._nodes.keys.get(key)
        if node is None or table.state[node] != PUBLISHED:
            raise KVCoreError(
                f"block {key.hex()} is not published in tier {table.name!r}: match again and pin "
                "before using its slot"
            )
        return node

    def _is_held(self, node: int) -> bool:
        """In some tier, and not on its way out: then what it stands on is there as well."""
        return any(RESERVED <= table.state[node] <= PUBLISHED for table in self._tables)

    def _somewhere(self, key: bytes) -> int:
        node = self._nodes.keys.get(key)
        if node is None or not any(table.holds(node) for table in self._tables):
            raise KVCoreError(f"block {key.hex()} is in no tier: match again")
        return node

    def _depth(self, table: TierTable, keys: Sequence[bytes], least: int) -> int:
        """Leading blocks whose state is ``least`` .. PUBLISHED: they are a prefix, so bisect."""
        find, state = self._nodes.keys.get, table.state
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high + 1) // 2
            node = find(keys[middle - 1])
            if node is not None and least <= state[node] <= PUBLISHED:
                low = middle
            else:
                high = middle - 1
        return low
