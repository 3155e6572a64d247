"""One shard's blocks on disk: parallel reads and writes of whole blocks, with direct I/O.

A write erases the slot's old record, writes the bytes, and then writes the new record. Whatever
interrupts it, the record is either absent or has the checksum of the bytes that should be there. A
read checks both the key and the checksum.

A batch goes to the kernel's queue as a whole. The calling thread computes each block's checksum or
MAC as it arrives or leaves, while the others are under way (benchmarks/disk.py compares this with
other methods). Encrypted blocks are decrypted by a few threads instead. Each caller has its own
queue, so a load never waits behind saves.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvcore._util.threads import GuardedThread, nobody_waits, started
from kvcore.errors import (
    CapacityError,
    CorruptBlock,
    FormatError,
    Mismatch,
    TierError,
    TierUnavailable,
)
from kvcore.index.slots import slot_runs
from kvcore.memory.arena import slot_bytes
from kvcore.memory.buffers import Buffers, nbytes_of
from kvcore.memory.checksums import bound_to, host_sum
from kvcore.memory.hugepages import Pages
from kvcore.model.parts import Part
from kvcore.tiers.base import (
    BlockRead,
    BlockRecord,
    BlockWrite,
    DeviceRead,
    NotDirect,
    SlotError,
    Tier,
    is_asked_for,
)
from kvcore.tiers.checksum import checksum
from kvcore.tiers.disk.files import FULL, DataFile, IndexFile, Piece
from kvcore.tiers.disk.foreign import ForeignStore, damaged, not_held
from kvcore.tiers.disk.format import Record, scan_shard, shard_files
from kvcore.tiers.disk.io import Outcome
from kvcore.tiers.disk.mount import STORE_SHIFT, DiskAccess, MountedStore
from kvcore.tiers.disk.scratch import AT_ONCE, Scratch
from kvcore.tiers.disk.tombstones import Stamps
from kvcore.tiers.geometry import Geometry
from kvcore.tiers.guard import BlockGuard

if TYPE_CHECKING:
    from kvcore.memory.device_region import DeviceRegion
    from kvcore.tiers.disk.gds import DirectReader

_log = logging.getLogger("kvcore.tiers.disk")

_DEFAULT_ACCESS = DiskAccess()
_THREADED_DECRYPT_NBYTES = 256 << 10
"""Encrypted blocks of at least this size are decrypted by other threads, while more blocks arrive.
Handing a block over took 9 us of a core. Decrypting half as many bytes in its cache took 11 us
(EPYC with VAES)."""


class _Draft(NamedTuple):
    """A write under way: its record without the checksum, and the bytes that go to disk."""

    record: Record
    buffers: Buffers


class DiskTier(Tier):
    """Slots of one shard of a store, and of the foreign stores that are mounted with it.

    Once its files were removed or moved, every read and write of its own store fails with
    TierUnavailable: nothing would be found after a restart.

    ``store.num_slots * slot_nbytes`` is the most that the data file grows to. With a ``guard``,
    which ``geometry`` names, blocks are encrypted or have a MAC, and no block is read straight into
    device memory.
    """

    def __init__(
        self,
        store: MountedStore,
        geometry: Geometry,
        *,
        shard: int,
        slot_nbytes: int,
        access: DiskAccess = _DEFAULT_ACCESS,
        guard: BlockGuard | None = None,
    ) -> None:
        """Raise FormatError if the folder holds other blocks.

        Raises TierUnavailable if the folder cannot be used, and CapacityError if ``slot_nbytes`` is
        not the size of the shard's slots.
        """
        folder, shape = store.folder, geometry.shard_shape(shard)
        if slot_nbytes != slot_bytes(shape):
            raise CapacityError(f"slots of {slot_nbytes} bytes; {shape} takes {slot_bytes(shape)}")
        if Geometry.load(folder) != geometry:
            raise FormatError(f"the store {folder} holds blocks of another model or other shards")
        if geometry.cipher != (guard.name if guard else ""):
            raise FormatError(
                f"the store {folder} uses the cipher {geometry.cipher or 'none'}, not {guard}: "
                "give every rank the same namespace.secret and key"
            )
        self.num_slots = store.num_slots
        self.slot_nbytes = slot_nbytes
        self._folder, self._geometry, self._shard = folder, geometry, shard
        self._block_nbytes = shape.nbytes
        data, index = shard_files(folder, shard)
        self._data = DataFile(
            data,
            slot_nbytes,
            num_slots=store.num_slots,
            direct_io=access.direct_io,
            io_threads=access.io_threads,
        )
        self._index = IndexFile(index, guard)
        self._guard = guard
        self._device_sums = access.device_sums and guard is None
        self._region: DeviceRegion | None = None
        self._direct: DirectReader | None = None
        self._shard_name = geometry.shard_name(shard)
        encrypts = guard is not None and guard.encrypts
        self._scratch = Scratch(slot_nbytes) if encrypts else None
        self._foreign = _open_foreign(store.foreign, geometry.parts[shard], access.direct_io, guard)
        self._stamps = Stamps.of(store.clock)
        self._foreign_readers = ThreadPoolExecutor(
            access.io_threads, thread_name_prefix="kvcore-foreign"
        )
        self._decryptors: ThreadPoolExecutor | None = None
        if encrypts and slot_nbytes >= _THREADED_DECRYPT_NBYTES:
            self._decryptors = ThreadPoolExecutor(
                access.io_threads, thread_name_prefix="kvcore-disk-decrypt"
            )
        self._flusher = _Flusher(self._sync, access.sync_interval_s)
        self._closed = False

    # -- the contract -----------------------------------------------------------------------

    def write(self, requests: Sequence[BlockWrite]) -> list[TierError | None]:
        if (gone := self._gone()) is not None:
            return [gone] * len(requests)
        results: list[TierError | None] = [None] * len(requests)
        step = AT_ONCE if self._scratch else max(len(requests), 1)
        for first in range(0, len(requests), step):
            self._write(range(first, min(first + step, len(requests))), requests, results)
        if None in results:
            self._flusher.dirtied()
        return results

    def read(self, requests: Sequence[BlockRead]) -> list[TierError | None]:
        results: list[TierError | None] = [None] * len(requests)
        foreign = [i for i, request in enumerate(requests) if request.slot >> STORE_SHIFT]
        theirs = [requests[i] for i in foreign]
        with started(self._foreign_readers, self._read_foreign, theirs) as reading:
            self._read_own(requests, results)
        for i, read in zip(foreign, reading, strict=True):
            results[i] = read.result()
        return results

    def attach_device(self, region: DeviceRegion) -> str:
        from kvcore.tiers.disk.gds import open_direct

        self._region = region
        if self._guard is None:
            self._direct = open_direct(self._data, region)
        return "" if self._direct is None else self._direct.backend

    def read_device(self, requests: Sequence[DeviceRead]) -> list[TierError | None]:
        """Read the blocks of the tier's own store whose records have a sum (`Tier.read_device`).

        If the read of a block fails, the result is NotDirect: `read` then shows whether the disk
        is at fault.
        """
        if (gone := self._gone()) is not None:
            return [gone] * len(requests)
        results: list[TierError | None] = []
        found: list[int] = []
        sums: dict[int, int] = {}
        for i, request in enumerate(requests):
            record = self._find_direct(request)
            if isinstance(record, Record):
                found.append(i)
                sums[i] = record.sum
                results.append(None)
            else:
                results.append(record)
        if self._direct is None or self._region is None or not found:
            return results
        from kvcore.tiers.disk.gds import Pick

        picks = [Pick(requests[i].slot, requests[i].place) for i in found]
        whole = []
        for i, why in zip(found, self._direct.read(picks), strict=True):
            if why is None:
                whole.append(i)
            else:
                results[i] = NotDirect(f"slot {requests[i].slot} of {self._data.path}: {why}")
        read = self._region.sums([requests[i].place for i in whole])
        for i, total in zip(whole, read, strict=True):
            if bound_to(requests[i].key, total) != sums[i]:
                results[i] = self._damaged(requests[i], Mismatch.CORRUPT)
        return results

    def invalidate(self, slots: Iterable[int]) -> None:
        for first, stop in slot_runs(slots):
            count = stop - first
            number, own = first >> STORE_SHIFT, first & (1 << STORE_SHIFT) - 1
            try:
                if number in self._foreign:
                    self._foreign[number].erase(own, count)
                elif number == 0 and own < self.num_slots:
                    end = min(own + count, self.num_slots, self._index.num_records())
                    self._index.erase(own, end - own)
            except OSError as error:
                raise self._unavailable("erasing", first, error) from error

    def scan(self) -> list[BlockRecord]:
        """Return the blocks of the tier's own store. `prepare_store` finds the foreign ones."""
        table = scan_shard(self._folder, self._geometry, self._shard, self._guard)
        return table.where(table.slots < self.num_slots).block_records()

    def sync(self) -> None:
        self._flusher.flush()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._direct is not None:
            self._direct.close()
        self._foreign_readers.shutdown()
        if self._decryptors is not None:
            self._decryptors.shutdown()
        try:
            self._flusher.close()
        finally:
            self._data.close()
            self._index.close()
            if self._scratch is not None:
                self._scratch.close()
            for store in self._foreign.values():
                store.close()

    def check_integrity(self) -> None:
        buffer = Pages(self.slot_nbytes).view
        for record in self.scan():
            (error,) = self.read([BlockRead(record.slot, record.key, [buffer])])
            if error is not None:
                raise error

    # -- blocks -----------------------------------------------------------------------------

    def _write(
        self, which: range, requests: Sequence[BlockWrite], results: list[TierError | None]
    ) -> None:
        """Write the requests numbered ``which``, and fill in their results.

        `begun` is a generator because the data file consumes it as its queue has room: a record is
        erased, and a block encrypted, while the blocks before it are under way.
        """
        drafts: dict[int, _Draft] = {}
        with self._scratch.lease() if self._scratch else nullcontext(()) as scratch:

            def begun() -> Iterator[Piece]:
                for i in which:
                    results[i] = self._begin_write(requests[i])
                    if results[i] is None:
                        into = scratch[i - which.start] if scratch else None
                        drafts[i] = self._draft(requests[i], into)
                        yield Piece(i, requests[i].slot, drafts[i].buffers)

            with closing(self._data.write(begun())) as ended:
                for i, outcome in ended:
                    results[i] = self._end_write(requests[i].slot, drafts.pop(i), outcome)

    def _draft(self, request: BlockWrite, into: memoryview | None) -> _Draft:
        """Return what is to be written. With a cipher, the block is encrypted ``into`` scratch."""
        record = Record(*request[1:4], bytes(16), self._block_nbytes, next(self._stamps))
        if self._guard is None:
            return _Draft(record, request.buffers)
        record = record._replace(flags=self._guard.flag)
        data = record.associated_data(self._shard_name)
        seal = self._guard.seal(request.buffers, self._block_nbytes, data, into)
        record = record._replace(nonce=seal.nonce, tag=seal.tag)
        return _Draft(record, request.buffers if into is None else [into])

    def _begin_write(self, request: BlockWrite) -> TierError | None:
        """Erase the slot's record, so that the slot is empty until the write has ended."""
        refused = self._refuse(request.slot, nbytes_of(request.buffers))
        if refused is not None:
            return refused
        try:
            self._index.erase(request.slot)
        except OSError as error:
            return self._unavailable("writing", request.slot, error)
        return None

    def _end_write(self, slot: int, draft: _Draft, outcome: Outcome) -> TierError | None:
        """Write the record of a block whose bytes have been written."""
        if isinstance(outcome, OSError):
            return self._unavailable("writing", slot, outcome)
        key, nbytes = draft.record.key, self._block_nbytes
        digest, total = checksum(key, draft.buffers, nbytes), 0
        if self._device_sums:
            total = bound_to(key, host_sum(draft.buffers, nbytes))
        try:
            self._index.put(slot, draft.record._replace(checksum=digest, sum=total))
        except OSError as error:
            return self._unavailable("writing", slot, error)
        return None

    def _read_own(self, requests: Sequence[BlockRead], results: list[TierError | None]) -> None:
        """Read the requests for store 0, and fill in their results.

        `found` is a generator for the same reason as `begun`: records are read while the blocks
        before them are under way.
        """
        records: dict[int, Record] = {}
        gone = self._gone()

        def found() -> Iterator[Piece]:
            for i, request in enumerate(requests):
                if request.slot >> STORE_SHIFT:
                    continue
                if gone is not None:
                    results[i] = gone
                    continue
                record = self._find(request, nbytes_of(request.buffers))
                if isinstance(record, Record):
                    records[i] = record
                    yield Piece(i, request.slot, request.buffers)
                else:
                    results[i] = record

        checked: dict[int, Future[TierError | None]] = {}
        try:
            with closing(self._data.read(found())) as ended:
                for i, outcome in ended:
                    check = (requests[i], records[i], outcome)
                    if self._decryptors is None:
                        results[i] = self._end_read(*check)
                    else:
                        checked[i] = self._decryptors.submit(self._end_read, *check)
        finally:
            wait(checked.values())  # after this the buffers are the caller's again
        for i, future in checked.items():
            results[i] = future.result()

    def _find_direct(self, request: DeviceRead) -> Record | TierError:
        """Return the record of a block to read straight into device memory, or an error."""
        slot = request.slot
        if self._direct is None or slot >> STORE_SHIFT:
            return NotDirect(f"slot {slot} is in a file that is not read into device memory")
        record = self._find(request, self.slot_nbytes)
        if isinstance(record, Record) and (record.nonce or not record.sum):
            return NotDirect(f"slot {slot} was written without a sum for device memory")
        return record

    def _find(self, request: BlockRead | DeviceRead, nbytes: int) -> Record | TierError:
        """Return the record of the block that is asked for, if it fits into ``nbytes``."""
        slot = request.slot
        refused = self._refuse(slot, nbytes)
        if refused is not None:
            return refused
        try:
            record = self._index.get(slot)
        except OSError as error:
            return self._unavailable("reading", slot, error)
        fits = record is not None and record.nbytes == self._block_nbytes
        if record is None or not fits or not is_asked_for(record, request):
            return not_held(f"slot {slot} of {self._data.path}", request.key, record)
        return record

    def _end_read(self, request: BlockRead, record: Record, outcome: Outcome) -> TierError | None:
        """Verify a block whose bytes have arrived, and decrypt it if necessary."""
        if isinstance(outcome, OSError):
            return self._unavailable("reading", request.slot, outcome)
        if outcome < record.nbytes:
            return self._damaged(request, Mismatch.TRUNCATED)
        wrong = record.mismatch(self._guard, request.buffers, self._shard_name)
        return None if wrong is None else self._damaged(request, wrong)

    def _damaged(self, request: BlockRead | DeviceRead, wrong: Mismatch) -> CorruptBlock:
        """Erase a slot whose bytes are not those that were written, and return the error."""
        slot = request.slot
        try:
            self._index.erase(slot)
        except OSError as error:
            _log.warning("slot %d could not be marked bad: %s", slot, error)
        return damaged(f"slot {slot} of {self._data.path}", request.key, wrong)

    def _read_foreign(self, request: BlockRead) -> TierError | None:
        number, slot = request.slot >> STORE_SHIFT, request.slot & (1 << STORE_SHIFT) - 1
        store = self._foreign.get(number)
        if store is None:
            return SlotError(f"slot {request.slot} is of store {number}, which is not open")
        try:
            return store.read(slot, request)
        except OSError as error:
            return self._unavailable("reading", request.slot, error)

    def _gone(self) -> TierUnavailable | None:
        """Return an error if the files are no longer in their folder: removed, moved or replaced.

        The space of removed ones is given back then.
        """
        try:
            if not (self._data.is_lost() | self._index.is_lost()):
                return None
        except OSError:
            return None  # closed, or the medium fails: so does each block, and says why
        return TierUnavailable(
            f"the store {self._folder} was removed or moved: restart the engine to make it anew"
        )

    def _refuse(self, slot: int, nbytes: int) -> SlotError | None:
        if 0 <= slot < self.num_slots and self._block_nbytes <= nbytes <= self.slot_nbytes:
            return None
        return SlotError(
            f"slot {slot} with {nbytes} bytes; this store has {self.num_slots} slots for blocks of "
            f"{self._block_nbytes} bytes, {self.slot_nbytes} with padding"
        )

    def _unavailable(self, doing: str, slot: int, error: OSError) -> TierUnavailable:
        why = ""
        if error.errno == errno.EFBIG:
            why = " (a file may be no larger: raise `ulimit -f`, or lower disk.capacity)"
        elif error.errno in FULL:
            why = " (the disk is full: lower disk.capacity)"
        return TierUnavailable(f"{doing} slot {slot} in {self._data.path}: {error}{why}")

    def _sync(self) -> None:
        try:
            self._data.sync()
            self._index.sync()
        except OSError as error:
            raise TierUnavailable(f"flushing {self._data.path}: {error}") from error


