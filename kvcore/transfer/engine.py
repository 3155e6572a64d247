"""Runs transfer graphs: one queue per path, each op started when its deps have ended.

    order   priority ──▶ wave ──▶ first layer ──▶ arrival

A wave is a set of graphs that are waited for together, layer by layer: the loads of a step, or the
chunks of a blend. Layer 0 of all graphs of a wave is copied before layer 1 of any of them, and an
earlier wave before a later one.

Waves are numbered by a clock that also counts the bytes of the loads that were begun. A load that
no step waits for is a wave of its own, as late as if its own bytes had been moved first:

    the clock   ──┬─────────────────┬────────────────▶
      large load  └── 4 GiB ────────┼───────▶ its wave
      small load                    └ 8 MiB ▶ its wave: it overtakes what is left of the large one

So the load with the fewest bytes left goes first: the sum of all waits is then the smallest, where
taking turns would let loads of one size all end at the end. But none waits for ever: once as many
bytes as its own were moved by others, no later load overtakes it.

    op      created ──▶ ready ──▶ running ──▶ issued ──▶ completed | failed
                  │       │           └──────────────────▶
                  └───────┴──▶ cancelled (by the caller, a deadline, or close)

The saves of a named wave are those of one step, of a few blocks each. Those that wait together are
joined: the executor copies all of them at once, up to `COPY_BYTES`, for about the cost of one op.
Each keeps its own state and reports its own end. If copies that were joined cannot be issued, each
is issued alone, and only those fail that fail alone.

A large save comes in several ops, each of at most `COPY_BYTES` where a row is not larger. So a step
that gives away the pages of a short save waits for two of them at most, and not for all that was
saved before: the short save is put first.

An executor may return before its work has ended, with what to wait for: the op is then *issued*.
Its thread goes on to the next op, and a second thread waits for the ends in order. Whoever may go
on once the work is in a queue of the device waits for "issued" only (`wait_issued`), and lets its
own stream wait for the rest. All reasons why rows of an op may fail are known by then: an op that
was issued can fail only if the device itself fails. Dependent ops and reports wait for the end.

What is issued cannot be overtaken. So at most `SAVES_ISSUED` ops of saves a thread are issued and
have not ended, and at most `BYTES_ISSUED` of the loads that no step waits for. The loads of a named
wave are issued as soon as they are ready, and so is any op that `wait_issued` waits for.

A row that fails does not stop the others: ops that depend on it skip that row and report it as
failed upstream. The outcome of each op is reported as an ``OpReport``.

An error of the engine's own stops it, because its books may be wrong: what has not started is
cancelled, what is under way ends, and `submit` refuses all that follows, naming the thread and the
error. Nobody waits for ever. An error of the observer stops nothing.

Thread safety: every public method may be called from any thread. Executors are called from the
engine's own threads, never under its lock, and may block.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from enum import Enum
from functools import partial
from typing import NamedTuple, Protocol, runtime_checkable

from kvcore._util.cpus import settle_thread
from kvcore._util.threads import GuardedThread, InOrder
from kvcore.errors import CapacityError, TransferError
from kvcore.transfer.graph import (
    COPY_BYTES,
    OpReport,
    Path,
    Priority,
    RowError,
    TransferGraph,
    TransferOp,
)

__all__ = [
    "Executor",
    "Issued",
    "JoiningExecutor",
    "OpPart",
    "OpState",
    "OpTiming",
    "TransferEngine",
]

_log = logging.getLogger("kvcore.transfer")

SAVES_ISSUED = 2
"""The most ops of saves and spills that a thread has issued and that have not ended."""

BYTES_ISSUED = 2 * COPY_BYTES
"""The most bytes of loads without a wave that a thread has issued to a device and that have not
ended, unless it is one op: two ops, so that the device always has one while the host sees the end
of another."""

_AWAITED = -1
"""The priority of ops that somebody waits for."""

_START_FAILED_S = 5.0
"""Seconds that the constructor waits for threads that have nothing to do, if one cannot start."""


class OpState(Enum):
    """State of an op in flight."""

    CREATED = "created"
    READY = "ready"
    RUNNING = "running"
    ISSUED = "issued"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        """True for the final states."""
        return self in (OpState.COMPLETED, OpState.FAILED, OpState.CANCELLED)

    @property
    def issued(self) -> bool:
        """True once the device has the op's work in a queue, and in the final states."""
        return self is OpState.ISSUED or self.ended


