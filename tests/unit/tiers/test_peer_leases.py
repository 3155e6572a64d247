"""What a node lends: bytes that stay as they are for as long as somebody may read them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from kvcore.errors import CapacityError
from kvcore.tiers.remote.peer import leases as module
from kvcore.tiers.remote.peer.leases import Lending, Room
from support.clock import Clock

LEASE_S = 10.0
NBYTES = 4096


def make(nbytes: int = NBYTES) -> tuple[Lending, Clock]:
    clock = Clock()
    return Lending(memoryview(bytearray(nbytes)), lease_s=LEASE_S, clock=clock), clock


def text(name: str, nbytes: int) -> bytes:
    return (name.encode() * nbytes)[:nbytes]


def put(lending: Lending, name: str, nbytes: int) -> bool:
    data = memoryview(text(name, nbytes))
    return lending.put(name, [data[: nbytes // 3], data[nbytes // 3 :]])


class Machine(RuleBasedStateMachine):
    """Against a naive twin that remembers, of each lease, the bytes it was promised."""

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.lending, self.clock = make()
        self.sizes: dict[str, int] = {}
        self.promised: dict[int, tuple[float, list[tuple[module.Span, bytes]]]] = {}

    @rule(n=st.integers(0, 9), nbytes=st.integers(1, 1200))
    def put(self, n: int, nbytes: int) -> None:
        name = f"m/{n % 2}/{n}"
        known = self.lending.exists([name])[0]
        if put(self.lending, name, nbytes) and not known:
            self.sizes[name] = nbytes

    @rule(target=leases, picks=st.lists(st.integers(0, 9), min_size=1, max_size=4))
    def lease(self, picks: list[int]) -> int:
        names = [f"m/{n % 2}/{n}" for n in picks]
        there = self.lending.exists(names)
        lent = self.lending.lease(names)
        assert [place is not None for place in lent.places] == there
        found = [
            (place, text(name, self.sizes[name]))
            for name, place in zip(names, lent.places, strict=True)
            if place is not None
        ]
        assert bool(lent.lease) == bool(found)
        if found:
            self.promised[lent.lease] = (self.clock.now + LEASE_S, found)
        return lent.lease

    @rule(lease=consumes(leases))
    def end(self, lease: int) -> None:
        until, _ = self.promised.pop(lease, (0.0, []))
        assert self.lending.end(lease) == (until > self.clock.now)

    @rule(n=st.integers(0, 9))
    def remove(self, n: int) -> None:
        self.lending.remove([f"m/{n % 2}/{n}", "never/there"])
        assert self.lending.exists([f"m/{n % 2}/{n}"]) == [False]

    @rule(seconds=st.sampled_from([1.0, 6.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @invariant()
    def what_is_leased_is_as_it_was(self) -> None:
        for until, places in self.promised.values():
            for place, data in places if until > self.clock.now else ():
                assert bytes(self.lending.view(place)) == data

    @invariant()
    def nothing_is_lost(self) -> None:
        live = sum(until > self.clock.now for until, _ in self.promised.values())
        assert self.lending.leased == live
        self.lending.check_integrity()


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


def test_a_leased_value_outlives_removal_and_a_full_memory() -> None:
    lending, clock = make(1024)
    assert put(lending, "f/a", 512)
    lease, [place] = lending.lease(["f/a"])
    assert place is not None
    lending.remove(["f/a"])
    assert put(lending, "f/b", 512)
    assert put(lending, "f/c", 512), "b makes room"
    assert lending.exists(["f/a", "f/b", "f/c"]) == [False, False, True]
    assert bytes(lending.view(place)) == text("f/a", 512)
    other, _ = lending.lease(["f/c"])
    assert not put(lending, "f/d", 512), "everything is being read"
    assert lending.exists(["f/c"]) == [True], "nothing is gained by evicting what is read"
    clock.now += LEASE_S
    assert put(lending, "f/d", 512), "its reader died"
    assert not lending.end(lease)
    assert not lending.end(other)
    lending.check_integrity()


def test_bytes_stay_for_the_last_of_their_readers() -> None:
    lending, _ = make(512)
    assert put(lending, "f/a", 512)
    (first, [place]), (second, _) = (lending.lease(["f/a"]) for _ in range(2))
    assert place is not None
    lending.remove(["f/a"])
    assert lending.end(first)
    assert not put(lending, "f/b", 512)
    assert bytes(lending.view(place)) == text("f/a", 512)
    lending.check_integrity()
    assert lending.end(second)
    assert put(lending, "f/b", 512)
    lending.check_integrity()


def test_of_two_threads_that_put_a_value_one_does_and_the_others_room_is_free() -> None:
    lending, _ = make(1024)

    class Slow(list[memoryview]):
        """While its bytes are copied, another thread puts the same."""

        def __iter__(self) -> Iterator[memoryview]:
            yield from super().__iter__()
            put(lending, "f/a", 512)

    assert lending.put("f/a", Slow([memoryview(text("f/a", 512))]))
    lending.check_integrity()
    assert put(lending, "f/b", 512)
    assert lending.exists(["f/a", "f/b"]) == [True, True]


def test_of_a_chain_its_end_is_evicted_first() -> None:
    lending, _ = make(1024)
    chain = [f"f/{n}" for n in range(4)]
    for name in chain:
        assert put(lending, name, 256)
    assert all(lending.exists(chain))
    assert put(lending, "f/new", 256)
    assert lending.exists(chain) == [True, True, True, False]


def test_leases_are_bounded_and_folders_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LEASES", 3)
    lending, clock = make()
    put(lending, "kvcore/m/h0-1/k", 8)
    put(lending, "kvcore/m/h0-1/l", 8)
    assert lending.folders == ["kvcore/m/h0-1"]
    for _ in range(3):
        lending.lease(["kvcore/m/h0-1/k"])
    assert lending.lease(["nothing"]).lease == 0, "nothing is held by that"
    with pytest.raises(CapacityError):
        lending.lease(["kvcore/m/h0-1/k"])
    clock.now += LEASE_S
    assert lending.lease(["kvcore/m/h0-1/k"]).lease
    lending.remove(["kvcore/m/h0-1/k", "kvcore/m/h0-1/l"])
    assert lending.folders == []


def test_room_joins_what_is_given_back() -> None:
    room = Room(640)
    spans = [room.take(128) for _ in range(5)]
    assert None not in spans
    assert room.take(1) is None
    for i in (1, 3, 2, 0, 4):
        span = spans[i]
        assert span is not None
        room.give(span)
    assert room.gaps == [(0, 640)]
    assert Room(0).take(1) is None
