"""The kernel's asynchronous I/O (io_submit and related calls), through plain system calls.

One thread keeps a deep queue of whole blocks filled, and checksums what has arrived meanwhile. Here
it is as fast as io_uring, needs no library, and is allowed by container runtimes that forbid
io_uring. It is asynchronous for direct I/O only. See io_submit(2) and linux/aio_abi.h.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import threading
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvcore.memory.buffers import nbytes_of
from kvcore.memory.hugepages import PAGE
from kvcore.tiers.disk.io import (
    IOV_MAX,
    Move,
    Mover,
    Outcome,
    Outcomes,
    address_of,
    is_aligned,
    read_all,
    rest_of,
    write_all,
)

DEPTH = 512
"""The most moves under way in a call."""
_BUSY_MOVES, _BUSY_NBYTES = 8, 2 << 20
"""As many moves, and as many bytes, keep a device busy while this thread waits for a core. No more
are under way: a device that shares its rate among all of them ends them all at once, and then
nothing is left to read while their checksums are verified."""
_AT_ONCE = 32
"""The most ended moves that are handled before the queue is filled up again."""


class _Calls(NamedTuple):
    """The numbers of the system calls."""

    setup: int
    destroy: int
    getevents: int
    submit: int


_CALLS = {"x86_64": _Calls(206, 207, 208, 209), "aarch64": _Calls(0, 1, 4, 2)}

# struct iocb: data, key, rw_flags, opcode, reqprio, file, buffer, nbytes, offset, reserved, flags,
# resfd. Opcodes with a V take iovecs (base, nbytes) as the buffer and their number as nbytes.
_IOCB = struct.Struct("=QIIHhIQQqQII")
_PREAD, _PWRITE, _PREADV, _PWRITEV = 0, 1, 7, 8
_IOVEC = struct.Struct("=QQ")
_EVENT = struct.Struct("=QQqq")  # data, iocb, result, result2


class _Context:
    """A queue in the kernel, for one thread at a time. ctypes releases the GIL in each call."""

    def __init__(self) -> None:
        """Raise OSError if the kernel, its limits or a sandbox refuse."""
        calls = _CALLS.get(platform.machine())
        if calls is None or not os.uname().sysname == "Linux":
            raise OSError(errno.ENOSYS, f"asynchronous I/O is not known on {platform.machine()}")
        self._calls = calls
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall
        self._syscall.restype = ctypes.c_long
        self._id = ctypes.c_ulong(0)
        self._events = ctypes.create_string_buffer(_EVENT.size * _AT_ONCE)
        self._iocbs = ctypes.create_string_buffer(_IOCB.size * DEPTH)
        self._pointers = (ctypes.c_uint64 * DEPTH)()
        self._call(calls.setup, DEPTH, ctypes.addressof(self._id))

    def submit(self, iocbs: Sequence[bytes]) -> int:
        """Start up to DEPTH requests in order. Return how many were started, at least one.

        Raises OSError if the first could not be started. What the requests point to must live until
        their events.
        """
        start, size = ctypes.addressof(self._iocbs), _IOCB.size
        ctypes.memmove(start, b"".join(iocbs), size * len(iocbs))  # the kernel copies them
        for i in range(len(iocbs)):
            self._pointers[i] = start + i * size
        return self._call(
            self._calls.submit, self._id.value, len(iocbs), ctypes.addressof(self._pointers)
        )

    def wait(self) -> list[tuple[int, int]]:
        """Return (data, result) of one or more requests that have ended. Blocks until one has."""
        events = ctypes.addressof(self._events)
        while True:
            try:
                count = self._call(self._calls.getevents, self._id.value, 1, _AT_ONCE, events, 0)
            except InterruptedError:
                continue
            ended = memoryview(self._events)[: count * _EVENT.size]
            return [(event[0], event[2]) for event in _EVENT.iter_unpack(ended)]

    def close(self) -> None:
        self._call(self._calls.destroy, self._id.value)

    def _call(self, number: int, *arguments: int) -> int:
        result: int = self._syscall(*map(ctypes.c_long, (number, *arguments)))
        if result < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return result


class AioMover(Mover):
    """Moves through the kernel's queue, for files opened for direct I/O.

    The queue takes page-aligned buffers of up to 1024 parts. All other moves go to ``fallback``,
    after those of the queue. Each call has a context of its own, which is kept for later calls. If
    the kernel's limit allows no further context, the whole call goes to ``fallback``. Closing the
    mover closes ``fallback`` too.
    """

    def __init__(self, fallback: Mover) -> None:
        """Raise OSError if asynchronous I/O is not available."""
        self._fallback = fallback
        self._lock = threading.Lock()
        self._idle = [_Context()]

    def move(self, file: int, moves: Iterable[Move], *, write: bool) -> Outcomes:
        context = self._take()
        if context is None:
            yield from self._fallback.move(file, moves, write=write)
            return
        batch = _Batch(context, file, moves, write)
        try:
            yield from batch.outcomes()
        finally:
            batch.drain()
            with self._lock:
                self._idle.append(context)
        yield from self._fallback.move(file, batch.left, write=write)

    def close(self) -> None:
        for context in self._idle:
            context.close()
        self._idle = []
        self._fallback.close()

    def _take(self) -> _Context | None:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        try:
            return _Context()
        except OSError:
            return None


class _Prepared(NamedTuple):
    """A move about to start. ``held`` is what ``iocb`` points to besides the buffers."""

    number: int
    iocb: bytes
    move: Move
    held: object


class _Batch:
    """The moves of one call. Those that the kernel's queue cannot take are put into ``left``."""

    def __init__(self, context: _Context, file: int, moves: Iterable[Move], write: bool) -> None:
        self._context = context
        self._file = file
        self._moves = iter(moves)
        self.left: list[Move] = []
        self._write = write
        self._next = 0
        self._nbytes = 0  # of the moves under way
        self._under_way: dict[int, tuple[Move, object]] = {}
        """Moves by our own number, with the memory besides their buffers that the kernel reads."""

    def outcomes(self) -> Outcomes:
        """Start the moves as there is room, and yield the outcome of each as it ends."""
        failed = self._fill()
        while self._under_way or failed:
            ended = self._wait() if self._under_way else []
            yield from failed
            failed = self._fill()  # before the caller handles what has ended: keep the queue deep
            for move, result in ended:
                yield move.tag, self._outcome(move, result)

    def drain(self) -> None:
        """Wait for the moves that are under way."""
        while self._under_way:
            self._wait()

    def _wait(self) -> list[tuple[Move, int]]:
        """Return (move, the kernel's result) of some moves that have ended. Blocks."""
        ended = [(self._under_way.pop(n)[0], result) for n, result in self._context.wait()]
        self._nbytes -= sum(nbytes_of(move.buffers) for move, _ in ended)
        return ended

    def _fill(self) -> list[tuple[int, Outcome]]:
        """Start moves until the queue is full or none is left. Return those that did not start."""
        failed: list[tuple[int, Outcome]] = []
        while some := [self._prepare(move) for move in self._next_moves()]:
            failed += self._start(some)
        return failed

    def _next_moves(self) -> list[Move]:
        """Return at most `_AT_ONCE` moves for which there is room. Others are kept for later."""
        taken: list[Move] = []
        count, nbytes = len(self._under_way), self._nbytes
        while len(taken) < _AT_ONCE and count < DEPTH:
            if count >= _BUSY_MOVES and nbytes >= _BUSY_NBYTES:
                break
            move = next(self._moves, None)
            if move is None:
                break
            if len(move.buffers) > IOV_MAX or not is_aligned(move.buffers):
                self.left.append(move)
                continue
            taken.append(move)
            count, nbytes = count + 1, nbytes + nbytes_of(move.buffers)
        return taken

    def _start(self, prepared: list[_Prepared]) -> list[tuple[int, Outcome]]:
        failed: list[tuple[int, Outcome]] = []
        while prepared:
            try:
                started = self._context.submit([item.iocb for item in prepared])
            except OSError as error:
                failed.append((prepared.pop(0).move.tag, error))
                continue
            self._under_way.update((p.number, (p.move, p.held)) for p in prepared[:started])
            self._nbytes += sum(nbytes_of(p.move.buffers) for p in prepared[:started])
            prepared = prepared[started:]
        return failed

    def _prepare(self, move: Move) -> _Prepared:
        _, buffers, offset = move
        if len(buffers) == 1:
            opcode = _PWRITE if self._write else _PREAD
            place, count, held = address_of(buffers[0]), buffers[0].nbytes, None
        else:
            opcode = _PWRITEV if self._write else _PREADV
            iovecs = b"".join(_IOVEC.pack(address_of(part), part.nbytes) for part in buffers)
            held = ctypes.create_string_buffer(iovecs, len(iovecs))
            place, count = ctypes.addressof(held), len(buffers)
        self._next += 1
        iocb = _IOCB.pack(self._next, 0, 0, opcode, 0, self._file, place, count, offset, 0, 0, 0)
        return _Prepared(self._next, iocb, move, held)

    def _outcome(self, move: Move, result: int) -> Outcome:
        """Return the outcome of an ended move, after completing it if it moved only a part.

        Plain calls move the rest, because they report why the queue stopped.
        """
        if result < 0:
            return OSError(-result, os.strerror(-result))
        asked = nbytes_of(move.buffers)
        if result == asked or (result % PAGE and not self._write):
            return result  # a count that is not of whole pages: the file ends there
        rest = rest_of([part.cast("B") for part in move.buffers], result)
        try:
            if self._write:
                write_all(self._file, rest, move.offset + result)
                return asked
            return result + read_all(self._file, rest, move.offset + result)
        except OSError as error:
            return error
