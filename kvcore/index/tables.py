"""The columns of the index: one table of nodes, and one table for each tier."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from kvcore.index.policy.base import MAX_NODES, Recency
from kvcore.index.quotas import RationedPolicy
from kvcore.index.slots import SlotPool
from kvcore.index.values import Eviction, Pin, Reservation, TierSpec
from kvcore.model.key_table import KeyTable
from kvcore.model.keys import ROOT_PARENT

NONE, RESERVED, FILLED, PUBLISHED, EVICTING = range(5)
ROOT = -1  # parent of a block that starts a prompt
FREE = -2  # "parent" of a node id that is not in use


class TierTable:
    """The columns of one tier, indexed by node."""

    def __init__(self, spec: TierSpec, recency: Recency) -> None:
        self.spec = spec
        self.name = spec.name
        self.pool = SlotPool(spec.num_slots, foreign=spec.foreign)
        self.policy = spec.make_policy(recency)
        self.quotas: RationedPolicy | None = None  # set: it wraps the policy; None: no quotas
        self.slot = array("q" if spec.foreign else "i")
        self.children = array("i")  # number of children in this tier that are not EVICTING
        self.state = bytearray()
        self.pins: dict[int, set[Pin]] = {}
        self.open: set[Reservation] = set()  # in flight, or filled and waiting for the parent
        self.dependents: dict[int, list[Reservation]] = {}  # by unpublished parent
        self.evicting: dict[int, Eviction] = {}
        self.leaving: set[Eviction] = set()
        self.parking: set[Reservation] = set()  # held reservations with parked slots
        self.retained: dict[int, int] = {}  # number of pins on slots of dropped blocks

    def grow(self, count: int) -> None:
        """Add ``count`` nodes to every column."""
        self.slot.frombytes(bytes(count * self.slot.itemsize))
        self.children.frombytes(bytes(count * self.children.itemsize))
        self.state.extend(bytes(count))

    def holds(self, node: int) -> bool:
        """Return True if a block is in the tier and not being evicted."""
        return NONE < self.state[node] < EVICTING

    def members(self) -> list[int]:
        """Return the nodes that have a slot, including those being evicted. O(index)."""
        found: list[int] = np.flatnonzero(np.frombuffer(self.state, dtype=np.uint8)).tolist()
        return found

    def grant(
        self, tenant: str, namespaces: frozenset[bytes], limit: int, nodes: NodeTable
    ) -> None:
        """Set a quota as `Admin.set_quota` does, without evicting."""
        quotas = RationedPolicy(self.policy, nodes) if self.quotas is None else self.quotas
        quotas.grant(tenant, namespaces, limit, self.members())
        self.policy = self.quotas = quotas

    def lift(self, tenant: str) -> None:
        """Remove a quota; the last one to go removes the wrapper around the policy."""
        if self.quotas is not None:
            self.quotas.lift(tenant, self.members())
            if not self.quotas.shares:
                self.policy, self.quotas = self.quotas.inner, None

    def is_evictable(self, node: int) -> bool:
        """Return True if a block is a published, unpinned leaf."""
        return self.state[node] == PUBLISHED and not self.children[node] and node not in self.pins

    def unpin(self, pin: Pin) -> None:
        """Remove a pin and free the slots of dropped blocks that it was the last to retain."""
        for slot in pin.doomed:
            self.retained[slot] -= 1
            if not self.retained[slot]:
                del self.retained[slot]
                self.pool.free(slot)
        pin.doomed = ()
        node = pin.node
        if node == ROOT:
            return
        self.pins[node].remove(pin)
        if not self.pins[node]:
            del self.pins[node]
            if self.is_evictable(node):
                self.policy.add(node)

    def add_child(self, parent: int) -> None:
        """Count a new child of a block, which is then no longer evictable."""
        if parent != ROOT:
            if self.is_evictable(parent):
                self.policy.remove(parent)
            self.children[parent] += 1

    def drop_child(self, parent: int) -> None:
        """Count one child less; without children a block may be evictable again."""
        if parent != ROOT:
            self.children[parent] -= 1
            if self.is_evictable(parent):
                self.policy.add(parent)

    def check_integrity(self, nodes: NodeTable) -> None:
        """Assert prefix closure, counts, states, slots, pins and the evictable set."""
        held = [node for node in nodes.keys.nodes() if self.holds(node)]
        children = dict.fromkeys(held, 0)
        for node in held:
            parent = nodes.parent[node]
            if parent != ROOT:
                assert self.holds(parent), "prefix closure: a parent is missing"
                if self.state[node] == PUBLISHED:
                    assert self.state[parent] == PUBLISHED, "published on an unpublished parent"
                children[parent] += 1
        assert all(self.children[node] == count for node, count in children.items()), "children"
        assert set(self.pins) <= {n for n in held if self.state[n] == PUBLISHED}, (
            "pinned, not there"
        )
        leaves = [node for node in held if self.is_evictable(node)]
        assert sorted(self.policy.evictable()) == sorted(leaves), "evictable set"
        if self.quotas is not None:
            self.quotas.check_integrity(self.members())
        self._check_slots(nodes, held)

    def _check_slots(self, nodes: NodeTable, held: list[int]) -> None:
        assert set(self.evicting.values()) <= self.leaving
        leaving = {n for n in nodes.keys.nodes() if self.state[n] == EVICTING}
        assert leaving == set(self.evicting), "leaving blocks"
        in_use = [self.slot[node] for node in [*held, *leaving]] + list(self.retained)
        in_use += [slot for eviction in self.leaving for slot in eviction.parked]
        in_use += [slot for reservation in self.parking for slot in reservation.parked]
        unpublished = {node for node in held if self.state[node] != PUBLISHED}
        for reservation in self.open:
            unpublished -= set(reservation.nodes[: reservation.live])
            if not reservation.filled:
                in_use += reservation.slots[reservation.live :].tolist()
        assert not unpublished, "a block is reserved by nobody"
        for parent, waiting in self.dependents.items():
            assert waiting, "empty list of dependents"
            assert self.state[parent] in (RESERVED, FILLED)
            assert all(r in self.open and r.live and r.parent == parent for r in waiting)
        self.pool.check_integrity(in_use)


class NodeTable:
    """The columns that all tiers share. A node is a block that at least one tier holds."""

    def __init__(self, expected: int) -> None:
        self.keys = KeyTable(min(expected, MAX_NODES))
        self.parent = array("i")
        self.space = array("I")
        self.recency = Recency()
        self._free = array("i")
        self.space_ids: dict[bytes, int] = {}
        self.space_names: list[bytes] = []
        self._space_uses: list[int] = []
        self._free_spaces: list[int] = []

    def grow(self) -> int:
        """Add free nodes to every column; returns how many."""
        size = len(self.parent)
        count = min(max(1024, size >> 4), MAX_NODES - size)
        self.keys.grow(count)
        self.parent.extend(FREE for _ in range(count))
        self.space.frombytes(bytes(count * self.space.itemsize))
        self.recency.grow(count)
        self._free.extend(range(size + count - 1, size - 1, -1))
        return count

    @property
    def num_free(self) -> int:
        """The number of nodes that `make` can return before the columns must grow."""
        return len(self._free)

    def key(self, node: int) -> bytes:
        """Return the key of a node in use."""
        assert self.parent[node] != FREE, f"node {node} is not in use"
        return self.keys.key(node)

    def parent_key(self, node: int) -> bytes:
        """Return the key of a node's parent, or `ROOT_PARENT`."""
        parent = self.parent[node]
        return ROOT_PARENT if parent == ROOT else self.key(parent)

    def make(self, key: bytes, parent: int, space: int) -> int:
        """Return a new node for a block."""
        node = self._free.pop()
        self.keys.put(key, node)
        self.parent[node] = parent
        self.space[node] = space
        self._space_uses[space] += 1
        return node

    def make_all(self, keys: Sequence[bytes], namespaces: Sequence[bytes]) -> list[int]:
        """Return new nodes for distinct new keys, all under `ROOT`, in a third of the time."""
        kept = len(self._free) - len(keys)
        nodes = self._free[kept:]
        del self._free[kept:]
        nodes.reverse()  # in the order in which `make` returns them
        self.keys.put_all(keys, nodes)
        spaces = {}
        for namespace, uses in Counter(namespaces).items():
            space = spaces[namespace] = self.space_of(namespace)
            self._space_uses[space] += uses
        places = np.frombuffer(nodes, dtype=np.int32)
        np.frombuffer(self.parent, dtype=np.int32)[places] = ROOT
        np.frombuffer(self.space, dtype=np.uint32)[places] = [spaces[name] for name in namespaces]
        return nodes.tolist()

    def free(self, node: int) -> None:
        """Free a node that no tier holds any more."""
        self.keys.remove(node)
        self.parent[node] = FREE
        self.recency.stamps[node] = 0
        self._free.append(node)
        space = self.space[node]
        self._space_uses[space] -= 1
        if not self._space_uses[space]:
            del self.space_ids[self.space_names[space]]
            self._free_spaces.append(space)

    def space_of(self, namespace: bytes) -> int:
        """Return the id of a namespace. The id lives while a node uses it."""
        space = self.space_ids.get(namespace)
        if space is None:
            if not self._free_spaces:
                self._free_spaces.append(len(self.space_names))
                self.space_names.append(b"")
                self._space_uses.append(0)
            space = self._free_spaces.pop()
            self.space_names[space] = namespace
            self.space_ids[namespace] = space
        return space

    def check_integrity(self) -> Iterator[int]:
        """Assert the invariants of the nodes alone; yields the nodes in use."""
        uses = [0] * len(self.space_names)
        for node in self.keys.nodes():
            assert self.keys[self.keys.key(node)] == node, "a key leads elsewhere"
            assert self.parent[node] != FREE, "a freed node has a key"
            uses[self.space[node]] += 1
            yield node
        assert uses == self._space_uses, "namespace use counts"
        assert set(self._free_spaces) == {i for i, count in enumerate(uses) if not count}
        assert {self.space_names[i]: i for i, count in enumerate(uses) if count} == self.space_ids
        free = set(self._free)
        assert len(free) == len(self._free) == len(self.parent) - len(self.keys), "free nodes"
        assert all(self.parent[node] == FREE for node in free)
        assert not any(self.recency.stamps[node] for node in free)
