"""One shard's data on disk: direct, parallel reads and writes of whole blocks.

A write makes the slot's old record invalid, writes the bytes, then writes the new record. Whatever
interrupts it, the record either is absent or tells the checksum of what should be there, and a read
checks both the key and the checksum.

Measured on a 2-core machine with an NVMe-backed volume: ``preadv`` / ``pwritev`` from 4 threads
with O_DIRECT reach what asynchronous I/O of one deep queue reaches (benchmarks/disk.py), without a
library to depend on; they release the GIL while they wait.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np

from kvcore.errors import CapacityError, CorruptBlock, TierError, TierUnavailable
from kvcore.tiers.base import BlockRead, BlockRecord, BlockWrite, Buffers, Tier, nbytes_of
from kvcore.tiers.disk.foreign import ForeignStore
from kvcore.tiers.disk.format import (
    EMPTY_RECORD,
    RECORD_NBYTES,
    Geometry,
    Record,
    checksum,
    read_records,
    shard_files,
    to_block_record,
)

_log = logging.getLogger("kvcore.tiers.disk")

SECTOR = 4096
STORE_SHIFT = 40
"""A slot number is ``store << STORE_SHIFT | slot``; store 0 is the tier's own."""
_GROW_BYTES = 256 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_Request = TypeVar("_Request", BlockRead, BlockWrite)


