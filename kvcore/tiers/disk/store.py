"""The choice of the store that an engine writes to, what it finds there, and how much it may use.

The leader prepares a store before its workers open it. It takes the store's lock, makes room within
the configured capacity, and reads the records. Stores that other engines left behind, with any
number of ranks or stages, are mounted for reading. Stores that other engines use are left alone.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path

from kvcore._util.fd import leads_to
from kvcore._util.file_lock import FileLock, holders
from kvcore._util.log_limit import LogLimit
from kvcore._util.private import (
    NotPrivateError,
    make_guarded,
    open_file,
    open_folder,
)
from kvcore.config.fields import forgotten_unit
from kvcore.errors import FormatError, TierUnavailable
from kvcore.memory.arena import slot_bytes
from kvcore.tiers.base import BlockRecord
from kvcore.tiers.disk.format import Table, scan_shard, shard_files
from kvcore.tiers.disk.mount import STORE_SHIFT, MountedStore
from kvcore.tiers.disk.tombstones import Tombstones, erase_cleared
from kvcore.tiers.geometry import RECORD_NBYTES, Geometry
from kvcore.tiers.guard import BlockGuard

_log = logging.getLogger("kvcore.tiers.disk")

_BASE_NAME = re.compile(r"[0-9a-f]{32}")
_STORE_NAME = re.compile(r"store-\d+")
_FILE_NAME = re.compile(r"lock|(store\.json|cleared)(\.new)?|shard-\d+\.(data|index)")
_LOCK = "lock"
_REFUSED = LogLimit()
_POLL_S = 0.1
_OVERHEAD = 4096  # bytes of store.json, the tombstones and the lock


@dataclass
class PreparedStore:
    """A store that is ready for the workers: they open ``folder`` and the ``foreign`` stores.

    ``records`` are the blocks that are whole in every shard here; ``torn`` counts records that were
    not valid, or not made with the deployment's key. The locks are held until `close`.
    ``tombstones`` records clears for the next start.
    """

    folder: Path
    num_slots: int
    records: list[BlockRecord]
    torn: int = 0
    foreign: dict[int, Path] = field(default_factory=dict)
    locks: ExitStack = field(default_factory=ExitStack)
    tombstones: Tombstones = field(init=False)

    def __post_init__(self) -> None:
        newest = max((record.stamp for record in self.records), default=0)
        self.tombstones = Tombstones([self.folder, *self.foreign.values()], newest)

    @property
    def mounted(self) -> MountedStore:
        """What a worker needs to open the same stores."""
        clock = self.tombstones.stamps.origin
        return MountedStore(self.folder, self.num_slots, self.foreign, clock)

    def close(self) -> None:
        """Release the stores to other engines. Idempotent."""
        self.tombstones.close()
        self.locks.close()


class _Crowded(TierUnavailable):
    """Running engines have reserved all of the capacity: those that hold the stores ``used``."""

    def __init__(self, told: str, used: Sequence[Path]) -> None:
        super().__init__(told)
        self.used = used


def prepare_store(
    path: Path,
    geometry: Geometry,
    capacity: int,
    *,
    share: int = 1,
    wait_s: float = 5.0,
    guard: BlockGuard | None = None,
) -> PreparedStore:
    """Choose, lock and scan a store under ``path`` for blocks of ``geometry``. Blocks.

    ``guard``, which ``geometry`` names, verifies the records. Of an engine on several machines, one
    process on each does this for the shards that ``geometry`` holds there, with its share of the
    capacity.

    Everything under ``path`` together, records included, stays below ``capacity`` bytes. This
    engine reserves up to ``capacity // share`` of them, where ``share`` is the number of engines
    that use the folder at once. If less than half of its part is free, the engine removes stores
    that no engine uses, the oldest first, and then truncates the stores that it mounts. Waits up to
    ``wait_s`` seconds for an engine that is shutting down. Raises TierUnavailable if the folder
    cannot be used. The message says what to change.
    """
    deadline = time.monotonic() + wait_s
    limit = LogLimit()  # because every attempt finds the same stores
    while True:
        try:
            with exclusive(path):
                return _prepare(path, geometry, capacity, capacity // share, limit, guard)
        except _Crowded as crowded:
            if time.monotonic() >= deadline:
                raise TierUnavailable(f"{crowded}. {_told_users(crowded.used)}") from crowded
        except OSError as error:
            raise TierUnavailable(
                f"cannot use {path} for KV: {_reason(error)}; set disk.path"
            ) from error
        time.sleep(_POLL_S)


def _prepare(
    path: Path,
    geometry: Geometry,
    capacity: int,
    part: int,
    limit: LogLimit,
    guard: BlockGuard | None,
) -> PreparedStore:
    base = path / geometry.base
    with ExitStack() as locks:
        own, mounted = _adopt(base, geometry, locks, limit)
        others, used = _make_room(path, own, mounted, capacity - part // 2)
        num_slots = (min(part, capacity - others) - _OVERHEAD) // geometry.per_slot
        if num_slots < 1:
            raise _no_room(path, geometry, capacity, others, used)
        if own is None:
            own = _create(base, geometry, locks)
        _cut(own.folder, geometry, num_slots)
        own.reserve(num_slots * geometry.per_slot + _OVERHEAD)
        (records, torn), foreign = _scan(own.folder, geometry, guard), dict[int, Path]()
        for number, store in enumerate(mounted, start=1):
            store.reserve(0)  # it does not grow
            foreign[number] = store.folder
            theirs, bad = _scan(store.folder, store.geometry, guard, number << STORE_SHIFT)
            records, torn = records + theirs, torn + bad
        prepared = PreparedStore(own.folder, num_slots, records, torn, foreign)
        prepared.locks = locks.pop_all()
    _log.info(
        "disk store=%s slots=%d blocks_found=%d foreign_stores=%d",
        own.folder,
        num_slots,
        len(prepared.records),
        len(mounted),
    )
    return prepared


@dataclass
class _LockedStore:
    """A store whose lock this process holds."""

    folder: Path
    lock: FileLock
    geometry: Geometry

    def reserve(self, nbytes: int) -> None:
        """Publish how large the store may grow, for as long as the lock is held."""
        file = self.lock.files[0]
        os.ftruncate(file, 0)
        os.pwrite(file, str(nbytes).encode(), 0)


def _no_room(
    path: Path, geometry: Geometry, capacity: int, others: int, used: Sequence[Path]
) -> TierUnavailable:
    if capacity < geometry.per_slot + _OVERHEAD:
        return TierUnavailable(
            f"{capacity} bytes under {path} do not hold one block of {geometry.per_slot} bytes: "
            f"raise disk.capacity{forgotten_unit(capacity)}"
        )
    return _Crowded(
        f"engines that are running keep {others} of the {capacity} bytes under {path}: give this "
        "one another disk.path, or raise disk.capacity",
        used,
    )


def _told_users(folders: Sequence[Path]) -> str:
    """Return who holds the stores, for an error: the one who reads it may end a left process."""
    found = {pid: folder for folder in folders for pid in holders(folder / _LOCK)}
    if not found:
        return "Their processes are not visible from here (in other containers?)"
    return "Held by process " + ", ".join(
        f"{pid} ({_command(pid)}: {folder.name})" for pid, folder in sorted(found.items())
    )


def _command(pid: int) -> str:
    """Return the name of a process, which any process may choose for itself."""
    try:
        return ascii(Path(f"/proc/{pid}/comm").read_text().strip())[1:-1]
    except OSError:
        return "ended"


def _reason(error: OSError) -> str:
    if isinstance(error, NotPrivateError):
        return f"{error.filename}: {error.strerror}"
    return {
        errno.EROFS: "it is read-only",
        errno.EACCES: "this user may not write there",
        errno.ENOTDIR: "a part of it is not a folder",
        errno.EEXIST: "it is not a folder",
        errno.ENOSPC: "the file system is full",
    }.get(error.errno or 0, str(error))


# -- locks and folders ----------------------------------------------------------------------


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold the lock under which a process chooses, makes and removes stores in ``path``. Blocks.

    Raises NotPrivateError if other users can replace what is this user's in ``path``.
    """
    os.close(make_guarded(path))
    while True:
        lock = FileLock()
        try:
            file = open_file(path / _LOCK, os.O_RDWR | os.O_CREAT, adopt=True)
            lock.take(file, wait=True)
            if leads_to(path / _LOCK, file):
                yield
                return
        finally:
            lock.close()  # or it was removed while this process waited: others do not see it


