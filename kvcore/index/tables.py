"""The columns behind `kvcore.index`, and the values its calls take and give. See there."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvcore.errors import ConfigError
from kvcore.index.policy import BUILTIN_POLICIES
from kvcore.index.policy.base import MAX_NODES, EvictionPolicy, Recency
from kvcore.index.quotas import RationedPolicy
from kvcore.index.slots import SlotPool
from kvcore.model.key_table import KeyTable
from kvcore.model.keys import ROOT_PARENT

Slots = npt.NDArray[np.int64]

NONE, RESERVED, FILLED, PUBLISHED, EVICTING = range(5)
ROOT = -1  # parent of a block that starts a prompt
FREE = -2  # "parent" of a node id that is not in use


@dataclass(frozen=True)
class TierSpec:
    """A tier as the index sees it: ``num_slots`` blocks and who decides what leaves.

    ``policy`` is a name in `BUILTIN_POLICIES` or a class. ``foreign`` allows slots beyond
    ``num_slots`` (a store id in the high bits): `restore` takes them, `reserve` never gives them.
    """

    name: str
    num_slots: int
    policy: str | type[EvictionPolicy] = "lru"
    policy_options: Mapping[str, object] = field(default_factory=dict)
    foreign: bool = False

    def make_policy(self, recency: Recency) -> EvictionPolicy:
        """A fresh policy; `ConfigError` if the name or an option is not known."""
        policy = BUILTIN_POLICIES.get(self.policy) if isinstance(self.policy, str) else self.policy
        if policy is None:
            raise ConfigError(
                f"tier {self.name!r}: no eviction policy {self.policy!r}; "
                f"known are {', '.join(sorted(BUILTIN_POLICIES))}"
            )
        try:
            return policy(self.num_slots, recency, **self.policy_options)
        except TypeError as error:
            raise ConfigError(f"tier {self.name!r}: options of policy: {error}") from error


class Match(NamedTuple):
    """How much of a prompt is published where: tier ``t`` holds blocks [0, depths[t])."""

    keys: Sequence[bytes]
    depths: tuple[int, ...]

    @property
    def depth(self) -> int:
        """Blocks held by at least one tier."""
        return max(self.depths)


class Evicted(NamedTuple):
    """A block that left, or is leaving, a tier. ``parent`` is `ROOT_PARENT` at a prompt's start."""

    key: bytes
    slot: int
    parent: bytes
    namespace: bytes


class Event(NamedTuple):
    """Blocks that a tier began to publish (``stored``), a run of a chain whose first stands on
    ``parent``, or that it publishes no longer: then in no order, and ``parent`` says nothing."""

    stored: bool
    tier: str
    keys: tuple[bytes, ...]
    parent: bytes = ROOT_PARENT


class BlockInfo(NamedTuple):
    """A published block and its slot in each tier that holds it."""

    key: bytes
    parent: bytes
    namespace: bytes
    slots: dict[str, int]


class Record(Protocol):
    """What a tier's scan yields and `restore` takes (`kvcore.tiers.base.BlockRecord` fits)."""

    @property
    def slot(self) -> int: ...
    @property
    def key(self) -> bytes: ...
    @property
    def parent(self) -> bytes: ...
    @property
    def namespace(self) -> bytes: ...
    @property
    def stamp(self) -> int: ...


class Pin:
    """Keeps a published block and its ancestors in one tier until `BlockIndex.unpin`."""

    __slots__ = ("doomed", "node", "tier")

    def __init__(self, tier: str, node: int) -> None:
        self.tier = tier
        self.node = node
        self.doomed: tuple[int, ...] = ()  # slots of dropped blocks, still read; `node` moved up


class Reservation:
    """Slots for blocks [start, stop) of a prompt, to be filled and then committed or aborted.

    ``evicted`` lists what had to leave to make room: its slots may be among ``slots`` already.
    """

    __slots__ = (
        "evicted",
        "filled",
        "held",
        "keys",
        "live",
        "nodes",
        "parent",
        "parked",
        "pin",
        "revoked",
        "slots",
        "start",
        "tier",
    )

    def __init__(self, tier: str, start: int, parent: int) -> None:
        self.tier = tier
        self.start = start
        self.keys: list[bytes] = []
        self.parent = parent
        self.nodes: list[int] = []
        self.slots: Slots = np.empty(0, dtype=np.int64)
        self.evicted: list[Evicted] = []
        self.live = 0  # nodes[:live] are still in the index
        self.filled = False  # committed, waiting for the parent
        self.revoked = False  # of what went before the commit, some was cleared
        self.held = False  # its slots are read after the commit, whatever becomes of its blocks
        self.parked: list[int] = []  # slots of blocks that went while it was held
        self.pin: Pin | None = None  # on what of it was published while it was held

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def stop(self) -> int:
        """One past the last block reserved."""
        return self.start + len(self.keys)


