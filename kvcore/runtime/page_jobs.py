"""Stores and loads of an engine's pages in threads of kvcore's own. Its thread never waits for I/O.

    engine's thread       find         load, store             take_ended
                           │                │                       ▲
    kvcore-pages-ask       ▼ medium         ▼ jobs in order         │ ended, or too late
    kvcore-pages-load-N    medium ──▶ a buffer of the thread ──▶ rows of the engine
    kvcore-pages-store     rows of the engine ──▶ a buffer of the thread ──▶ medium

A medium may hang for as long as it likes. A thread touches the engine's rows only while it copies
between them and its buffer, which is memory of kvcore's own. So a job can be ended at its deadline,
and the engine can give the job's rows to others at once.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvcore._util.threads import GuardedThread
from kvcore.memory.buffers import Buffers
from kvcore.runtime.page_store import PageCounts, Pages

__all__ = ["BUFFER_NBYTES", "Ended", "PageJobs"]

LOADERS = 2
"""Threads that load, so that a short load does not wait for a long one."""
BUFFER_NBYTES = 8 << 20
"""Bytes of each thread's buffer; of one row, if a row is larger."""
FAILED_S = 5.0
"""Seconds for which a page whose load failed is not found."""
KEPT = 1 << 16
"""Most keys that are asked about, or known to be absent, at a time."""
CLOSE_S = 10.0
"""Longest wait of `PageJobs.close` for the jobs that are under way, and then for the threads."""


class Ended(NamedTuple):
    """A job that has ended. Its rows are the engine's again.

    ``good`` are the positions of the pages that were loaded, or that are stored now.
    """

    number: int
    keys: Sequence[str]
    good: tuple[int, ...]
    seconds: float


