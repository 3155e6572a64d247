"""What a node lends: bytes that stay as they are for as long as somebody may read them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from kvcore.errors import CapacityError
from kvcore.tiers.remote.peer import leases as module
from kvcore.tiers.remote.peer.leases import LentMemory, SpanAllocator
from support.budget import examples
from support.clock import Clock

LEASE_S = 10.0
NBYTES = 4096


def make(nbytes: int = NBYTES) -> tuple[LentMemory, Clock]:
    clock = Clock()
    return LentMemory(memoryview(bytearray(nbytes)), lease_s=LEASE_S, clock=clock), clock


def text(name: str, nbytes: int) -> bytes:
    return (name.encode() * nbytes)[:nbytes]


def put(lent: LentMemory, name: str, nbytes: int) -> bool:
    data = memoryview(text(name, nbytes))
    return lent.put(name, [data[: nbytes // 3], data[nbytes // 3 :]])


class Machine(RuleBasedStateMachine):
    """Against a naive twin that remembers, of each lease, the bytes it was promised."""

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.lent, self.clock = make()
        self.sizes: dict[str, int] = {}
        self.promised: dict[int, tuple[float, list[tuple[module.Span, bytes]]]] = {}

    @rule(n=st.integers(0, 9), nbytes=st.integers(1, 1200))
    def put(self, n: int, nbytes: int) -> None:
        name = f"m/{n % 2}/{n}"
        known = self.lent.exists([name])[0]
        if put(self.lent, name, nbytes) and not known:
            self.sizes[name] = nbytes

    @rule(target=leases, picks=st.lists(st.integers(0, 9), min_size=1, max_size=4))
    def lease(self, picks: list[int]) -> int:
        names = [f"m/{n % 2}/{n}" for n in picks]
        there = self.lent.exists(names)
        grant = self.lent.lease(names)
        assert [place is not None for place in grant.places] == there
        found = [
            (place, text(name, self.sizes[name]))
            for name, place in zip(names, grant.places, strict=True)
            if place is not None
        ]
        assert bool(grant.lease) == bool(found)
        if found:
            self.promised[grant.lease] = (self.clock.now + LEASE_S, found)
        return grant.lease

    @rule(lease=consumes(leases))
    def end(self, lease: int) -> None:
        until, _ = self.promised.pop(lease, (0.0, []))
        assert self.lent.end(lease) == (until > self.clock.now)

    @rule(n=st.integers(0, 9))
    def remove(self, n: int) -> None:
        self.lent.remove([f"m/{n % 2}/{n}", "never/there"])
        assert self.lent.exists([f"m/{n % 2}/{n}"]) == [False]

    @rule(seconds=st.sampled_from([1.0, 6.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @invariant()
    def what_is_leased_is_as_it_was(self) -> None:
        for until, places in self.promised.values():
            for place, data in places if until > self.clock.now else ():
                assert bytes(self.lent.view(place)) == data

    @invariant()
    def nothing_is_lost(self) -> None:
        live = sum(until > self.clock.now for until, _ in self.promised.values())
        assert self.lent.leased == live
        self.lent.check_integrity()


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=examples(30, 1), stateful_step_count=30, deadline=None)


def test_a_leased_value_outlives_removal_and_a_full_memory() -> None:
    lent, clock = make(1024)
    assert put(lent, "f/a", 512)
    lease, [place] = lent.lease(["f/a"])
    assert place is not None
    lent.remove(["f/a"])
    assert put(lent, "f/b", 512)
    assert put(lent, "f/c", 512), "b makes room"
    assert lent.exists(["f/a", "f/b", "f/c"]) == [False, False, True]
    assert bytes(lent.view(place)) == text("f/a", 512)
    other, _ = lent.lease(["f/c"])
    assert not put(lent, "f/d", 512), "everything is being read"
    assert lent.exists(["f/c"]) == [True], "nothing is gained by evicting what is read"
    clock.now += LEASE_S
    assert put(lent, "f/d", 512), "its reader died"
    assert not lent.end(lease)
    assert not lent.end(other)
    lent.check_integrity()


def test_bytes_stay_for_the_last_of_their_readers() -> None:
    lent, _ = make(512)
    assert put(lent, "f/a", 512)
    (first, [place]), (second, _) = (lent.lease(["f/a"]) for _ in range(2))
    assert place is not None
    lent.remove(["f/a"])
    assert lent.end(first)
    assert not put(lent, "f/b", 512)
    assert bytes(lent.view(place)) == text("f/a", 512)
    lent.check_integrity()
    assert lent.end(second)
    assert put(lent, "f/b", 512)
    lent.check_integrity()


def test_of_two_threads_that_put_a_value_one_does_and_the_others_room_is_free() -> None:
    lent, _ = make(1024)

    class Slow(list[memoryview]):
        """While its bytes are copied, another thread puts the same."""

        def __iter__(self) -> Iterator[memoryview]:
            yield from super().__iter__()
            put(lent, "f/a", 512)

    assert lent.put("f/a", Slow([memoryview(text("f/a", 512))]))
    lent.check_integrity()
    assert put(lent, "f/b", 512)
    assert lent.exists(["f/a", "f/b"]) == [True, True]


def test_of_a_chain_its_end_is_evicted_first() -> None:
    lent, _ = make(1024)
    chain = [f"f/{n}" for n in range(4)]
    for name in chain:
        assert put(lent, name, 256)
    assert all(lent.exists(chain))
    assert put(lent, "f/new", 256)
    assert lent.exists(chain) == [True, True, True, False]


def test_leases_are_bounded_and_folders_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LEASES", 3)
    monkeypatch.setattr(module, "PEER_LEASES", 2)
    lent, clock = make()
    put(lent, "kvcore/m/h0-1/k", 8)
    put(lent, "kvcore/m/h0-1/l", 8)
    assert lent.folders == ["kvcore/m/h0-1"]
    for peer in ("a", "a", "b"):
        lent.lease(["kvcore/m/h0-1/k"], peer)
    assert lent.lease(["nothing"], "a").lease == 0, "nothing is held by that"
    for peer, why in (("a", "2 leases of this node"), ("c", "3 in all")):
        with pytest.raises(CapacityError, match=why):
            lent.lease(["kvcore/m/h0-1/k"], peer)
    assert lent.lease(["kvcore/m/h0-1/k"]).lease, "the node itself"
    clock.now += LEASE_S
    assert lent.lease(["kvcore/m/h0-1/k"], "a").lease
    assert lent.lease(["kvcore/m/h0-1/k"]).lease
    lent.remove(["kvcore/m/h0-1/k", "kvcore/m/h0-1/l"])
    assert lent.folders == []


def test_a_node_pins_a_part_of_the_memory_and_ends_only_its_own_leases() -> None:
    lent, clock = make(1024)
    names = [f"f/{n}" for n in range(4)]
    assert all(put(lent, name, 256) for name in names)
    granted = lent.lease(names, "a")
    assert [place is not None for place in granted.places] == [True, True, True, False]
    assert lent.lease(names, "a").lease == 0, "it holds what one node may"
    assert lent.lease(names, "b").lease, "another may lease the same"
    assert put(lent, "f/new", 256), "there is room that nobody pins"
    for other in ("b", "", None):
        assert not lent.end(granted.lease, other)
    lent.check_integrity()
    assert lent.end(granted.lease, "a")
    assert lent.lease(names, "a").lease
    clock.now += LEASE_S
    assert lent.lease(names[:3], "a").lease, "what has expired counts no more"
    lent.check_integrity()


def test_a_value_that_is_most_of_the_memory_can_be_read() -> None:
    lent, _ = make(1024)
    assert put(lent, "f/0", 1000)
    granted = lent.lease(["f/0"], "a")
    assert granted.places[0]
    assert lent.lease(["f/0"], "a").places == [None]
    assert lent.end(granted.lease, "a")
    lent.check_integrity()


def test_freed_spans_are_joined() -> None:
    allocator = SpanAllocator(640)
    spans = [allocator.allocate(128) for _ in range(5)]
    assert None not in spans
    assert allocator.allocate(1) is None
    for i in (1, 3, 2, 0, 4):
        span = spans[i]
        assert span is not None
        allocator.free(span)
    assert allocator.gaps == [(0, 640)]
    assert SpanAllocator(0).allocate(1) is None
