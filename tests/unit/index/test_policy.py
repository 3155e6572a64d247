"""Eviction policies and admission: known sequences, and a property every policy must have."""

from __future__ import annotations

import random
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.errors import ConfigError
from kvcore.index.policy import (
    ARC,
    BUILTIN_POLICIES,
    LFU,
    LRU,
    S3FIFO,
    Always,
    EvictionPolicy,
    LeafHeap,
    OnNthUse,
    Priority,
    Recency,
)
from kvcore.index.policy.base import fit
from kvcore.index.policy.ghost import Ghost


class Cache:
    """A tier of unrelated blocks (each a leaf and a root) named by small integers."""

    def __init__(self, policy: type[EvictionPolicy], capacity: int, **options: object) -> None:
        self.recency = Recency()
        self.recency.grow(4096)
        self.policy = policy(capacity, self.recency, **options)  # type: ignore[arg-type]
        self.capacity = capacity
        self.inside: set[int] = set()

    def use(self, block: int) -> bool:
        """Use a block, storing it if it is not there; True if it was."""
        if block in self.inside:
            self.recency.touch(block)
            self.policy.touch(block)
            return True
        if len(self.inside) == self.capacity:
            self.evict()
        self.inside.add(block)
        self.recency.touch(block)
        self.policy.stored(block, key(block))
        self.policy.add(block)
        return False

    def evict(self) -> int:
        victim = self.policy.victim()
        assert victim is not None
        self.policy.forget(victim, key(victim), -1, evicted=True)
        self.recency.stamps[victim] = 0
        self.inside.remove(victim)
        return victim

    def use_all(self, blocks: list[int]) -> int:
        return sum(self.use(block) for block in blocks)


def key(block: int) -> bytes:
    return block.to_bytes(16, "little")


# -- heap -------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9), st.integers(0, 20)), max_size=300))
def test_heap_against_a_dict(steps: list[tuple[int, int, int]]) -> None:
    scores, twin = [0] * 10, set[int]()
    heap = LeafHeap(scores.__getitem__)
    for action, node, score in steps:
        if action == 0 and node not in twin:
            scores[node] = max(scores[node], score)
            heap.add(node)
            twin.add(node)
        elif action == 1:
            heap.discard(node)
            twin.discard(node)
        elif action == 2:
            scores[node] += score  # risen: nothing to say
        elif action == 3:
            scores[node] = min(scores[node], score)
            heap.lowered(node)
        else:
            expected = min(twin, key=lambda n: (scores[n], n), default=None)
            assert heap.pop() == expected
            twin.discard(expected)  # type: ignore[arg-type]
        assert len(heap) == len(twin)
        assert set(heap.nodes()) == twin
        assert all((n in heap) == (n in twin) for n in range(10))


def test_heap_keeps_its_bound_while_leaves_come_and_go() -> None:
    scores = list(range(10_000))
    heap = LeafHeap(scores.__getitem__)
    for node in range(10_000):  # one prompt that grows: only its end is a leaf
        heap.add(node)
        if node:
            heap.discard(node - 1)
        assert len(heap._entries) <= 2 * len(heap) + 66  # the one just discarded counted
    assert heap.pop() == 9_999


def test_columns_grow_with_zeros() -> None:
    numbers, small = array("q"), bytearray()
    fit(5, numbers, small)
    numbers[5], small[5] = 7, 7
    fit(5000, numbers, small)
    assert (numbers[5], small[5], numbers[5000], small[5000]) == (7, 7, 0, 0)


# -- every policy -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", BUILTIN_POLICIES)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 11)), max_size=120))
def test_victims_are_evictable_and_every_block_goes_in_the_end(
    name: str, steps: list[tuple[int, int]]
) -> None:
    cache = Cache(BUILTIN_POLICIES[name], 4)
    pinned: set[int] = set()
    for action, block in steps:
        if action == 0 and (block in cache.inside or len(pinned) < 4):
            cache.use(block)
        elif action == 1 and block in cache.inside and block not in pinned:
            cache.policy.remove(block)
            pinned.add(block)
        elif action == 2 and block in pinned:
            pinned.remove(block)
            cache.policy.add(block)
        assert sorted(cache.policy.evictable()) == sorted(cache.inside - pinned)
    for block in pinned:
        cache.policy.add(block)
    for _ in range(len(cache.inside)):
        cache.evict()
    assert not cache.inside
    assert cache.policy.victim() is None


@pytest.mark.parametrize("name", BUILTIN_POLICIES)
def test_names_are_those_of_the_registry(name: str) -> None:
    assert BUILTIN_POLICIES[name].name == name


# -- each policy ------------------------------------------------------------------------------


def test_lru_evicts_the_oldest_use() -> None:
    cache = Cache(LRU, 3)
    cache.use_all([1, 2, 3, 1])
    assert [cache.evict() for _ in range(3)] == [2, 3, 1]


