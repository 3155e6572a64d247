"""What is asked of a remote store in the background, and what a leader believes of it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore._util.circuit_breaker import Breaker, BreakerState
from kvcore.index import BlockIndex, TierSpec
from kvcore.manager.remote_lookup import StoreLookup
from kvcore.model.points import PointShape, StateGroup, WindowGroup, point_keys
from kvcore.model.shape import BlockShape
from kvcore.tiers.finder import Promise
from kvcore.tiers.remote import Shard, StoreFinder, StoreQuery
from kvcore.tiers.remote.memory import MemoryStore
from support.stores import GEOMETRY, SPACE, Flaky, key_of


@pytest.fixture
def store() -> Flaky:
    return Flaky()


# -- queries ----------------------------------------------------------------------------------


SHARDS = Shard.all_of(GEOMETRY, "kvcore")


def names_of(key: bytes) -> list[str]:
    return [shard.name(key) for shard in SHARDS]


def hold(store: MemoryStore, seeds: Sequence[int], ranks: int = 2) -> None:
    for seed in seeds:
        for name in names_of(key_of(seed))[:ranks]:
            store.values[name] = b"?"


@pytest.fixture
def finder(store: Flaky) -> Iterator[StoreFinder]:
    finder = StoreFinder(store, SHARDS, name="far")
    yield finder
    store.gate.set()
    finder.close()


def asked(finder: StoreFinder, seeds: Sequence[int]) -> StoreQuery:
    query = finder.ask([key_of(seed) for seed in seeds])
    assert query is not None
    for _ in range(100):
        if query.ended:
            return query
        finder.wait(0.3)
    raise AssertionError("no answer")


@given(
    held=st.lists(st.booleans(), max_size=1100),
    half=st.sets(st.integers(0, 1099), max_size=3),
)
def test_it_finds_the_first_block_that_is_not_whole(held: list[bool], half: set[int]) -> None:
    """The naive answer: walk the keys. A block that lacks one rank's part is not there."""
    store = MemoryStore()
    hold(store, [i for i, there in enumerate(held) if there])
    hold(store, sorted(half), ranks=1)
    expected = [*held, False].index(False)
    finder = StoreFinder(store, SHARDS, name="far")
    try:
        query = asked(finder, range(1100)[: len(held) or 1])
        assert (query.found, query.failed) == (min(expected, len(held) or 1), False)
    finally:
        finder.close()


def test_several_queries_are_answered_together(finder: StoreFinder, store: Flaky) -> None:
    hold(store, range(40))
    store.gate.clear()
    first = finder.ask([key_of(0)])  # keeps the thread busy
    while store.calls == 0:
        pass
    queries = [finder.ask([key_of(seed) for seed in range(30 + n)]) for n in range(20)]
    store.gate.set()
    while not all(query is not None and query.ended for query in [first, *queries]):
        finder.wait(0.1)
    assert [q.found for q in queries if q] == [min(40, 30 + n) for n in range(20)]
    assert store.calls <= 5


def test_a_store_that_does_not_answer_ends_the_query(finder: StoreFinder, store: Flaky) -> None:
    store.down = True
    assert asked(finder, [1, 2]).failed
    store.down = False
    assert not asked(finder, [1, 2]).failed


def test_queries_are_bounded(finder: StoreFinder, store: Flaky) -> None:
    store.gate.clear()
    taken = [finder.ask([key_of(n)]) for n in range(400)]
    assert taken[0] is not None
    assert taken[-1] is None
    store.gate.set()


def test_blocks_are_removed_before_it_closes(store: Flaky) -> None:
    hold(store, range(5))
    finder = StoreFinder(store, SHARDS, name="far")
    finder.delete([key_of(1), key_of(3)])
    finder.close()
    assert len(store.values) == 6
    assert finder.ask([key_of(0)]) is None


# -- beliefs ------------------------------------------------------------------------------------


