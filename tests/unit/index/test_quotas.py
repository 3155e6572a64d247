"""Quotas against a twin that keeps plain dicts, and against an index that knows none."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcore.errors import ConfigError
from kvcore.index import BlockIndex, TierSpec
from kvcore.index.policy import BUILTIN_POLICIES, Priority
from kvcore.index.quotas import Quota
from support.budget import examples

Path = tuple[int, ...]
SPACES = [bytes([65 + tenant]) * 16 for tenant in range(3)]
TENANTS = ["ann", "bob", "eve", "everybody else"]
REST = -1
NO_LIMIT = 1 << 20


def keys_of(path: Path) -> list[bytes]:
    return [bytes(path[: i + 1]).ljust(16, b"\xff") for i in range(len(path))]


def path_of(key: bytes) -> Path:
    return tuple(key.rstrip(b"\xff"))


def store(index: BlockIndex, path: Path) -> Any:
    """A prompt of the tenant that its first number names."""
    reservation = index.lifecycle.reserve("t", keys_of(path), 0, len(path), SPACES[path[0]])
    index.lifecycle.commit(reservation)
    return reservation


class Twin:
    """One tier under LRU, recomputed from the start at every step."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used: dict[Path, int] = {}  # what is held, and when it or what stood on it was used
        self.limits: dict[int, int] = {}
        self.pins: list[Path] = []

    def of(self, tenant: int) -> list[Path]:
        return [path for path in self.used if tenant in (path[0], self.quota_of(path))]

    def quota_of(self, path: Path) -> int:
        return path[0] if path[0] in self.limits else REST

    def leaves(self, keep: Path) -> list[Path]:
        inner = {path[:-1] for path in self.used} | set(self.pins) | {keep}
        return [path for path in self.used if path not in inner]

    def make_room(self, keep: Path, tenant: int | None, enough: Any) -> list[Path]:
        """Evict the least recently used leaf (of a tenant) until there is ``enough``."""
        gone = []
        while not enough():
            leaves = [p for p in self.leaves(keep) if tenant in (None, self.quota_of(p))]
            if not leaves:
                break
            gone.append(min(leaves, key=self.used.__getitem__))
            del self.used[gone[-1]]
        return gone

    def store(self, path: Path, now: int) -> list[Path]:
        tenant = self.quota_of(path)
        held = sum(path[: i + 1] in self.used for i in range(len(path)))
        wanted, gone = len(path) - held, []
        if wanted and tenant in self.limits:
            limit = self.limits[tenant]
            gone = self.make_room(
                path[:held], tenant, lambda: len(self.of(tenant)) + wanted <= limit
            )
            wanted = min(wanted, max(0, limit - len(self.of(tenant))))
        gone += self.make_room(path[:held], None, lambda: self.capacity - len(self.used) >= wanted)
        wanted = min(wanted, self.capacity - len(self.used))
        if wanted:
            self.use(path[: held + wanted], now)
        return gone

    def use(self, path: Path, now: int) -> None:
        for i in range(len(path)):
            self.used[path[: i + 1]] = now


class QuotaMachine(RuleBasedStateMachine):
    """The index does what the twin does, eviction by eviction."""

    paths = st.tuples(st.integers(0, 2), st.lists(st.integers(0, 1), min_size=0, max_size=3)).map(
        lambda parts: (parts[0], *parts[1])
    )

    @initialize(capacity=st.integers(3, 9))
    def start(self, capacity: int) -> None:
        self.index = BlockIndex([TierSpec("t", capacity)])
        self.twin = Twin(capacity)
        self.pins: list[Any] = []
        self.now = 0

    @rule(path=paths)
    def store(self, path: Path) -> None:
        self.now += 1
        expected = self.twin.store(path, self.now)
        assert [path_of(block.key) for block in store(self.index, path).evicted] == expected

    @rule(path=paths)
    def touch(self, path: Path) -> None:
        self.now += 1
        match = self.index.match(keys_of(path))
        self.index.touch(match)
        self.twin.use(path[: match.depth], self.now)

    @rule(tenant=st.integers(REST, 2), limit=st.none() | st.integers(0, 9))
    def set_quota(self, tenant: int, limit: int | None) -> None:
        spaces = [] if tenant == REST else [SPACES[tenant]]
        gone = self.index.admin.set_quota("t", TENANTS[tenant], spaces, limit)
        expected = []
        self.twin.limits.pop(tenant, None)
        if limit is not None:
            self.twin.limits[tenant] = limit
            expected = self.twin.make_room((), tenant, lambda: len(self.twin.of(tenant)) <= limit)
        assert [path_of(block.key) for block in gone] == expected

    @precondition(lambda self: self.twin.used)
    @rule(pick=st.integers(0, 99))
    def pin(self, pick: int) -> None:
        path = sorted(self.twin.used)[pick % len(self.twin.used)]
        self.pins.append(self.index.pin("t", keys_of(path)[-1]))
        self.twin.pins.append(path)

    @precondition(lambda self: self.pins)
    @rule(pick=st.integers(0, 99))
    def unpin(self, pick: int) -> None:
        self.index.unpin(self.pins.pop(pick % len(self.pins)))
        del self.twin.pins[pick % len(self.twin.pins)]

    @precondition(lambda self: not self.pins and self.now % 5 == 2)
    @rule(tenant=st.integers(0, 2))
    def clear(self, tenant: int) -> None:
        self.index.removal.clear(SPACES[tenant])
        for path in self.twin.of(tenant):
            del self.twin.used[path]

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "index"):
            return
        self.index.check_integrity()
        assert {
            path_of(info.key) for info in self.index.admin.list_blocks()
        } == self.twin.used.keys()
        held = {SPACES[t]: len(self.twin.of(t)) for t in range(3) if self.twin.of(t)}
        assert self.index.admin.usage("t") == held
        assert self.index.admin.quotas("t") == {
            TENANTS[t]: Quota(
                len(self.twin.of(t)), limit, frozenset(() if t == REST else [SPACES[t]])
            )
            for t, limit in self.twin.limits.items()
        }


