"""A machine with a GPU that is not there: queued work, the order that was asked for, and faults.

    launch ──▶ queue of its stream ──▶ run later: when something waits for it, or at random

Work runs in any order that streams and events permit, so what was right by accident gives wrong
bytes. Independently of that, every access of memory carries a vector clock, and two accesses of a
place without an order between them are a fault, in whatever order they ran.

Queued work runs on the thread that forces it, under the machine's lock. It must not call back into
kvcore.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kvcore.errors import UnsupportedError
from kvcore.memory.hugepages import PAGE
from kvcore_devtools.gpu.allocator import Allocator
from kvcore_devtools.gpu.clocks import Access, Actor, Clock, call_site
from kvcore_devtools.gpu.memory import NOTHING, Conflict, Memory, Region, Spans, span
from kvcore_devtools.gpu.streams import Point, StreamQueue, Work

__all__ = ["STEP_S", "Call", "Fault", "Machine", "Point", "StreamQueue", "Work"]

_PATIENCE = 30
"""How often an event says that it has not passed, before what is queued before it runs."""

STEP_S = 1e-6
"""Seconds that one piece of queued work takes, for events that are timed."""


@dataclass(frozen=True)
class Fault:
    """Something that is wrong on a GPU, even if this run had the right bytes.

    ``kind`` is one of "race", "memory", "in use", "device", "pending error", "stall", "bytes",
    "work".
    """

    kind: str
    message: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


class Call(NamedTuple):
    """A call of the device.

    ``kind`` is one of "batch", "enter", "follow", "hold", "record", "register", "unregister",
    "upload". ``what`` is the sizes of a batch, the point of an event, the bytes of an upload, or
    an address. ``current`` is True if the thread had made this rank's device its current one.
    """

    kind: str
    what: Any
    stream: StreamQueue
    thread: str
    current: bool


class _Host(Actor):
    """A host thread: its current device and stream, and its pending error."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.device = 0
        self.stream: StreamQueue | None = None
        self.error = ""
        self.doing: list[str] = []
        self.in_step = False
        self.queues_torch = False


