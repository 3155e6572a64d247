"""The two files of a shard: blocks at their slots, read and written directly; and their records."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from kvcore._util.fd import Descriptor
from kvcore.errors import TierUnavailable
from kvcore.memory.buffers import Buffers
from kvcore.memory.hugepages import PAGE, Pages
from kvcore.tiers.disk.aio import AioMover
from kvcore.tiers.disk.format import EMPTY_RECORD, Record
from kvcore.tiers.disk.io import Move, Mover, Outcome, Outcomes, ThreadMover, is_aligned
from kvcore.tiers.geometry import RECORD_NBYTES

_log = logging.getLogger("kvcore.tiers.disk")

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_CANNOT_RESERVE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
_ERASED_AT_ONCE = 8192
_GROW_BYTES = 256 << 20  # at a time, and no more than a sixteenth of the file


class Piece(NamedTuple):
    """A slot and the memory for it. ``tag`` comes back with the outcome."""

    tag: int
    slot: int
    buffers: Buffers


class DataFile:
    """Slot ``i`` lies at ``i * slot_nbytes``, a multiple of 4096. Thread-safe between slots.

    ``num_slots`` None opens the file for reading only. Whole pages of memory go to the kernel's
    queue where that can be had, everything else through ``io_threads`` threads. What is asked of it
    after `close` fails with EBADF.
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
        self.path = path
        self._slot_nbytes = slot_nbytes
        self.limit = (num_slots or 0) * slot_nbytes
        self._step = min(_GROW_BYTES, self.limit // 16 // slot_nbytes * slot_nbytes)
        flags = os.O_RDONLY if num_slots is None else os.O_RDWR | os.O_CREAT
        self.direct, number = _open(path, flags, direct_io)
        self._file = Descriptor(number)
        self._size = os.fstat(number).st_size
        self._grow_lock = threading.Lock()
        self._threads = ThreadMover(io_threads, direct=self.direct, most=slot_nbytes)
        self._queue = _queue(path, self._threads) if self.direct else None

    def read(self, pieces: Iterable[Piece]) -> Outcomes:
        """Fill the buffers of each piece from its slot."""
        return self._move((self._place(piece) for piece in pieces), write=False)

    def write(self, pieces: Iterable[Piece]) -> Outcomes:
        """Write the buffers of each piece to its slot, all of them or with an error."""
        failed: list[tuple[int, Outcome]] = []

        def grown() -> Iterator[Move]:
            for piece in pieces:
                error = self._grow((piece.slot + 1) * self._slot_nbytes)
                if error is None:
                    yield self._place(piece)
                else:
                    failed.append((piece.tag, error))

        yield from self._move(grown(), write=True)
        yield from failed

    def sync(self) -> None:
        with self._file as number:
            os.fdatasync(number)

    def descriptor(self) -> Descriptor:
        """The file, for reads of whole slots by others: ``with`` it, that is its number."""
        return self._file

    def close(self) -> None:
        """Nothing may be under way."""
        self._file.close()
        self._threads.close()
        if self._queue is not None:
            self._queue.close()

    def _place(self, piece: Piece) -> Move:
        return Move(piece.tag, piece.buffers, piece.slot * self._slot_nbytes)

    def _move(self, moves: Iterator[Move], *, write: bool) -> Outcomes:
        with ExitStack() as use:
            try:
                number = use.enter_context(self._file)
            except OSError as error:
                yield from [(move.tag, error) for move in moves]
                return
            yield from self._move_in(number, moves, write=write)

    def _move_in(self, number: int, moves: Iterator[Move], *, write: bool) -> Outcomes:
        others: list[Move] = []

        def queued() -> Iterator[Move]:
            for move in moves:
                if self._can_queue(move.buffers):
                    yield move
                else:
                    others.append(move)

        if self._queue is not None:
            yield from self._queue.move(number, queued(), write=write)
            moves = iter(others)
        yield from self._threads.move(number, moves, write=write)

    def _can_queue(self, buffers: Buffers) -> bool:
        return self._queue is not None and self._queue.takes(buffers) and is_aligned(buffers)

    def _grow(self, need: int) -> OSError | None:
        """Make the file ``need`` bytes long, in steps, reserved on the medium where allowed."""
        if need <= self._size:
            return None
        with self._grow_lock:
            if need <= self._size:
                return None
            size = min(max(need, self._size + self._step), self.limit)
            try:
                with self._file as number:
                    self._size = _extend(number, self._size, size, need)
            except OSError as error:
                return error
        return None


class IndexFile:
    """Record ``i`` tells what slot ``i`` holds. Goes through the page cache. Thread-safe.

    Every call raises OSError where the medium fails, and (EBADF) after `close`."""

    def __init__(self, path: Path) -> None:
        """Makes the file when it is missing."""
        try:
            self._file = Descriptor(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        except OSError as error:
            raise TierUnavailable(f"cannot open {path}: {error}") from error

    def num_records(self) -> int:
        """Records that the file has room for; slots beyond hold nothing."""
        with self._file as number:
            return -(-os.fstat(number).st_size // RECORD_NBYTES)

    def get(self, slot: int) -> Record | None:
        with self._file as number:
            return Record.unpack(os.pread(number, RECORD_NBYTES, slot * RECORD_NBYTES))

    def put(self, slot: int, record: Record) -> None:
        self._write(slot, record.pack())

    def erase(self, slot: int, count: int = 1) -> None:
        """``count`` slots from ``slot`` on hold nothing from now on."""
        for first in range(slot, slot + count, _ERASED_AT_ONCE):
            size = min(_ERASED_AT_ONCE, slot + count - first)
            self._write(first, EMPTY_RECORD * size)

    def sync(self) -> None:
        with self._file as number:
            os.fdatasync(number)

    def close(self) -> None:
        """Idempotent."""
        self._file.close()

    def _write(self, slot: int, data: bytes) -> None:
        with self._file as number:
            written = os.pwrite(number, data, slot * RECORD_NBYTES)
        if written != len(data):
            raise OSError(errno.ENOSPC, "a record was written in part")


def _open(path: Path, flags: int, direct_io: str) -> tuple[bool, int]:
    """(whether direct, descriptor)"""
    if direct_io != "off":
        try:
            return True, _open_direct(path, flags)
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


def _open_direct(path: Path, flags: int) -> int:
    """Some file systems refuse direct I/O only when it is done, so do some."""
    file = os.open(path, flags | os.O_DIRECT, 0o600)
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
    """Length of the file after it was made ``wanted`` bytes long, or on a full disk ``need``."""
    try:
        os.posix_fallocate(file, size, wanted - size)
    except OSError as error:
        if error.errno in FULL:
            wanted = need  # take what is left, one slot at a time
        elif error.errno not in _CANNOT_RESERVE:
            raise
        os.ftruncate(file, wanted)
    return wanted


def _queue(path: Path, fallback: Mover) -> AioMover | None:
    try:
        return AioMover(fallback)
    except OSError as error:
        _log.warning("no asynchronous I/O for %s (%s): threads do it instead", path, error)
        return None
