"""One shard's blocks on disk: direct, parallel reads and writes of whole blocks.

A write erases the slot's old record, writes the bytes, then writes the new record. Whatever
interrupts it, the record either is absent or tells the checksum of what should be there, and a read
checks both the key and the checksum.

``preadv`` and ``pwritev`` from a few threads reach what one deep queue of asynchronous I/O reaches
(benchmarks/disk.py measures both), without a library to depend on; they release the GIL while they
wait. Reads and writes have threads of their own, so that a load never queues behind saves.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from kvcore.errors import (
    CapacityError,
    CorruptBlock,
    FormatError,
    TierError,
    TierUnavailable,
)
from kvcore.tiers.base import (
    BlockRead,
    BlockRecord,
    BlockWrite,
    SlotError,
    Tier,
    nbytes_of,
)
from kvcore.tiers.disk.files import FULL, DataFile, IndexFile
from kvcore.tiers.disk.foreign import ForeignStore
from kvcore.tiers.disk.format import Geometry, Record, checksum, scan_shard, shard_files
from kvcore.tiers.host import slot_bytes
from kvcore.tiers.pages import Pages

_log = logging.getLogger("kvcore.tiers.disk")

STORE_SHIFT = 40
"""A slot number is ``store << STORE_SHIFT | slot``; store 0 is the tier's own."""

_Request = TypeVar("_Request", BlockRead, BlockWrite)


class DiskTier(Tier):
    """Slots of shard ``shard`` of the store in ``folder``, which exists and is this engine's.

    ``num_slots * slot_nbytes`` is the most the data file grows to. ``foreign`` maps store numbers
    to folders of stores with the same base geometry, read, never written. ``direct_io`` is "auto",
    "on" or "off"; ``on`` raises TierUnavailable where the file system refuses it. What was written
    is flushed to the medium within ``sync_interval_s`` seconds, by a thread of its own; at 0,
    before a write returns.
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
        """Raises FormatError when the folder holds other blocks, TierUnavailable when it cannot
        be used."""
        shape = geometry.shard_shape(shard)
        if slot_nbytes != slot_bytes(shape):
            raise CapacityError(f"slots of {slot_nbytes} bytes; {shape} takes {slot_bytes(shape)}")
        if Geometry.load(folder) != geometry:
            raise FormatError(f"the store {folder} holds blocks of another model or other shards")
        self.num_slots = num_slots
        self.slot_nbytes = slot_nbytes
        self._folder, self._geometry, self._shard = folder, geometry, shard
        self._block_nbytes = shape.nbytes
        data, index = shard_files(folder, shard)
        self._data = DataFile(data, slot_nbytes, num_slots=num_slots, direct_io=direct_io)
        self._index = IndexFile(index)
        self._foreign = _open_foreign(foreign or {}, geometry.heads[shard], direct_io)
        self._stamps = itertools.count(time.time_ns())  # next() is atomic
        self._readers = ThreadPoolExecutor(io_threads, thread_name_prefix="kvcore-disk-read")
        self._writers = ThreadPoolExecutor(io_threads, thread_name_prefix="kvcore-disk-write")
        self._flusher = _Flusher(self._sync, sync_interval_s)
        self._closed = False

    # -- the contract -----------------------------------------------------------------------

    def write(self, requests: Sequence[BlockWrite]) -> list[TierError | None]:
        results = _each(self._writers, self._write, requests)
        if None in results:
            self._flusher.dirtied()
        return results

    def read(self, requests: Sequence[BlockRead]) -> list[TierError | None]:
        return _each(self._readers, self._read, requests)

    def invalidate(self, slots: Iterable[int]) -> None:
        for slot in slots:
            number, own = slot >> STORE_SHIFT, slot & (1 << STORE_SHIFT) - 1
            try:
                if number in self._foreign:
                    self._foreign[number].erase(own)
                elif number == 0 and own < self.num_slots:
                    self._index.erase(own)
            except OSError as error:
                raise self._unavailable("erasing", slot, error) from error

    def scan(self) -> list[BlockRecord]:
        """Blocks of the tier's own store. `prepare_store` tells those of the foreign ones."""
        table = scan_shard(self._folder, self._geometry, self._shard)
        return table.where(table.slots < self.num_slots).block_records()

    def sync(self) -> None:
        self._flusher.flush()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._readers.shutdown()
        self._writers.shutdown()
        try:
            self._flusher.close()
        finally:
            self._data.close()
            self._index.close()
            for store in self._foreign.values():
                store.close()

    def check_integrity(self) -> None:
        buffer = Pages(self.slot_nbytes).view
        for record in self.scan():
            error = self._read(BlockRead(record.slot, record.key, [buffer]))
            if error is not None:
                raise error

    # -- one block --------------------------------------------------------------------------

    def _write(self, request: BlockWrite) -> TierError | None:
        slot, buffers = request.slot, request.buffers
        refused = self._refuse(slot, nbytes_of(buffers))
        if refused is not None:
            return refused
        try:
            self._index.erase(slot)
            self._data.write(slot, buffers)
            digest = checksum(request.key, buffers, self._block_nbytes)
            record = Record(*request[1:4], digest, self._block_nbytes, next(self._stamps))
            self._index.put(slot, record)
        except OSError as error:
            return self._unavailable("writing", slot, error)
        return None

    def _read(self, request: BlockRead) -> TierError | None:
        number, slot = request.slot >> STORE_SHIFT, request.slot & (1 << STORE_SHIFT) - 1
        try:
            if number == 0:
                return self._read_own(request)
            if number in self._foreign:
                return self._foreign[number].read(slot, request.key, request.buffers)
        except OSError as error:
            return self._unavailable("reading", request.slot, error)
        return SlotError(f"slot {request.slot} is of store {number}, which is not open")

    def _read_own(self, request: BlockRead) -> TierError | None:
        slot, key, buffers = request
        refused = self._refuse(slot, nbytes_of(buffers))
        if refused is not None:
            return refused
        record = self._index.get(slot)
        if record is None or record.key != key or record.nbytes != self._block_nbytes:
            return CorruptBlock(f"slot {slot} of {self._data.path} does not hold {key.hex()}")
        got = self._data.read(slot, buffers)
        if got < record.nbytes or checksum(key, buffers, record.nbytes) != record.checksum:
            self._index.erase(slot)
            return CorruptBlock(
                f"slot {slot} of {self._data.path}: the bytes of block {key.hex()} are not those "
                "written; the slot is erased"
            )
        return None

    def _refuse(self, slot: int, nbytes: int) -> SlotError | None:
        if 0 <= slot < self.num_slots and self._block_nbytes <= nbytes <= self.slot_nbytes:
            return None
        return SlotError(
            f"slot {slot} with {nbytes} bytes; this store has {self.num_slots} slots for blocks of "
            f"{self._block_nbytes} bytes, {self.slot_nbytes} with padding"
        )

    def _unavailable(self, doing: str, slot: int, error: OSError) -> TierUnavailable:
        full = " (the disk is full: lower disk.capacity)" if error.errno in FULL else ""
        return TierUnavailable(f"{doing} slot {slot} in {self._data.path}: {error}{full}")

    def _sync(self) -> None:
        try:
            self._data.sync()
            self._index.sync()
        except OSError as error:
            raise TierUnavailable(f"flushing {self._data.path}: {error}") from error