class Issued(Protocol):
    """Work in a queue of a device."""

    def wait(self) -> None:
        """Block, without spinning, until the work has ended. Raises if the device has failed."""
        ...

    def seconds(self) -> float:
        """Return how long the device was at work. Call after `wait`."""
        ...


class Executor(Protocol):
    """Moves the bytes of one path."""

    def run(
        self, graph: TransferGraph, op: TransferOp, rows: list[int]
    ) -> dict[int, RowError] | Issued:
        """Copy ``rows`` of ``op``.

        Blocks until they are copied and returns the rows that failed. Or returns what to wait for,
        once a device has all copies in a queue.
        """
        ...


class OpPart(NamedTuple):
    """An op among several that are carried out at once: ``rows`` of ``op`` of ``graph``."""

    graph: TransferGraph
    op: TransferOp
    rows: list[int]


@runtime_checkable
class JoiningExecutor(Executor, Protocol):
    """An executor that can copy rows of several graphs at once."""

    def run_joined(self, parts: Sequence[OpPart]) -> Issued | None:
        """Copy all rows of ``parts``, or raise.

        Returns None once they are copied, or what to wait for, once a device has all copies in a
        queue. If it raises, what it has issued has ended; any of the parts may be run again.
        """
        ...


_Which = Callable[[TransferOp], bool]

_Entry = tuple[int, int, int, int, int, int]
"""Priority, wave, first layer, arrival, id of the graph, and position of the op in it."""


class OpTiming(NamedTuple):
    """What the observer of an engine receives when an op ends; ``started`` is a clock time."""

    op: TransferOp
    rows: int
    failed: int
    seconds: float
    graph_id: int
    started: float


class _Taken(NamedTuple):
    """An op that a thread carries out. ``counted`` if it counts against what may be issued.

    Of ops that are joined the first one counts for all.
    """

    run: _ActiveGraph
    position: int
    upstream: dict[int, RowError]
    rows: list[int]
    counted: bool

    @property
    def op(self) -> TransferOp:
        return self.run.graph.ops[self.position]


_Ends = InOrder[tuple[list[_Taken], Issued]]
"""Sees the ends of what a thread has issued, in order."""


class _ActiveGraph:
    """A graph in flight. All fields are guarded by the engine's lock."""

    def __init__(
        self,
        graph: TransferGraph,
        deadline: float | None,
        wave: int,
        nbytes: list[int],
        *,
        alone: bool,
    ) -> None:
        self.graph = graph
        self.deadline = deadline
        self.wave = wave
        self.nbytes = nbytes  # by position
        self.alone = alone  # True without a named wave
        self.states = [OpState.CREATED] * len(graph.ops)
        self.index = {op.op_id: i for i, op in enumerate(graph.ops)}
        self.failed: dict[int, RowError] = {}
        self.issued: dict[int, Issued] = {}  # by position
        self.awaited: set[int] = set()  # positions of ops that were put first

    def positions(self, which: _Which) -> list[int]:
        return [i for i, op in enumerate(self.graph.ops) if which(op)]

    def ended(self, which: _Which) -> bool:
        return all(self.states[i].ended for i in self.positions(which))

    def all_issued(self, which: _Which) -> bool:
        return all(self.states[i].issued for i in self.positions(which))

    def runnable(self) -> list[int]:
        """Return the positions of created ops whose deps have all ended."""
        return [
            i
            for i, op in enumerate(self.graph.ops)
            if self.states[i] is OpState.CREATED
            and all(self.states[self.index[dep]].ended for dep in op.deps)
        ]


