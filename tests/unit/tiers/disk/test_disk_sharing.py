"""A folder shared by engines of different models and different tensor-parallel sizes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcore._util.file_lock import FileLock
from kvcore._util.private import open_file
from kvcore.errors import CorruptBlock, TierUnavailable
from kvcore.memory.arena import slot_bytes
from kvcore.model.shape import BlockShape
from kvcore.testing.tier_contract import Block, write_blocks
from kvcore.testing.waiting import until
from kvcore.tiers.base import BlockRead, BlockWrite, SlotError
from kvcore.tiers.disk import STORE_SHIFT, DiskTier, Geometry, prepare_store
from kvcore.tiers.disk.format import shard_files
from kvcore.tiers.disk.store import exclusive
from kvcore.tiers.geometry import RECORD_NBYTES
from support.disk import GEOMETRY, ROOM, SLOT, fill, flip, open_tier, opened, some_blocks


def total_bytes(path: Path) -> int:
    return sum(f.stat().st_size for f in path.rglob("*") if f.is_file())


# -- sharing a folder -----------------------------------------------------------------------


def test_an_engine_that_is_running_keeps_its_store(path: Path) -> None:
    first = prepare_store(path, GEOMETRY, ROOM, share=2)
    second = prepare_store(path, GEOMETRY, ROOM, share=2)
    assert first.folder != second.folder
    assert second.foreign == {}
    assert (first.num_slots + second.num_slots) * GEOMETRY.per_slot <= ROOM
    folder = first.folder
    first.close()
    third = prepare_store(path, GEOMETRY, ROOM, share=2)
    assert third.folder == folder
    second.close()
    third.close()


def test_a_crowded_folder_is_refused_until_there_is_room(path: Path) -> None:
    running = prepare_store(path, GEOMETRY, ROOM)
    with pytest.raises(TierUnavailable, match=r"running keep .* another disk\.path"):
        prepare_store(path, GEOMETRY, ROOM, wait_s=0)
    leaving = threading.Timer(0.3, running.close)
    leaving.start()
    after = prepare_store(path, GEOMETRY, ROOM, wait_s=30)
    assert after.folder == running.folder
    after.close()
    leaving.join()


def test_a_removed_lock_lets_no_second_engine_in(path: Path) -> None:
    first = prepare_store(path, GEOMETRY, ROOM, share=2)
    (first.folder / "lock").unlink()
    (path / "lock").unlink()
    second = prepare_store(path, GEOMETRY, ROOM, share=2)
    assert second.folder != first.folder
    assert second.foreign == {}
    second.close()
    first.close()


def test_who_waited_for_a_removed_lock_takes_the_new_one(path: Path) -> None:
    """Two processes would choose and remove stores at once otherwise."""
    entered = threading.Event()

    def enter() -> None:
        with exclusive(path):
            entered.set()

    waiting = threading.Thread(target=enter)
    with exclusive(path):
        waiting.start()
        until(lambda: len(locks_of(path / "lock")) > 1)
        (path / "lock").unlink()
        newer = FileLock()
        newer.take(open_file(path / "lock", os.O_RDWR | os.O_CREAT))
    until(lambda: len(locks_of(path / "lock")) > 1)
    assert not entered.is_set()
    newer.close()
    waiting.join(30)
    assert entered.is_set()


def locks_of(lock: Path) -> list[str]:
    """Return this process's descriptors of a file."""
    wanted, found = lock.stat(), []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(f"/proc/self/fd/{name}"), wanted):
                found.append(name)
    return found


def test_a_forked_child_that_outlives_its_engine_keeps_no_store(path: Path) -> None:
    """The engine keeps it while it runs, whatever its children do."""
    running = prepare_store(path, GEOMETRY, ROOM)
    told, tell = os.pipe()
    begun, began = os.pipe()
    child = os.fork()
    if not child:  # what a library forks: it lives until this test ends
        os.close(tell)
        os.write(began, b"!")
        os.read(told, 1)
        os._exit(0)
    os.close(began)
    try:
        assert os.read(begun, 1), "it has closed what it is to close"
        with pytest.raises(TierUnavailable, match=rf"Held by process {os.getpid()} \(.*store-0\)"):
            prepare_store(path, GEOMETRY, ROOM, wait_s=0)
        running.close()
        after = prepare_store(path, GEOMETRY, ROOM, wait_s=0)
        assert after.folder == running.folder
        after.close()
    finally:
        os.close(tell)
        os.waitpid(child, 0)
        os.close(told)
        os.close(begun)