def lock_store(folder: Path) -> FileLock | None:
    """Lock a store. Return None if another engine holds the lock.

    The lock is on two files: a removed ``lock`` lets no second engine in.
    """
    lock = FileLock()
    try:
        taken = lock.take(open_file(folder / _LOCK, os.O_RDWR | os.O_CREAT, adopt=True))
        with suppress(FileNotFoundError, NotPrivateError):  # then the store is not read at all
            taken = taken and lock.take(open_file(folder / "store.json", os.O_RDWR, adopt=True))
    except BaseException:
        lock.close()
        raise
    if not taken:
        lock.close()
        return None
    return lock


def stores_under(base: Path) -> list[Path]:
    """Return the folders of stores, the last written first.

    A folder that contains any other files does not count as a store, nor does one that another user
    may have made.
    """
    if not _BASE_NAME.fullmatch(base.name) or not _is_ours(base):
        return []
    folders = [f for f in base.iterdir() if _STORE_NAME.fullmatch(f.name) and _is_ours(f)]
    ours = [f for f in folders if all(_FILE_NAME.fullmatch(file.name) for file in f.iterdir())]
    return sorted(ours, key=_last_write, reverse=True)


def _is_ours(folder: Path) -> bool:
    """Return True if a folder is there that no other user can have made or changed."""
    try:
        os.close(open_folder(folder, adopt=True))
    except NotPrivateError as error:
        if _REFUSED.admit(folder) is not None:
            _log.warning("%s is not used: %s", folder, error.strerror)
        return False
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _last_write(folder: Path) -> float:
    files = [f for f in folder.iterdir() if f.name != _LOCK]
    return max((f.lstat().st_mtime for f in files), default=0.0)