class _Flusher:
    """Calls ``flush`` within ``interval`` seconds of the first write after the last flush."""

    def __init__(self, flush: Callable[[], None], interval: float) -> None:
        self._flush = flush
        self._interval = interval
        self._flushing = threading.Lock()  # taken before _lock
        self._lock = threading.Lock()
        self._due: threading.Event | None = None  # set to call the flush off
        self._closed = False

    def dirtied(self) -> None:
        """Schedule a flush, because something was written. At interval 0, flush at once."""
        if self._interval <= 0:
            self._flush_or_warn()
            return
        with self._lock:
            if self._due is not None or self._closed:
                return
            self._due = called_off = threading.Event()
        run = partial(self._flush_later, called_off)
        if not GuardedThread("kvcore-flush", run, nobody_waits).start():
            self._flush_or_warn()

    def _flush_later(self, called_off: threading.Event) -> None:
        if not called_off.wait(self._interval):
            self._flush_or_warn()

    def flush(self) -> None:
        """Flush now. Later writes wait for the next flush."""
        with self._flushing:
            self._disarm()
            self._flush()

    def close(self) -> None:
        """Flush if a flush is due. After this returns, none is under way, and none will start."""
        with self._flushing:
            self._closed = True
            if self._disarm():
                self._flush()

    def _disarm(self) -> bool:
        with self._lock:
            due, self._due = self._due, None
        if due is not None:
            due.set()
        return due is not None

    def _flush_or_warn(self) -> None:
        with self._flushing:
            if self._closed:
                return
            self._disarm()
            try:
                self._flush()
            except TierUnavailable as error:
                _log.warning("a flush failed: %s", error)


def _open_foreign(
    folders: Mapping[int, Path],
    part: Part,
    direct_io: str,
    guard: BlockGuard | None,
) -> dict[int, ForeignStore]:
    """Open the stores that can be read. Log the others, whose blocks are then recomputed."""

    def open_one(folder: Path) -> ForeignStore | None:
        try:
            return ForeignStore(folder, part, direct_io, guard)
        except (TierError, FormatError) as error:
            _log.warning("the store %s is not read: %s", folder, error)
            return None

    opened = ((number, open_one(folder)) for number, folder in folders.items())
    return {number: store for number, store in opened if store is not None}