class DiskTier(Tier):
    """Slots of shard ``shard`` of the store in ``folder``, which exists and is this engine's.

    ``num_slots * slot_nbytes`` is the most the data file grows to. ``foreign`` maps store numbers
    to folders of stores with the same base geometry, read, never written. ``direct_io`` is "auto",
    "on" or "off"; ``on`` raises TierUnavailable where the file system refuses it.
    """

    def __init__(
        self,
        folder: Path,
        geometry: Geometry,
        *,
        shard: int,
        num_slots: int,
        slot_nbytes: int,
        direct_io: str = "auto",
        io_threads: int = 4,
        sync_interval_s: float = 5.0,
        foreign: Mapping[int, Path] | None = None,
    ) -> None:
        if slot_nbytes % SECTOR:
            raise CapacityError(f"slots of {slot_nbytes} bytes; direct I/O wants {SECTOR}n")
        self.num_slots = num_slots
        self.slot_nbytes = slot_nbytes
        self._data_path, self._index_path = shard_files(folder, shard)
        self._direct, self._data = _open_data(self._data_path, direct_io)
        self._index = os.open(self._index_path, os.O_RDWR | os.O_CREAT, 0o600)
        self._grow_lock = threading.Lock()
        self._size = os.fstat(self._data).st_size
        self._stamp = time.time_ns()
        self._sync_interval = sync_interval_s
        self._synced_at = time.monotonic()
        self._dirty = False
        self._closed = False
        self._bounce = threading.local()
        self._pool = ThreadPoolExecutor(io_threads, thread_name_prefix="kvcore-disk")
        heads = geometry.heads[shard]
        self._foreign = {
            number: ForeignStore(path, geometry.shape, heads)
            for number, path in (foreign or {}).items()
        }

    # -- the contract -----------------------------------------------------------------------

    def write(self, requests: Sequence[BlockWrite]) -> list[TierError | None]:
        results = self._each(self._write, requests)
        self._sync_if_due()
        return results

    def read(self, requests: Sequence[BlockRead]) -> list[TierError | None]:
        return self._each(self._read, requests)

    def invalidate(self, slots: Iterable[int]) -> None:
        for slot in slots:
            if slot >> STORE_SHIFT == 0:
                self._put_record(slot, EMPTY_RECORD)

    def scan(self) -> list[BlockRecord]:
        return [
            to_block_record(slot, record)
            for slot, record in read_records(self._index_path)
            if slot < self.num_slots
        ]

    def sync(self) -> None:
        self._dirty = False
        self._synced_at = time.monotonic()
        try:
            os.fdatasync(self._data)
            os.fdatasync(self._index)
        except OSError as error:
            raise TierUnavailable(f"flushing {self._data_path.name}: {error}") from error

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._pool.shutdown()
        try:
            if self._dirty:
                self.sync()
        finally:
            os.close(self._data)
            os.close(self._index)
            for store in self._foreign.values():
                store.close()

    def check_integrity(self) -> None:
        buffer = _aligned_buffer(self.slot_nbytes)
        for record in self.scan():
            error = self._read(BlockRead(record.slot, record.key, [buffer]))
            if error is not None:
                raise error

    # -- one block --------------------------------------------------------------------------

    def _each(
        self, act: Callable[[_Request], TierError | None], requests: Sequence[_Request]
    ) -> list[TierError | None]:
        if len(requests) == 1:
            return [act(requests[0])]
        return list(self._pool.map(act, requests))

    def _write(self, request: BlockWrite) -> TierError | None:
        slot = request.slot
        if not 0 <= slot < self.num_slots or nbytes_of(request.buffers) > self.slot_nbytes:
            return CapacityTierError(
                f"slot {slot} with {nbytes_of(request.buffers)} bytes; "
                f"this store has {self.num_slots} slots of {self.slot_nbytes}"
            )
        try:
            self._grow(slot)
            self._put_record(slot, EMPTY_RECORD)
            self._put_data(slot, request.buffers)
            self._stamp += 1
            record = Record(
                request.key,
                request.parent,
                request.namespace,
                checksum(request.key, request.buffers),
                nbytes_of(request.buffers),
                self._stamp,
            )
            self._put_record(slot, record.pack())
            self._dirty = True
        except OSError as error:
            return self._unavailable("write", slot, error)
        return None

    def _read(self, request: BlockRead) -> TierError | None:
        store = request.slot >> STORE_SHIFT
        if store:
            return self._read_foreign(store, request)
        slot = request.slot
        try:
            record = Record.unpack(os.pread(self._index, RECORD_NBYTES, slot * RECORD_NBYTES))
            if record is None or record.key != request.key:
                return CorruptBlock(
                    f"slot {slot} of {self._data_path.name} does not hold block {request.key.hex()}"
                )
            if record.nbytes != nbytes_of(request.buffers):
                return CorruptBlock(f"slot {slot} holds {record.nbytes} bytes")
            got = self._get_data(slot, request.buffers)
        except OSError as error:
            return self._unavailable("read", slot, error)
        if got < record.nbytes or checksum(request.key, request.buffers) != record.checksum:
            self._quarantine(slot)
            return CorruptBlock(
                f"slot {slot} of {self._data_path.name}: the bytes of block {request.key.hex()} "
                "are not those written; the slot is quarantined"
            )
        return None

    def _read_foreign(self, number: int, request: BlockRead) -> TierError | None:
        store = self._foreign.get(number)
        if store is None:
            return CorruptBlock(f"slot {request.slot} names store {number}, which is not open")
        try:
            return store.read(request.slot & (1 << STORE_SHIFT) - 1, request.key, request.buffers)
        except OSError as error:
            return self._unavailable("read", request.slot, error)

    def _quarantine(self, slot: int) -> None:
        try:
            self._put_record(slot, EMPTY_RECORD)
        except OSError as error:
            _log.warning("slot %d could not be marked bad: %s", slot, error)

    def _unavailable(self, what: str, slot: int, error: OSError) -> TierUnavailable:
        full = " (the disk is full: lower disk.capacity)" if error.errno in _FULL else ""
        return TierUnavailable(f"{what} of slot {slot} in {self._data_path}: {error}{full}")

    # -- bytes ------------------------------------------------------------------------------

    def _put_record(self, slot: int, data: bytes) -> None:
        if os.pwrite(self._index, data, slot * RECORD_NBYTES) != RECORD_NBYTES:
            raise OSError(errno.ENOSPC, "short write of a record")

    def _put_data(self, slot: int, buffers: Buffers) -> None:
        parts = buffers
        if self._direct and not _aligned(buffers):
            bounce = self._bounce_buffer()
            _gather(buffers, bounce)
            parts = [bounce[: -(-nbytes_of(buffers) // SECTOR) * SECTOR]]
        _write_all(self._data, parts, slot * self.slot_nbytes)

    def _get_data(self, slot: int, buffers: Buffers) -> int:
        if self._direct and not _aligned(buffers):
            bounce = self._bounce_buffer()
            wanted = -(-nbytes_of(buffers) // SECTOR) * SECTOR
            got = _read_all(self._data, [bounce[:wanted]], slot * self.slot_nbytes)
            _scatter(bounce, buffers)
            return got
        return _read_all(self._data, buffers, slot * self.slot_nbytes)

    def _bounce_buffer(self) -> memoryview:
        """This thread's own aligned buffer of one slot."""
        buffer: memoryview | None = getattr(self._bounce, "buffer", None)
        if buffer is None:
            buffer = self._bounce.buffer = _aligned_buffer(self.slot_nbytes)
        return buffer

    def _grow(self, slot: int) -> None:
        """Make the data file cover ``slot``, in steps, reserved where that is allowed."""
        need = (slot + 1) * self.slot_nbytes
        if need <= self._size:
            return
        with self._grow_lock:
            if need <= self._size:
                return
            most = self.num_slots * self.slot_nbytes
            size = min(max(need, self._size + _GROW_BYTES), most)
            try:
                os.posix_fallocate(self._data, self._size, size - self._size)
            except OSError as error:
                if error.errno in _FULL:
                    size = need  # take what is there, one slot at a time
                elif error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                    raise
                os.ftruncate(self._data, size)
            self._size = size

    def _sync_if_due(self) -> None:
        if self._dirty and time.monotonic() - self._synced_at >= self._sync_interval:
            try:
                self.sync()
            except TierUnavailable as error:
                _log.warning("%s", error)


class CapacityTierError(TierError, CapacityError):
    """A block does not fit the store."""


def _open_data(path: Path, direct_io: str) -> tuple[bool, int]:
    """(whether direct, descriptor)"""
    flags = os.O_RDWR | os.O_CREAT
    if direct_io != "off":
        try:
            return True, os.open(path, flags | os.O_DIRECT, 0o600)
        except OSError as error:
            if direct_io == "on" or error.errno != errno.EINVAL:
                raise TierUnavailable(
                    f"cannot open {path} for direct I/O ({error}): set disk.direct_io to auto, or "
                    "disk.path to a local file system"
                ) from error
            _log.warning("no direct I/O in %s: reads and writes go through the page cache", path)
    try:
        return False, os.open(path, flags, 0o600)
    except OSError as error:
        raise TierUnavailable(f"cannot open {path}: {error}") from error


def _aligned_buffer(nbytes: int) -> memoryview:
    """Anonymous memory, so it starts on a page; on huge pages where allowed."""
    memory = mmap.mmap(-1, nbytes)
    return memoryview(memory)


def _aligned(buffers: Buffers) -> bool:
    return all(
        part.nbytes % SECTOR == 0 and np.frombuffer(part, np.uint8).ctypes.data % SECTOR == 0
        for part in buffers
    )


def _gather(buffers: Buffers, into: memoryview) -> None:
    start = 0
    for part in buffers:
        into[start : start + part.nbytes] = part.cast("B")
        start += part.nbytes


def _scatter(source: memoryview, buffers: Buffers) -> None:
    start = 0
    for part in buffers:
        part.cast("B")[:] = source[start : start + part.nbytes]
        start += part.nbytes


_IOV_MAX = 1024


def _write_all(file: int, buffers: Buffers, offset: int) -> None:
    parts = [part.cast("B") for part in buffers]
    while parts:
        done = os.pwritev(file, parts[:_IOV_MAX], offset)
        if done <= 0:
            raise OSError(errno.EIO, "nothing was written")
        offset += done
        parts = _after(parts, done)


def _read_all(file: int, buffers: Buffers, offset: int) -> int:
    """Bytes read: fewer than asked for at the end of the file."""
    parts, total = [part.cast("B") for part in buffers], 0
    while parts:
        done = os.preadv(file, parts[:_IOV_MAX], offset)
        if done <= 0:
            break
        total += done
        offset += done
        parts = _after(parts, done)
    return total


def _after(parts: list[memoryview], done: int) -> list[memoryview]:
    """What is left of ``parts`` after ``done`` bytes."""
    for i, part in enumerate(parts):
        if done < part.nbytes:
            return [part[done:], *parts[i + 1 :]] if done else parts[i:]
        done -= part.nbytes
    return []