@dataclass(eq=False)
class _Job:
    number: int
    loads: bool
    keys: Sequence[str]
    rows: Sequence[int]
    space: bytes
    began: float
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while a thread copies from or to the rows."""
    left: bool = False
    """The job has ended: its rows must not be touched."""
    started: bool = False
    good: list[int] = field(default_factory=list)


class PageJobs:
    """The jobs of one engine on ``pages``. One thread of the engine calls the methods.

    `drain`, `clear` and `close` block. All others wait for locks only: for bookkeeping of other
    threads, and in `take_ended` at a deadline for one copy of `BUFFER_NBYTES` in memory.

    Args:
        memory: the engine's rows, uint8, [rows, bytes of a page].
        deadline_s: seconds after which a job is ended without having been carried out.
    """

    def __init__(
        self,
        pages: Pages,
        memory: npt.NDArray[np.uint8],
        deadline_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pages = pages
        self._memory: npt.NDArray[np.uint8] | None = memory
        self._nbytes = int(memory.shape[1])
        self._deadline_s = deadline_s
        self._clock = clock
        self._changed = threading.Condition()
        self._queues: dict[bool, deque[_Job]] = {True: deque(), False: deque()}
        self._open: dict[int, _Job] = {}
        self._ended: list[Ended] = []
        self._asked: dict[str, float] = {}
        self._asking_since: float | None = None
        self._absent: OrderedDict[str, float] = OrderedDict()
        self._used: deque[Sequence[str]] = deque(maxlen=64)
        self._busy: dict[str, float] = {}  # since when a thread is in one operation
        self._hung: dict[bool, bool] = {True: False, False: False}
        self._stopped = False
        self._closed = False
        self.late = 0
        """Jobs that were ended at their deadline."""
        loaders = {f"kvcore-pages-load-{i}": True for i in range(LOADERS)}
        self._movers = {**loaders, "kvcore-pages-store": False}
        self._threads = [
            GuardedThread("kvcore-pages-ask", self._answer, self._die),
            *(
                GuardedThread(name, partial(self._move, name, loads), self._die)
                for name, loads in self._movers.items()
            ),
        ]
        for thread in self._threads:
            thread.start()

    # -- the engine's thread ------------------------------------------------------------------

    def find(self, key: str) -> bool | None:
        """Return True if a page can be loaded, False if not, None if that is being asked.

        It is False at the latest after `Pages.lookup_s` seconds.
        """
        now = self._clock()
        with self._changed:
            if self._stopped or self._hung[True] or now < self._absent.get(key, now):
                return False
            if self._pages.holds(key):
                self._asked.pop(key, None)
                return True
            if not self._pages.shared:
                return False
            late = now - self._pages.lookup_s
            hangs = self._asking_since is not None and self._asking_since < late
            if hangs or self._asked.get(key, now) < late or len(self._asked) >= KEPT:
                self._asked.pop(key, None)
                return False
            if key not in self._asked:
                self._asked[key] = now
                self._changed.notify_all()
            return None

    def use(self, keys: Sequence[str]) -> None:
        """Have a use of pages counted, which keeps them from being evicted."""
        with self._changed:
            self._used.append(keys)
            self._changed.notify_all()

    def load(self, number: int, keys: Sequence[str], rows: Sequence[int]) -> None:
        """Have pages loaded into rows. `take_ended` tells the end of job ``number``."""
        self._submit(True, number, keys, rows)

    def store(self, number: int, keys: Sequence[str], rows: Sequence[int]) -> None:
        """Have rows stored as pages. The rows must not change until `take_ended` tells the end."""
        self._submit(False, number, keys, rows)

    def take_ended(self) -> list[Ended]:
        """Return the jobs that have ended since the last call, also those that are too late."""
        with self._changed:
            self._expire()
            ended, self._ended = self._ended, []
            return ended

    def drain(self, limit_s: float | None = None) -> None:
        """Block until every job has ended, at its deadline at the latest, or ``limit_s`` is over.

        Jobs that have not ended after ``limit_s`` seconds are ended then.
        """
        until = None if limit_s is None else self._clock() + limit_s
        with self._changed:
            while True:
                self._expire()
                if not self._open:
                    return
                now = self._clock()
                if until is not None and now >= until:
                    break
                due = min(job.began for job in self._open.values()) + self._deadline_s
                self._changed.wait(max(0.001, min(due, until or due) - now))
            self._leave_all()

    def renew(self) -> None:
        """Find nothing that was stored before. Stores under way count as stored before."""
        with self._changed:
            self._pages.renew()

    def clear(self) -> None:
        """Forget every page, on the medium too. Blocks for that; no job may be under way."""
        self._pages.clear()

    def stop(self) -> None:
        """Find and carry out nothing from now on, and end all jobs. No row is touched after it."""
        with self._changed:
            self._stopped = True
            self._leave_all()
            self._memory = None

    def counts(self) -> PageCounts:
        return self._pages.counts()

    def close(self) -> None:
        """Finish the jobs under way, end the threads and close the pages. Blocks. Idempotent.

        A thread that hangs in the medium is left behind after `CLOSE_S` seconds, with a warning.
        The medium then stays open.
        """
        with self._changed:
            if self._closed:
                return
        if not self._stopped:
            self.drain(CLOSE_S)
        self.stop()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        until = time.monotonic() + CLOSE_S
        ended = [thread.join(until - time.monotonic()) for thread in self._threads]
        if all(ended):
            self._pages.close()

    # -- with the lock held -------------------------------------------------------------------

    def _submit(self, loads: bool, number: int, keys: Sequence[str], rows: Sequence[int]) -> None:
        with self._changed:
            job = _Job(number, loads, keys, rows, self._pages.space, self._clock())
            self._open[number] = job
            if self._stopped or self._hung[loads]:
                self._leave(job)
                return
            self._queues[loads].append(job)
            self._changed.notify_all()

    def _expire(self) -> None:
        """End the jobs that are too late, and note which threads hang."""
        late = self._clock() - self._deadline_s
        due = [job for job in self._open.values() if job.began <= late]
        for job in due:
            self.late += 1
            if job.started:
                self._pages.late()
            self._leave(job)
        for loads in self._hung:
            since = [self._busy.get(name) for name, of in self._movers.items() if of is loads]
            self._hung[loads] = all(began is not None and began <= late for began in since)

    def _leave_all(self) -> None:
        for job in list(self._open.values()):
            self._leave(job)

    def _leave(self, job: _Job) -> None:
        """End a job, whatever a thread is doing with it."""
        with job.lock:
            job.left = True
        self._note_end(job)

    def _note_end(self, job: _Job) -> None:
        if self._open.pop(job.number, None) is None:
            return
        now = self._clock()
        good = set(job.good)
        for i, key in enumerate(job.keys):
            if i in good:
                self._absent.pop(key, None)
            elif job.loads:
                self._note_absent(key, now + FAILED_S)
        self._ended.append(Ended(job.number, job.keys, tuple(sorted(good)), now - job.began))
        self._changed.notify_all()

    def _note_absent(self, key: str, until: float) -> None:
        self._absent[key] = until
        self._absent.move_to_end(key)
        if len(self._absent) > KEPT:
            self._absent.popitem(last=False)

    # -- the threads --------------------------------------------------------------------------

    def _die(self, error: BaseException) -> None:
        self.stop()

    def _answer(self) -> None:
        """Count uses, and ask the medium about pages."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._used or self._asked)
                if self._closed:
                    return
                used, keys = [*self._used], [*self._asked]
                self._used.clear()
                self._asking_since = self._clock() if keys else None
            for those in used:
                self._pages.use(those)
            held = self._pages.ask(keys)
            with self._changed:
                until = self._clock() + self._pages.absent_s
                for key, there in zip(keys, held, strict=True):
                    self._asked.pop(key, None)
                    if not there:
                        self._note_absent(key, until)
                self._asking_since = None

    def _move(self, name: str, loads: bool) -> None:
        buffer: npt.NDArray[np.uint8] | None = None
        while (job := self._next(name, loads)) is not None:
            if buffer is None:
                buffer = self._make_buffer()
            for start in range(0, len(job.keys), len(buffer)):
                with self._changed:
                    self._busy[name] = self._clock()
                part = range(start, min(start + len(buffer), len(job.keys)))
                if not (self._load(job, part, buffer) if loads else self._store(job, part, buffer)):
                    break
            with self._changed:
                self._note_end(job)

    def _next(self, name: str, loads: bool) -> _Job | None:
        """Wait for a job that has not ended; None if there will be no more."""
        queue = self._queues[loads]
        with self._changed:
            self._busy.pop(name, None)
            while True:
                self._changed.wait_for(lambda: self._closed or queue)
                if self._closed:
                    return None
                job = queue.popleft()
                if not job.left:
                    job.started = True
                    return job

    def _make_buffer(self) -> npt.NDArray[np.uint8]:
        """Return rows of memory that begins at a page of the system, as direct I/O wants it."""
        rows = max(1, BUFFER_NBYTES // self._nbytes)
        memory = mmap.mmap(-1, rows * self._nbytes)
        return np.frombuffer(memory, dtype=np.uint8).reshape(rows, self._nbytes)

    def _load(self, job: _Job, part: range, buffer: npt.NDArray[np.uint8]) -> bool:
        """Load a part of a job; return False if the job has ended."""
        keys = [job.keys[i] for i in part]
        found = self._pages.get(keys, _pages(buffer, len(keys)), job.space)
        with job.lock:
            if job.left:
                return False
            assert self._memory is not None, "jobs are left before the memory is"
            for at, i in enumerate(part):
                if found[at]:
                    np.copyto(self._memory[job.rows[i]], buffer[at])
                    job.good.append(i)
        return True

    def _store(self, job: _Job, part: range, buffer: npt.NDArray[np.uint8]) -> bool:
        """Store a part of a job, less what is held already; return False if the job has ended."""
        held = self._pages.ask([job.keys[i] for i in part], job.space)
        new = [i for i, there in zip(part, held, strict=True) if not there]
        with job.lock:
            if job.left:
                return False
            assert self._memory is not None, "jobs are left before the memory is"
            for at, i in enumerate(new):
                np.copyto(buffer[at], self._memory[job.rows[i]])
        keys = [job.keys[i] for i in new]
        stored = self._pages.put(keys, _pages(buffer, len(keys)), job.space) if new else []
        with job.lock:
            if job.left:
                return False
            job.good += [i for i, there in zip(part, held, strict=True) if there]
            job.good += [i for i, there in zip(new, stored, strict=True) if there]
        return True


def _pages(buffer: npt.NDArray[np.uint8], count: int) -> list[Buffers]:
    return [[buffer[i].data] for i in range(count)]