class Eviction:
    """Blocks on their way out (a demotion): not matched any more, slots kept until it ends."""

    __slots__ = ("blocks", "nodes", "parked", "tier")

    def __init__(self, tier: str) -> None:
        self.tier = tier
        self.blocks: list[Evicted] = []
        self.nodes: list[int] = []
        self.parked: list[int] = []  # slots of blocks dropped meanwhile


class TierTable:
    """One tier's columns, by node id."""

    def __init__(self, spec: TierSpec, recency: Recency) -> None:
        self.spec = spec
        self.name = spec.name
        self.pool = SlotPool(spec.num_slots, foreign=spec.foreign)
        self.policy = spec.make_policy(recency)
        self.quotas: RationedPolicy | None = None  # then it is the policy; None: no quota is set
        self.slot = array("q" if spec.foreign else "i")
        self.children = array("i")  # children in this tier, EVICTING ones not counted
        self.state = bytearray()
        self.pins: dict[int, set[Pin]] = {}
        self.open: set[Reservation] = set()  # in flight, or filled and waiting
        self.dependents: dict[int, list[Reservation]] = {}  # by unpublished parent
        self.evicting: dict[int, Eviction] = {}
        self.leaving: set[Eviction] = set()
        self.parking: set[Reservation] = set()  # held ones that have parked slots
        self.retained: dict[int, int] = {}  # dropped slots still pinned: number of pins

    def grow(self, count: int) -> None:
        self.slot.frombytes(bytes(count * self.slot.itemsize))
        self.children.frombytes(bytes(count * self.children.itemsize))
        self.state.extend(bytes(count))

    def holds(self, node: int) -> bool:
        return NONE < self.state[node] < EVICTING

    def members(self) -> list[int]:
        """Nodes that have a slot, leaving ones included. O(index)."""
        found: list[int] = np.flatnonzero(np.frombuffer(self.state, dtype=np.uint8)).tolist()
        return found

    def grant(
        self, tenant: str, namespaces: frozenset[bytes], limit: int, nodes: NodeTable
    ) -> None:
        """See `BlockIndex.set_quota`; nothing is evicted."""
        quotas = RationedPolicy(self.policy, nodes) if self.quotas is None else self.quotas
        quotas.grant(tenant, namespaces, limit, self.members())
        self.policy = self.quotas = quotas

    def lift(self, tenant: str) -> None:
        """Take a quota away; without any the policy is on its own again."""
        if self.quotas is not None:
            self.quotas.lift(tenant)
            if not self.quotas.shares:
                self.policy, self.quotas = self.quotas.inner, None

    def is_evictable(self, node: int) -> bool:
        return self.state[node] == PUBLISHED and not self.children[node] and node not in self.pins

    def add_child(self, parent: int) -> None:
        if parent != ROOT:
            if self.is_evictable(parent):
                self.policy.remove(parent)
            self.children[parent] += 1

    def drop_child(self, parent: int) -> None:
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
    """Columns that all tiers share: a node is a block held by at least one tier."""

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
        """Make room for more nodes; returns how many."""
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
        """Node ids that `make` can give out before the columns must grow."""
        return len(self._free)

    def make(self, key: bytes, parent: int, space: int) -> int:
        node = self._free.pop()
        self.keys.put(key, node)
        self.parent[node] = parent
        self.space[node] = space
        self._space_uses[space] += 1
        return node

    def make_all(self, keys: Sequence[bytes], namespaces: Sequence[bytes]) -> list[int]:
        """`make` for different new keys, all under `ROOT`, at a third of its time a key."""
        kept = len(self._free) - len(keys)
        nodes = self._free[kept:]
        del self._free[kept:]
        nodes.reverse()  # as `make` gives them out
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
        """The id of a namespace; it lives while a node uses it."""
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
        """Assert what concerns nodes alone; yields the nodes in use."""
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