class _Flusher:
    """Calls ``flush`` within ``interval`` seconds of the first write since it was last called."""

    def __init__(self, flush: Callable[[], None], interval: float) -> None:
        self._flush = flush
        self._interval = interval
        self._flushing = threading.Lock()  # taken before _lock
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._closed = False

    def dirtied(self) -> None:
        """Something was written. At interval 0 it is flushed here and now."""
        if self._interval <= 0:
            self._flush_or_warn()
            return
        with self._lock:
            if self._timer is None and not self._closed:
                self._timer = threading.Timer(self._interval, self._flush_or_warn)
                self._timer.daemon = True
                self._timer.start()

    def flush(self) -> None:
        """Flush now; what is written from here on waits for the next."""
        with self._flushing:
            self._disarm()
            self._flush()

    def close(self) -> None:
        """Flush what is not flushed; no flush is under way, nor comes, after this returns."""
        with self._flushing:
            self._closed = True
            if self._disarm():
                self._flush()

    def _disarm(self) -> bool:
        with self._lock:
            timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
        return timer is not None

    def _flush_or_warn(self) -> None:
        with self._flushing:
            if self._closed:
                return
            self._disarm()
            try:
                self._flush()
            except TierUnavailable as error:
                _log.warning("%s", error)


def _each(
    pool: ThreadPoolExecutor,
    act: Callable[[_Request], TierError | None],
    requests: Sequence[_Request],
) -> list[TierError | None]:
    if len(requests) == 1:
        return [act(requests[0])]
    return list(pool.map(act, requests))


def _open_foreign(
    folders: Mapping[int, Path], heads: tuple[int, int], direct_io: str
) -> dict[int, ForeignStore]:
    """Those that can be read; the others are named in the log, and their blocks recomputed."""

    def open_one(folder: Path) -> ForeignStore | None:
        try:
            return ForeignStore(folder, heads, direct_io)
        except (TierError, FormatError) as error:
            _log.warning("the store %s is not read: %s", folder, error)
            return None

    opened = ((number, open_one(folder)) for number, folder in folders.items())
    return {number: store for number, store in opened if store is not None}