class Machine:
    """One rank's GPU, with index ``index``, and the process that uses it.

    ``seed`` chooses among the legal orders. After each call, queued work runs with probability
    ``eager``; 0 runs nothing before something waits for it, None chooses by the seed.
    ``lockable`` is how many bytes may be registered in all, and ``room`` how many bytes of the
    device's memory may be allocated; None is no limit. ``node`` is the device's NUMA node.
    ``on_register`` is called before each registration, on its thread, with the number of those
    that are held. It may block. All of these may be changed at any time.

    ``faults`` are those found so far. ``counts`` has the numbers of launches, host_waits, uploads,
    upload_nbytes and registrations, and ``by_op`` the same for each thing named with `doing`.
    ``calls`` are the calls of the device in their order, ``allocated`` the sizes of all that was
    allocated, and ``waited`` the names of the threads that have waited for the device.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        index: int = 0,
        eager: float | None = None,
        lockable: int | None = None,
    ) -> None:
        self.index = index
        self.memory = Memory()
        self.allocator = Allocator(self)
        self.faults: list[Fault] = []
        self.counts: Counter[str] = Counter()
        self.by_op: dict[str, Counter[str]] = {}
        self.lock = threading.RLock()
        self._random = random.Random(seed)
        self._eager = self._random.choice([0.0, 0.2, 0.8]) if eager is None else eager
        self.lockable = lockable
        self.room: int | None = None
        self.node: int | None = None
        self.on_register: Callable[[int], None] = lambda count: None
        self.calls: list[Call] = []
        self.allocated: list[int] = []
        self.waited: set[str] = set()
        self._queued: list[Work] = []
        self._kept: list[object] = []
        self._runner: int | None = None
        self._time = 0.0
        self._threads = threading.local()
        self.default = StreamQueue("the default stream")
        self.streams: list[StreamQueue] = [self.default]

    @property
    def registered(self) -> dict[int, int]:
        """The sizes of what is registered now by its address."""
        return self.memory.registered

    # -- host threads -----------------------------------------------------------------------

    def host(self) -> _Host:
        """Return the calling thread."""
        found: _Host | None = getattr(self._threads, "host", None)
        if found is None:
            thread = threading.current_thread()
            found = self._threads.host = _Host(f"thread {thread.name}")
            found.learn(getattr(thread, "_gpu_born", {}))
            thread._gpu_host = found  # type: ignore[attr-defined]
        return found

    def now(self) -> Clock:
        """Return what the calling thread knows, to pass on to another thread with `learn`."""
        return self.host().step()

    def learn(self, clock: Clock) -> None:
        """Order all that the calling thread does from now on after ``clock``."""
        self.host().learn(clock)

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Name what the calling thread does, for messages and for the counts by op."""
        host = self.host()
        host.doing.append(what)
        try:
            yield
        finally:
            host.doing.pop()

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Say that the calling thread is in an engine's step: it must not block for long."""
        host, before = self.host(), self.host().in_step
        host.in_step = True
        try:
            yield
        finally:
            host.in_step = before

    # -- memory -----------------------------------------------------------------------------

    def know_device(
        self, address: int, nbytes: int, name: str, place: Callable[[int], str] | None = None
    ) -> Region:
        """Let a range stand for device memory. ``place`` names an offset in it."""
        with self.lock:
            where = place or (lambda offset: f"{name}, byte {offset}")
            return self.memory.add(Region(name, address, address + nbytes, where, is_host=False))

    def know_host(
        self, address: int, nbytes: int, name: str, place: Callable[[int], str] | None = None
    ) -> Region:
        """Let a range be host memory that is tracked, registered or not."""
        with self.lock:
            where = place or (lambda offset: f"{name}, byte {offset}")
            region = Region(name, address, address + nbytes, where, is_host=True)
            region.why = "it is not registered"
            old = self.memory.at(address)
            if old is not None and old.is_host and old.start == address:
                region.why, region.live = old.why, old.live
            return self.memory.add(region)

    def keep(self, memory: object) -> None:
        """Keep memory alive as long as this machine: queued work has its address only."""
        self._kept.append(memory)

    def unmap(self, region: Region) -> None:
        """Take device memory away, as an engine's sleep does, or a free. Work must have ended."""
        with self.lock:
            self._expect_idle(span(region.start, region.stop - region.start), "unmapped")
            region.reached, region.why = False, f"it was unmapped at {call_site()}"

    def map_again(self, region: Region) -> None:
        """Give unmapped device memory back."""
        region.reached, region.why = True, ""

    def register(self, address: int, nbytes: int) -> None:
        """Register host memory. A failure leaves an error pending in the calling thread.

        Raises UnsupportedError if more than ``lockable`` bytes would be registered. Two
        registrations that share a page are a fault.
        """
        self.on_register(len(self.registered))
        with self.lock:
            self.needs_device("cudaHostRegister")
            self._count("registrations")
            if self.host().in_step:
                self.fault("stall", f"{nbytes} bytes are registered in a step, at {call_site()}")
            held = sum(self.registered.values())
            if self.lockable is not None and held + nbytes > self.lockable:
                self.host().error = f"cudaHostRegister of {nbytes} bytes, at {call_site()}"
                raise UnsupportedError(f"no room to lock {nbytes} bytes beside {held}")
            others = self.registered.items()
            if address % PAGE or any(
                at < address + nbytes and address < at + n for at, n in others
            ):
                self.fault("memory", f"two registrations may share a page, at {call_site()}")
            self.registered[address] = nbytes
            if not self.memory.parts(span(address, nbytes)):
                self.know_host(address, nbytes, "registered host memory")

    def unregister(self, address: int) -> None:
        """Undo `register`. No work may use the memory."""
        with self.lock:
            self.needs_device("cudaHostUnregister")
            nbytes = self.registered.pop(address, None)
            if nbytes is None:
                self.host().error = f"cudaHostUnregister of {address:#x}, at {call_site()}"
                self.fault("memory", f"nothing is registered at {address:#x}: {call_site()}")
                return
            self._expect_idle(span(address, nbytes), "unregistered")
            for region, _ in self.memory.parts(span(address, nbytes)):
                region.why = f"it was unregistered at {call_site()}"

    def take_error(self) -> str:
        """Return and forget the calling thread's pending error, as cudaGetLastError does."""
        host = self.host()
        error, host.error = host.error, ""
        return error

    def reaches(self, spans: Spans) -> bool:
        """Return True if the device can touch all of these bytes."""
        with self.lock:
            return self.memory.unknown(spans) is None and all(
                self.memory.unreached(*part) is None for part in self.memory.parts(spans)
            )

    def spans_two_registrations(self, spans: Spans) -> int | None:
        """Return the start of a range of ``spans`` that lies in more than one registration."""
        with self.lock:
            starts = np.array(sorted(self.memory.registered), dtype=np.int64)
            first, last = (
                np.searchsorted(starts, at, side="right") for at in (spans[:, 0], spans[:, 1] - 1)
            )
            over = np.flatnonzero((first != last) & (first > 0))
            return int(spans[over[0], 0]) if len(over) else None

    # -- streams ----------------------------------------------------------------------------

    def new_stream(self) -> StreamQueue:
        """Return a new stream."""
        with self.lock:
            number = len(self.streams)
            made = StreamQueue(f"stream {number} of {self.host().name}")
            self.streams.append(made)
            return made

    def current_stream(self) -> StreamQueue:
        """Return the stream that the calling thread issues to."""
        return self.host().stream or self.default

    @contextmanager
    def issuing(self, stream: StreamQueue) -> Iterator[None]:
        """Let the calling thread issue to ``stream`` in this block, with its device current.

        The same is true of ``torch.cuda.stream``.
        """
        host = self.host()
        before = host.stream, host.device
        host.stream, host.device = stream, self.index
        try:
            yield
        finally:
            host.stream, host.device = before

    def launch(
        self,
        what: str,
        run: Callable[[], None],
        *,
        reads: Spans = NOTHING,
        writes: Spans = NOTHING,
        pageable: bool = False,
    ) -> Work:
        """Queue work on the calling thread's stream, with all that it reads and writes.

        With ``pageable`` it may touch host memory that is not registered; the caller waits for it.
        Work that touches memory out of the device's reach is a fault, and does not run. Raises
        RuntimeError if an error is pending in the calling thread.
        """
        with self.lock:
            host, stream = self.host(), self.current_stream()
            self.needs_device(what)
            if error := self.take_error():
                self.fault("pending error", f"{what} meets the error that was left by {error}")
                raise RuntimeError(
                    f"simulated CUDA error: {what} follows {error}, which failed before"
                )
            what = " of ".join([what, *reversed(host.doing)])
            self._count("launches")
            stream.learn(host.step())
            clock, where = stream.step(), call_site()
            legal = True
            for spans, is_write in ((reads, False), (writes, True)):
                if len(spans):
                    legal &= self._expect_reached(what, where, spans, pageable)
                    self._touch(stream, clock, what, where, spans, is_write)
            work = self._queue(stream, what, run if legal else None)
            self._drift()
            return work

    def record(self, stream: StreamQueue) -> Point:
        """Record an event on a stream."""
        with self.lock:
            stream.learn(self.host().step())
            point = Point(self._queue(stream, "an event", None), stream.step(), stream.name)
            self._drift()
            return point

    def follow(self, stream: StreamQueue, point: Point) -> None:
        """Let a stream wait for an event."""
        with self.lock:
            stream.learn(self.host().step())
            stream.learn(point.clock)
            stream.awaited.append(point.work)
            self._drift()

    # -- the host waits ---------------------------------------------------------------------

    def wait(self, point: Point) -> None:
        """Run what is queued before an event, and order the calling thread after it.

        Raises RuntimeError if any of it failed.
        """
        with self.lock:
            self.needs_device("a wait for an event")
            self._count("host_waits")
            self.waited.add(threading.current_thread().name)
            self.force(point.work)
            self.host().learn(point.clock)
            if point.work.error is not None:
                raise RuntimeError("a kernel failed") from point.work.error

    def passed(self, point: Point) -> bool:
        """Return True if what was queued before an event has run.

        It may run now: with the probability ``eager``, or if this was asked often.
        """
        with self.lock:
            self.needs_device("the query of an event")
            point.asked += 1
            if point.asked > _PATIENCE or self._random.random() < self._eager:
                self.force(point.work)
            if point.work.done:
                self.host().learn(point.clock)
            return point.work.done

    def synchronize(self) -> None:
        """Run all that is queued, and order the calling thread after it."""
        with self.lock:
            self._count("host_waits")
            self.waited.add(threading.current_thread().name)
            self.finish()
            for stream in self.streams:
                self.host().learn(stream.clock)

    def force(self, work: Work) -> None:
        """Run a piece of queued work and what it needs, in a random legal order.

        No thread is ordered after it: the GPU went on by itself.
        """
        with self.lock:
            while not work.done:
                wanted = self._before(work) if self._random.random() < 0.7 else set(self._queued)
                self._run_one([one for one in self._queued if one in wanted])

    def finish(self) -> None:
        """Run all that is queued, in a random legal order, without ordering a thread after it."""
        with self.lock:
            while self._queued:
                self._run_one(self._queued)

    # -- synchronous access -----------------------------------------------------------------

    def touch(self, what: str, spans: Spans, *, writes: bool) -> None:
        """Record that the calling thread itself reads or writes memory now."""
        with self.lock:
            host = self.host()
            what = " of ".join([what, *reversed(host.doing)])
            self._touch(host, host.step(), what, call_site(), spans, writes)

    # -- faults -----------------------------------------------------------------------------

    def fault(self, kind: str, message: str) -> None:
        """Record a fault."""
        with self.lock:
            self.faults.append(Fault(kind, message))

    def check(self) -> None:
        """Run all that is queued, and raise AssertionError if there was a fault."""
        self.finish()
        if self.faults:
            some = "\n\n".join(map(str, self.faults[:5]))
            raise AssertionError(f"{len(self.faults)} faults, the first of which are:\n\n{some}")

    def needs_device(self, what: str) -> None:
        """Record a fault if another device than this rank's is the thread's current one.

        The CUDA runtime then fails, or makes a context of hundreds of MiB on the other GPU. The
        creation of a stream and the record of an event do not need it: torch guards them.
        """
        host = self.host()
        if host.device != self.index:
            self.fault(
                "device",
                f"{what} is called with current device {host.device} in a rank of device "
                f"{self.index}, on {host.name}, at {call_site()}",
            )

    def note(self, kind: str, what: Any, stream: StreamQueue | None = None) -> None:
        """Add to ``calls``. The calling thread's stream takes the place of None."""
        host, stream = self.host(), stream or self.current_stream()
        name = threading.current_thread().name
        self.calls.append(Call(kind, what, stream, name, host.device == self.index))

    def upload(self, nbytes: int, run: Callable[[], None], writes: Spans) -> None:
        """Queue a copy of a host array to the device."""
        with self.lock:
            self.needs_device("an upload")
            self._count("uploads")
            self._count("upload_nbytes", nbytes)
            stream = self.current_stream()
            stream.learn(self.host().step())
            self._touch(stream, stream.step(), "an upload", call_site(), writes, writes=True)
            work = self._queue(stream, "an upload", run)
            if not self.host().queues_torch:
                self.force(work)  # what reads it is not queued either
            self._drift()

    @property
    def runs_queued(self) -> bool:
        """True if the calling thread is just running queued work."""
        return self._runner == threading.get_ident()

    # -- under the lock ---------------------------------------------------------------------

    def _count(self, what: str, by: int = 1) -> None:
        self.counts[what] += by
        for op in self.host().doing:
            self.by_op.setdefault(op, Counter())[what] += by

    def _queue(self, stream: StreamQueue, what: str, run: Callable[[], None] | None) -> Work:
        needs = [*stream.awaited, *([stream.last] if stream.last is not None else [])]
        work = Work(what, run, needs, stream)
        stream.last, stream.awaited = work, []
        self._queued.append(work)
        return work

    def _before(self, work: Work) -> set[Work]:
        found: set[Work] = set()
        open_ = [work]
        while open_:
            one = open_.pop()
            if one not in found and not one.done:
                found.add(one)
                open_ += one.needs
        return found

    def _run_one(self, among: list[Work]) -> None:
        ready = [one for one in among if all(need.done for need in one.needs)]
        self._run(self._random.choice(ready))

    def _run(self, work: Work) -> None:
        self._queued.remove(work)
        work.error = next((one.error for one in work.needs if one.error is not None), None)
        self._runner = threading.get_ident()
        try:
            if work.run is not None:
                work.run()
        except Exception as error:  # noqa: BLE001 - a kernel that fails must not stop the others
            self.fault("work", f"{work.what} failed: {error!r}")
            work.error = error
        finally:
            self._runner = None
            self._time += STEP_S
            work.done, work.at, work.run, work.needs = True, self._time, None, []

    def _drift(self) -> None:
        """Let the device go on by itself for a while."""
        while self._queued and self._random.random() < self._eager:
            self._run_one(self._queued)

    def _touch(
        self, actor: Actor, clock: Clock, what: str, where: str, spans: Spans, writes: bool
    ) -> None:
        step = clock[actor.number]
        access = Access(actor.number, step, actor.name, what, where, writes, spans)
        for conflict in self.memory.touch(access, clock):
            self._race(conflict)

    def _race(self, conflict: Conflict) -> None:
        self.fault(
            "race",
            f"no order between two accesses of {conflict.place}:\n"
            f"  it is {conflict.earlier}\n  it is {conflict.later}",
        )

    def _expect_reached(self, what: str, where: str, spans: Spans, pageable: bool) -> bool:
        before = len(self.faults)
        unknown = self.memory.unknown(spans)
        if unknown is not None and not pageable:
            self.fault("memory", f"{what} touches {unknown:#x}, which nothing made known: {where}")
        for region, inside in self.memory.parts(spans):
            address = self.memory.unreached(region, inside)
            if address is not None and not (pageable and region.is_host):
                place = region.place(address - region.start)
                self.fault("memory", f"{what} touches {place}, but {region.why}: {where}")
        return len(self.faults) == before

    def _expect_idle(self, spans: Spans, done: str) -> None:
        """Record a fault for each use that the calling thread is not ordered after.

        Queued work runs, because the memory may really be gone soon.
        """
        conflicts = self.memory.in_use(spans, self.host().clock)
        if conflicts:
            self.finish()
        for conflict in conflicts:
            self.fault(
                "in use",
                f"{conflict.place} is {done} on {self.host().name} at {call_site()}, but there is "
                f"no order after its use:\n  it is {conflict.earlier}",
            )