def _adopt(
    base: Path, geometry: Geometry, locks: ExitStack, limit: LogLimit
) -> tuple[_LockedStore | None, list[_LockedStore]]:
    """Lock all stores that no engine uses. Return (the one to write to, those to mount).

    The first is None if no store has this geometry. All of them hold comparable blocks. None is
    mounted if some of its shards, or of those of this engine, are on other machines.
    """
    own: _LockedStore | None = None
    mounted: list[_LockedStore] = []
    for folder in stores_under(base):
        lock = lock_store(folder)
        if lock is None:
            if limit.admit(("in use", folder)) is not None:
                _log.info("store %s is in use by another engine", folder)
            continue
        found = _load(folder, geometry, limit)
        if found is None:
            lock.close()
            continue
        locks.callback(lock.close)
        held = _LockedStore(folder, lock, found)
        if own is None and (found.parts, found.held) == (geometry.parts, geometry.held):
            own = held
        elif found.is_whole and geometry.is_whole:
            mounted.append(held)
        else:  # it may be removed to make room
            lock.close()
            if limit.admit(("other machines", folder)) is not None:
                _log.info("store %s is not read: %s", folder, _why_not_mounted(found, geometry))
    return own, mounted


def _why_not_mounted(found: Geometry, geometry: Geometry) -> str:
    if found.is_whole:
        return "ranks of other machines than this one cannot read it"
    first, stop = found.held
    return f"it has the parts of ranks {first} to {stop - 1} alone"


def _load(folder: Path, wanted: Geometry, limit: LogLimit) -> Geometry | None:
    """Return the store's geometry if its blocks are comparable, else None with a log line."""
    try:
        found = Geometry.load(folder)
    except FormatError as error:
        if limit.admit(("not used", folder)) is not None:
            _log.warning("store %s is not used: %s", folder, error)
        return None
    if found.base != wanted.base:
        if limit.admit(("not used", folder)) is not None:
            _log.warning("store %s is not used: it holds blocks of another model", folder)
        return None
    return found


