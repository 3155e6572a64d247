"""The tier contract on our own tiers, a random walk against the naive one, and the host arena."""

from __future__ import annotations

import logging
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvcore.errors import CapacityError, CorruptBlock, TierUnavailable
from kvcore.memory import arena as host
from kvcore.memory import hugepages as pages
from kvcore.memory.arena import HostArena, slot_bytes
from kvcore.memory.hugepages import HUGE_PAGE, Pages
from kvcore.memory.layout import Arrangement
from kvcore.model.shape import BlockShape
from kvcore.testing.tier_contract import Block, TierContract
from kvcore.tiers.base import BlockRead, BlockRecord, Tier
from kvcore.tiers.disk import DiskAccess, DiskTier, Geometry, MountedStore
from kvcore.tiers.memory import MemoryTier
from kvcore_devtools.memory_pages import huge_nbytes, resident_nbytes
from support.budget import examples

SHAPE = BlockShape(layers=5, kv_heads=2, head_dim=16, block_tokens=16, dtype="bfloat16")
GEOMETRY = Geometry(SHAPE, b"model", ((0, 2),))


def open_disk(folder: Path, num_slots: int, **options: Any) -> DiskTier:
    """Open the store in ``folder``, made if it is missing. No lock is taken: a leader does that."""
    if not (folder / "store.json").exists():
        GEOMETRY.save(folder)
    return DiskTier(
        MountedStore(folder, num_slots),
        GEOMETRY,
        shard=0,
        slot_nbytes=slot_bytes(SHAPE),
        access=DiskAccess(**options),
    )


class TestMemory(TierContract):
    def make_tier(self, folder: Path) -> Tier:
        return MemoryTier(self.num_slots, 4096)


class TestDisk(TierContract):
    persistent = True

    def make_tier(self, folder: Path) -> Tier:
        return open_disk(folder, self.num_slots)


class TestDiskFromOddMemory(TestDisk):
    odd = True


class TestDiskThroughThePageCache(TierContract):
    persistent = True

    def make_tier(self, folder: Path) -> Tier:
        return open_disk(folder, self.num_slots, direct_io="off", sync_interval_s=0, io_threads=1)


# -- a random walk --------------------------------------------------------------------------

SLOTS = 4
slots = st.integers(0, SLOTS - 1)
seeds = st.integers(0, 5)  # few, so that keys come back in other slots


