"""Which folder an engine writes to, what it finds there, and how much it may use.

The leader prepares a store before its workers open it: it takes the lock, makes room within the
configured capacity, and reads what is there. Stores that another engine left behind, also at
another tensor-parallel size, are mounted for reading; stores in use elsewhere are left alone.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvcore.errors import FormatError, TierUnavailable
from kvcore.tiers.base import BlockRecord
from kvcore.tiers.disk.format import (
    RECORD_NBYTES,
    Geometry,
    Record,
    read_records,
    shard_files,
    to_block_record,
)
from kvcore.tiers.disk.tier import STORE_SHIFT
from kvcore.tiers.host import slot_bytes

_log = logging.getLogger("kvcore.tiers.disk")


@dataclass
class PreparedStore:
    """A store ready for the workers: they open ``folder`` and the ``foreign`` ones.

    ``records`` are the blocks whole in every shard. The lock is held until ``close``.
    """

    folder: Path
    num_slots: int
    records: list[BlockRecord]
    foreign: dict[int, Path] = field(default_factory=dict)
    locks: list[int] = field(default_factory=list)

    def options(self) -> dict[str, Any]:
        """What a worker needs to open the same, as plain data."""
        return {
            "folder": str(self.folder),
            "num_slots": self.num_slots,
            "foreign": {str(number): str(path) for number, path in self.foreign.items()},
        }

    def close(self) -> None:
        for lock in self.locks:
            os.close(lock)
        self.locks = []


def prepare_store(path: Path, geometry: Geometry, capacity: int) -> PreparedStore:
    """Choose, lock and scan a store under ``path`` for blocks of ``geometry``.

    Raises TierUnavailable when the folder cannot be used, saying what to change. Everything under
    ``path`` together stays below ``capacity`` bytes: stores of other models, oldest first, are
    removed until at least half of it is free for this one.
    """
    base = path / geometry.base
    _make_folder(path)
    _make_folder(base)
    own: tuple[Path, int] | None = None
    foreign: list[tuple[Path, Geometry, int]] = []
    for folder in _stores(base):
        lock = _lock(folder)
        if lock is None:
            _log.info("store %s is in use by another engine", folder.name)
            continue
        found = _load(folder, geometry)
        if found is None:
            os.close(lock)
        elif found.heads == geometry.heads and own is None:
            own = folder, lock
        else:
            foreign.append((folder, found, lock))
    folder, lock = own or _create(base, geometry)
    others = _make_room(path, folder, [f for f, _, _ in foreign], capacity)
    shards = len(geometry.heads)
    per_slot = sum(slot_bytes(geometry.shard_shape(i)) + RECORD_NBYTES for i in range(shards))
    num_slots = max(capacity - others, 0) // per_slot
    if num_slots < 1:
        os.close(lock)
        raise TierUnavailable(
            f"{capacity} bytes under {path}, of which {others} are used by other stores, do not "
            f"hold one block of {per_slot} bytes: raise disk.capacity"
        )
    _trim(folder, geometry, num_slots)
    prepared = PreparedStore(folder, num_slots, _scan(folder, geometry, 0, num_slots), {}, [lock])
    for number, (place, found, held) in enumerate(foreign, start=1):
        prepared.foreign[number] = place
        prepared.locks.append(held)
        prepared.records += _scan(place, found, number, None)
    _log.info(
        "disk store=%s slots=%d blocks_found=%d foreign_stores=%d",
        folder,
        num_slots,
        len(prepared.records),
        len(foreign),
    )
    return prepared


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        probe = folder / f".probe-{os.getpid()}"
        probe.touch(mode=0o600)
        probe.unlink()
    except OSError as error:
        hint = {
            errno.EROFS: "it is read-only",
            errno.EACCES: "this user may not write there",
            errno.ENOTDIR: "a part of it is not a folder",
            errno.EEXIST: "it is not a folder",
            errno.ENOSPC: "the file system is full",
        }.get(error.errno or 0, str(error))
        raise TierUnavailable(f"cannot use {folder} for KV: {hint}; set disk.path") from error


def _stores(base: Path) -> Iterator[Path]:
    """Folders of stores, those written to last first."""
    folders = [f for f in base.iterdir() if f.is_dir() and f.name.startswith("store-")]
    return iter(sorted(folders, key=_last_write, reverse=True))


def _last_write(folder: Path) -> float:
    try:
        return max((f.stat().st_mtime for f in folder.iterdir()), default=0.0)
    except OSError:
        return 0.0


def _lock(folder: Path) -> int | None:
    """A held lock on the store, None when another process has it."""
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def _load(folder: Path, wanted: Geometry) -> Geometry | None:
    """The store's geometry when its blocks are comparable, else None with a log line."""
    try:
        found = Geometry.load(folder)
    except FormatError as error:
        _log.warning("store %s is not used: %s", folder.name, error)
        return None
    if (found.shape, found.model) != (wanted.shape, wanted.model):
        _log.warning("store %s is not used: it holds blocks of another model", folder.name)
        return None
    return found


def _create(base: Path, geometry: Geometry) -> tuple[Path, int]:
    number = 0
    while True:
        folder = base / f"store-{number}"
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            number += 1
            continue
        lock = _lock(folder)
        if lock is not None:
            geometry.save(folder)
            return folder, lock


def _make_room(path: Path, own: Path, mounted: list[Path], capacity: int) -> int:
    """Remove unused stores, oldest first, while others fill over half; returns bytes of others."""
    others = [f for base in path.iterdir() if base.is_dir() for f in _stores(base) if f != own]
    used = {folder: _disk_usage(folder) for folder in others}
    total = sum(used.values())
    for folder in sorted(others, key=_last_write):
        if total <= capacity // 2:
            break
        if folder in mounted:
            continue
        lock = _lock(folder)
        if lock is None:
            continue
        _log.warning("removing the store %s (%d bytes) to make room", folder, used[folder])
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)
        total -= used[folder]
    return total


def _disk_usage(folder: Path) -> int:
    return sum(f.stat().st_size for f in folder.iterdir() if f.is_file())


def _trim(folder: Path, geometry: Geometry, num_slots: int) -> None:
    """Cut files that a larger capacity left longer than this one allows."""
    for shard in range(len(geometry.heads)):
        data, index = shard_files(folder, shard)
        limit = num_slots * slot_bytes(geometry.shard_shape(shard))
        for file, most in ((data, limit), (index, num_slots * RECORD_NBYTES)):
            if file.exists() and file.stat().st_size > most:
                os.truncate(file, most)


def _scan(
    folder: Path, geometry: Geometry, number: int, num_slots: int | None
) -> list[BlockRecord]:
    """Blocks that every shard holds, at their slots in store ``number``."""
    whole: dict[int, Record] | None = None
    for shard in range(len(geometry.heads)):
        _, index = shard_files(folder, shard)
        records = dict(read_records(index)) if index.exists() else {}
        if whole is None:
            whole = records
        else:
            whole = {
                slot: record
                for slot, record in whole.items()
                if slot in records and records[slot].key == record.key
            }
    return [
        to_block_record(number << STORE_SHIFT | slot, record)
        for slot, record in (whole or {}).items()
        if num_slots is None or slot < num_slots
    ]