class Leader:
    """An index with a store below host memory, a clock that is set, and a finder that is real."""

    def __init__(self, store: Flaky, slots: int = 64, points: PointShape | None = None) -> None:
        self.now = 0.0
        self.index = BlockIndex([TierSpec("host", 8), TierSpec("far", slots)])
        self.breaker = Breaker("far", clock=lambda: self.now)
        self.finder = StoreFinder(store, SHARDS, name="far", lookup_s=1, absent_s=10)
        self.lookup = StoreLookup(
            "far",
            self.index,
            self.breaker,
            self.finder,
            points=points,
            clock=lambda: self.now,
        )

    def find(self, keys: Sequence[bytes], beyond: int = 0) -> int:
        """Ask and take in the answer; how many blocks are believed then."""
        if self.lookup.ask(keys, beyond=beyond):
            while self.lookup._asked and not self.lookup._asked[keys[-1]].query.ended:
                self.finder.wait(0.1)
            assert self.lookup.settle(keys, SPACE) is not None
        self.index.check_integrity()
        return self.index.match(keys).depths[1]


@pytest.fixture
def leader(store: Flaky) -> Iterator[Leader]:
    leader = Leader(store)
    yield leader
    store.gate.set()
    leader.finder.close()


def keys_of(seeds: Sequence[int]) -> list[bytes]:
    return [key_of(seed) for seed in seeds]


def test_what_another_host_wrote_is_found(leader: Leader, store: Flaky) -> None:
    hold(store, range(5))
    keys = keys_of(range(8))
    assert leader.lookup.ask(keys)
    assert leader.lookup.ask(keys), "still on its way"
    assert leader.find(keys) == 5
    assert not leader.lookup.ask(keys), "block 5 is known to be absent"
    assert leader.lookup.settle(keys, SPACE) is None


def test_a_hole_ends_what_is_believed(leader: Leader, store: Flaky) -> None:
    hold(store, [0, 1, 3, 4])
    assert leader.find(keys_of(range(5))) == 2


def test_absent_blocks_are_asked_for_again_after_a_while(leader: Leader, store: Flaky) -> None:
    keys = keys_of(range(4))
    assert leader.find(keys) == 0
    hold(store, range(4))
    calls = store.calls
    assert leader.find(keys) == 0
    assert store.calls == calls
    leader.now += 11
    assert leader.find(keys) == 4


def test_a_late_answer_is_not_waited_for(leader: Leader, store: Flaky) -> None:
    store.gate.clear()
    keys = keys_of(range(3))
    assert leader.lookup.ask(keys)
    leader.now = 0.9
    assert leader.lookup.settle(keys, SPACE) is None
    leader.now = 1.1
    believed = leader.lookup.settle(keys, SPACE)
    assert believed is not None
    assert believed.outcome == "late"
    assert not leader.lookup.ask(keys), "it does not wait twice in a row"


def test_what_was_found_before_the_deadline_counts(leader: Leader, store: Flaky) -> None:
    """Of a long prompt the first batches were answered, then the store hung."""
    hold(store, range(100))
    keys = keys_of(range(100))
    store.hang_at = 3
    assert leader.lookup.ask(keys)
    while store.calls < 3:
        leader.finder.wait(0.01)
    leader.now = 2
    assert leader.lookup.settle(keys, SPACE) is not None
    assert leader.index.match(keys).depths[1] == 16 + 32
    assert leader.breaker.allows()


def test_a_dead_store_is_left_alone_and_tried_again(leader: Leader, store: Flaky) -> None:
    store.down = True
    for n in range(3):
        assert leader.find(keys_of([n])) == 0
    assert leader.breaker.state is BreakerState.OPEN
    calls = store.calls
    assert not leader.lookup.ask(keys_of([9]))
    assert store.calls == calls
    store.down = False
    hold(store, [9])
    leader.now = 6
    assert leader.find(keys_of([9])) == 1
    assert leader.breaker.state is BreakerState.CLOSED


def test_a_store_that_cannot_be_read_is_not_asked(leader: Leader, store: Flaky) -> None:
    """It would answer, and its answers would be waited for, for nothing."""
    hold(store, range(3))
    readable = False
    leader.lookup._readable = lambda: readable
    assert leader.find(keys_of(range(3))) == 0
    assert store.calls == 0
    readable = True
    assert leader.find(keys_of(range(3))) == 3


def test_a_probe_that_nobody_came_back_for_blocks_nothing(leader: Leader, store: Flaky) -> None:
    """Its request was aborted. Otherwise a store that is back would never be asked again."""
    store.down = True
    for n in range(3):
        leader.find(keys_of([n]))
    store.down = False
    hold(store, [8])
    leader.now = 6
    assert leader.lookup.ask(keys_of([7]))
    assert not leader.lookup.ask(keys_of([8])), "one probe at a time"
    [probe] = leader.lookup._asked.values()
    while not probe.query.ended:
        leader.finder.wait(0.1)
    leader.now = 8
    assert leader.find(keys_of([8])) == 1