class TwoTiers(RuleBasedStateMachine):
    """After any sequence of calls, the disk tier answers like the dictionary."""

    @initialize()
    def open(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.disk: Tier = open_disk(Path(self.folder.name), SLOTS)
        self.naive = MemoryTier(SLOTS, self.disk.slot_nbytes)

    @rule(batch=st.dictionaries(slots, seeds))
    def write(self, batch: dict[int, int]) -> None:
        requests = [Block(s, k, self.naive.slot_nbytes).to_write() for s, k in batch.items()]
        assert self.disk.write(requests) == self.naive.write(requests)

    @rule(batch=st.dictionaries(slots, seeds))
    def read(self, batch: dict[int, int]) -> None:
        blocks = [Block(s, k, self.naive.slot_nbytes) for s, k in batch.items()]
        got = []
        for tier in (self.disk, self.naive):
            into = [block._replace(odd=bool(block.slot % 2)).memory() for block in blocks]
            requests = [BlockRead(b.slot, b.key, [i]) for b, i in zip(blocks, into, strict=True)]
            errors = tier.read(requests)
            got.append([i if e is None else type(e) for i, e in zip(into, errors, strict=True)])
        assert got[0] == got[1]

    @rule(which=st.sets(slots))
    def invalidate(self, which: set[int]) -> None:
        self.disk.invalidate(which)
        self.naive.invalidate(which)

    @rule()
    def restart(self) -> None:
        self.disk.close()
        self.disk = open_disk(Path(self.folder.name), SLOTS)

    @invariant()
    def same_blocks(self) -> None:
        def told(records: list[BlockRecord]) -> list[tuple[object, ...]]:
            return sorted(record[:4] for record in records)

        assert told(self.disk.scan()) == told(self.naive.scan())
        self.disk.check_integrity()
        self.naive.check_integrity()

    def teardown(self) -> None:
        self.disk.close()
        self.folder.cleanup()


TestTwoTiers = pytest.mark.usefixtures("kept_queues")(TwoTiers.TestCase)
TestTwoTiers.settings = settings(max_examples=examples(25), stateful_step_count=20, deadline=None)


def test_memory_notices_that_it_was_tampered_with() -> None:
    tier = MemoryTier(2, 64)
    tier.write([Block(0, 0, 64).to_write()])
    tier._blocks[1] = tier._blocks[0]
    with pytest.raises(CorruptBlock, match="slot 1"):
        tier.check_integrity()


# -- host memory ----------------------------------------------------------------------------


@pytest.mark.parametrize("arrangement", list(Arrangement))
def test_slot_buffers_are_the_slots_bytes_and_no_others(arrangement: Arrangement) -> None:
    arena = HostArena(SHAPE, 3, arrangement=arrangement)
    for slot in range(3):
        for part in arena.slot_buffers(slot):
            part[:] = bytes([slot + 1]) * part.nbytes
    for slot in range(3):
        parts = arena.slot_buffers(slot)
        assert sum(part.nbytes for part in parts) >= SHAPE.nbytes
        assert {byte for part in parts for byte in part} == {slot + 1}
    with pytest.raises(CapacityError):
        arena.slot_buffers(3)


def test_the_tensor_shares_the_memory() -> None:
    import torch

    arena = HostArena(SHAPE, 2)
    arena.slot_buffers(1)[0][:4] = b"\x80\x3f\x00\x40"  # bfloat16 1.0, 2.0
    start = arena.slot_nbytes // 2
    assert arena.tensor()[start : start + 2].tolist() == [1.0, 2.0]
    assert arena.tensor().dtype == torch.bfloat16


def test_memory_starts_on_a_huge_page_and_takes_nothing_until_touched() -> None:
    memory = Pages(8 * HUGE_PAGE)
    assert memory.address % HUGE_PAGE == 0
    assert memory.view.nbytes == 8 * HUGE_PAGE
    assert huge_nbytes(memory.view) == 0
    memory.view[HUGE_PAGE] = 1
    if memory.huge:
        assert huge_nbytes(memory.view) in (0, HUGE_PAGE)  # 0 when the machine has none free
    memory.close()
    memory.close()


LARGE = replace(SHAPE, layers=512)  # 512 KiB: four to a huge page


def until_resident(arena: HostArena, nbytes: int) -> None:
    limit = time.monotonic() + 120
    while resident_nbytes(arena.memory) < nbytes:
        assert time.monotonic() < limit, (
            f"of {nbytes} bytes only {resident_nbytes(arena.memory)} came"
        )
        time.sleep(0.01)


@pytest.mark.parametrize("arrangement", Arrangement)
def test_memory_is_given_ahead_while_it_is_in_use(arrangement: Arrangement) -> None:
    slots = 33
    arena = HostArena(LARGE, slots, arrangement=arrangement, prefault=slots * slot_bytes(LARGE))
    for slot in range(slots):
        for buffer in arena.slot_buffers(slot):
            buffer[:4] = slot.to_bytes(4, "big")
    until_resident(arena, arena.nbytes)
    for slot in range(slots):
        for buffer in arena.slot_buffers(slot):
            assert buffer[:4] == slot.to_bytes(4, "big")
            assert not any(buffer[4:])
    arena.close()
    assert "kvcore-prefault" not in {thread.name for thread in threading.enumerate()}


def test_memory_is_given_no_further_than_it_is_about_to_be_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host, "CALM_S", 0.0)
    slots, huge = 64, HUGE_PAGE // slot_bytes(LARGE)
    arena = HostArena(LARGE, slots, prefault=2 * HUGE_PAGE)
    until_resident(arena, 2 * HUGE_PAGE)
    arena.reach([slots - 1])  # a staging slot: far from where slots are handed out
    assert resident_nbytes(arena.memory) < 4 * HUGE_PAGE
    arena.reach([0, slots - 1, 2 * huge - 1])
    until_resident(arena, 4 * HUGE_PAGE)
    assert resident_nbytes(arena.memory) < 6 * HUGE_PAGE
    for slot in range(slots):
        arena.reach([slot])
        until_resident(arena, min((slot + 1) * slot_bytes(LARGE) + 2 * HUGE_PAGE, arena.nbytes))
    arena.close()


def test_memory_is_given_when_nobody_uses_it_or_little_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host, "CALM_S", 3600.0)
    ahead = 64 * slot_bytes(LARGE)
    arena = HostArena(LARGE, 256, prefault=ahead)
    until_resident(arena, ahead)
    for slot in range(48):
        arena.reach([slot])
        time.sleep(0.003)  # a thread that does not wait for calm has had its turn
    assert resident_nbytes(arena.memory) == ahead
    arena.reach([48])
    until_resident(arena, 49 * slot_bytes(LARGE) + ahead)
    monkeypatch.setattr(host, "CALM_S", 0.001)
    arena.reach([49])  # wakes it
    until_resident(arena, 50 * slot_bytes(LARGE) + ahead)
    arena.close()