def _create(base: Path, geometry: Geometry, locks: ExitStack) -> _LockedStore:
    os.close(open_folder(base, make=True, adopt=True))
    taken = {f.name for f in base.iterdir()}
    number = next(i for i in range(len(taken) + 1) if f"store-{i}" not in taken)
    folder = base / f"store-{number}"
    folder.mkdir(mode=0o700)
    geometry.save(folder)
    lock = lock_store(folder)
    assert lock is not None, "the store was made under the path's lock"
    locks.callback(lock.close)
    return _LockedStore(folder, lock, geometry)


# -- room -----------------------------------------------------------------------------------


def _make_room(
    path: Path, own: _LockedStore | None, mounted: list[_LockedStore], most: int
) -> tuple[int, list[Path]]:
    """Reduce the stores other than ``own`` to ``most`` bytes if possible.

    Returns their bytes, and those of them that other engines use, which are not touched.
    """
    kept = {store.folder for store in (own, *mounted) if store is not None}
    total = sum(_usage(store.folder) for store in mounted)
    idle: list[tuple[Path, int]] = []
    used_by_others: list[Path] = []
    for folder in (f for base in path.iterdir() for f in stores_under(base) if f not in kept):
        lock = lock_store(folder)
        if lock is None:
            total += max(_usage(folder), _reserved(folder))
            used_by_others.append(folder)
        else:
            lock.close()  # no engine can take it now: that needs the path's lock, held here
            idle.append((folder, _usage(folder)))
    total += sum(used for _, used in idle)
    for folder, used in sorted(idle, key=lambda item: _last_write(item[0])):
        if total > most:
            _log.warning("removing the store %s (%d bytes) to make room", folder, used)
            _remove(folder)
            total -= used
    for store in sorted(mounted, key=lambda store: _last_write(store.folder)):
        if total > most:
            total -= _shrink(store, total - most)
    return total, used_by_others


def _usage(folder: Path) -> int:
    return sum(f.lstat().st_size for f in folder.iterdir())


def _reserved(folder: Path) -> int:
    """Return the bytes that the engine using the store may fill."""
    with open(open_file(folder / _LOCK, os.O_RDONLY, adopt=True), "rb") as file:
        text = file.read(20)
    return int(text) if text.isdigit() else 0


def _remove(folder: Path) -> None:
    """Remove a store, and nothing else even if the folder is exchanged meanwhile."""
    within = open_folder(folder, adopt=True)
    try:
        for name in filter(_FILE_NAME.fullmatch, os.listdir(within)):
            os.unlink(name, dir_fd=within)
    finally:
        os.close(within)
    folder.rmdir()
    if not any(folder.parent.iterdir()):
        folder.parent.rmdir()


def _shrink(store: _LockedStore, excess: int) -> int:
    """Cut at least ``excess`` bytes off a mounted store's end, or all. Return the bytes cut."""
    before = _usage(store.folder)
    slots = max(before - excess - _OVERHEAD, 0) // store.geometry.per_slot
    _log.warning("cutting the store %s to %d blocks to make room", store.folder, slots)
    _cut(store.folder, store.geometry, slots)
    return before - _usage(store.folder)


def _cut(folder: Path, geometry: Geometry, num_slots: int) -> None:
    """Truncate the files that are longer than ``num_slots`` slots."""
    for shard in geometry.shards:
        data, index = shard_files(folder, shard)
        limit = num_slots * slot_bytes(geometry.shard_shape(shard))
        for file, most in ((data, limit), (index, num_slots * RECORD_NBYTES)):
            if file.exists() and file.stat().st_size > most:
                truncate(file, most)


def truncate(file: Path, nbytes: int) -> None:
    """Cut a store's file off at ``nbytes`` bytes."""
    number = open_file(file, os.O_RDWR, adopt=True)
    try:
        os.ftruncate(number, nbytes)
    finally:
        os.close(number)


def _scan(
    folder: Path, geometry: Geometry, guard: BlockGuard | None, first_slot: int = 0
) -> tuple[list[BlockRecord], int]:
    """Erase what was cleared. Return (the blocks that every shard holds, the torn records).

    Slots are counted from ``first_slot``.
    """
    erase_cleared(folder, geometry)
    shards = [scan_shard(folder, geometry, shard, guard) for shard in geometry.shards]
    return reduce(Table.also_in, shards).block_records(first_slot), sum(t.torn for t in shards)
