"""Moving many pieces between memory and one file: the seam, and the way that works everywhere."""

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
"""Bytes moved, fewer than asked for only where a file that is read ends; or what went wrong."""


Outcomes = Generator[tuple[int, Outcome], None, None]
"""Each move's (tag, outcome) as it ends. Once exhausted or closed, nothing is under way any more:
the buffers are the caller's again."""


class Move(NamedTuple):
    """Between ``buffers`` and the bytes of the file from ``offset`` on. ``tag`` is the caller's."""

    tag: int
    buffers: Buffers
    offset: int


class Mover(ABC):
    """Thread-safe. Of the moves of one call, many are under way at once."""

    @abstractmethod
    def move(self, file: int, moves: Iterable[Move], *, write: bool) -> Outcomes:
        """Read the file into the buffers, or write them to it. ``moves`` is taken from as there is
        room, so that the first are under way while the last are made."""

    @abstractmethod
    def close(self) -> None:
        """Nothing may be under way."""


class ThreadMover(Mover):
    """A blocking call a move, from a few threads; they release the GIL while they wait.

    Reads and writes have threads of their own: a load never queues behind saves. With ``direct``,
    buffers that do not start and end on whole pages go through one of the thread's own, of at most
    ``most`` bytes.
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
        """This thread's own buffer, as long as ``buffers`` rounded up to whole pages."""
        pages: Pages | None = getattr(self._own, "pages", None)
        if pages is None:
            pages = self._own.pages = Pages(self._most)
        return pages.view[: -(-nbytes_of(buffers) // PAGE) * PAGE]


def address_of(part: memoryview) -> int:
    if not part.readonly:
        return ctypes.addressof(ctypes.c_char.from_buffer(part))
    address: int = np.frombuffer(part, np.uint8).__array_interface__["data"][0]  # thrice the time
    return address


def is_aligned(buffers: Buffers) -> bool:
    """Direct I/O takes them as they are."""
    return not any(part.nbytes % PAGE or address_of(part) % PAGE for part in buffers)


def read_all(file: int, buffers: Buffers, offset: int) -> int:
    """Bytes read: fewer than asked for at the end of the file."""
    parts, total = [part.cast("B") for part in buffers], 0
    while parts:
        asked = nbytes_of(parts[:IOV_MAX])
        done = os.preadv(file, parts[:IOV_MAX], offset)
        total += done
        offset += done
        if done <= 0 or (done < asked and done % PAGE):
            break  # the end of the file; direct I/O could not even go on from an odd place
        parts = rest_of(parts, done)
    return total


def write_all(file: int, buffers: Buffers, offset: int) -> None:
    parts = [part.cast("B") for part in buffers]
    while parts:
        done = os.pwritev(file, parts[:IOV_MAX], offset)
        if done <= 0:
            raise OSError(errno.EIO, "nothing was written")
        offset += done
        parts = rest_of(parts, done)


def rest_of(parts: Buffers, done: int) -> list[memoryview]:
    """What is left of ``parts``, of bytes, after ``done`` bytes."""
    for i, part in enumerate(parts):
        if done < part.nbytes:
            return [part[done:], *parts[i + 1 :]]
        done -= part.nbytes
    return []


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