class TransferEngine:
    """Runs graphs on the threads of one worker.

    ``executors`` maps each path to its executor, ``threads`` to its number of threads (default 1).
    At most ``queue_depth`` ops are in flight. ``nbytes`` returns the bytes that an op moves here,
    for the order of loads and their limit. ``observer`` is called for every op that ran; what it
    raises is logged once. ``near`` are cores that the threads prefer (`settle_thread`). Raises
    CapacityError if a thread cannot be started.
    """

    def __init__(
        self,
        executors: Mapping[Path, Executor],
        *,
        threads: Mapping[Path, int] | None = None,
        queue_depth: int = 4096,
        nbytes: Callable[[TransferOp], int] = lambda op: 0,
        observer: Callable[[OpTiming], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        near: Set[int] = frozenset(),
    ) -> None:
        self._near = near
        self._executors = dict(executors)
        self._depth = queue_depth
        self._nbytes = nbytes
        self._observer = observer
        self._clock = clock
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._work = {path: threading.Condition(self._lock) for path in self._executors}
        self._queues: dict[Path, list[_Entry]] = {path: [] for path in self._executors}
        self._runs: dict[int, _ActiveGraph] = {}
        self._reports: list[OpReport] = []
        self._live_ops = 0
        self._order = 0
        self._closed = False
        self._stopped = ""
        self._observer_failed = False
        counts = threads or {}
        self._counts = {path: counts.get(path, 1) for path in self._executors}
        self._saves_issued = dict.fromkeys(self._executors, 0)
        self._bytes_issued = dict.fromkeys(self._executors, 0)
        self._ends: list[_Ends] = []
        self._threads = [
            self._thread(path, f"kvcore-{path.value}-{n}")
            for path, count in self._counts.items()
            for n in range(count)
        ]
        if not all(thread.start() for thread in self._threads):
            self.close(timeout=_START_FAILED_S)
            raise CapacityError(
                f"the transfer engine needs {len(self._threads)} threads, of which one cannot be "
                "started: raise the limit of processes (pids, ulimit -u)"
            )

    # -- submitting -------------------------------------------------------------------------

    def wave(self) -> int:
        """Return a new wave, which comes after every earlier wave."""
        with self._lock:
            return self._next()

    def submit(self, graph: TransferGraph, wave: int | None = None) -> None:
        """Start ``graph`` in ``wave``, or in a wave of its own. Does not block.

        Raises CapacityError if the ops in flight would exceed ``queue_depth``. Raises TransferError
        if the graph is malformed, uses a path without executor, or if its id is in flight, and
        once the engine has `stopped`.
        """
        graph.check()
        if missing := {op.path.value for op in graph.ops} - {p.value for p in self._executors}:
            have = sorted(path.value for path in self._executors)
            raise TransferError(
                f"graph {graph.graph_id} needs paths {sorted(missing)}; this engine has {have}"
            )
        with self._lock:
            if self._stopped:
                raise TransferError(f"graph {graph.graph_id}: {self._stopped}")
            if self._closed:
                raise TransferError(f"graph {graph.graph_id}: the transfer engine is closed")
            if graph.graph_id in self._runs:
                raise TransferError(f"graph {graph.graph_id} is already in flight")
            if self._live_ops + len(graph.ops) > self._depth:
                raise CapacityError(
                    f"graph {graph.graph_id} has {len(graph.ops)} ops and {self._live_ops} are in "
                    f"flight; the limit is {self._depth} (transfer.queue_depth)"
                )
            deadline = None if graph.deadline_s is None else self._clock() + graph.deadline_s
            nbytes = [self._nbytes(op) for op in graph.ops]
            alone = wave is None
            if wave is None:
                own = sum(nbytes) if graph.priority is Priority.LOAD else 0
                wave = self._next() + own
            run = _ActiveGraph(graph, deadline, wave, nbytes, alone=alone)
            self._runs[graph.graph_id] = run
            self._live_ops += len(graph.ops)
            self._advance(run)
            self._forget_if_ended(run)

    def cancel(self, graph_id: int) -> None:
        """Cancel the ops of a graph that have not started; running ops finish."""
        with self._lock:
            if run := self._runs.get(graph_id):
                self._cancel(run, RowError.CANCELLED)

    # -- waiting ----------------------------------------------------------------------------

    def wait(self, graph_id: int, timeout: float | None = None) -> bool:
        """Block until every op of the graph has ended, at most ``timeout`` seconds; True if so."""
        return self._wait(graph_id, lambda run: run.ended(_every), timeout)

    def wait_device(self, graph_id: int, timeout: float | None = None) -> bool:
        """Wait as ``wait`` does, only for the ops that touch the device."""
        return self._wait(graph_id, lambda run: run.ended(_on_device), timeout)

    def wait_issued(
        self, graph_id: int, layer: int | None = None, timeout: float | None = None
    ) -> bool:
        """Block until the device has all copies of a graph in its queues, or they have ended.

        With ``layer``, waits only for the copies of layers up to and including this one. These ops
        are issued before others.
        Every failure of their rows that is not one of the device itself can be polled afterwards.
        Returns False after ``timeout`` seconds.
        """
        which = _up_to(layer)

        def issued(run: _ActiveGraph) -> bool:
            self._put_first(run, which)
            return run.all_issued(which)

        return self._wait(graph_id, issued, timeout)

    def wait_idle(self, timeout: float) -> bool:
        """Block until no op in flight touches the device, at most ``timeout`` seconds; True if so.

        Ops that have not started and ops that were issued count too. Those of a graph that copies
        no unit do not: it may wait for a read that hangs.
        """

        def idle() -> bool:
            return all(
                run.ended(_on_device) or not run.graph.uses_units for run in self._runs.values()
            )

        with self._lock:
            return self._until(idle, timeout)

    def wait_report(self, timeout: float) -> bool:
        """Block until a report can be polled, at most ``timeout`` seconds; True if so."""
        with self._lock:
            return self._until(lambda: bool(self._reports), timeout)

    def wait_graph(self, timeout: float) -> bool:
        """Block until some graph has ended and its last reports can be polled; True if so.

        Blocks at most ``timeout`` seconds.
        For callers that cannot use part of a graph: each wake-up takes the interpreter from threads
        that read.
        """

        def ended() -> bool:
            return any(report.graph_id not in self._runs for report in self._reports)

        with self._lock:
            return self._until(ended, timeout)

    def poll(self) -> list[OpReport]:
        """Take the reports of the ops that ended since the last call. Does not block."""
        with self._lock:
            self._expire(self._clock())
            reports, self._reports = self._reports, []
            return reports

    def put_first(self, graph_ids: Iterable[int]) -> None:
        """Issue the device ops of these graphs before all others, for who will wait for each."""
        with self._lock:
            for graph_id in graph_ids:
                if run := self._runs.get(graph_id):
                    self._put_first(run, _on_device)

    # -- looking ----------------------------------------------------------------------------

    @property
    def stopped(self) -> str:
        """Why the engine takes no more graphs: an error of its own. Empty while it works."""
        return self._stopped

    @property
    def in_flight(self) -> int:
        """Number of ops submitted that have not ended."""
        with self._lock:
            return self._live_ops

    def issued(self, graph_id: int, layer: int | None = None) -> list[Issued]:
        """Return the copies of a graph that were issued and may not have ended.

        With ``layer``, returns only those of layers up to and including this one.
        """
        which = _up_to(layer)
        with self._lock:
            run = self._runs.get(graph_id)
            ops = () if run is None else run.graph.ops
            return [] if run is None else [c for i, c in run.issued.items() if which(ops[i])]

    def close(self, *, drain: bool = True, timeout: float = 30.0) -> bool:
        """Stop the threads. With ``drain``, saves and spills in flight are finished first.

        Returns True if everything ended within ``timeout`` seconds. A thread stuck in a hung device
        is left behind; it is a daemon.
        """
        limit = self._clock() + timeout
        with self._lock:
            if not drain:
                for run in list(self._runs.values()):
                    self._cancel(run, RowError.CANCELLED)
            self._changed.wait_for(lambda: not self._runs, timeout)
            for run in list(self._runs.values()):
                self._cancel(run, RowError.CANCELLED)
            self._closed = True
            self._wake_threads()
        ended = [thread.join(limit - self._clock()) for thread in self._threads]
        ended += [ends.join(limit - self._clock()) for ends in self._ends]
        return all(ended)

    def check_integrity(self) -> None:
        """Raise TransferError unless the counters agree with the graphs in flight."""
        with self._lock:
            live = sum(1 for r in self._runs.values() for s in r.states if not s.ended)
            ready = sum(1 for r in self._runs.values() for s in r.states if s is OpState.READY)
            entries = {
                (graph_id, position)
                for queue in self._queues.values()
                for *_, graph_id, position in queue
                if self._is_ready(graph_id, position)
            }
            queued = len(entries)
        if live != self._live_ops or ready != queued:
            raise TransferError(
                f"{live} ops live but {self._live_ops} counted; {ready} ready but {queued} queued"
            )

    # -- under the lock ---------------------------------------------------------------------

    def _wait(
        self, graph_id: int, reached: Callable[[_ActiveGraph], bool], timeout: float | None
    ) -> bool:
        def done() -> bool:
            run = self._runs.get(graph_id)
            return run is None or reached(run)

        with self._lock:
            return self._until(done, timeout)

    def _until(self, done: Callable[[], bool], timeout: float | None) -> bool:
        """Wait until ``done()``, and cancel loads at their deadlines meanwhile.

        Returns False after ``timeout`` seconds.
        """
        limit = None if timeout is None else self._clock() + timeout
        while not done():
            now = self._clock()
            self._expire(now)
            if done():
                return True
            if limit is not None and now >= limit:
                return False
            ends = (limit, *(run.deadline for run in self._runs.values()))
            left = [end - now for end in ends if end is not None]
            self._changed.wait(min(left) if left else None)
        return True

    def _next(self) -> int:
        self._order += 1
        return self._order

    def _advance(self, run: _ActiveGraph) -> None:
        """Queue every op of ``run`` that has become ready."""
        for position in run.runnable():
            run.states[position] = OpState.READY
            self._queue(run, position, run.graph.priority.value)

    def _queue(self, run: _ActiveGraph, position: int, priority: int) -> None:
        op = run.graph.ops[position]
        layer = 0 if op.layers is None else op.layers.start
        rank = priority, run.wave, layer, self._next()
        heapq.heappush(self._queues[op.path], (*rank, run.graph.graph_id, position))
        self._work[op.path].notify()

    def _put_first(self, run: _ActiveGraph, which: _Which) -> None:
        """Queue ready ops once more, before all others. Their earlier entries become void."""
        for position in run.positions(which):
            if run.states[position] is OpState.READY and position not in run.awaited:
                run.awaited.add(position)
                self._queue(run, position, _AWAITED)

    def _is_ready(self, graph_id: int, position: int) -> bool:
        run = self._runs.get(graph_id)
        return run is not None and run.states[position] is OpState.READY

    def _finish(self, run: _ActiveGraph, position: int, failed: dict[int, RowError]) -> None:
        if not failed:
            state = OpState.COMPLETED
        elif any(e in (RowError.CANCELLED, RowError.DEADLINE) for e in failed.values()):
            state = OpState.CANCELLED
        else:
            state = OpState.FAILED
        report = OpReport(run.graph.graph_id, run.graph.ops[position].op_id, failed)
        for row, error in failed.items():
            run.failed.setdefault(row, error)
        run.issued.pop(position, None)
        self._reports.append(report)
        self._live_ops -= 1
        run.states[position] = state  # last: an op that has ended has been reported

    def _cancel(self, run: _ActiveGraph, why: RowError) -> None:
        for position, state in enumerate(run.states):
            if state in (OpState.CREATED, OpState.READY):
                op = run.graph.ops[position]
                self._finish(run, position, dict.fromkeys(range(*op.rows), why))
        self._forget_if_ended(run)
        self._changed.notify_all()

    def _give_up(self, run: _ActiveGraph, position: int) -> None:
        """End an op as failed, because the engine has. Does not raise."""
        if run.states[position].ended:
            return
        op = run.graph.ops[position]
        try:
            self._finish(run, position, dict.fromkeys(range(*op.rows), RowError.INTERNAL))
        except Exception:  # noqa: BLE001 - nobody may wait for it for ever
            run.states[position] = OpState.FAILED
            self._log_failure(run.graph, op)

    def _expire(self, now: float) -> None:
        late = [r for r in self._runs.values() if r.deadline is not None and now >= r.deadline]
        for run in late:
            run.deadline = None
            _log.warning(
                "load abandoned at its deadline graph=%d after_s=%s",
                run.graph.graph_id,
                run.graph.deadline_s,
            )
            self._cancel(run, RowError.DEADLINE)

    def _forget_if_ended(self, run: _ActiveGraph) -> None:
        if run.ended(_every):
            self._runs.pop(run.graph.graph_id, None)

    def _wake_threads(self) -> None:
        for condition in self._work.values():
            condition.notify_all()

    # -- threads ----------------------------------------------------------------------------

    def _thread(self, path: Path, name: str) -> GuardedThread:
        return GuardedThread(name, partial(self._serve, path), partial(self._stop, name))

    def _serve(self, path: Path) -> None:
        settle_thread(background=path.writes_tier, near=self._near)
        ends = self._make_ends()
        try:
            while (joined := self._take(path)) is not None:
                self._carry_out(joined, ends)
        finally:
            ends.close()

    def _make_ends(self) -> _Ends:
        """Return what sees the ends of this thread's ops: a second thread, once it has any."""
        name = f"{threading.current_thread().name}-ends"
        settle = partial(settle_thread, near=self._near)
        ends = _Ends(name, self._see_end, partial(self._stop, name), settle)
        with self._lock:
            self._ends.append(ends)
        return ends

    def _carry_out(self, joined: list[_Taken], ends: _Ends) -> None:
        """Carry ops out until they have ended, or until their copies are issued.

        If the engine itself has an error, that is raised, after all of them have ended, as failed.
        """
        left = deque(joined)
        try:
            started = self._clock()
            outcome = self._execute_joined(joined) if len(joined) > 1 else None
            if outcome is not None:
                left.clear()
                self._take_outcome(joined, outcome, started, ends)
            while left:
                started, taken = self._clock(), left.popleft()
                self._take_outcome([taken], self._execute(taken), started, ends)
        except BaseException:
            state_of = ((taken, taken.run.states[taken.position]) for taken in joined)
            self._drop([taken for taken, state in state_of if state is OpState.RUNNING], None)
            raise

    def _take_outcome(
        self,
        joined: list[_Taken],
        outcome: dict[int, RowError] | Issued,
        started: float,
        ends: _Ends,
    ) -> None:
        """End ops that were carried out, or see their end later. Raises as `_carry_out` does."""
        if isinstance(outcome, dict):
            failed = [outcome] if len(joined) == 1 else [{} for _ in joined]
            self._end(joined, failed, started, self._clock() - started)
            return
        try:
            with self._lock:
                for taken in joined:
                    taken.run.states[taken.position] = OpState.ISSUED
                    taken.run.issued[taken.position] = outcome
                self._changed.notify_all()
            ends.put((joined, outcome))
        except BaseException:
            self._drop(joined, outcome)
            raise

    def _see_end(self, issued: tuple[list[_Taken], Issued]) -> None:
        """Wait until copies have ended. Raises as `_carry_out` does."""
        joined, copies = issued
        failed: list[dict[int, RowError]] = [{} for _ in joined]
        seconds = 0.0
        try:
            try:
                copies.wait()
                seconds = copies.seconds()
            except Exception:  # noqa: BLE001 - thread boundary: the device has failed
                self._log_failure(joined[0].run.graph, joined[0].op)
                failed = [dict.fromkeys(taken.rows, RowError.INTERNAL) for taken in joined]
            self._end(joined, failed, self._clock() - seconds, seconds)
        except BaseException:
            self._drop(joined, copies)
            raise

    def _drop(self, joined: list[_Taken], copies: Issued | None) -> None:
        """End ops in hand as failed, after what was issued of them: it may touch pages till then.

        If the executor has raised, there is none left.
        """
        if copies is not None:
            with suppress(Exception):  # the device has failed
                copies.wait()
        with self._lock:
            for taken in joined:
                self._give_up(taken.run, taken.position)
            self._changed.notify_all()

    def _stop(self, name: str, error: BaseException) -> None:
        """Take no more ops, because thread ``name`` has ended by an error. Others end theirs."""
        with self._lock:
            first = not self._stopped
            if first:
                self._stopped = f"the transfer thread {name} has stopped after an error: {error!r}"
            for run in list(self._runs.values()):
                for position, state in enumerate(run.states):
                    if state in (OpState.CREATED, OpState.READY):
                        self._give_up(run, position)
                self._forget_if_ended(run)
            self._wake_threads()
            self._changed.notify_all()
        if first:
            _log.error("this rank loads and saves no more: %s", self._stopped, exc_info=error)

    def _end(
        self,
        joined: list[_Taken],
        failed: list[dict[int, RowError]],
        started: float,
        seconds: float,
    ) -> None:
        """End ops that took ``seconds`` together; ``failed`` has the failed rows of each."""
        with self._lock:
            for taken, errors in zip(joined, failed, strict=True):
                run = taken.run
                if taken.counted:
                    self._count_issued(run, taken.position, -1)
                self._finish(run, taken.position, {**taken.upstream, **errors})
                self._advance(run)
                self._forget_if_ended(run)
            self._work[joined[0].op.path].notify_all()
            self._changed.notify_all()
        if self._observer is not None:
            self._observe(self._observer, joined, failed, started, seconds)

    def _observe(
        self,
        observer: Callable[[OpTiming], None],
        joined: list[_Taken],
        failed: list[dict[int, RowError]],
        started: float,
        seconds: float,
    ) -> None:
        """Tell the observer of each op, with its share of the seconds by rows."""
        each = seconds / max(1, sum(len(taken.rows) for taken in joined))
        for taken, errors in zip(joined, failed, strict=True):
            rows = len(taken.rows)
            share = each * rows if len(joined) > 1 else seconds
            graph_id = taken.run.graph.graph_id
            try:
                observer(OpTiming(taken.op, rows, len(errors), share, graph_id, started))
            except Exception:  # noqa: BLE001 - who looks on ends nothing
                if not self._observer_failed:
                    self._observer_failed = True
                    _log.exception("what observes transfers has failed, and is called again")
            started += share

    def _take(self, path: Path) -> list[_Taken] | None:
        """Block until an op of ``path`` may start, and take it with those that it is joined with.

        Returns None when the engine closes.
        """
        queue = self._queues[path]
        with self._lock:
            while True:
                if (first := self._first(path)) and self._may_start(path, first):
                    heapq.heappop(queue)
                    return self._joined(path, first)
                if (self._closed or self._stopped) and not queue:
                    return None
                self._work[path].wait()

    def _first(self, path: Path) -> _Entry | None:
        """Return the first op that is ready on a path. Forgets entries that are void."""
        queue = self._queues[path]
        while queue and not self._is_ready(*queue[0][-2:]):
            heapq.heappop(queue)
        return queue[0] if queue else None

    def _joined(self, path: Path, first: _Entry) -> list[_Taken]:
        """Take an op, and the saves of its wave that wait with it."""
        taken = [self._taken(*first[-2:], counted=True)]
        run = taken[0].run
        joins = isinstance(self._executors[path], JoiningExecutor) and not run.alone
        if not joins or run.graph.priority is not Priority.SAVE:
            return taken
        nbytes = run.nbytes[taken[0].position]
        while (entry := self._first(path)) and entry[:3] == first[:3]:
            graph_id, position = entry[-2:]
            nbytes += self._runs[graph_id].nbytes[position]
            if nbytes > COPY_BYTES:
                break
            heapq.heappop(self._queues[path])
            taken.append(self._taken(graph_id, position, counted=False))
        return taken

    def _may_start(self, path: Path, entry: _Entry) -> bool:
        """Return True unless as much as may be issued of its kind is issued on this path."""
        priority, *_, graph_id, position = entry
        count, run = self._counts[path], self._runs[graph_id]
        if priority > Priority.LOAD:
            return self._saves_issued[path] < SAVES_ISSUED * count
        before = self._bytes_issued[path]
        if priority == _AWAITED or not (before and run.alone and path.touches_device):
            return True
        return before + run.nbytes[position] <= BYTES_ISSUED * count

    def _count_issued(self, run: _ActiveGraph, position: int, sign: int) -> None:
        """Count an op that starts (+1) or has ended (-1) against what may be issued."""
        path = run.graph.ops[position].path
        if run.graph.priority > Priority.LOAD:
            self._saves_issued[path] += sign
        elif run.alone:
            self._bytes_issued[path] += sign * run.nbytes[position]

    def _taken(self, graph_id: int, position: int, *, counted: bool) -> _Taken:
        run = self._runs[graph_id]
        span = range(*run.graph.ops[position].rows)
        upstream = {row: RowError.UPSTREAM for row in span if row in run.failed}
        rows = [row for row in span if row not in upstream]
        taken = _Taken(run, position, upstream, rows, counted)
        if counted:
            self._count_issued(run, position, 1)
        if run.graph.priority is Priority.LOAD:
            self._order += run.nbytes[position]
        run.states[position] = OpState.RUNNING  # last: from here on this thread must end it
        return taken

    def _execute(self, taken: _Taken) -> dict[int, RowError] | Issued:
        if not taken.rows:
            return {}
        try:
            return self._executors[taken.op.path].run(taken.run.graph, taken.op, taken.rows)
        except Exception:  # noqa: BLE001 - thread boundary: the op fails, its queue continues
            self._log_failure(taken.run.graph, taken.op)
            why = RowError.IO if taken.op.tier else RowError.INTERNAL
            return dict.fromkeys(taken.rows, why)

    def _execute_joined(self, joined: list[_Taken]) -> dict[int, RowError] | Issued | None:
        """Carry ops out at once; return None if they must be carried out one by one."""
        executor = self._executors[joined[0].op.path]
        assert isinstance(executor, JoiningExecutor)
        parts = [OpPart(taken.run.graph, taken.op, taken.rows) for taken in joined if taken.rows]
        try:
            return (executor.run_joined(parts) if parts else None) or {}
        except Exception:  # noqa: BLE001 - one of them may be at fault: each is tried alone
            _log.debug("%d ops failed together and are tried one by one", len(parts), exc_info=True)
            return None

    @staticmethod
    def _log_failure(graph: TransferGraph, op: TransferOp) -> None:
        _log.exception("transfer op failed graph=%d path=%s", graph.graph_id, op.path.value)


def _every(op: TransferOp) -> bool:
    return True


def _on_device(op: TransferOp) -> bool:
    return op.path.touches_device


def _up_to(layer: int | None) -> _Which:
    """Return what is true for the device ops of layers up to ``layer``; None for all layers.

    Earlier layers are included: who waits for the last one only may count on all of them.
    """
    if layer is None:
        return _on_device
    return lambda op: op.path.touches_device and (op.layers is None or op.layers.start <= layer)
