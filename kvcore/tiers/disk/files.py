"""The two files of a shard: the blocks at their slots, with direct I/O; and their records."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from kvcore._util.fd import Descriptor, is_removed, leads_to
from kvcore._util.private import NotPrivateError, open_file
from kvcore.errors import TierUnavailable
from kvcore.memory.buffers import Buffers
from kvcore.memory.hugepages import PAGE, Pages
from kvcore.tiers.disk.aio import AioMover
from kvcore.tiers.disk.format import EMPTY_RECORD, Record
from kvcore.tiers.disk.io import Move, Mover, Outcome, Outcomes, ThreadMover
from kvcore.tiers.geometry import RECORD_NBYTES
from kvcore.tiers.guard import BlockGuard

_log = logging.getLogger("kvcore.tiers.disk")

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_CANNOT_RESERVE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
_ERASED_AT_ONCE = 8192
_GROW_BYTES = 256 << 20  # at a time, but at most a sixteenth of the file


class Piece(NamedTuple):
    """A slot to read or write, and the memory for it. ``tag`` comes back with the outcome."""

    tag: int
    slot: int
    buffers: Buffers


class DataFile:
    """The blocks of a shard. Slot ``i`` starts at ``i * slot_nbytes``, a multiple of 4096.

    Thread-safe between slots.

    ``num_slots`` None opens the file for reading only. Whole pages of memory go to the kernel's
    queue if it is available, and everything else through ``io_threads`` threads (`Mover`). Every
    call after `close` fails with EBADF.
    """

    def __init__(
        self,
        path: Path,
        slot_nbytes: int,
        *,
        num_slots: int | None,
        direct_io: str = "auto",
        io_threads: int = 1,
    ) -> None:
        self.path = path.absolute()
        self._slot_nbytes = slot_nbytes
        self.limit = (num_slots or 0) * slot_nbytes
        self._step = min(_GROW_BYTES, self.limit // 16 // slot_nbytes * slot_nbytes)
        flags = os.O_RDONLY if num_slots is None else os.O_RDWR | os.O_CREAT
        self.direct, number = _open(path, flags, direct_io)
        self._file = Descriptor(number)
        self._size = os.fstat(number).st_size
        self._grow_lock = threading.Lock()
        threads = ThreadMover(io_threads, direct=self.direct, most=slot_nbytes)
        self._mover: Mover = _with_queue(path, threads) if self.direct else threads

    def read(self, pieces: Iterable[Piece]) -> Outcomes:
        """Fill the buffers of each piece from its slot."""
        return self._move(pieces, write=False)

    def write(self, pieces: Iterable[Piece]) -> Outcomes:
        """Write the buffers of each piece to its slot, all of them or with an error."""
        return self._move(pieces, write=True)

    def sync(self) -> None:
        """Flush the blocks to the medium. Raise OSError if that fails. Blocks."""
        with self._file as number:
            os.fdatasync(number)

    def is_lost(self) -> bool:
        """Return True if its path is no longer that of the file. Raises OSError after `close`.

        The space of a removed file is given back then. Reads under way find no bytes.
        """
        with self._file as number:
            if leads_to(self.path, number):
                return False
            if is_removed(number):  # if it was moved, its blocks are somebody's
                os.ftruncate(number, 0)
            return True

    def descriptor(self) -> Descriptor:
        """Return the file, for other readers of whole slots. ``with`` it gives the number."""
        return self._file

    def close(self) -> None:
        """Close the file. No read or write may be under way."""
        self._file.close()
        self._mover.close()

    def _move(self, pieces: Iterable[Piece], *, write: bool) -> Outcomes:
        """Move all pieces, and hold the file open meanwhile.

        ``pieces`` is consumed as the mover has room, so that the first are under way while the
        caller still prepares the others. That is why `moves` is a generator.
        """
        failed: list[tuple[int, Outcome]] = []

        def moves(number: int) -> Iterator[Move]:
            for tag, slot, buffers in pieces:
                offset = slot * self._slot_nbytes
                try:
                    if write:
                        self._grow(number, offset + self._slot_nbytes)
                except OSError as error:
                    failed.append((tag, error))
                else:
                    yield Move(tag, buffers, offset)

        with ExitStack() as use:
            try:
                number = use.enter_context(self._file)
            except OSError as error:
                yield from [(piece.tag, error) for piece in pieces]
                return
            yield from self._mover.move(number, moves(number), write=write)
        yield from failed

    def _grow(self, number: int, need: int) -> None:
        """Make the file ``need`` bytes long, in steps, and reserve them if the medium allows it."""
        if need <= self._size:
            return
        with self._grow_lock:
            if need > self._size:
                size = min(max(need, self._size + self._step), self.limit)
                self._size = _extend(number, self._size, size, need)


class IndexFile:
    """The records of a shard: record ``i`` says what slot ``i`` holds. Thread-safe.

    The file goes through the page cache. Every call raises OSError if the medium fails, and OSError
    with EBADF after `close`.
    """

    def __init__(self, path: Path, guard: BlockGuard | None = None) -> None:
        """Open the file. Create it if it is missing. ``guard`` seals the records, if there is one.

        Raises TierUnavailable.
        """
        self._guard = guard
        self._path = path.absolute()
        try:
            self._file = Descriptor(open_file(path, os.O_RDWR | os.O_CREAT, adopt=True))
        except OSError as error:
            raise TierUnavailable(f"cannot open {path}: {error}") from error

    def num_records(self) -> int:
        """Return how many records the file has room for. Slots beyond them are empty."""
        with self._file as number:
            return -(-os.fstat(number).st_size // RECORD_NBYTES)

    def get(self, slot: int) -> Record | None:
        """Return a slot's record; None if the slot is empty or its record is not valid."""
        with self._file as number:
            return Record.unpack(os.pread(number, RECORD_NBYTES, slot * RECORD_NBYTES), self._guard)

    def put(self, slot: int, record: Record) -> None:
        """Write a slot's record."""
        self._write(slot, record.pack(self._guard))

    def erase(self, slot: int, count: int = 1) -> None:
        """Mark ``count`` slots from ``slot`` on as empty."""
        for first in range(slot, slot + count, _ERASED_AT_ONCE):
            size = min(_ERASED_AT_ONCE, slot + count - first)
            self._write(first, EMPTY_RECORD * size)

    def is_lost(self) -> bool:
        """Return True if its path is no longer that of the file."""
        with self._file as number:
            return not leads_to(self._path, number)

    def sync(self) -> None:
        """Flush the records to the medium. Blocks."""
        with self._file as number:
            os.fdatasync(number)

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()

    def _write(self, slot: int, data: bytes) -> None:
        with self._file as number:
            written = os.pwrite(number, data, slot * RECORD_NBYTES)
        if written != len(data):
            raise OSError(errno.ENOSPC, "a record was written only in part")


