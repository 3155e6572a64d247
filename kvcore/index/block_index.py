"""The block index: which block is in which tier, and in which slot.

Every tier holds a *prefix-closed* set: a block is in a tier only if its parent is there too, or if
it starts a prompt. This keeps the operations cheap:

    prompt     b0 ── b1 ── b2 ── b3 ── b4 ── b5        match: binary search, because "held" is
    host       ■     ■     ■     ■     ·     ·                monotone over the keys of a prompt
    disk       ■     ■     ■     ■     ■     ·         pin:   the deepest block protects all before
                                                       evict: leaves only, so no prefix loses its
                                                              middle
The life of a block in a tier:

    (gone) ──reserve──▶ RESERVED ──commit──▶ FILLED ──parent published──▶ PUBLISHED
       ▲                    │ abort, failure    │ parent aborted              │   ▲
       │◀───────────────────┴───────────────────┘              evictions.begin│   │ rescued
       │◀─────────────────────── evictions.finish ── EVICTING ◀───────────────┘───┘
       │◀──────────────────────────── evict, drop_subtree, clear ─────────────┘

Only PUBLISHED blocks are matched. A block that is being evicted is rescued, that is published
again, if a new reservation needs it. `BlockIndex` looks blocks up and pins them; its attributes
change them: `lifecycle` reserves and publishes, `evictions` makes room, `removal` drops blocks, and
`admin` lists, restores and sets quotas. Everything runs on the leader's thread, without locks and
without I/O. Match and pin take O(log n). Reserve, commit and evict take O(blocks), a few
microseconds a block. Removal, listing, restore and `check_integrity` take O(index).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kvcore.errors import KVCoreError
from kvcore.index.admin import Admin
from kvcore.index.evictions import Evictions
from kvcore.index.lifecycle import Lifecycle
from kvcore.index.policy.base import EvictionPolicy
from kvcore.index.removal import Removal
from kvcore.index.state import IndexState
from kvcore.index.tables import NONE, PUBLISHED, RESERVED, ROOT
from kvcore.index.values import Event, Match, Pin, Slots, TierSpec


class BlockIndex:
    """Longest-prefix lookup and pins over all tiers, and the parts that change what they hold.

    Leader thread only.
    """

    def __init__(self, tiers: Sequence[TierSpec]) -> None:
        """Make an empty index of ``tiers``, nearest first: the order of `Match.depths`."""
        self._state = state = IndexState(tiers)
        self._nodes = state.nodes
        self._tables = state.tables
        self.evictions = Evictions(state)
        self.lifecycle = Lifecycle(state, self.evictions)
        self.removal = Removal(state, self.lifecycle)
        self.admin = Admin(state, self.evictions)

    # -- lookup ---------------------------------------------------------------------------------

    def match(self, keys: Sequence[bytes]) -> Match:
        """Count the leading blocks of a prompt that each tier has published. Changes nothing."""
        depth = self._state.depth
        return Match(keys, tuple(depth(table, keys, PUBLISHED) for table in self._tables))

    def touch(self, match: Match) -> None:
        """Count a match as a use of its blocks. O(tiers), because only the deepest is marked."""
        for table, depth in zip(self._tables, match.depths, strict=True):
            node = self._nodes.keys.get(match.keys[depth - 1]) if depth else None
            if node is not None and table.state[node] == PUBLISHED:
                self._nodes.recency.touch(node)
                table.policy.touch(node)

    def held(self, tier: str, keys: Sequence[bytes]) -> int:
        """Count the leading blocks that a tier holds or has reserved: these need no store."""
        return self._state.depth(self._state.table(tier), keys, RESERVED)

    def slots(self, tier: str, keys: Sequence[bytes], start: int, stop: int) -> Slots:
        """Return the slots of published blocks [start, stop) of a prompt, int64. Pin them first."""
        table, parents = self._state.table(tier), self._nodes.parent
        count = max(0, stop - start)
        slots = np.empty(count, dtype=np.int64)
        if count:
            node, slot_of, found = self._state.published(table, keys[stop - 1]), table.slot, []
            for _ in range(count):
                found.append(slot_of[node])
                node = parents[node]
            slots[:] = found[::-1]
        return slots

    def path(self, key: bytes) -> list[bytes]:
        """Return the keys from the start of the prompt up to and including ``key``."""
        node, keys = self._somewhere(key), []
        while node != ROOT:
            keys.append(self._nodes.key(node))
            node = self._nodes.parent[node]
        return keys[::-1]

    def namespace_of(self, key: bytes) -> bytes:
        """Return the digest of the namespace of a block."""
        return self._nodes.space_names[self._nodes.space[self._somewhere(key)]]

    def is_chain(self, keys: Sequence[bytes], held: int, namespace: bytes) -> bool:
        """Return True if ``keys`` can be the chain of a prompt in ``namespace``. O(keys).

        That is so if the first ``held`` keys are reserved or published in a tier as one chain, and
        no other key is known with a different parent, and no key comes twice. Check keys from
        another process with this: to reserve keys that are no chain would break the invariants of
        the index.
        """
        if len(set(keys)) < len(keys):
            return False
        table, parents = self._nodes.keys, self._nodes.parent
        space = self._nodes.space_ids.get(namespace)
        below, node = [], ROOT
        if held:
            last = table.get(keys[held - 1])
            if last is None or not self._state.is_held(last):
                return False
            node = last
        while node != ROOT:
            below.append(node)
            node = parents[node]
        if table.pack(np.array(below[::-1], dtype=np.int64)) != b"".join(keys[:held]):
            return False
        nodes = [table.get(key) for key in keys[held:]]
        for known, parent in zip(nodes, [below[0] if below else ROOT, *nodes], strict=False):
            if known is not None and self._state.is_held(known) and parents[known] != parent:
                return False
        ends = below[:1] + [known for known in nodes if known is not None]
        return all(self._nodes.space[known] == space for known in ends)

    # -- pins -----------------------------------------------------------------------------------

    def pin(self, tier: str, key: bytes) -> Pin:
        """Keep a published block and its ancestors in a tier until `unpin`. O(log n).

        Raises `KVCoreError` if the block is not published there: match again.
        """
        table = self._state.table(tier)
        node = self._state.published(table, key)
        if table.is_evictable(node):
            table.policy.remove(node)
        pin = Pin(tier, node)
        table.pins.setdefault(node, set()).add(pin)
        return pin

    def unpin(self, pin: Pin) -> None:
        """Remove a pin, exactly once. Slots of blocks dropped meanwhile are freed now."""
        self._state.table(pin.tier).unpin(pin)

    # -- events ---------------------------------------------------------------------------------

    def watch(self, observer: Callable[[Event], object] | None) -> None:
        """Call ``observer`` whenever blocks are published or no longer published; None stops it.

        The observer runs inside calls of the index and must not call back, except
        `Admin.published`: its snapshot and the events after it give the state of the index.
        """
        self._state.observer = observer

    # -- occupancy ------------------------------------------------------------------------------

    @property
    def tiers(self) -> tuple[str, ...]:
        """The names of the tiers, nearest first."""
        return tuple(self._state.by_name)

    def num_slots(self, tier: str) -> int:
        """Return how many blocks a tier can hold."""
        return self._state.table(tier).pool.num_slots

    def most(self, tier: str, namespace: bytes) -> int:
        """Return how many blocks of a namespace a tier can hold at most, with its quota there."""
        table = self._state.table(tier)
        share = None if table.quotas is None else table.quotas.share_of(namespace)
        slots = table.pool.num_slots
        return slots if share is None else min(slots, share.limit)

    def num_free(self, tier: str) -> int:
        """Count the slots of a tier that are free without evicting."""
        return self._state.table(tier).pool.num_free

    def num_used(self, tier: str) -> int:
        """Count the slots of a tier in use, including reserved, evicting and retained ones."""
        return self._state.table(tier).pool.num_used

    def policy(self, tier: str) -> EvictionPolicy:
        """Return the eviction policy of a tier."""
        table = self._state.table(tier)
        return table.policy if table.quotas is None else table.quotas.inner

    def set_priority(self, tier: str, key: bytes, priority: int, ttl: float | None = None) -> None:
        """Give a published block and its ancestors a priority, 0 to 100, for ``ttl`` seconds.

        Raises `ConfigError` if the tier's policy has no priorities.
        """
        table = self._state.table(tier)
        table.policy.set_priority(self._state.published(table, key), priority, ttl)

    def __len__(self) -> int:
        """Return the number of blocks in any state in any tier."""
        return len(self._nodes.keys)

    def __contains__(self, key: bytes) -> bool:
        """Return True if a block is published in some tier."""
        node = self._nodes.keys.get(key)
        return node is not None and any(t.state[node] == PUBLISHED for t in self._tables)

    def check_integrity(self) -> None:
        """Assert every invariant of the whole index. O(index), slow: for tests and debugging."""
        for node in self._nodes.check_integrity():
            assert any(table.state[node] != NONE for table in self._tables), "node held nowhere"
        for table in self._tables:
            table.check_integrity(self._nodes)

    # -- inside ---------------------------------------------------------------------------------

    def _somewhere(self, key: bytes) -> int:
        node = self._nodes.keys.get(key)
        if node is None or not any(table.holds(node) for table in self._tables):
            raise KVCoreError(f"block {key.hex()} is in no tier: match again")
        return node
