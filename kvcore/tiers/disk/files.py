"""The two files of a shard: blocks at their slots, read and written directly; and their records."""

from __future__ import annotations

import errno
import logging
import os
import threading
from pathlib import Path

import numpy as np

from kvcore.errors import TierUnavailable
from kvcore.tiers.base import Buffers, nbytes_of
from kvcore.tiers.disk.format import EMPTY_RECORD, RECORD_NBYTES, Record
from kvcore.tiers.pages import PAGE, Pages

_log = logging.getLogger("kvcore.tiers.disk")

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_CANNOT_RESERVE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
_GROW_BYTES = 256 << 20  # at a time, and no more than a sixteenth of the file
_IOV_MAX = 1024


class DataFile:
    """Slot ``i`` lies at ``i * slot_nbytes``, a multiple of 4096. Thread-safe between slots.

    Direct I/O wants buffers that start and end on 4096 bytes; others go through a buffer of this
    thread's own. ``num_slots`` None opens the file for reading only.
    """

    def __init__(
        self, path: Path, slot_nbytes: int, *, num_slots: int | None, direct_io: str = "auto"
    ) -> None:
        self.path = path
        self._slot_nbytes = slot_nbytes
        self._limit = (num_slots or 0) * slot_nbytes
        self._step = min(_GROW_BYTES, self._limit // 16 // slot_nbytes * slot_nbytes)
        flags = os.O_RDONLY if num_slots is None else os.O_RDWR | os.O_CREAT
        self.direct, self._file = _open(path, flags, direct_io)
        self._size = os.fstat(self._file).st_size
        self._grow_lock = threading.Lock()
        self._own = threading.local()

    def read(self, slot: int, buffers: Buffers) -> int:
        """Fill ``buffers`` from the start of ``slot``; bytes read, fewer where the file ends."""
        if not self._must_bounce(buffers):
            return _read_all(self._file, buffers, slot * self._slot_nbytes)
        bounce = self._bounce(buffers)
        got = _read_all(self._file, [bounce], slot * self._slot_nbytes)
        _scatter(bounce, buffers)
        return min(got, nbytes_of(buffers))

    def write(self, slot: int, buffers: Buffers) -> None:
        """Write all of ``buffers``, or raise OSError."""
        self._grow((slot + 1) * self._slot_nbytes)
        parts = buffers
        if self._must_bounce(buffers):
            bounce = self._bounce(buffers)
            _gather(buffers, bounce)
            parts = [bounce]
        _write_all(self._file, parts, slot * self._slot_nbytes)

    def sync(self) -> None:
        os.fdatasync(self._file)

    def close(self) -> None:
        os.close(self._file)

    def _must_bounce(self, buffers: Buffers) -> bool:
        return self.direct and not all(map(_aligned, buffers))

    def _bounce(self, buffers: Buffers) -> memoryview:
        """This thread's own buffer, as long as ``buffers`` rounded up to whole pages."""
        pages: Pages | None = getattr(self._own, "pages", None)
        if pages is None:
            pages = self._own.pages = Pages(self._slot_nbytes)
        return pages.view[: -(-nbytes_of(buffers) // PAGE) * PAGE]

    def _grow(self, need: int) -> None:
        """Make the file ``need`` bytes long, in steps, reserved on the medium where allowed."""
        if need <= self._size:
            return
        with self._grow_lock:
            if need <= self._size:
                return
            size = min(max(need, self._size + self._step), self._limit)
            try:
                os.posix_fallocate(self._file, self._size, size - self._size)
            except OSError as error:
                if error.errno in FULL:
                    size = need  # take what is left, one slot at a time
                elif error.errno not in _CANNOT_RESERVE:
                    raise
                os.ftruncate(self._file, size)
            self._size = size


class IndexFile:
    """Record ``i`` tells what slot ``i`` holds. Goes through the page cache. Thread-safe."""

    def __init__(self, path: Path) -> None:
        """Makes the file when it is missing."""
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise TierUnavailable(f"cannot open {path}: {error}") from error

    def get(self, slot: int) -> Record | None:
        return Record.unpack(os.pread(self._file, RECORD_NBYTES, slot * RECORD_NBYTES))

    def put(self, slot: int, record: Record) -> None:
        self._write(slot, record.pack())

    def erase(self, slot: int) -> None:
        """The slot holds nothing from now on."""
        self._write(slot, EMPTY_RECORD)

    def sync(self) -> None:
        os.fdatasync(self._file)

    def close(self) -> None:
        os.close(self._file)

    def _write(self, slot: int, data: bytes) -> None:
        if os.pwrite(self._file, data, slot * RECORD_NBYTES) != RECORD_NBYTES:
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


def _aligned(part: memoryview) -> bool:
    address: int = np.frombuffer(part, np.uint8).__array_interface__["data"][0]
    return part.nbytes % PAGE == 0 and address % PAGE == 0


def _gather(buffers: Buffers, into: memoryview) -> None:
    """Copy ``buffers`` one after the other; the rest of ``into`` becomes zero."""
    start = 0
    for part in buffers:
        into[start : start + part.nbytes] = part.cast("B")
        start += part.nbytes
    into[start:] = bytes(into.nbytes - start)


def _scatter(source: memoryview, buffers: Buffers) -> None:
    start = 0
    for part in buffers:
        part.cast("B")[:] = source[start : start + part.nbytes]
        start += part.nbytes


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
        asked = nbytes_of(parts[:_IOV_MAX])
        done = os.preadv(file, parts[:_IOV_MAX], offset)
        total += done
        offset += done
        if done <= 0 or (done < asked and done % PAGE):
            break  # the end of the file; direct I/O could not even go on from an odd place
        parts = _after(parts, done)
    return total


def _after(parts: list[memoryview], done: int) -> list[memoryview]:
    """What is left of ``parts`` after ``done`` bytes."""
    for i, part in enumerate(parts):
        if done < part.nbytes:
            return [part[done:], *parts[i + 1 :]] if done else parts[i:]
        done -= part.nbytes
    return []
