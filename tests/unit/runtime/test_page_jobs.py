"""Jobs on pages move the right rows, end in time whatever the medium does, and leave rows alone."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.index import BlockIndex, TierSpec
from kvcore.runtime.page_jobs import BUFFER_NBYTES, FAILED_S, LOADERS, Ended, PageJobs
from kvcore.runtime.page_store import PageStore
from kvcore.tiers.base import BlockRead, BlockWrite
from kvcore.tiers.memory import MemoryTier
from kvcore.tiers.remote.lookup import StoreFinder
from support.budget import examples

NBYTES = 4096
ROWS = 12
SLOTS = 8
DEADLINE_S = 30.0


class Gated(MemoryTier):
    """A tier whose operations wait for a gate, and raise on demand."""

    def __init__(self) -> None:
        super().__init__(SLOTS, NBYTES)
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)
        self.mistake: Exception | None = None
        self.writes = 0

    def write(self, requests: Sequence[BlockWrite]) -> list:
        self._enter()
        self.writes += len(requests)
        return super().write(requests)

    def read(self, requests: Sequence[BlockRead]) -> list:
        self._enter()
        return super().read(requests)

    def _enter(self) -> None:
        self.entered.release()
        assert self.gate.wait(30)
        if self.mistake is not None:
            raise self.mistake


class Rig:
    """Jobs over a tier, with a clock that the test moves."""

    def __init__(self, finder: StoreFinder | None = None) -> None:
        self.tier = Gated()
        self.now = 1000.0
        index = BlockIndex([TierSpec("tier", SLOTS)])
        self.pages = PageStore(index, self.tier, b"identity", finder=finder)
        self.memory = np.zeros((ROWS, NBYTES), dtype=np.uint8)
        for row in range(ROWS):
            self.fill(row, row)
        self.jobs = PageJobs(self.pages, self.memory, DEADLINE_S, clock=lambda: self.now)
        self._number = 0

    def fill(self, row: int, content: object) -> None:
        data = random.Random(str(content)).randbytes(NBYTES)
        self.memory[row] = np.frombuffer(data, dtype=np.uint8)

    def holds(self, row: int, content: object) -> bool:
        return bytes(self.memory[row]) == random.Random(str(content)).randbytes(NBYTES)

    def begin(self, kind: str, pairs: dict[str, int]) -> int:
        self._number += 1
        getattr(self.jobs, kind)(self._number, [*pairs], [*pairs.values()])
        return self._number

    def done(self, kind: str, pairs: dict[str, int]) -> list[str]:
        """Carry a job out; return the keys of its pages that are good."""
        number = self.begin(kind, pairs)
        self.jobs.drain()
        [ended] = self.jobs.take_ended()
        assert ended.number == number
        return [[*pairs][i] for i in ended.good]


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.tier.gate.set()
    made.jobs.close()
    left = [thread.name for thread in threading.enumerate() if "kvcore-pages" in thread.name]
    assert left == []
    assert made.jobs.find("a") is False
    made.pages._index.check_integrity()


def wait_for(what: Callable[[], object]) -> None:
    until = time.monotonic() + 30
    while not what():
        assert time.monotonic() < until
        time.sleep(0.001)


def test_rows_come_back_into_other_rows(rig: Rig) -> None:
    assert rig.jobs.find("a") is False
    assert rig.done("store", {"a": 3, "b": 1}) == ["a", "b"]
    assert rig.jobs.find("a") is True
    assert rig.done("load", {"b": 7, "unknown": 8, "a": 9}) == ["b", "a"]
    assert rig.holds(7, 1)
    assert rig.holds(8, 8)
    assert rig.holds(9, 3)


def test_a_page_that_is_held_is_not_written_again(rig: Rig) -> None:
    rig.done("store", {"a": 0})
    rig.fill(1, "other")
    assert rig.done("store", {"a": 1, "b": 2}) == ["a", "b"]
    assert rig.tier.writes == 2
    rig.done("load", {"a": 5})
    assert rig.holds(5, 0)


@settings(max_examples=examples(30, 1), deadline=None)
@given(
    st.lists(
        st.tuples(st.booleans(), st.lists(st.sampled_from("abcdef"), min_size=1, unique=True)),
        max_size=8,
    )
)
def test_it_does_what_a_dictionary_does(steps: list[tuple[bool, list[str]]]) -> None:
    """Jobs one after the other, each with rows of its own, and room for all pages."""
    rig, held, contents = Rig(), dict[str, int](), 0
    for loads, wanted in steps:
        pairs = {key: row for row, key in enumerate(wanted)}
        for row in pairs.values():
            contents += 1
            rig.fill(row, contents)
        before = contents - len(pairs) + 1
        if not loads:
            assert rig.done("store", pairs) == [*pairs]
            for key, row in pairs.items():
                held.setdefault(key, before + row)
            continue
        assert rig.done("load", pairs) == [key for key in pairs if key in held]
        for key, row in pairs.items():
            assert rig.holds(row, held.get(key, before + row))
    rig.jobs.close()


def test_a_job_larger_than_the_buffer_is_moved_in_parts() -> None:
    nbytes = BUFFER_NBYTES // 2 + 1
    tier = MemoryTier(3, nbytes)
    pages = PageStore(BlockIndex([TierSpec("tier", 3)]), tier, b"identity")
    memory = np.arange(6 * nbytes, dtype=np.int64).astype(np.uint8).reshape(6, nbytes)
    before = memory.copy()
    jobs = PageJobs(pages, memory, DEADLINE_S)
    jobs.store(1, ["a", "b", "c"], [0, 1, 2])
    jobs.drain()
    jobs.load(2, ["c", "b", "a"], [3, 4, 5])
    jobs.drain()
    ended = [(each.number, each.good) for each in jobs.take_ended()]
    assert ended == [(1, (0, 1, 2)), (2, (0, 1, 2))]
    assert (memory[3:] == before[2::-1]).all()
    jobs.close()


# -- a medium that fails --------------------------------------------------------------------------


def test_a_read_that_hangs_ends_at_the_deadline_and_does_not_write_later(rig: Rig) -> None:
    rig.done("store", {"a": 0, "b": 1})
    rig.tier.entered = threading.Semaphore(0)
    rig.tier.gate.clear()
    for row in range(LOADERS):
        rig.begin("load", {"a": 4 + row})
    for _ in range(LOADERS):
        assert rig.tier.entered.acquire(timeout=30)
    queued = rig.begin("load", {"b": 6})
    assert rig.jobs.take_ended() == []
    rig.now += DEADLINE_S
    ended = rig.jobs.take_ended()
    assert [each.good for each in ended] == [()] * (LOADERS + 1)
    assert ended[-1].number == queued
    assert rig.jobs.find("b") is False, "every thread that loads hangs"
    assert rig.begin("load", {"b": 7}), "which ends at once"
    assert [each.good for each in rig.jobs.take_ended()] == [()]
    for row in range(4, 8):
        rig.fill(row, f"somebody else's {row}")
    rig.tier.gate.set()
    wait_for(lambda: rig.jobs.take_ended() == [] and not rig.jobs._hung[True])
    for row in range(4, 8):
        assert rig.holds(row, f"somebody else's {row}")
    rig.now += FAILED_S
    assert rig.jobs.find("b") is True
    assert rig.done("load", {"b": 7}) == ["b"]


def test_a_write_that_hangs_gives_its_rows_back_and_stores_what_they_held(rig: Rig) -> None:
    rig.tier.gate.clear()
    rig.begin("store", {"a": 0})
    assert rig.tier.entered.acquire(timeout=30)
    rig.begin("store", {"b": 1})
    rig.now += DEADLINE_S
    assert [each.good for each in rig.jobs.take_ended()] == [(), ()]
    rig.fill(0, "other")
    rig.begin("store", {"c": 2})
    assert [each.good for each in rig.jobs.take_ended()] == [()], "the thread hangs"
    rig.tier.gate.set()
    wait_for(lambda: rig.jobs.find("a"))
    wait_for(lambda: rig.jobs.take_ended() == [] and not rig.jobs._hung[False])
    rig.done("load", {"a": 5})
    assert rig.holds(5, 0)
    assert rig.jobs.find("b") is False


def test_a_page_whose_load_failed_is_not_found_for_a_while(rig: Rig) -> None:
    """Otherwise the engine would find it, fail to load it, and find it again, for ever."""
    rig.done("store", {"a": 0})
    rig.tier.mistake = OSError("the medium fails")
    assert rig.done("load", {"a": 1}) == []
    assert rig.jobs.find("a") is False
    rig.tier.mistake = None
    rig.now += FAILED_S
    assert rig.jobs.find("a") is True
    rig.tier.mistake = OSError("the medium fails")
    assert rig.done("load", {"a": 1}) == []
    rig.tier.mistake = None
    assert rig.done("store", {"a": 0}) == ["a"]
    assert rig.jobs.find("a") is True, "it was stored again"


@pytest.mark.parametrize("inside", ["get", "put", "ask", "use"])
def test_a_mistake_of_ours_ends_all_jobs_and_finds_nothing(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, inside: str
) -> None:
    def boom(*_: object) -> None:
        raise RuntimeError("a mistake of ours")

    rig.done("store", {"a": 0})
    rig.tier.gate.clear()
    other = rig.begin("load", {"a": 2})
    assert rig.tier.entered.acquire(timeout=30)
    monkeypatch.setattr(rig.pages, inside, boom)
    numbers = [rig.begin("store", {"b": 1}), rig.begin("load", {"a": 3}), other]
    rig.jobs.use(["a"])
    ended: list[Ended] = []
    wait_for(lambda: ended.extend(rig.jobs.take_ended()) or len(ended) == len(numbers))
    assert sorted(each.number for each in ended) == sorted(numbers)
    assert rig.jobs.find("a") is False
    late = rig.begin("load", {"a": 4})
    assert [(each.number, each.good) for each in rig.jobs.take_ended()] == [(late, ())]
    rig.tier.gate.set()


def test_threads_that_cannot_be_started_leave_a_tier_without_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no)
    rig = Rig()
    number = rig.begin("store", {"a": 0})
    assert [(each.number, each.good) for each in rig.jobs.take_ended()] == [(number, ())]
    assert rig.jobs.find("a") is False
    rig.jobs.close()


def test_after_a_renewal_old_jobs_store_old_pages(rig: Rig) -> None:
    rig.done("store", {"a": 0})
    rig.tier.gate.clear()
    rig.begin("store", {"b": 1})
    assert rig.tier.entered.acquire(timeout=30)
    rig.begin("store", {"c": 2})
    rig.jobs.renew()
    rig.tier.gate.set()
    rig.jobs.drain()
    assert [rig.jobs.find(key) for key in "abc"] == [False] * 3
    rig.jobs.take_ended()
    assert rig.done("store", {"c": 3}) == ["c"]
    assert rig.done("load", {"c": 5}) == ["c"]
    assert rig.holds(5, 3)


def test_draining_ends_what_does_not_end_by_itself(rig: Rig) -> None:
    rig.done("store", {"a": 0})
    rig.tier.entered = threading.Semaphore(0)
    rig.tier.gate.clear()
    rig.begin("load", {"a": 1})
    assert rig.tier.entered.acquire(timeout=30)
    rig.jobs.drain(limit_s=0)
    assert [each.good for each in rig.jobs.take_ended()] == [()]


# -- a medium that others write to ----------------------------------------------------------------


class Asked(StoreFinder):
    """A finder whose answers wait for a gate."""

    lookup_s, absent_s = 0.5, 2.0

    def __init__(self, there: set[str]) -> None:
        self.there = there
        self.gate = threading.Event()
        self.gate.set()
        self.rounds = 0
        self.pages: PageStore

    def held(self, keys: Sequence[bytes]) -> set[bytes]:
        self.rounds += 1
        assert self.gate.wait(30)
        return {self.pages._key(key) for key in self.there} & set(keys)

    def delete(self, keys: Sequence[bytes]) -> None:
        return None


@pytest.fixture
def shared() -> Iterator[tuple[Rig, Asked]]:
    finder = Asked({"a", "b"})
    rig = Rig(finder)
    finder.pages = rig.pages
    yield rig, finder
    finder.gate.set()
    rig.jobs.close()


def test_a_shared_medium_is_asked_while_nobody_waits(shared: tuple[Rig, Asked]) -> None:
    rig, finder = shared
    finder.gate.clear()
    assert [rig.jobs.find(key) for key in "ab"] == [None, None]
    finder.gate.set()
    wait_for(lambda: [rig.jobs.find(key) for key in "abx"] == [True, True, False])
    rounds = finder.rounds
    assert rig.jobs.find("x") is False
    assert finder.rounds == rounds, "what it lacks is not asked again at once"
    rig.now += finder.absent_s
    assert rig.jobs.find("x") is None


def test_a_shared_medium_that_does_not_answer_finds_nothing(shared: tuple[Rig, Asked]) -> None:
    rig, finder = shared
    finder.gate.clear()
    assert rig.jobs.find("a") is None
    wait_for(lambda: finder.rounds)
    assert rig.jobs.find("b") is None
    rig.now += finder.lookup_s * 1.01
    assert [rig.jobs.find(key) for key in "abc"] == [False] * 3
    finder.gate.set()
    wait_for(lambda: rig.jobs.find("a"))
