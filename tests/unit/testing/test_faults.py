"""The fault kit itself: repeatable, and each fault does what it says."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.errors import ConfigError, CorruptBlock, TierUnavailable
from kvcore.index.slots import SlotRun
from kvcore.memory.arena import slot_bytes
from kvcore.model.shape import BlockShape
from kvcore.testing.faults import (
    FITS,
    Fault,
    Faults,
    FaultyClock,
    FaultyMessages,
    FaultyStore,
    FaultyTier,
    Rule,
    Seam,
    into_disk,
    write_rules,
)
from kvcore.testing.store_contract import StoreContract
from kvcore.testing.tier_contract import Block, TierContract, read_back, write_blocks
from kvcore.tiers.base import BlockRead, Tier
from kvcore.tiers.disk import DiskTier, Geometry, MountedStore
from kvcore.tiers.disk import files as disk_files
from kvcore.tiers.memory import MemoryTier
from kvcore.tiers.remote.base import BlockStore, Item
from kvcore.tiers.remote.memory import MemoryStore
from kvcore.transfer.graph import OpReport, TransferGraph
from support.budget import examples

SHAPE = BlockShape(layers=5, kv_heads=2, head_dim=16, block_tokens=16, dtype="bfloat16")
GEOMETRY = Geometry(SHAPE, b"model", ((0, 2),))
SLOT = slot_bytes(SHAPE)
PAIRS = [(fault, seam) for seam in Seam for fault in Fault if fault in FITS[seam]]

rules = st.lists(
    st.builds(
        lambda pair, rate, skip, limit: Rule(*pair, rate=rate, skip=skip, limit=limit),
        st.sampled_from(PAIRS),
        st.sampled_from([0.0, 0.1, 0.5, 1.0]),
        st.integers(0, 3),
        st.none() | st.integers(0, 3),
    ),
    max_size=4,
)


# -- when -----------------------------------------------------------------------------------


@settings(max_examples=examples(50, 1))
@given(rules=rules, seed=st.integers(0, 2**32), order=st.randoms(use_true_random=False))
def test_the_same_seed_gives_the_same_faults_whatever_comes_first(
    rules: list[Rule], seed: int, order: random.Random
) -> None:
    """What the n-th point of a seam gets does not depend on how seams take turns."""
    points = [rule.seam for rule in rules for _ in range(12)]
    seen = []
    for _ in range(2):
        faults = Faults(*rules, seed=seed)
        seen.append([(seam, faults.at(seam)) for seam in points])
        order.shuffle(points)
    by_seam = [{s: [strike for seam, strike in run if seam is s] for s in Seam} for run in seen]
    assert by_seam[0] == by_seam[1]


@given(rules=rules, seed=st.integers(0, 2**32))
def test_rules_keep_to_their_skip_and_limit(rules: list[Rule], seed: int) -> None:
    faults = Faults(*rules, seed=seed)
    for rule in rules:
        for _ in range(10):
            faults.at(rule.seam)
    for place, rule in enumerate(rules):
        points = [s.point for s in faults.history if s.rule is rule]
        assert all(point >= rule.skip for point in points)
        if rule.limit is not None:
            same = sum(1 for other in rules if other is rule)
            assert len(points) <= rule.limit * same, place
        if not rule.rate:
            assert not points


def test_threads_share_the_points() -> None:
    """However many threads there are, each point is passed once."""
    rule = Rule(Fault.ERROR, Seam.TIER_READ, rate=0.3)
    alone = Faults(rule, seed=5)
    for _ in range(400):
        alone.at(Seam.TIER_READ)
    together = Faults(rule, seed=5)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: together.at(Seam.TIER_READ), range(400)))
    assert together.history == alone.history
    assert 60 < len(alone.history) < 180


def test_another_seed_gives_other_faults() -> None:
    rule = Rule(Fault.ERROR, Seam.TIER_READ, rate=0.5)
    runs = [Faults(rule, seed=seed) for seed in (1, 2)]
    assert len({tuple(bool(run.at(rule.seam)) for _ in range(64)) for run in runs}) == 2


def test_a_fault_that_a_seam_cannot_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="fault bit_flip at load; this seam takes error, hang"):
        Rule(Fault.BIT_FLIP, Seam.LOAD)


def test_what_hangs_goes_on_when_the_rules_change() -> None:
    faults = Faults(Rule(Fault.HANG, Seam.SAVE, seconds=100))
    hung = threading.Thread(target=faults.meet, args=(Seam.SAVE,))
    hung.start()
    hung.join(0.1)
    assert hung.is_alive()
    faults.clear()
    hung.join(30)
    assert not hung.is_alive()


def test_rules_of_a_file_are_followed(tmp_path: Path) -> None:
    path = tmp_path / "rules"
    faults = Faults(follow=path)
    assert faults.at(Seam.TIER_READ) is None
    rule = Rule(Fault.HANG, Seam.TIER_READ, limit=1, seconds=100)
    write_rules(path, rule)
    hung = threading.Thread(target=faults.meet, args=(Seam.TIER_READ,))
    hung.start()
    limit = time.monotonic() + 60
    while not faults.struck[Seam.TIER_READ, Fault.HANG]:
        assert time.monotonic() < limit, "the thread never came to the point"
        hung.join(0.01)
    assert faults.rules == (rule,)
    assert hung.is_alive()
    path.unlink()
    hung.join(30)
    assert not hung.is_alive()


# -- what -----------------------------------------------------------------------------------


class TestFaultyTierWithoutFaults(TierContract):
    """It is a tier like the one below."""

    def make_tier(self, folder: Path) -> Tier:
        return FaultyTier(MemoryTier(self.num_slots, SLOT), Faults())


class TestFaultyDiskWithoutFaults(TierContract):
    persistent = True

    def make_tier(self, folder: Path) -> Tier:
        if not (folder / "store.json").exists():
            GEOMETRY.save(folder)
        return into_disk(open_disk(folder, self.num_slots), Faults())


class TestFaultyStoreWithoutFaults(StoreContract):
    shared = MemoryStore()

    def make_store(self) -> BlockStore:
        return FaultyStore(self.shared, Faults())


def open_disk(folder: Path, num_slots: int) -> DiskTier:
    return DiskTier(MountedStore(folder, num_slots), GEOMETRY, shard=0, slot_nbytes=SLOT)


@pytest.fixture(params=["queue", "threads"])
def disk(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[DiskTier, Faults]]:
    if request.param == "threads":
        monkeypatch.setattr(disk_files, "_with_queue", lambda path, threads: threads)
    faults = Faults(seed=3)
    GEOMETRY.save(tmp_path)
    tier = into_disk(open_disk(tmp_path, 8), faults)
    yield tier, faults
    faults.clear()
    tier.close()


def blocks(count: int = 4) -> list[Block]:
    return [Block(slot, slot, SHAPE.nbytes) for slot in range(count)]


@pytest.mark.parametrize("seam", [Seam.FILE_WRITE, Seam.RECORD])
@pytest.mark.parametrize("fault", [Fault.TORN_WRITE, Fault.BIT_FLIP])
def test_a_write_that_was_spoilt_in_silence_is_found_when_it_is_read(
    disk: tuple[DiskTier, Faults], seam: Seam, fault: Fault
) -> None:
    tier, faults = disk
    harmless = 0
    for block in blocks():
        faults.set(Rule(fault, seam, skip=int(seam is Seam.RECORD), limit=1))  # after the erase
        assert tier.write([block.to_write()]) == [None], "nothing is said"
        faults.clear()
        try:
            assert read_back(tier, block) == block.data
            harmless += 1
        except CorruptBlock:
            pass
    # Bytes 88..120 of a record say nothing: a bit that flips there does no harm.
    assert not harmless or (seam, fault) == (Seam.RECORD, Fault.BIT_FLIP)
    write_blocks(tier, blocks())
    assert [read_back(tier, block) for block in blocks()] == [block.data for block in blocks()]


def test_a_torn_write_may_lose_everything(disk: tuple[DiskTier, Faults]) -> None:
    """Of some nothing arrives, and they are said to be written all the same."""
    tier, faults = disk
    faults.set(Rule(Fault.TORN_WRITE, Seam.FILE_WRITE))
    for _ in range(10):
        assert tier.write([block.to_write() for block in blocks()]) == [None] * 4
    assert faults.struck[Seam.FILE_WRITE, Fault.TORN_WRITE] == 40


@pytest.mark.parametrize("fault", [Fault.SHORT_READ, Fault.BIT_FLIP])
def test_a_read_that_was_spoilt_in_silence_is_noticed(
    disk: tuple[DiskTier, Faults], fault: Fault
) -> None:
    tier, faults = disk
    write_blocks(tier, blocks())
    faults.set(Rule(fault, Seam.FILE_READ))
    for block in blocks():
        with pytest.raises(CorruptBlock):
            read_back(tier, block)


@pytest.mark.parametrize(
    ("seam", "fault", "words"),
    [
        (Seam.FILE_WRITE, Fault.FULL, "lower disk.capacity"),
        (Seam.FILE_WRITE, Fault.ERROR, "Input/output error (an injected fault)"),
        (Seam.RECORD, Fault.FULL, "lower disk.capacity"),
    ],
)
def test_a_write_that_fails_says_why_and_leaves_nothing(
    disk: tuple[DiskTier, Faults], seam: Seam, fault: Fault, words: str
) -> None:
    tier, faults = disk
    faults.set(Rule(fault, seam))
    for result in tier.write([block.to_write() for block in blocks()]):
        assert isinstance(result, TierUnavailable)
        assert words in str(result)
    faults.clear()
    assert tier.scan() == []


def test_reads_that_end_in_another_order_go_where_they_belong(
    disk: tuple[DiskTier, Faults],
) -> None:
    tier, faults = disk
    faults.set(Rule(Fault.REORDER, Seam.FILE_READ), Rule(Fault.REORDER, Seam.FILE_WRITE))
    write_blocks(tier, blocks())
    memory = [block.memory() for block in blocks()]
    reads = [BlockRead(b.slot, b.key, [into]) for b, into in zip(blocks(), memory, strict=True)]
    assert tier.read(reads) == [None] * len(reads)
    assert [bytes(into) for into in memory] == [block.data for block in blocks()]
    assert faults.struck[Seam.FILE_READ, Fault.REORDER]
    assert faults.struck[Seam.FILE_WRITE, Fault.REORDER]


def test_a_flush_that_fails_is_raised(disk: tuple[DiskTier, Faults]) -> None:
    tier, faults = disk
    write_blocks(tier, blocks())
    faults.set(Rule(Fault.ERROR, Seam.SYNC))
    with pytest.raises(TierUnavailable, match="an injected fault"):
        tier.sync()


@pytest.mark.parametrize("fault", [Fault.LOST, Fault.TORN_WRITE, Fault.BIT_FLIP])
def test_a_store_loses_and_spoils_values(fault: Fault) -> None:
    faults = Faults(Rule(fault, Seam.STORE_PUT))
    store, data = FaultyStore(MemoryStore(), faults), random.Random(0).randbytes(5000)
    assert store.put([Item("a", [memoryview(data)])]) == [None]
    assert store.exists(["a"]) == [fault is not Fault.LOST]
    if fault is not Fault.LOST:
        into = bytearray(5000)
        assert store.get([Item("a", [memoryview(into)])]) == [None]
        assert bytes(into) != data


class Line:
    """A transport that does nothing, and says what it was told."""

    def __init__(self) -> None:
        self.told: list[object] = []
        self.reports: list[OpReport] = []

    def submit(self, graph: TransferGraph, lane: object = None) -> None:
        self.told.append(graph)

    def cancel(self, graph_id: int) -> None:
        self.told.append(graph_id)

    def invalidate(self, tier: str, slots: object) -> None:
        self.told.append((tier, slots))

    def wait_report(self, timeout: float) -> bool:
        return bool(self.reports)

    def poll(self) -> list[OpReport]:
        reports, self.reports = self.reports, []
        return reports


def test_messages_are_lost() -> None:
    line, faults = Line(), Faults(Rule(Fault.LOST, Seam.CANCEL), Rule(Fault.LOST, Seam.REPORT))
    messages = FaultyMessages(line, faults)
    messages.cancel(3)
    messages.invalidate("disk", [SlotRun(1, 2)])
    line.reports = [OpReport(1, 0, {})]
    assert line.told == [("disk", [(1, 2)])]
    assert messages.poll() == []


def test_reports_come_in_another_order_and_none_is_lost() -> None:
    line, faults = Line(), Faults(Rule(Fault.REORDER, Seam.REPORT, rate=0.5), seed=1)
    messages = FaultyMessages(line, faults)
    sent = [OpReport(number, 0, {}) for number in range(40)]
    got = []
    for start in range(0, 40, 8):
        line.reports = sent[start : start + 8]
        got += messages.poll()
    while messages.wait_report(0):
        got += messages.poll()
    assert got != sent
    assert sorted(got, key=lambda report: report.graph_id) == sent


def test_a_clock_jumps() -> None:
    faults = Faults(Rule(Fault.CLOCK_JUMP, Seam.CLOCK, skip=1, limit=1, seconds=1000))
    clock = FaultyClock(faults)
    first = clock()
    assert clock() - first >= 1000
    assert clock() - time.monotonic() < 1001