def test_requests_that_go_away_leave_nothing_behind(leader: Leader, store: Flaky) -> None:
    for n in range(1000):
        leader.lookup.ask(keys_of([n]))
        leader.now += 2
    assert len(leader.lookup._asked) <= 256


def test_an_owner_of_every_lookup_makes_room_for_others(leader: Leader, store: Flaky) -> None:
    """A client may promise itself KV that never comes, in as many requests as it likes."""
    store.gate.clear()
    leader.lookup.owner_of = lambda space: space.decode().rstrip("0123456789")
    never = Promise(1, 60.0)
    for n in range(400):
        assert leader.lookup.ask(keys_of([n]), never, b"eve%d" % n) == (n < 256)
    for n in range(200):
        assert leader.lookup.ask(keys_of([500 + n]), None, b"ann") == (n < 128)
    assert leader.lookup.ask(keys_of([900]), None, b"bob"), "and for a third"
    owners = Counter(asked.owner for asked in leader.lookup._asked.values())
    assert sum(owners.values()) == 256
    assert owners["bob"] == 1
    assert len(leader.finder._open) == 256
    assert leader.breaker.state is BreakerState.CLOSED, "nobody failed"


def test_belief_keeps_to_its_budget(store: Flaky) -> None:
    """A store holds more than the leader has slots for: old prompts are forgotten, not stored."""
    leader = Leader(store, slots=6)
    hold(store, range(100))
    for start in range(0, 40, 4):
        assert leader.find(keys_of(range(start, start + 4))) == 4
    assert leader.index.num_used("far") <= 6
    assert leader.find(keys_of(range(50, 90))) <= 6
    assert not leader.lookup.ask(keys_of(range(50, 90))), "what does not fit is not asked for again"
    leader.finder.close()


def test_blocks_dropped_while_it_was_asked_make_no_hole(leader: Leader, store: Flaky) -> None:
    hold(store, range(6))
    assert leader.find(keys_of(range(3))) == 3
    keys = keys_of(range(6))
    assert leader.lookup.ask(keys)
    leader.index.removal.invalidate("far", keys[1])
    assert leader.find(keys) == 1


