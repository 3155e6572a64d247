"""Damage on disk: torn writes, flipped bits, swapped blocks."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.errors import CorruptBlock, FormatError
from kvcore.testing.tier_contract import Block, read_back, write_blocks
from kvcore.tiers.checksum import checksum
from kvcore.tiers.disk import Geometry, prepare_store
from kvcore.tiers.disk.format import EMPTY_RECORD, Record, read_table
from kvcore.tiers.geometry import RECORD_NBYTES
from kvcore.tiers.guard import BlockCipher, BlockMac
from support import disk as disk_rig
from support.disk import GEOMETRY, ROOM, SHAPE, SLOT, fill, flip, open_tier, opened

# -- records --------------------------------------------------------------------------------

key_bytes = st.binary(min_size=16, max_size=16)
number = st.integers(0, 2**64 - 1)
nothing = st.just(b"")
fields = [key_bytes] * 4 + [number] * 2
sealed = st.builds(
    Record,
    *fields,
    key_bytes,
    key_bytes,
    st.just(0),
    st.sampled_from([BlockCipher.flag, BlockMac.flag]),
)
records = st.one_of(st.builds(Record, *fields, nothing, nothing, number, st.just(0)), sealed)


@given(record=records, bit=st.integers(0, 8 * RECORD_NBYTES - 1))
def test_a_record_reads_back_and_any_flipped_bit_that_counts_is_noticed(
    record: Record, bit: int
) -> None:
    data = bytearray(record.pack())
    assert len(data) == RECORD_NBYTES
    assert Record.unpack(bytes(data)) == record
    data[bit // 8] ^= 1 << bit % 8
    if record.flags and bit // 8 in range(88, 120):  # it fails the block
        found = Record.unpack(bytes(data))
        assert found is not None
        assert found != record
        assert found._replace(nonce=record.nonce, tag=record.tag) == record
        return
    if bit // 8 in range(88, 96):  # it fails a block that is read straight into device memory
        changed = record._replace(sum=record.sum ^ 1 << bit - 8 * 88)
    else:
        changed = record if bit // 8 in range(96, 120) else None
    assert Record.unpack(bytes(data)) == changed


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
        lambda d: d | {"heads": [[0, 2]] * 4097},
        lambda d: d | {"heads": [[0, float("inf")]]},
        lambda d: d | {"heads": 7},
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
    flip(folder / "shard-0.data", SLOT + offset)
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
    flip(folder / "shard-0.index", RECORD_NBYTES + offset)
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
    """First only the bytes of two blocks are swapped, then their records too."""
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "round_", [0, 1, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (2, 3))]
)
def test_a_killed_writer_leaves_whole_blocks_or_none(path: Path, round_: int) -> None:
    """kill -9 at a random moment, while the same slots are overwritten again and again."""
    program = f"""
import sys; sys.path.insert(0, {str(Path(disk_rig.__file__).parents[1])!r})
import itertools
from support import disk as t
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
    """Stop a write for good after its n-th system call. Half of a block's bytes count as one call.

    What is on disk then is what a killed process leaves.
    """
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
