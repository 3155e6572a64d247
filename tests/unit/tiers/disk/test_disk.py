"""Disks that are full, missing or not ours; flushing; and calls after the tier is closed."""

from __future__ import annotations

import errno
import json
import logging
import os
import resource
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvcore.errors import CapacityError, CorruptBlock, FormatError, TierUnavailable
from kvcore.testing.tier_contract import Block, read_back, write_blocks
from kvcore.tiers.base import BlockRead, BlockWrite
from kvcore.tiers.disk import STORE_SHIFT, DiskTier, Geometry, MountedStore, prepare_store
from kvcore.tiers.disk import files as disk_files
from kvcore.tiers.disk.store import PreparedStore
from support.disk import GEOMETRY, ROOM, SHAPE, SLOT, fill, opened, some_blocks

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
        assert ("the disk is full" in str(error)) is (code == errno.ENOSPC)
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

    def refuses(file: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct I/O here")
        return real(file, flags, *args, **options)

    monkeypatch.setattr(os, "open", refuses)
    fill(path, 2)
    assert "no direct I/O" in caplog.text
    with pytest.raises(TierUnavailable, match="direct_io"), opened(path, direct_io="on"):
        pass


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("way", ["removed", "moved", "folder moved", "replaced"])
def test_a_store_that_leaves_its_path_under_a_tier_is_noticed(path: Path, way: str) -> None:
    """Nothing more is written there. The space of removed files is given back; moved ones stay."""
    blocks, away = some_blocks(4), path.with_name("away")
    with opened(path) as (store, tier):
        write_blocks(tier, blocks[:2])
        if way == "removed":
            shutil.rmtree(path)
        elif way == "moved":
            path.rename(away)
        else:
            store.folder.rename(away)
        if way == "replaced":
            shutil.copytree(away, store.folder)
        for results in (
            tier.write([block.to_write() for block in blocks[2:]]),
            tier.read([BlockRead(block.slot, block.key, [bytearray(SLOT)]) for block in blocks]),
        ):
            assert {type(result) for result in results} == {TierUnavailable}
            assert "was removed or moved: restart the engine" in str(results[0])
        with tier._data.descriptor() as number:
            assert (os.fstat(number).st_size == 0) == (way == "removed")
        with opened(path) as (_, other):
            write_blocks(other, blocks)
            assert read_back(other, blocks[0]) == blocks[0].data, "a new engine has its own"


def test_a_store_that_comes_back_is_used_again(path: Path) -> None:
    """A folder that is moved and moved back is the same store, and its engine goes on with it."""
    blocks, away = some_blocks(4), path.with_name("away")
    with opened(path) as (_, tier):
        write_blocks(tier, blocks[:2])
        path.rename(away)
        assert isinstance(tier.write([blocks[2].to_write()])[0], TierUnavailable)
        away.rename(path)
        write_blocks(tier, blocks[2:])
        assert read_back(tier, blocks[0]) == blocks[0].data


def test_a_relative_path_is_that_of_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with opened(Path("kv")) as (_, tier):
        monkeypatch.chdir("/")
        write_blocks(tier, some_blocks(2))


def test_a_mounted_store_outlives_the_removal_of_the_own_one(path: Path) -> None:
    folder, blocks = fill(path, 2)
    moved = path.parent / "other"
    with opened(moved) as (store, _):
        foreign = {1: folder}
        mounted = MountedStore(store.folder, store.num_slots, foreign)
        tier = DiskTier(mounted, GEOMETRY, shard=0, slot_nbytes=SLOT)
        shutil.rmtree(moved)
        buffers = [memoryview(bytearray(SLOT)) for _ in range(2)]
        asked = [
            BlockRead(blocks[0].slot, blocks[0].key, [buffers[0]]),
            BlockRead(1 << STORE_SHIFT | blocks[1].slot, blocks[1].key, [buffers[1]]),
        ]
        own, foreign_one = tier.read(asked)
        tier.close()
        assert isinstance(own, TierUnavailable)
        assert foreign_one is None


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

    def refuses(file: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & os.O_CREAT:
            raise OSError(code, os.strerror(code))
        return real(file, flags, *args, **options)

    monkeypatch.setattr(os, "open", refuses)
    with pytest.raises(TierUnavailable, match=r"set disk\.path"):
        prepare_store(path, GEOMETRY, ROOM)


def test_only_the_owner_may_read(path: Path) -> None:
    fill(path, 1)
    assert {f.stat().st_mode & 0o777 for f in path.rglob("*") if f.is_dir()} == {0o700}
    assert {f.stat().st_mode & 0o777 for f in path.rglob("*") if f.is_file()} == {0o600}
    assert path.stat().st_mode & 0o777 == 0o700


@contextmanager
def beside_a_spoilt_store(
    path: Path, spoil: Callable[[Path], object]
) -> Iterator[tuple[Path, PreparedStore]]:
    """A tier in a folder with a store that was spoilt: it takes blocks, and none from that store.

    Yields the folder of the spoilt store, and the store that the tier uses.
    """
    folder, blocks = fill(path, 2)
    spoil(folder / "store.json")
    with opened(path) as (store, tier):
        assert store.records == []
        yield folder, store
        write_blocks(tier, blocks)
        tier.check_integrity()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda f: f.write_text(f.read_text().replace('"version": 1', '"version": 9')),
        lambda f: f.write_text(json.dumps(replace(GEOMETRY, model=b"other").to_json())),
        lambda f: f.write_text("{"),
        lambda f: f.write_bytes(b"\xff\xfe"),
        lambda f: f.write_text("[" * 200_000),
        lambda f: f.write_text(f.read_text().replace('"version": 1', '"version": 1e400')),
        lambda f: f.unlink(),
    ],
)
def test_a_store_that_cannot_be_understood_is_left_alone(
    path: Path, spoil: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    with beside_a_spoilt_store(path, spoil) as (folder, store):
        assert store.folder != folder
        assert "is not used" in caplog.text
    with pytest.raises(FormatError):
        DiskTier(MountedStore(folder, 2), GEOMETRY, shard=0, slot_nbytes=SLOT)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda f: os.truncate(f, 3 << 30),
        lambda f: f.write_text(json.dumps(GEOMETRY.to_json() | {"heads": [[0, 1]] * 200_000})),
    ],
    ids=["sparse", "many shards"],
)
def test_a_store_json_of_any_size_costs_its_own_store_only(
    path: Path, spoil: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    """It counts against the capacity, so the store may be removed to make room."""
    with beside_a_spoilt_store(path, spoil):
        assert "store.json has" in caplog.text


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
        DiskTier(MountedStore(folder, 1), GEOMETRY, shard=0, slot_nbytes=2 * SLOT)


# -- flushing -------------------------------------------------------------------------------


def test_what_was_written_is_flushed_within_the_interval(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if nothing is written afterwards."""
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
    """Open other files, so that they get every file number that was just released."""
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
    """A leader's order to forget slots may arrive after a worker has closed its tiers."""
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
    """The slots of a batch are reused as soon as the batch has failed."""
    with opened(path) as (_, tier):
        running, ended = threading.Event(), threading.Event()

        def read_foreign(request: BlockRead) -> None:
            if request.slot & 1:
                assert running.wait(60)
                raise MemoryError("no room for a staging buffer")
            running.set()
            for _ in range(1000):  # yields until the failure has long been seen
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