@pytest.mark.slow
@given(st.data())
def test_belief_is_never_more_than_the_store_held_when_asked(data: st.DataObject) -> None:
    """Whatever is stored, dropped and asked in between: what an answer adds was there."""
    store = Flaky()
    leader = Leader(store, slots=data.draw(st.integers(1, 12)))
    chains = [keys_of([n // 2 * 100 + i if i < 3 else n * 1000 + i for i in range(6)])
              for n in range(4)]  # fmt: skip
    try:
        for _ in range(data.draw(st.integers(1, 12))):
            keys = data.draw(st.sampled_from(chains))
            for key in data.draw(st.sets(st.sampled_from(keys))):
                for name in names_of(key):
                    store.values[name] = b"?"
            before = leader.index.match(keys).depths[1]
            after = leader.find(keys)
            there = [names_of(key)[0] in store.values for key in keys]
            if after > before:
                assert all(there[before:after])
            if after and data.draw(st.booleans()):
                gone = data.draw(st.integers(0, after - 1))
                leader.index.removal.invalidate("far", keys[gone])
                leader.lookup.absent(keys[gone])
            leader.now += data.draw(st.sampled_from([0.1, 20]))
    finally:
        leader.finder.close()


# -- resume points ------------------------------------------------------------------------------

LAYER = BlockShape(1, 1, 1, block_tokens=1, dtype="uint8")
POINTS = PointShape(
    (StateGroup(1, ("state",), 20),), 8, every=2, windows=(WindowGroup(2, ("w",), LAYER, 3),)
)


def put(store: Flaky, *keys: bytes) -> None:
    for key in keys:
        for name in names_of(key):
            store.values[name] = b"?"


def resumable(leader: Leader, keys: Sequence[bytes]) -> int:
    """The blocks before the longest point that the index holds of the store."""
    ends = range(POINTS.boundary(len(keys)), 0, -POINTS.every)
    chains = {end: POINTS.chain(keys, end) for end in ends}
    return next(
        (end for end in ends if leader.index.held("far", chains[end]) == len(chains[end])), 0
    )


@pytest.fixture
def pointed(store: Flaky) -> Iterator[Leader]:
    leader = Leader(store, points=POINTS)
    yield leader
    store.gate.set()
    leader.finder.close()


def test_only_a_point_is_believed_with_all_before_it(pointed: Leader, store: Flaky) -> None:
    keys = keys_of(range(9))
    put(store, *keys[:7], *POINTS.chain(keys, 2), *POINTS.chain(keys, 4))
    pointed.find(keys)
    assert resumable(pointed, keys) == 4
    assert pointed.index.match(keys).depths[1] == 4, "blocks behind it are of no use"
    assert not pointed.lookup.ask(keys, beyond=4), "a longer one is known to be absent"
    pointed.now = 20
    put(store, *POINTS.chain(keys, 6))
    pointed.find(keys, beyond=4)
    assert resumable(pointed, keys) == 6


@pytest.mark.parametrize("row", [0, 1])
def test_a_point_of_which_a_row_was_lost_gives_way_to_a_shorter_one(
    pointed: Leader, store: Flaky, row: int
) -> None:
    keys = keys_of(range(4))
    put(store, *POINTS.chain(keys, 2), *POINTS.chain(keys, 4))
    pointed.find(keys)
    assert resumable(pointed, keys) == 4
    lost = point_keys(keys[3], POINTS.rows(4))[row]
    pointed.index.removal.invalidate("far", lost)
    pointed.lookup.absent(lost)
    pointed.find(keys)
    assert resumable(pointed, keys) == 2


def test_a_prompt_that_nobody_stored_costs_one_round_trip(pointed: Leader, store: Flaky) -> None:
    pointed.find(keys_of(range(64)))
    assert store.calls == 1


def test_the_end_of_a_query_may_be_far_from_the_longest(pointed: Leader, store: Flaky) -> None:
    """Ends are looked for in growing batches, from the longest on."""
    keys = keys_of(range(64))
    put(store, *keys, *POINTS.chain(keys, 2))
    pointed.find(keys)
    assert resumable(pointed, keys) == 2


@given(st.data())
def test_the_longest_point_is_found_as_by_looking_at_all(data: st.DataObject) -> None:
    """The store must hold all blocks before the point, and its last row."""
    store = Flaky()
    leader = Leader(store, points=POINTS, slots=200)
    keys = keys_of(range(data.draw(st.integers(1, 40))))
    ends = list(range(2, len(keys) + 1, 2))
    try:
        for _ in range(data.draw(st.integers(1, 3))):
            leader.now += 20  # what was absent is asked for again
            put(store, *keys[: data.draw(st.integers(0, len(keys)))])
            for end in data.draw(st.sets(st.sampled_from(ends), max_size=4)) if ends else ():
                put(store, *point_keys(keys[end - 1], POINTS.rows(end)))
            beyond = data.draw(st.sampled_from([0, resumable(leader, keys)]))
            leader.find(keys, beyond)
            there = [names_of(key)[0] in store.values for key in keys]
            most = [*there, False].index(False)
            rows = [
                end
                for end in ends
                if end <= most
                and names_of(point_keys(keys[end - 1], POINTS.rows(end))[-1])[0] in store.values
            ]
            assert resumable(leader, keys) == max(rows, default=0)
    finally:
        leader.finder.close()


@pytest.mark.parametrize("promise", [None, Promise(6, 60.0)])
@pytest.mark.parametrize("slots", [1, 6, 11, 12])
def test_a_point_for_which_there_is_no_room_is_not_asked_for_for_ever(
    store: Flaky, slots: int, promise: Promise | None
) -> None:
    """An engine computes a prompt once nothing more is asked about it."""
    leader = Leader(store, slots, POINTS)
    keys, other = keys_of(range(6)), keys_of(range(100, 101))
    put(store, *POINTS.chain(keys, 6), *POINTS.chain(keys, 4))
    hold_here(leader, other)
    queries = 0
    while leader.lookup.ask(keys, promise, beyond=resumable(leader, keys)):
        queries, promise = queries + 1, None
        assert queries < 5
        while leader.lookup.settle(keys, SPACE) is None:
            leader.finder.wait(0.1)
        leader.index.check_integrity()
    whole = slots >= len(POINTS.chain(keys, 6))
    assert resumable(leader, keys) == (6 if whole else 0)
    assert leader.index.held("far", other) == (not whole), "what is of no use evicts nothing"
    leader.finder.close()


def test_a_point_whose_room_is_in_use_is_not_asked_for_for_ever(store: Flaky) -> None:
    leader = Leader(store, len(POINTS.chain(keys_of(range(6)), 6)), POINTS)
    keys, other = keys_of(range(6)), keys_of(range(100, 101))
    put(store, *POINTS.chain(keys, 6))
    hold_here(leader, other)
    pin = leader.index.pin("far", other[-1])
    leader.find(keys)
    assert leader.index.num_used("far") == 1, "a part of a point is of no use"
    assert not leader.lookup.ask(keys)
    leader.index.unpin(pin)
    leader.now = 20
    leader.find(keys)
    assert resumable(leader, keys) == 6
    leader.finder.close()


def hold_here(leader: Leader, keys: Sequence[bytes], tier: str = "far") -> None:
    index = leader.index
    index.lifecycle.commit(index.lifecycle.reserve(tier, keys, 0, len(keys), SPACE))


@pytest.mark.parametrize("points", [None, POINTS], ids=["blocks", "points"])
def test_keys_that_are_no_chain_when_the_answer_comes_are_not_believed(
    store: Flaky, points: PointShape | None
) -> None:
    """A server's sessions say which keys follow each other, and may change their words."""
    leader = Leader(store, points=points)
    keys, apart = keys_of(range(4)), key_of(50)
    put(store, *POINTS.chain(keys, 4))
    claimed = keys[2] if points is None else POINTS.last_row(keys, 4)
    assert leader.lookup.ask(keys)
    hold_here(leader, [apart, claimed], "host")
    while leader.lookup.settle(keys, SPACE) is None:
        leader.finder.wait(0.1)
    leader.index.check_integrity()
    assert leader.index.path(claimed) == [apart, claimed]
    assert leader.index.num_used("far") == 0
    assert not leader.lookup.ask(keys)
    leader.finder.close()


def promised(leader: Leader, keys: Sequence[bytes], promise: Promise, beyond: int = 0) -> str:
    """Wait for what is promised; the outcome. The finder's clock is a real one."""
    assert leader.lookup.ask(keys, promise, beyond=beyond)
    while (believed := leader.lookup.settle(keys, SPACE)) is None:
        leader.finder.wait(0.1)
    leader.index.check_integrity()
    return believed.outcome


def test_a_promised_point_is_waited_for_though_a_shorter_one_is_there(
    pointed: Leader, store: Flaky
) -> None:
    """Its rows come one by one, in any order, and it is not read before all are there."""
    keys = keys_of(range(9))
    put(store, *POINTS.chain(keys, 2))
    rest = [key for key in POINTS.chain(keys, 6) if key not in POINTS.chain(keys, 2)]
    coming, exists = rest[::-1], store.exists

    def then_one_comes(names: Sequence[str]) -> list[bool]:
        there = exists(names)
        if coming:
            assert resumable(pointed, keys) == 0
            put(store, coming.pop(0))
        return there

    store.exists = then_one_comes  # type: ignore[method-assign]
    assert promised(pointed, keys, Promise(6, 60.0)) == "found"
    assert not coming
    assert resumable(pointed, keys) == 6


def test_a_promised_point_is_asked_for_though_it_was_not_there_a_moment_ago(
    pointed: Leader, store: Flaky
) -> None:
    keys = keys_of(range(8))
    pointed.find(keys)
    assert not pointed.lookup.ask(keys)
    put(store, *POINTS.chain(keys, 4))
    assert promised(pointed, keys, Promise(4, 60.0)) == "found"
    assert resumable(pointed, keys) == 4
    assert not pointed.lookup.ask(keys, beyond=4), "the longest was absent"


@pytest.mark.parametrize("points", [None, POINTS], ids=["blocks", "points"])
def test_a_promise_counts_though_the_prompt_is_being_asked_for_without_it(
    store: Flaky, points: PointShape | None
) -> None:
    """Such as by a request that was aborted, and is sent again with the promise of another node."""
    leader = Leader(store, points=points)
    keys = keys_of(range(4))
    store.gate.clear()
    assert leader.lookup.ask(keys)
    assert leader.lookup.ask(keys, Promise(4, 60.0))
    assert leader.lookup.ask(keys), "who has no promise waits with the others"
    assert len(leader.lookup._asked) == 1
    store.gate.set()
    calls = store.calls
    while store.calls < calls + 3:
        time.sleep(0.01)
    put(store, *POINTS.chain(keys, 4))
    while (believed := leader.lookup.settle(keys, SPACE)) is None:
        leader.finder.wait(0.1)
    assert believed.outcome == "found"
    assert leader.index.match(keys).depths[1] == 4
    assert leader.breaker.state is BreakerState.CLOSED
    leader.finder.close()


@pytest.mark.parametrize("points", [None, POINTS], ids=["blocks", "points"])
def test_what_was_promised_and_has_come_another_way_is_not_waited_for(
    store: Flaky, points: PointShape | None
) -> None:
    """A server's other engine saves it in host memory, and its store may get it late or never."""
    leader = Leader(store, points=points)
    keys = keys_of(range(8))
    assert leader.lookup.ask(keys, Promise(4, 60.0))
    query = leader.lookup._asked[keys[-1]].query
    assert leader.lookup.ask(keys, beyond=3)
    assert leader.lookup._asked[keys[-1]].query is query, "it is not all there"
    while leader.lookup.ask(keys, beyond=4):
        assert leader.lookup._asked[keys[-1]].query is not query
        while leader.lookup.settle(keys, SPACE) is None:
            leader.finder.wait(0.1)
    assert not leader.finder._open
    assert leader.breaker.state is BreakerState.CLOSED
    leader.finder.close()


def test_when_a_promises_time_is_over_a_shorter_point_is_taken(
    pointed: Leader, store: Flaky
) -> None:
    keys = keys_of(range(8))
    put(store, *keys, *POINTS.chain(keys, 4))
    began = time.monotonic()
    assert promised(pointed, keys, Promise(6, 0.3)) == "found"
    assert time.monotonic() - began >= 0.3
    assert resumable(pointed, keys) == 4
    assert not pointed.lookup.ask(keys, beyond=4), "no prompt waits twice in a row"


def test_a_promise_is_waited_for_where_nothing_else_is(pointed: Leader, store: Flaky) -> None:
    keys = keys_of(range(8))
    assert promised(pointed, keys, Promise(6, 0.1)) == "absent"
    assert resumable(pointed, keys) == 0
    assert not pointed.lookup.ask(keys)


@pytest.mark.parametrize(("blocks", "beyond"), [(5, 0), (10, 0), (4, 4), (2, 4)])
def test_a_promise_that_is_of_no_use_is_not_waited_for(
    pointed: Leader, store: Flaky, blocks: int, beyond: int
) -> None:
    """There can be no such point in this prompt, or the engine has as much."""
    keys = keys_of(range(8))
    put(store, *POINTS.chain(keys, 6))
    began = time.monotonic()
    assert promised(pointed, keys, Promise(blocks, 600.0), beyond) == "found"
    assert time.monotonic() - began < 60
    assert resumable(pointed, keys) == 6, "it is looked up without it"


@given(st.data())
def test_a_promised_point_or_the_longest_before_it_is_found(data: st.DataObject) -> None:
    """Whatever of it, and of shorter ones, the store has when the wait is over."""
    store = Flaky()
    leader = Leader(store, points=POINTS, slots=200)
    keys = keys_of(range(data.draw(st.integers(2, 40))))
    ends = list(range(2, len(keys) + 1, 2))
    try:
        put(store, *keys[: data.draw(st.integers(0, len(keys)))])
        for end in data.draw(st.sets(st.sampled_from(ends), max_size=4)):
            put(store, *point_keys(keys[end - 1], POINTS.rows(end)))
        beyond = data.draw(st.sampled_from([0, *ends]))
        end = data.draw(st.sampled_from(ends))
        if end <= beyond:
            return
        promised(leader, keys, Promise(end, 0.001), beyond)

        def there(*asked: bytes) -> bool:
            return all(names_of(key)[0] in store.values for key in asked)

        right = [
            each
            for each in ends
            if beyond < each < end and there(*keys[:each], POINTS.last_row(keys, each))
        ]
        if there(*POINTS.chain(keys, end)):
            right.append(end)
        assert resumable(leader, keys) == max(right, default=0)
    finally:
        leader.finder.close()