TestQuotas = QuotaMachine.TestCase
TestQuotas.settings = settings(
    max_examples=examples(60),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)

STEPS = st.lists(st.tuples(QuotaMachine.paths, st.booleans()), max_size=40)


@pytest.mark.parametrize("policy", BUILTIN_POLICIES)
@settings(max_examples=examples(30, 1))
@given(steps=STEPS)
def test_a_quota_that_never_binds_changes_no_eviction(
    policy: str, steps: list[tuple[Path, bool]]
) -> None:
    """The plain order holds for everyone, whatever policy gives it."""
    plain, limited = (BlockIndex([TierSpec("t", 6, policy)]) for _ in range(2))
    for tenant, space in zip(TENANTS, SPACES, strict=False):
        limited.admin.set_quota("t", tenant, [space], NO_LIMIT)
    for path, touch in steps:
        if touch:
            for index in (plain, limited):
                index.touch(index.match(keys_of(path)))
        assert store(plain, path).evicted == store(limited, path).evicted
        limited.check_integrity()


@pytest.mark.parametrize("policy", BUILTIN_POLICIES)
@settings(max_examples=examples(30, 1))
@given(steps=STEPS, limit=st.integers(0, 4))
def test_a_tenant_is_never_above_its_quota_and_takes_only_what_it_grows_by(
    policy: str, steps: list[tuple[Path, bool]], limit: int
) -> None:
    index = BlockIndex([TierSpec("t", 6, policy)])
    index.admin.set_quota("t", "ann", [SPACES[0]], limit)
    for path, _ in steps:
        before = index.admin.usage("t").get(SPACES[path[0]], 0)
        evicted = store(index, path).evicted
        after = index.admin.usage("t").get(SPACES[path[0]], 0)
        assert index.admin.usage("t").get(SPACES[0], 0) <= limit
        others = sum(block.namespace != SPACES[path[0]] for block in evicted)
        if path[0] == 0:
            assert others <= max(0, after - before)
        index.check_integrity()


def test_two_namespaces_of_a_tenant_share_its_quota() -> None:
    index = BlockIndex([TierSpec("t", 9)])
    index.admin.set_quota("t", "ann", SPACES[:2], 3)
    store(index, (0, 1))
    assert [path_of(block.key) for block in store(index, (1, 1)).evicted] == [(0, 1)]
    assert index.admin.quotas("t")["ann"].used == 3
    with pytest.raises(ConfigError, match="'bob' and 'ann' are the same"):
        index.admin.set_quota("t", "bob", [SPACES[1]], 3)


def test_a_lifted_quota_leaves_the_policy_alone() -> None:
    index = BlockIndex([TierSpec("t", 4, "priority")])
    policy = index.policy("t")
    index.admin.set_quota("t", "ann", [SPACES[0]], 2)
    assert index.policy("t") is policy
    assert isinstance(policy, Priority)
    store(index, (0, 1))
    index.set_priority("t", keys_of((0, 1))[-1], 90)
    store(index, (0,))
    index.admin.set_quota("t", "ann", [], None)
    assert index.admin.quotas("t") == {}
    assert len(store(index, (0, 1, 1, 1))) == 2
    index.check_integrity()


def test_own_leaves_go_in_the_policys_order() -> None:
    index = BlockIndex([TierSpec("t", 9, "priority")])
    index.admin.set_quota("t", "ann", [SPACES[0]], 3)
    for name in (1, 2):
        store(index, (0, name))
    index.set_priority("t", keys_of((0, 1))[-1], 90)
    assert [path_of(block.key) for block in store(index, (0, 3)).evicted] == [(0, 2)]


def test_leaving_blocks_count_until_they_have_left() -> None:
    index = BlockIndex([TierSpec("t", 9)])
    index.admin.set_quota("t", "ann", [SPACES[0]], 2)
    store(index, (0, 1))
    eviction = index.evictions.begin("t", 1)
    assert not store(index, (0, 2)).evicted
    assert index.admin.quotas("t")["ann"].used == 2
    index.check_integrity()
    index.evictions.finish(eviction)
    assert len(store(index, (0, 2))) == 1


def test_a_namespace_has_at_most_the_slots_or_its_quota() -> None:
    index = BlockIndex([TierSpec("t", 9)])
    assert index.most("t", SPACES[0]) == 9
    index.admin.set_quota("t", "ann", [SPACES[0]], 4)
    store(index, (0, 1))
    assert [index.most("t", space) for space in SPACES[:2]] == [4, 9]
    index.admin.set_quota("t", "others", [], 20)
    assert [index.most("t", space) for space in SPACES[:2]] == [4, 9]