def test_lru_against_a_list() -> None:
    rng, cache, twin = random.Random(0), Cache(LRU, 8), list[int]()
    for _ in range(3000):
        block = rng.randrange(16)
        assert cache.use(block) == (block in twin)
        twin = [*[b for b in twin if b != block], block][-8:]
        assert cache.inside == set(twin)


def test_lfu_keeps_what_is_used_often_and_ages() -> None:
    cache = Cache(LFU, 3)
    cache.use_all([1, 1, 1, 2, 2, 3])
    assert cache.evict() == 3
    cache.use(4)  # age 1: starts at 2, as good as block 2
    assert cache.evict() in (2, 4)
    assert 1 in cache.inside
    cache.use_all([5, 5])
    for newcomer in range(100, 120):  # what was popular once does not stay for ever
        cache.use(newcomer)
        cache.use(newcomer)
    assert 1 not in cache.inside


def test_lfu_counts_no_more_uses_than_told() -> None:
    """A block used a hundred times goes after as many newcomers as one that was used four times."""
    recency = Recency()
    recency.grow(4)
    policy = LFU(4, recency, max_uses=4)
    for node, uses in ((0, 100), (1, 4), (2, 1)):
        policy.stored(node, key(node))
        for _ in range(uses - 1):
            policy.touch(node)
        recency.touch(node)
        policy.add(node)
    first, *others = [policy.victim() for _ in range(3)]
    assert first == 2
    assert {*others} == {0, 1}
    assert policy.order(0) >> 48 == policy.order(1) >> 48
    with pytest.raises(ConfigError, match="max_uses must be at least 1, got 0"):
        LFU(4, recency, max_uses=0)


def test_lfu_finds_much_where_users_take_turns() -> None:
    """The default has to hold up where contexts are more than the tier: LRU then finds nothing."""
    lfu, lru = Cache(LFU, 12), Cache(LRU, 12)
    assert lru.use_all(list(range(15)) * 40) == 0
    assert lfu.use_all(list(range(15)) * 40) > 0.4 * 15 * 40


def test_lfu_parent_inherits_uses() -> None:
    recency = Recency()
    recency.grow(8)
    policy = LFU(8, recency)
    for node in (1, 2):
        recency.touch(node)
        policy.stored(node, key(node))
    policy.touch(1)
    policy.touch(1)
    policy.forget(1, key(1), 0, evicted=True)  # 0: the parent of 1
    policy.add(0)
    policy.add(2)
    assert policy.victim() == 2


def test_arc_survives_a_scan() -> None:
    hot = [1, 2, 3, 4]
    arc, lru = Cache(ARC, 8), Cache(LRU, 8)
    for cache in (arc, lru):
        cache.use_all(hot * 2)
        cache.use_all(list(range(100, 140)))  # a scan of blocks used once
    assert arc.use_all(hot) == 4
    assert lru.use_all(hot) == 0


def test_arc_learns_from_its_ghosts() -> None:
    cache = Cache(ARC, 4)
    policy = cache.policy
    assert isinstance(policy, ARC)
    cache.use_all([1, 1, 2, 2, 3, 4, 5, 6])
    assert policy.target == 0.0
    ghost = next(block for block in (3, 4, 5) if block not in cache.inside)
    cache.use(ghost)  # it was in B1: T1 was too small
    assert policy.target > 0.0
    cache.use_all([2, 2, 1, 1])
    for block in range(20, 40):
        cache.use_all([block, block])
    before = policy.target
    regretted = next(b for b in range(39, 19, -1) if b not in cache.inside)
    cache.use(regretted)  # it was in B2
    assert policy.target < before


def test_arc_ghosts_are_bounded() -> None:
    cache = Cache(ARC, 16)
    rng = random.Random(0)
    for _ in range(3000):
        cache.use(rng.randrange(200))
        policy = cache.policy
        assert isinstance(policy, ARC)
        assert len(policy._once_ghosts) + len(policy._again_ghosts) <= 16
        assert 0.0 <= policy.target <= 1.0


def test_s3fifo_filters_one_hit_wonders() -> None:
    cache = Cache(S3FIFO, 10)
    cache.use_all([1, 2])
    cache.use_all([1, 1, 2, 2])
    cache.use_all(list(range(100, 150)))
    assert {1, 2} <= cache.inside


def test_s3fifo_readmits_what_its_ghost_knows_into_main() -> None:
    cache = Cache(S3FIFO, 10)
    cache.use_all(list(range(1, 12)))  # 1 left through the small queue
    assert 1 not in cache.inside
    cache.use(1)
    cache.use_all(list(range(100, 150)))  # never used again, yet the scan does not reach it
    assert 1 in cache.inside
    with pytest.raises(ConfigError, match="small_share"):
        S3FIFO(4, Recency(), small_share=1.5)


