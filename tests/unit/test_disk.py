"""What happens to files: torn writes, flipped bits, full and foreign disks, other shards."""

from __future__ import annotations

import errno
import json
import logging
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.errors import CapacityError, CorruptBlock, FormatError, TierUnavailable
from kvcore.layout import BlockShape
from kvcore.testing.tier_contract import Block, read_back, write_blocks
from kvcore.tiers.base import BlockRead, BlockWrite, SlotError
from kvcore.tiers.disk import STORE_SHIFT, DiskTier, Geometry, PreparedStore, prepare_store
from kvcore.tiers.disk import files as disk_files
from kvcore.tiers.disk.format import (
    EMPTY_RECORD,
    RECORD_NBYTES,
    Record,
    checksum,
    read_table,
    shard_files,
)
from kvcore.tiers.host import slot_bytes

SHAPE = BlockShape(layers=5, kv_heads=2, head_dim=16, block_tokens=16, dtype="bfloat16")
GEOMETRY = Geometry(SHAPE, b"model", ((0, 2),))
SLOT = slot_bytes(SHAPE)
ROOM = 1 << 20


@pytest.fixture(params=["queue", "threads"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With the kernel's queue, and as where it cannot be had."""
    if request.param == "threads":
        monkeypatch.setattr(disk_files, "_queue", lambda *_: None)
    return str(request.param)


@pytest.fixture
def only_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that make os.preadv and os.pwritev fail."""
    monkeypatch.setattr(disk_files, "_queue", lambda *_: None)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def open_tier(
    store: PreparedStore, geometry: Geometry = GEOMETRY, shard: int = 0, **options: Any
) -> DiskTier:
    """As a worker opens what its leader prepared."""
    told = store.options()
    return DiskTier(
        Path(told["folder"]),
        geometry,
        shard=shard,
        num_slots=told["num_slots"],
        slot_nbytes=slot_bytes(geometry.shard_shape(shard)),
        foreign={int(n): Path(p) for n, p in told["foreign"].items()},
        **options,
    )


@contextmanager
def opened(
    path: Path, geometry: Geometry = GEOMETRY, capacity: int = ROOM, **options: Any
) -> Iterator[tuple[PreparedStore, DiskTier]]:
    """Leader and one worker, of shard 0, as after a restart."""
    store = prepare_store(path, geometry, capacity, wait_s=0)
    tier = open_tier(store, geometry, **options)
    try:
        yield store, tier
    finally:
        tier.close()
        store.close()


def some_blocks(count: int, first_seed: int = 0) -> list[Block]:
    return [Block(slot, first_seed + slot, SLOT) for slot in range(count)]


def fill(path: Path, count: int, **options: Any) -> tuple[Path, list[Block]]:
    """(The folder of a store with ``count`` blocks, the blocks)"""
    blocks = some_blocks(count)
    with opened(path, **options) as (store, tier):
        write_blocks(tier, blocks)
        return store.folder, blocks


def total_bytes(path: Path) -> int:
    return sum(f.stat().st_size for f in path.rglob("*") if f.is_file())


def damage(file: Path, offset: int) -> None:
    with file.open("r+b") as data:
        data.seek(offset)
        (byte,) = data.read(1)
        data.seek(offset)
        data.write(bytes([byte ^ 0x10]))


# -- records --------------------------------------------------------------------------------

key_bytes = st.binary(min_size=16, max_size=16)
records = st.builds(
    Record,
    key_bytes,
    key_bytes,
    key_bytes,
    key_bytes,
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1),
    st.just(b""),
    st.just(b""),
)


@given(record=records, bit=st.integers(0, 8 * RECORD_NBYTES - 1))
def test_a_record_reads_back_and_any_flipped_bit_that_counts_is_noticed(
    record: Record, bit: int
) -> None:
    data = bytearray(record.pack())
    assert len(data) == RECORD_NBYTES
    assert Record.unpack(bytes(data)) == record
    data[bit // 8] ^= 1 << bit % 8
    padding = range(88, 120)
    assert Record.unpack(bytes(data)) == (record if bit // 8 in padding else None)


@given(
    rows=st.lists(st.one_of(st.none(), records, st.binary(min_size=128, max_size=128))),
    tail=st.binary(max_size=127),
)
def test_the_table_is_what_reading_record_by_record_gives(
    rows: list[Record | bytes | None],
    tail: bytes,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    packed = [row.pack() if isinstance(row, Record) else row or EMPTY_RECORD for row in rows]
    file = tmp_path_factory.getbasetemp() / "index"
    file.write_bytes(b"".join(packed) + tail)
    table, torn = read_table(file)
    one_by_one = [(i, Record.unpack(data)) for i, data in enumerate(packed)]
    expected = [(i, *record[:3], record.stamp) for i, record in one_by_one if record]
    assert [tuple(record) for record in table.block_records()] == expected
    not_empty = sum(data[:4] != bytes(4) for data in packed)
    assert torn == not_empty - len(expected) + bool(tail)


def test_the_checksum_is_of_the_key_and_the_block_without_its_padding() -> None:
    data = random.Random(0).randbytes(100)
    a, b = b"a" * 16, b"b" * 16
    whole = checksum(a, [memoryview(data)], 90)
    assert checksum(a, [memoryview(data)[:33], memoryview(data)[33:]], 90) == whole
    assert checksum(a, [memoryview(data)[:90]], 90) == whole
    assert checksum(b, [memoryview(data)], 90) != whole
    assert checksum(a, [memoryview(data)], 91) != whole


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d | {"format": "something"},
        lambda d: d | {"version": 2},
        lambda d: d | {"model": "xyz"},
        lambda d: d | {"heads": [[0, 9]]},
        lambda d: d | {"heads": []},
        lambda d: d | {"shape": {"layers": 1}},
        lambda d: d | {"shape": None},
        lambda d: [],
    ],
)
def test_a_damaged_store_json_is_named(change: Callable[[Any], Any]) -> None:
    assert Geometry.from_json(GEOMETRY.to_json()) == GEOMETRY
    with pytest.raises(FormatError):
        Geometry.from_json(change(GEOMETRY.to_json()))


# -- damage ---------------------------------------------------------------------------------


@pytest.mark.parametrize("direct_io", ["auto", "off"])
@pytest.mark.parametrize("offset", [0, SHAPE.nbytes // 2, SHAPE.nbytes - 1])
@pytest.mark.usefixtures("either_way")
def test_a_flipped_bit_of_a_block_is_never_served(path: Path, offset: int, direct_io: str) -> None:
    folder, blocks = fill(path, 3)
    damage(folder / "shard-0.data", SLOT + offset)
    with opened(path, direct_io=direct_io) as (store, tier):
        assert len(store.records) == 3
        with pytest.raises(CorruptBlock, match="erased"):
            tier.check_integrity()
        assert [r.slot for r in tier.scan()] == [0, 2]
        for block in (blocks[0], blocks[2]):
            assert read_back(tier, block) == block.data
        with pytest.raises(CorruptBlock):
            read_back(tier, blocks[1])
        write_blocks(tier, [blocks[1]])
        assert read_back(tier, blocks[1]) == blocks[1].data


@pytest.mark.parametrize("offset", [0, 4, 20, 70, 80, 127])
def test_a_flipped_bit_of_a_record_drops_its_block(
    path: Path, offset: int, caplog: pytest.LogCaptureFixture
) -> None:
    folder, blocks = fill(path, 3)
    damage(folder / "shard-0.index", RECORD_NBYTES + offset)
    with opened(path) as (store, tier):
        assert [record.slot for record in store.records] == [0, 2]
        assert "torn=1" in caplog.text
        with pytest.raises(CorruptBlock):
            read_back(tier, blocks[1])


@pytest.mark.parametrize("left", [0, SLOT - 2500, SLOT, 2 * SLOT - 4096, 2 * SLOT - 2500])
@pytest.mark.usefixtures("either_way")
def test_a_truncated_data_file_loses_what_was_cut(path: Path, left: int) -> None:
    folder, blocks = fill(path, 3)
    with opened(path) as (_, tier):  # cut while it is open, and again found cut
        os.truncate(folder / "shard-0.data", left)
        whole = left // SLOT
        for block in blocks[whole:]:
            with pytest.raises(CorruptBlock):
                read_back(tier, block)
    with opened(path) as (store, tier):
        assert [record.slot for record in store.records] == list(range(whole))
        tier.check_integrity()
        write_blocks(tier, blocks)
        tier.check_integrity()


def test_records_beyond_the_data_are_dropped(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, _ = fill(path, 3)
    os.truncate(folder / "shard-0.data", 2 * SLOT - 1)
    with opened(path) as (store, _):
        assert [record.slot for record in store.records] == [0]
    assert "beyond_data_or_of_other_size=2" in caplog.text


@pytest.mark.parametrize("left", [0, 1, RECORD_NBYTES, 3 * RECORD_NBYTES - 1])
def test_a_truncated_index_loses_what_was_cut(path: Path, left: int) -> None:
    folder, blocks = fill(path, 3)
    os.truncate(folder / "shard-0.index", left)
    with opened(path) as (store, tier):
        whole = left // RECORD_NBYTES
        assert [record.slot for record in store.records] == list(range(whole))
        for block in blocks[whole:]:
            with pytest.raises(CorruptBlock):
                read_back(tier, block)
        write_blocks(tier, blocks)
        tier.check_integrity()


@pytest.mark.usefixtures("either_way")
def test_swapped_blocks_are_never_served(path: Path) -> None:
    """The bytes change places, the records stay; then the records change places too."""
    folder, blocks = fill(path, 2)
    file = folder / "shard-0.data"
    data = file.read_bytes()
    file.write_bytes(data[SLOT : 2 * SLOT] + data[:SLOT] + data[2 * SLOT :])
    with opened(path) as (_, tier):
        for block in blocks:
            with pytest.raises(CorruptBlock):
                read_back(tier, block)
    write = folder / "shard-0.index"
    with opened(path) as (_, tier):
        write_blocks(tier, blocks)
    rows = write.read_bytes()
    write.write_bytes(rows[RECORD_NBYTES:] + rows[:RECORD_NBYTES])
    with opened(path) as (_, tier):
        for block in blocks:
            with pytest.raises(CorruptBlock):
                read_back(tier, block)


def test_another_blocks_bytes_do_not_pass_under_a_forged_key(path: Path) -> None:
    folder, blocks = fill(path, 2)
    index = folder / "shard-0.index"
    rows = index.read_bytes()
    first = Record.unpack(rows[:RECORD_NBYTES])
    assert first is not None
    forged = first._replace(key=blocks[1].key)  # a sound record: right seal, right sum of the bytes
    index.write_bytes(forged.pack() + rows[RECORD_NBYTES:])
    with opened(path) as (_, tier), pytest.raises(CorruptBlock):
        read_back(tier, blocks[1]._replace(slot=0))


@pytest.mark.parametrize("round_", range(4))
def test_a_killed_writer_leaves_whole_blocks_or_none(path: Path, round_: int) -> None:
    """kill -9 at a random moment, while the same slots are written over and over."""
    program = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
import itertools, test_disk as t
with t.opened(t.Path({str(path)!r})) as (_, tier):
    for seed in itertools.count(0, 4):
        t.write_blocks(tier, t.some_blocks(4, seed))
        print(seed, flush=True)
"""
    chance = random.Random(round_)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        for _ in range(chance.randrange(1, 40)):
            last = int(writer.stdout.readline())
        time.sleep(chance.random() * 0.003)
        writer.send_signal(signal.SIGKILL)
        last = max([last, *map(int, writer.stdout.read().split())])
    with opened(path) as (store, tier):
        keys = {Block(s, seed + s, SLOT).key: seed for s in range(4) for seed in (last, last + 4)}
        for record in store.records:
            seed = keys[record.key]  # of the last batch that ended, or of the one under way
            block = Block(record.slot, seed + record.slot, SLOT)
            assert read_back(tier, block) == block.data
        tier.check_integrity()


@pytest.mark.parametrize("stop_after", range(5))
@pytest.mark.usefixtures("only_threads")
def test_a_write_cut_short_anywhere_is_no_block(
    path: Path, stop_after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stops for good after the n-th system call of a write; half of a block's bytes count as one.
    What is on disk then is what a killed process leaves."""
    folder, blocks = fill(path, 1)
    store = prepare_store(path, GEOMETRY, ROOM)
    tier = open_tier(store)
    calls = 0

    class Killed(BaseException):
        pass

    def count() -> None:
        nonlocal calls
        calls += 1
        if calls > stop_after:
            raise Killed

    pwrite, pwritev = os.pwrite, os.pwritev

    def half(file: int, parts: list[memoryview], offset: int) -> int:
        count()
        return pwritev(file, [parts[0][:4096]], offset)

    def spied(file: int, data: bytes, offset: int) -> int:
        count()
        return pwrite(file, data, offset)

    monkeypatch.setattr(os, "pwritev", half)
    monkeypatch.setattr(os, "pwrite", spied)
    new = Block(0, 77, SLOT)
    finished = True
    try:
        tier.write([new.to_write()])
    except Killed:
        finished = False
    monkeypatch.undo()
    tier.close()
    store.close()
    needed = 2 + -(-SLOT // 4096)  # erase, the bytes in pieces of 4096, the record
    assert finished == (stop_after >= needed)
    with opened(path) as (store, tier):
        tier.check_integrity()
        keys = {record.key for record in store.records}
        assert keys == ({blocks[0].key} if stop_after == 0 else {new.key} if finished else set())
    assert folder.exists()


# -- a disk that is full, missing or not ours -----------------------------------------------


@contextmanager
def file_size_limit(nbytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("either_way")
def test_a_full_disk_fails_the_write_and_serves_on(path: Path) -> None:
    blocks = some_blocks(4)
    with opened(path) as (_, tier), file_size_limit(2 * SLOT):
        results = tier.write([block.to_write() for block in blocks])
        assert [type(r) for r in results] == [type(None)] * 2 + [TierUnavailable] * 2
        assert "lower disk.capacity" in str(results[2])
        for block in blocks[:2]:
            assert read_back(tier, block) == block.data
        for block in blocks[2:]:
            with pytest.raises(CorruptBlock):
                read_back(tier, block)
        assert len(tier.scan()) == 2


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.usefixtures("only_threads")
def test_an_error_in_the_middle_leaves_no_block(
    path: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, (old,) = fill(path, 1)
    new = Block(0, 5, SLOT)
    real = os.pwritev

    def fails(file: int, parts: list[memoryview], offset: int) -> int:
        if offset % SLOT:
            raise OSError(code, os.strerror(code))
        return real(file, [parts[0][:4096]], offset)

    with opened(path) as (_, tier):
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", fails)
            (error,) = tier.write([new.to_write()])
        assert isinstance(error, TierUnavailable)
        for block in (old, new):
            with pytest.raises(CorruptBlock):
                read_back(tier, block)
        write_blocks(tier, [new])
        assert read_back(tier, new) == new.data


@pytest.mark.usefixtures("only_threads")
def test_a_read_error_is_not_called_corruption(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, (block,) = fill(path, 1)

    def fails(*_: object) -> int:
        raise OSError(errno.EIO, "gone")

    with opened(path) as (_, tier):
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", fails)
            with pytest.raises(TierUnavailable, match="gone"):
                read_back(tier, block)
        assert read_back(tier, block) == block.data


@pytest.mark.parametrize("refusal", [errno.EOPNOTSUPP, errno.EINVAL])
@pytest.mark.usefixtures("either_way")
def test_space_that_cannot_be_reserved_is_used_all_the_same(
    path: Path, refusal: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise OSError(refusal, "no fallocate here")

    monkeypatch.setattr(os, "posix_fallocate", refused)
    _, blocks = fill(path, 4)
    with opened(path) as (store, tier):
        assert len(store.records) == 4
        assert [read_back(tier, block) for block in blocks] == [block.data for block in blocks]


def test_no_direct_io_falls_back_or_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = os.open

    def refuses(file: Any, flags: int, *args: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct I/O here")
        return real(file, flags, *args)

    monkeypatch.setattr(os, "open", refuses)
    fill(path, 2)
    assert "no direct I/O" in caplog.text
    with pytest.raises(TierUnavailable, match="direct_io"), opened(path, direct_io="on"):
        pass


def test_a_path_that_is_no_folder_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for path in (file, file / "below"):
        with pytest.raises(TierUnavailable, match=r"not a folder; set disk\.path"):
            prepare_store(path, GEOMETRY, ROOM)


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_a_folder_that_cannot_be_written_is_named(
    path: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refuses(file: Any, flags: int, *args: Any) -> int:
        if flags & os.O_CREAT:
            raise OSError(code, os.strerror(code))
        return real(file, flags, *args)

    monkeypatch.setattr(os, "open", refuses)
    with pytest.raises(TierUnavailable, match=r"set disk\.path"):
        prepare_store(path, GEOMETRY, ROOM)


def test_only_the_owner_may_read(path: Path) -> None:
    fill(path, 1)
    assert {f.stat().st_mode & 0o777 for f in path.rglob("*") if f.is_dir()} == {0o700}
    assert {f.stat().st_mode & 0o777 for f in path.rglob("*") if f.is_file()} == {0o600}
    assert path.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "spoil",
    [
        lambda f: f.write_text(f.read_text().replace('"version": 1', '"version": 9')),
        lambda f: f.write_text(json.dumps(replace(GEOMETRY, model=b"other").to_json())),
        lambda f: f.write_text("{"),
        lambda f: f.write_bytes(b"\xff\xfe"),
        lambda f: f.unlink(),
    ],
)
def test_a_store_that_cannot_be_understood_is_left_alone(
    path: Path, spoil: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    folder, blocks = fill(path, 2)
    spoil(folder / "store.json")
    with opened(path) as (store, tier):
        assert store.folder != folder
        assert store.records == []
        assert "is not used" in caplog.text
        write_blocks(tier, blocks)
        tier.check_integrity()
    with pytest.raises(FormatError):
        DiskTier(folder, GEOMETRY, shard=0, num_slots=2, slot_nbytes=SLOT)


def test_another_model_gets_another_store(path: Path) -> None:
    fill(path, 2)
    other = replace(GEOMETRY, model=b"other")
    with opened(path, other) as (store, _):
        assert store.records == []
    wider = Geometry(replace(SHAPE, head_dim=32), b"model", ((0, 2),))
    with opened(path, wider) as (store, _):
        assert store.records == []
    with opened(path) as (store, tier):
        assert len(store.records) == 2
        tier.check_integrity()


def test_slots_of_another_size_than_the_blocks_are_refused(path: Path) -> None:
    folder, _ = fill(path, 1)
    with pytest.raises(CapacityError, match="slots of"):
        DiskTier(folder, GEOMETRY, shard=0, num_slots=1, slot_nbytes=2 * SLOT)


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
    """A folder that only looks like a store, and one that holds something else as well."""
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
    """As ranks share heads; with more ranks than heads, several ranks keep the same one."""
    if ranks <= HEADS:
        step = HEADS // ranks
        spans = tuple((r * step, (r + 1) * step) for r in range(ranks))
    else:
        spans = tuple((r * HEADS // ranks, r * HEADS // ranks + 1) for r in range(ranks))
    return Geometry(WIDE, b"model", spans)


def numpy_block(seed: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """[layers, heads, bytes] of the whole model."""
    shape = (WIDE.layers, HEADS, WIDE.head_nbytes)
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def rank_part(geometry: Geometry, rank: int, seed: int) -> bytes:
    start, stop = geometry.heads[rank]
    return numpy_block(seed)[:, start:stop].tobytes()


def key_of(seed: int) -> bytes:
    return bytes([seed]) * 16


def save_at(path: Path, geometry: Geometry, seeds: range) -> Path:
    """Every rank writes its part of the blocks to slots of the same numbers."""
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
    damage(data, 7)
    damage(index, RECORD_NBYTES + 30)
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


# -- flushing -------------------------------------------------------------------------------


def test_what_was_written_is_flushed_within_the_interval(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when nothing is written after it."""
    flushed = threading.Event()
    real = disk_files.IndexFile.sync

    def spied(file: disk_files.IndexFile) -> None:
        real(file)
        flushed.set()

    monkeypatch.setattr(disk_files.IndexFile, "sync", spied)
    with opened(path, sync_interval_s=0.05) as (_, tier):
        write_blocks(tier, some_blocks(2))
        assert flushed.wait(30)
        flushed.clear()
    assert not flushed.is_set()  # nothing was left for close to flush
    with opened(path, sync_interval_s=0) as (_, tier):
        write_blocks(tier, some_blocks(1))
        assert flushed.is_set()
    flushed.clear()
    with opened(path, sync_interval_s=1000) as (_, tier):
        write_blocks(tier, some_blocks(1))
        assert not flushed.is_set()
    assert flushed.is_set()


def test_a_failing_flush_is_said_and_raised_where_it_was_asked_for(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise OSError(errno.EIO, "no flush")

    with opened(path, sync_interval_s=0) as (_, tier), monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fails)
        with caplog.at_level(logging.WARNING):
            write_blocks(tier, some_blocks(1))
        assert "no flush" in caplog.text
        with pytest.raises(TierUnavailable, match="no flush"):
            tier.sync()


# -- after it is closed ---------------------------------------------------------------------


@contextmanager
def reused(folder: Path) -> Iterator[list[Path]]:
    """Files of somebody else, which have every number that was just given back."""
    paths = [folder / f"other-{i}" for i in range(16)]
    for other in paths:
        other.write_bytes(b"somebody else's" * 512)
    numbers = [os.open(other, os.O_RDWR) for other in paths]
    try:
        yield paths
    finally:
        for number in numbers:
            os.close(number)
        assert all(other.read_bytes() == b"somebody else's" * 512 for other in paths)


def test_a_tier_that_is_closed_touches_no_file_that_was_opened_since(
    path: Path, tmp_path: Path, either_way: str
) -> None:
    """A leader's word to forget slots may come after a worker has closed its tiers."""
    blocks = some_blocks(3)
    with opened(path) as (_, tier):
        write_blocks(tier, blocks)
        tier.close()
        with reused(tmp_path):
            with pytest.raises(TierUnavailable, match="erasing slot 0"):
                tier.invalidate([0, 1])
            with pytest.raises(TierUnavailable, match="flushing"):
                tier.sync()
            write = BlockWrite(0, b"k" * 16, b"p" * 16, b"n" * 16, [memoryview(bytes(SLOT))])
            assert [type(error) for error in tier.write([write])] == [TierUnavailable]
            buffer = bytearray(SLOT)
            read = BlockRead(0, blocks[0].key, [memoryview(buffer)])
            assert [type(error) for error in tier.read([read])] == [TierUnavailable]
            assert not any(buffer)
            tier.close()


def test_a_data_file_that_is_closed_fails_every_piece(path: Path, either_way: str) -> None:
    path.mkdir()
    file = disk_files.DataFile(path / "data", SLOT, num_slots=4)
    file.close()
    pieces = [disk_files.Piece(tag, tag, [memoryview(bytearray(SLOT))]) for tag in range(3)]
    for outcomes in (file.read(pieces), file.write(pieces)):
        found = dict(outcomes)
        assert sorted(found) == [0, 1, 2]
        assert all(isinstance(error, OSError) for error in found.values())
        assert {error.errno for error in found.values()} == {errno.EBADF}  # type: ignore[union-attr]


def test_a_read_that_fails_has_no_other_of_its_batch_still_writing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slots of a batch are given to others as soon as it has failed."""
    with opened(path) as (_, tier):
        running, ended = threading.Event(), threading.Event()

        def read_foreign(request: BlockRead) -> None:
            if request.slot & 1:
                assert running.wait(60)
                raise MemoryError("no room for a staging buffer")
            running.set()
            for _ in range(1000):  # gives way until the failure has long been seen
                time.sleep(0)
            ended.set()
            request.buffers[0][:1] = b"\1"

        monkeypatch.setattr(tier, "_read_foreign", read_foreign)
        buffers = [bytearray(SLOT), bytearray(SLOT)]
        reads = [
            BlockRead(1 << STORE_SHIFT | 1 - i, b"k" * 16, [memoryview(buffers[i])]) for i in (0, 1)
        ]
        with pytest.raises(MemoryError):
            tier.read(reads)
        assert ended.is_set()