LEFT = """
import ctypes, os, sys
from pathlib import Path
from kvcore.tiers.disk import prepare_store
from support.disk import GEOMETRY, ROOM
store = prepare_store(Path(sys.argv[1]), GEOMETRY, ROOM)
child = ctypes.CDLL(None).fork()  # as a library does that knows nothing of Python
if child:
    print(child, flush=True)
    os._exit(0)
sys.stdin.read()
os._exit(0)
"""


@pytest.mark.slow
def test_a_left_process_that_holds_the_store_is_named(path: Path) -> None:
    left = subprocess.Popen(
        [sys.executable, "-c", LEFT, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert left.stdin is not None
    assert left.stdout is not None
    try:
        pid = int(left.stdout.readline())
        left.wait(30)
        with pytest.raises(TierUnavailable, match=rf"Held by process {pid} \(python"):
            prepare_store(path, GEOMETRY, ROOM, wait_s=0)
    finally:
        left.stdin.close()
        left.stdout.close()
    prepare_store(path, GEOMETRY, ROOM, wait_s=30).close()


def test_a_capacity_below_one_block_is_refused(path: Path) -> None:
    with pytest.raises(TierUnavailable, match=r"raise disk\.capacity"):
        prepare_store(path, GEOMETRY, GEOMETRY.per_slot)
    assert not list(path.rglob("store.json"))


def test_the_capacity_holds_for_all_models_together(path: Path) -> None:
    capacity = 12 * GEOMETRY.per_slot + 4096
    for model in range(6):
        geometry = replace(GEOMETRY, model=bytes([model]))
        with opened(path, geometry, capacity) as (store, tier):
            assert store.num_slots >= 5
            write_blocks(tier, some_blocks(store.num_slots))
            assert isinstance(
                tier.write([Block(store.num_slots, 0, SLOT).to_write()])[0], SlotError
            )
            assert total_bytes(path) <= capacity
    with opened(path, replace(GEOMETRY, model=bytes([5])), capacity) as (store, _):
        assert store.records
        assert total_bytes(path) <= capacity


def test_a_smaller_capacity_keeps_the_blocks_that_fit(path: Path) -> None:
    fill(path, 8)
    with opened(path, capacity=5 * GEOMETRY.per_slot + 4096) as (store, tier):
        assert store.num_slots == 5
        assert sorted(record.slot for record in store.records) == list(range(5))
        tier.check_integrity()
    assert total_bytes(path) <= 5 * GEOMETRY.per_slot + 4096


def test_other_files_are_never_removed(path: Path) -> None:
    """Neither a folder that only looks like a store, nor a store that holds another file too."""
    base = path / ("a" * 32)
    theirs = [path / "photos" / "store-1" / "lock", base / "store-1" / "mine.txt"]
    for file in theirs:
        file.parent.mkdir(parents=True)
        file.write_bytes(bytes(ROOM))
    with opened(path):
        pass
    assert all(file.stat().st_size == ROOM for file in theirs)


def test_stores_of_other_models_go_oldest_first(path: Path) -> None:
    capacity = 12 * GEOMETRY.per_slot + 3 * 4096
    folders = []
    for model in range(3):
        geometry = replace(GEOMETRY, model=bytes([model]))
        store = prepare_store(path, geometry, capacity, share=3)
        tier = open_tier(store, geometry)
        write_blocks(tier, some_blocks(store.num_slots))
        tier.close()
        store.close()
        folders.append(store.folder)
        for file in store.folder.iterdir():
            os.utime(file, (model, model))
    with opened(path, capacity=capacity):
        assert [folder.exists() for folder in folders] == [False, False, True]


# -- other tensor-parallel sizes ------------------------------------------------------------

HEADS = 4
WIDE = BlockShape(layers=3, kv_heads=HEADS, head_dim=40, block_tokens=16, dtype="float16")


def split(ranks: int) -> Geometry:
    """Split heads over ranks. With more ranks than heads, several ranks hold the same head."""
    if ranks <= HEADS:
        step = HEADS // ranks
        spans = tuple((r * step, (r + 1) * step) for r in range(ranks))
    else:
        spans = tuple((r * HEADS // ranks, r * HEADS // ranks + 1) for r in range(ranks))
    return Geometry(WIDE, b"model", spans)


def numpy_block(seed: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return a block of the whole model, [layers, heads, bytes]."""
    shape = (WIDE.layers, HEADS, WIDE.head_nbytes)
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def rank_part(geometry: Geometry, rank: int, seed: int) -> bytes:
    start, stop = geometry.heads[rank]
    return numpy_block(seed)[:, start:stop].tobytes()


def key_of(seed: int) -> bytes:
    return bytes([seed]) * 16


def save_at(path: Path, geometry: Geometry, seeds: range) -> Path:
    """Let every rank write its part of the blocks to slots with the same numbers."""
    store = prepare_store(path, geometry, ROOM)
    for rank in range(len(geometry.heads)):
        tier = open_tier(store, geometry, rank)
        for slot, seed in enumerate(seeds):
            part = rank_part(geometry, rank, seed)
            request = BlockWrite(slot, key_of(seed), key_of(9), key_of(8), [memoryview(part)])
            assert tier.write([request]) == [None]
        tier.close()
    store.close()
    return store.folder


@pytest.mark.usefixtures("kept_queues")
@pytest.mark.parametrize("readers", [1, 2, 4, 8])
@pytest.mark.parametrize("writers", [1, 2, 4, 8])
@pytest.mark.usefixtures("either_way")
def test_any_number_of_ranks_reads_what_any_other_wrote(
    path: Path, writers: int, readers: int
) -> None:
    save_at(path, split(writers), range(3))
    geometry = split(readers)
    store = prepare_store(path, geometry, ROOM)
    assert sorted(record.key for record in store.records) == [key_of(s) for s in range(3)]
    assert {r.slot >> STORE_SHIFT for r in store.records} == ({0} if writers == readers else {1})
    for rank in range(readers):
        tier = open_tier(store, geometry, rank)
        for record in store.records:
            expected = rank_part(geometry, rank, record.key[0])
            cuts = [bytearray(100), bytearray(len(expected) - 100)]
            pieces = [memoryview(cut) for cut in cuts]
            assert tier.read([BlockRead(record.slot, record.key, pieces)]) == [None]
            assert b"".join(cuts) == expected
        tier.close()
    store.close()


def one_read(tier: DiskTier, slot: int, seed: int) -> object:
    buffer = memoryview(bytearray(slot_bytes(WIDE)))
    return tier.read([BlockRead(slot, key_of(seed), [buffer])])[0]


def test_damage_in_one_shard_of_a_foreign_store_drops_the_block(path: Path) -> None:
    folder = save_at(path, split(2), range(3))
    data, index = shard_files(folder, 1)
    flip(data, 7)
    flip(index, RECORD_NBYTES + 30)
    with opened(path, split(1)) as (store, tier):
        slots = {record.key[0]: record.slot for record in store.records}
        assert set(slots) == {0, 2}
        assert isinstance(one_read(tier, slots[0], 0), CorruptBlock)
        assert isinstance(one_read(tier, slots[0] + 1, 1), CorruptBlock)
        assert isinstance(one_read(tier, slots[2], 1), CorruptBlock)
        assert one_read(tier, slots[2], 2) is None
    with opened(path, split(1)) as (store, _):
        assert [record.key[0] for record in store.records] == [2]


def test_invalidated_foreign_blocks_stay_away(path: Path) -> None:
    save_at(path, split(2), range(3))
    with opened(path, split(1)) as (store, tier):
        gone = next(r.slot for r in store.records if r.key == key_of(1))
        tier.invalidate([gone, 5 << STORE_SHIFT])
        assert isinstance(one_read(tier, gone, 1), CorruptBlock)
    with opened(path, split(2)) as (store, _):
        assert sorted(record.key[0] for record in store.records) == [0, 2]


def test_a_foreign_store_that_vanished_fails_only_its_own_blocks(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_at(path, split(2), range(1))
    store = prepare_store(path, split(1), ROOM)
    (folder / "shard-1.data").unlink()
    tier = open_tier(store, split(1))
    assert "is not read" in caplog.text
    assert isinstance(one_read(tier, store.records[0].slot, 0), SlotError)
    write = BlockWrite(0, key_of(5), key_of(9), key_of(8), [memoryview(rank_part(split(1), 0, 5))])
    assert tier.write([write]) == [None]
    assert one_read(tier, 0, 5) is None
    tier.close()
    store.close()


def test_a_foreign_store_is_cut_to_make_room(path: Path) -> None:
    save_at(path, split(2), range(8))
    capacity = 8 * split(2).per_slot + 2 * 4096
    with opened(path, split(1), capacity) as (store, tier):
        assert store.num_slots >= 3
        kept = [record for record in store.records if record.slot >> STORE_SHIFT]
        assert 2 <= len(kept) < 8
        assert all(one_read(tier, record.slot, record.key[0]) is None for record in kept)
        assert total_bytes(path) + store.num_slots * split(1).per_slot <= capacity + 4096


def test_a_store_that_stays_in_use_is_logged_once(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    running = prepare_store(path, GEOMETRY, ROOM)
    caplog.clear()
    with caplog.at_level("INFO", logger="kvcore.tiers.disk"), pytest.raises(TierUnavailable):
        prepare_store(path, GEOMETRY, ROOM, wait_s=0.5)
    assert caplog.messages == [f"store {running.folder} is in use by another engine"]
    running.close()