def test_s3fifo_main_gives_second_chances() -> None:
    cache = Cache(S3FIFO, 4)
    cache.use_all([1, 2, 3, 4])
    cache.use_all([1, 1, 2, 2, 3, 3, 4, 4])
    cache.use(5)  # 1 to 4 move to main in turn; the oldest there goes, as its uses are spent
    assert 1 not in cache.inside
    cache.use(2)  # a second chance
    cache.policy.remove(5)
    assert [cache.evict() for _ in range(3)] == [3, 4, 2]


def test_priority_first_then_recency() -> None:
    cache = Cache(Priority, 4)
    cache.use_all([1, 2, 3, 4])
    policy = cache.policy
    policy.set_priority(1, 90)
    policy.set_priority(3, 0)
    assert [cache.evict() for _ in range(4)] == [3, 2, 4, 1]
    cache.use(1)  # the id is another block now
    assert isinstance(policy, Priority)
    assert policy.priority_of(1) == 35


def test_priority_expires() -> None:
    now = [0.0]
    cache = Cache(Priority, 3, default=10, clock=lambda: now[0])
    cache.use_all([1, 2])
    policy = cache.policy
    assert isinstance(policy, Priority)
    policy.set_priority(1, 90, ttl=5.0)
    policy.set_priority(2, 50, ttl=50.0)
    assert policy.priority_of(1) == 90
    now[0] = 5.0
    assert policy.priority_of(1) == 10
    assert cache.evict() == 1


def test_priority_is_inherited_with_its_deadline() -> None:
    now, recency = [0.0], Recency()
    recency.grow(4)
    policy = Priority(4, recency, clock=lambda: now[0])
    policy.set_priority(1, 80, ttl=9.0)
    policy.forget(1, key(1), 0, evicted=True)
    assert policy.priority_of(0) == 80
    assert policy.priority_of(1) == 35
    now[0] = 10.0
    assert policy.priority_of(0) == 35


def test_priority_memory_is_bounded() -> None:
    cache = Cache(Priority, 4)
    cache.use(1)
    policy = cache.policy
    assert isinstance(policy, Priority)
    for _ in range(1000):
        policy.set_priority(1, 50, ttl=1000.0)
    assert len(policy._expiries) <= 70
    with pytest.raises(ConfigError, match="0 to 100"):
        policy.set_priority(1, 101)


# -- ghost and admission ------------------------------------------------------------------------


def test_ghost_is_a_bounded_fifo() -> None:
    ghost = Ghost(2)
    for block in (1, 2, 1, 3):
        ghost.put(key(block))
    assert [key(b) in ghost for b in (1, 2, 3)] == [True, False, True]
    assert ghost.take(key(1))
    assert not ghost.take(key(1))
    assert len(ghost) == 1


def test_always() -> None:
    assert Always().admit(key(1))


@given(st.lists(st.integers(0, 50), max_size=300), st.integers(1, 4))
def test_nth_use_is_never_refused(blocks: list[int], n: int) -> None:
    admission, seen = OnNthUse(n, width=1 << 14), dict[int, int]()
    for block in blocks:
        number = block * 0x9E3779B97F4A7C15F39CC0605CEDC835 % (1 << 128)  # keys are hashes
        seen[block] = seen.get(block, 0) + 1
        admitted = admission.admit(number.to_bytes(16, "little"))
        assert admitted == (seen[block] >= n)


def test_nth_use_is_not_hurried_by_shared_counters() -> None:
    admission = OnNthUse(2, width=2)  # row i tells keys apart by bit 32 * i
    one, two, three = (n.to_bytes(16, "little") for n in (0, 1 << 32 | 1, 1))
    assert not admission.admit(one)
    assert not admission.admit(two)  # shares the counters of rows 2 and 3 with the first
    assert [row[0] for row in admission._rows] == [1, 1, 1, 1]
    assert [row[1] for row in admission._rows] == [1, 1, 0, 0]
    assert admission.admit(three), "every counter it has was raised by others: admitted early"


def test_nth_use_is_not_held_back_by_shared_counters() -> None:
    admission = OnNthUse(4, width=2)
    one, two = bytes(16), (1 << 32 | 1).to_bytes(16, "little")
    assert [admission.admit(key) for key in (one, one, one, two, one)] == [False] * 4 + [True]


def test_nth_use_fades() -> None:
    admission = OnNthUse(2, width=8)
    admission.admit(bytes(16))
    for _ in range(63):  # 8 * width uses in all: the count of 64 is halved
        admission.admit(bytes(16))
    assert max(admission._rows[0]) == 32
    admission = OnNthUse(2, width=1 << 10)
    assert not admission.admit(key(5))
    rng = random.Random(0)
    for _ in range(8 << 10):
        admission._until_fade = max(1, admission._until_fade)
        admission.admit(rng.randbytes(16))
    assert admission._until_fade < 8 << 10


@pytest.mark.parametrize(("n", "width"), [(0, 8), (256, 8), (2, 7), (2, 0)])
def test_bad_admission_options(n: int, width: int) -> None:
    with pytest.raises(ConfigError):
        OnNthUse(n, width)