def test_an_arena_that_waits_to_be_used_can_be_closed() -> None:
    arena = HostArena(LARGE, 64, prefault=2 * HUGE_PAGE)
    until_resident(arena, 2 * HUGE_PAGE)
    closing = threading.Thread(target=arena.close, daemon=True)
    closing.start()
    closing.join(60)
    assert not closing.is_alive()


def test_memory_is_given_ahead_only_while_it_is_wanted() -> None:
    memory = Pages(8 * HUGE_PAGE)
    before = resident_nbytes(memory.view)
    assert not memory.prefault(0, 8 * HUGE_PAGE, lambda: False)
    assert resident_nbytes(memory.view) == before
    answers = iter([True, True, False])
    assert not memory.prefault(0, 8 * HUGE_PAGE, lambda: next(answers))
    assert resident_nbytes(memory.view) - before == 2 * HUGE_PAGE
    assert memory.prefault(0, 8 * HUGE_PAGE, lambda: True)
    assert resident_nbytes(memory.view) - before == 8 * HUGE_PAGE
    memory.close()


MEMINFO = "MemTotal: 8192000 kB\nMemFree: 1000 kB\nMemAvailable: 4096000 kB\nHugePages_Total: 0\n"


@pytest.mark.parametrize(
    ("meminfo", "limit", "used", "nbytes", "expected"),
    [
        (MEMINFO, None, None, 1 << 30, False),
        (MEMINFO, None, None, 3 << 30, True),
        (MEMINFO, "max", 1 << 30, 1 << 30, False),
        (MEMINFO, 2 << 30, 1 << 30, 1 << 29, False),
        (MEMINFO, 2 << 30, 1 << 30, 1 << 30, True),
        (None, None, None, 1 << 60, False),
        ("MemTotal 1\n", None, None, 1 << 60, False),
    ],
)
def test_scarce_memory_is_known(
    meminfo: str | None,
    limit: int | str | None,
    used: int | None,
    nbytes: int,
    expected: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cached = 1 << 30
    stat = f"anon {used}\nactive_file {cached // 2}\ninactive_file {cached // 2}\n"
    files = {"meminfo": meminfo, "memory.max": limit, "memory.stat": stat}
    if used is not None:
        files["memory.current"] = used + cached
    for name, content in files.items():
        if content is not None:
            (tmp_path / name).write_text(str(content))
    monkeypatch.setattr(pages, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(pages, "_CGROUP", tmp_path)
    assert pages.scarce(nbytes) is expected


def test_no_memory_is_taken_ahead_where_little_is_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pages, "scarce", lambda nbytes: True)
    memory = Pages(2 * HUGE_PAGE)
    before = resident_nbytes(memory.view)
    with caplog.at_level(logging.WARNING):
        assert not memory.prefault(0, 2 * HUGE_PAGE, lambda: True)
    assert resident_nbytes(memory.view) == before
    assert "host.capacity" in caplog.text


def test_memory_in_use_outlives_close() -> None:
    memory = Pages(4096)
    part = memory.view[:10]
    memory.close()
    part[:] = b"still here"
    assert bytes(part) == b"still here"


@pytest.mark.parametrize("text", ["always madvise [never]", None])
def test_missing_huge_pages_are_said_once_and_harmless(
    text: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(pages, "_THP", tmp_path / "enabled")
    if text:
        (tmp_path / "enabled").write_text(text)
    with caplog.at_level(logging.WARNING):
        arena = HostArena(SHAPE, 1)
    assert not arena.huge_pages
    assert len(caplog.records) == 1
    arena.slot_buffers(0)[0][:] = bytes(arena.slot_nbytes)


@pytest.mark.parametrize("slots", [0, -1])
def test_an_arena_of_no_slots_is_refused(slots: int) -> None:
    with pytest.raises(CapacityError, match=r"host\.capacity"):
        HostArena(SHAPE, slots)


def test_more_memory_than_there_are_addresses_is_refused() -> None:
    with pytest.raises(TierUnavailable, match=r"host\.capacity"):
        HostArena(SHAPE, 1 << 50)


def test_pages_are_private_so_that_huge_ones_can_be_had() -> None:
    """On most machines, shared anonymous memory silently ignores the advice."""
    memory = Pages(4096)
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, permissions = line.split()[:2]
        start, stop = (int(end, 16) for end in span.split("-"))
        if start <= memory.address < stop:
            assert permissions == "rw-p"
            return
    pytest.fail("the memory is not mapped")