def _open(path: Path, flags: int, direct_io: str) -> tuple[bool, int]:
    """Open a data file. Return (True if for direct I/O, the file's number)."""
    if direct_io != "off":
        try:
            return True, _open_direct(path, flags)
        except NotPrivateError as error:
            raise TierUnavailable(f"{path} is not used: {error.strerror}") from error
        except OSError as error:
            if direct_io == "on" or error.errno != errno.EINVAL:
                raise TierUnavailable(
                    f"cannot open {path} for direct I/O ({error}): set disk.direct_io to auto, or "
                    "disk.path to a local file system"
                ) from error
            _log.warning("no direct I/O in %s: reads and writes go through the page cache", path)
    try:
        return False, open_file(path, flags, adopt=True)
    except OSError as error:
        raise TierUnavailable(f"cannot open {path}: {error}") from error


def _open_direct(path: Path, flags: int) -> int:
    """Open a file for direct I/O, and try it: some file systems refuse it only at a read."""
    file = open_file(path, flags | os.O_DIRECT, adopt=True)
    probe = Pages(PAGE, huge=False)
    try:
        os.preadv(file, [probe.view], 0)
    except OSError:
        os.close(file)
        raise
    finally:
        probe.close()
    return file


def _extend(file: int, size: int, wanted: int, need: int) -> int:
    """Make the file ``wanted`` bytes long, or ``need`` if the disk is full. Return its length."""
    try:
        os.posix_fallocate(file, size, wanted - size)
    except OSError as error:
        if error.errno in FULL:
            wanted = need  # use what is left, one slot at a time
        elif error.errno not in _CANNOT_RESERVE:
            raise
        os.ftruncate(file, wanted)
    return wanted


def _with_queue(path: Path, threads: ThreadMover) -> Mover:
    """Return a mover through the kernel's queue, or ``threads`` if there is no such queue."""
    try:
        return AioMover(threads)
    except OSError as error:
        _log.warning("no asynchronous I/O for %s (%s): threads do it instead", path, error)
        return threads
