"""Moves between memory and a file: the interface, and an implementation that works everywhere."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import NamedTuple

import numpy as np

from kvcore.memory.buffers import Buffers, nbytes_of
from kvcore.memory.hugepages import PAGE, Pages

IOV_MAX = 1024

Outcome = int | OSError
"""The number of bytes moved, or the error. A read at the end of a file moves fewer than asked."""

Outcomes = Generator[tuple[int, Outcome], None, None]
"""Each move's (tag, outcome) as it ends. Once this is exhausted or closed, no move is under way any
more, and the buffers are the caller's again."""


class Move(NamedTuple):
    """A move between ``buffers`` and the file from ``offset`` on. ``tag`` is the caller's."""

    tag: int
    buffers: Buffers
    offset: int


class Mover(ABC):
    """Moves bytes between buffers and files, many moves of one call at once. Thread-safe."""

    @abstractmethod
    def move(self, file: int, moves: Iterable[Move], *, write: bool) -> Outcomes:
        """Read the file into the buffers, or write the buffers to the file.

        ``moves`` is consumed as there is room, so that the first moves are under way while the
        caller still makes the last ones.
        """

    @abstractmethod
    def close(self) -> None:
        """Release all resources. No move may be under way."""


class ThreadMover(Mover):
    """Makes one blocking call for each move, in a few threads that release the GIL meanwhile.

    Reads and writes have separate threads, so that a load never queues behind saves. With
    ``direct``, buffers that are not page-aligned go through a bounce buffer of the thread, of at
    most ``most`` bytes.
    """

    def __init__(self, threads: int, *, direct: bool, most: int) -> None:
        self._direct = direct
        self._most = most
        self._own = threading.local()
        self._readers = ThreadPoolExecutor(threads, thread_name_prefix="kvcore-disk-read")
        self._writers = ThreadPoolExecutor(threads, thread_name_prefix="kvcore-disk-write")

    def move(self, file: int, moves: Iterable[Move], *, write: bool) -> Outcomes:
        act = self._write if write else self._read
        pool = self._writers if write else self._readers
        tags: dict[Future[Outcome], int] = {}
        try:
            for move in moves:
                tags[pool.submit(act, file, move)] = move.tag
            for future in as_completed(tags):
                yield tags[future], future.result()
        finally:
            for future in tags:
                if not future.cancel():
                    future.exception()  # waits

    def close(self) -> None:
        self._readers.shutdown()
        self._writers.shutdown()

    def _read(self, file: int, move: Move) -> Outcome:
        try:
            if not self._direct or is_aligned(move.buffers):
                return read_all(file, move.buffers, move.offset)
            bounce = self._bounce(move.buffers)
            got = read_all(file, [bounce], move.offset)
            _scatter(bounce, move.buffers)
            return min(got, nbytes_of(move.buffers))
        except OSError as error:
            return error

    def _write(self, file: int, move: Move) -> Outcome:
        parts = move.buffers
        try:
            if self._direct and not is_aligned(parts):
                bounce = self._bounce(parts)
                _gather(parts, bounce)
                parts = [bounce]
            write_all(file, parts, move.offset)
        except OSError as error:
            return error
        return nbytes_of(move.buffers)

    def _bounce(self, buffers: Buffers) -> memoryview:
        """Return this thread's bounce buffer, as long as ``buffers`` rounded up to whole pages."""
        pages: Pages | None = getattr(self._own, "pages", None)
        if pages is None:
            pages = self._own.pages = Pages(self._most)
        return pages.view[: -(-nbytes_of(buffers) // PAGE) * PAGE]


def address_of(part: memoryview) -> int:
    """Return the address of a buffer's first byte."""
    if not part.readonly:
        return ctypes.addressof(ctypes.c_char.from_buffer(part))
    address: int = np.frombuffer(part, np.uint8).__array_interface__["data"][0]  # 3 times slower
    return address


def is_aligned(buffers: Buffers) -> bool:
    """Return True if direct I/O accepts the buffers as they are: whole pages of memory."""
    return not any(part.nbytes % PAGE or address_of(part) % PAGE for part in buffers)


def read_all(file: int, buffers: Buffers, offset: int) -> int:
    """Fill the buffers from ``offset`` on. Return the bytes read, fewer at the end of the file."""
    parts, total = [part.cast("B") for part in buffers], 0
    while parts:
        asked = nbytes_of(parts[:IOV_MAX])
        done = os.preadv(file, parts[:IOV_MAX], offset)
        total += done
        offset += done
        if done <= 0 or (done < asked and done % PAGE):
            break  # the end of the file: direct I/O cannot continue from an unaligned offset
        parts = rest_of(parts, done)
    return total


def write_all(file: int, buffers: Buffers, offset: int) -> None:
    """Write all of the buffers from ``offset`` on. Raise OSError if that fails."""
    parts = [part.cast("B") for part in buffers]
    while parts:
        done = os.pwritev(file, parts[:IOV_MAX], offset)
        if done <= 0:
            raise OSError(errno.EIO, "nothing was written")
        offset += done
        parts = rest_of(parts, done)


def rest_of(parts: Buffers, done: int) -> list[memoryview]:
    """Return what is left of ``parts`` (buffers of bytes) after the first ``done`` bytes."""
    for i, part in enumerate(parts):
        if done < part.nbytes:
            return [part[done:], *parts[i + 1 :]]
        done -= part.nbytes
    return []


def _gather(buffers: Buffers, into: memoryview) -> None:
    """Copy ``buffers`` into ``into`` one after the other, and fill the rest with zeros."""
    start = 0
    for part in buffers:
        into[start : start + part.nbytes] = part.cast("B")
        start += part.nbytes
    into[start:] = bytes(into.nbytes - start)


def _scatter(source: memoryview, buffers: Buffers) -> None:
    """Copy ``source`` into ``buffers`` one after the other."""
    start = 0
    for part in buffers:
        part.cast("B")[:] = source[start : start + part.nbytes]
        start += part.nbytes
