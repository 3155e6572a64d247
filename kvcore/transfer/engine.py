"""Runs transfer graphs: one queue per path, each op started when its deps have ended.

A row that fails does not stop the others: ops that depend on it skip that row and report it as
failed upstream. The outcome of each op is reported as an ``OpReport``.

Whoever may go on once the work is in a queue of the device waits for "issued" only (`wait_issued`),
and lets its own stream wait for the rest. All reasons why rows of an op may fail are known by then:
an op that was issued can fail only if the device itself fails. Dependent ops and reports wait for
the end.

An error of the engine's own stops it, because its books may be wrong: what has not started is
cancelled, what is under way ends, and `submit` refuses all that follows, naming the thread and the
error. Nobody waits for ever. An error of the observer stops nothing.

Thread safety: every public method may be called from any thread. Executors are called from the
engine's own threads, never under its lock, and may block.

    engine       the graphs in flight: submitted, waited for, cancelled, reported
    path_queue   which op of a path starts next, and how much may be issued
    op_thread    carries ops out, and sees their ends
    active       the states of one graph
    executor     moves the bytes
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set

from kvcore.errors import CapacityError, TransferError
from kvcore.transfer.active import ActiveGraph, OpState, TakenOp, Which, every, on_device, up_to
from kvcore.transfer.executor import Executor, Issued
from kvcore.transfer.graph import OpReport, Path, Priority, RowError, TransferGraph, TransferOp
from kvcore.transfer.op_thread import OpThread, OpTiming, Timings
from kvcore.transfer.path_queue import PathQueue

__all__ = ["TransferEngine"]

_log = logging.getLogger("kvcore.transfer")

_START_FAILED_S = 5.0
"""Seconds that the constructor waits for threads that have nothing to do, if one cannot start."""


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
        near: Set[int] = frozenset(),
    ) -> None:
        self._depth = queue_depth
        self._nbytes = nbytes
        self._clock = time.monotonic
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._runs: dict[int, ActiveGraph] = {}
        self._reports: list[OpReport] = []
        self._live_ops = 0
        self._order = 0
        self._closed = False
        self._stopped = ""
        counts = {path: (threads or {}).get(path, 1) for path in executors}
        self._executors = dict(executors)
        shared = self._executors, self._runs, self._lock
        self._queues = {path: PathQueue(path, n, *shared) for path, n in counts.items()}
        timings = Timings(observer)
        self._threads = [
            OpThread(f"kvcore-{path.value}-{n}", path, self._executors, self, timings, near)
            for path, count in counts.items()
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
        if missing := {op.path.value for op in graph.ops} - {p.value for p in self._queues}:
            have = sorted(path.value for path in self._queues)
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
            run = ActiveGraph(graph, deadline, wave, nbytes, alone=alone)
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
        return self._wait(graph_id, lambda run: run.ended(every), timeout)

    def wait_device(self, graph_id: int, timeout: float | None = None) -> bool:
        """Wait as ``wait`` does, only for the ops that touch the device."""
        return self._wait(graph_id, lambda run: run.ended(on_device), timeout)

    def wait_issued(
        self, graph_id: int, layer: int | None = None, timeout: float | None = None
    ) -> bool:
        """Block until the device has all copies of a graph in its queues, or they have ended.

        With ``layer``, waits only for the copies of layers up to and including this one. These ops
        are issued before others.
        Every failure of their rows that is not one of the device itself can be polled afterwards.
        Returns False after ``timeout`` seconds.
        """
        which = up_to(layer)

        def issued(run: ActiveGraph) -> bool:
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
                run.ended(on_device) or not run.graph.uses_units for run in self._runs.values()
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
                    self._put_first(run, on_device)

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
        which = up_to(layer)
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
        return all(ended)

    def check_integrity(self) -> None:
        """Raise TransferError unless the counters agree with the graphs in flight."""
        with self._lock:
            live = sum(1 for r in self._runs.values() for s in r.states if not s.ended)
            ready = sum(1 for r in self._runs.values() for s in r.states if s is OpState.READY)
            queued = sum(len(queue.ready) for queue in self._queues.values())
        if live != self._live_ops or ready != queued:
            raise TransferError(
                f"{live} ops live but {self._live_ops} counted; {ready} ready but {queued} queued"
            )

    # -- under the lock ---------------------------------------------------------------------

    def _wait(
        self, graph_id: int, reached: Callable[[ActiveGraph], bool], timeout: float | None
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

    def _advance(self, run: ActiveGraph) -> None:
        """Queue every op of ``run`` that has become ready."""
        for position in run.runnable():
            run.states[position] = OpState.READY
            self._queue_of(run, position).push(run, position, self._next())

    def _put_first(self, run: ActiveGraph, which: Which) -> None:
        """Put ready ops before all others of their paths."""
        for position in run.positions(which):
            if run.states[position] is OpState.READY and position not in run.awaited:
                self._queue_of(run, position).put_first(run, position, self._next())

    def _queue_of(self, run: ActiveGraph, position: int) -> PathQueue:
        return self._queues[run.graph.ops[position].path]

    def _finish(self, run: ActiveGraph, position: int, failed: dict[int, RowError]) -> None:
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

    def _cancel(self, run: ActiveGraph, why: RowError) -> None:
        for position, state in enumerate(run.states):
            if state in (OpState.CREATED, OpState.READY):
                op = run.graph.ops[position]
                self._finish(run, position, dict.fromkeys(range(*op.rows), why))
        self._forget_if_ended(run)
        self._changed.notify_all()

    def _give_up(self, run: ActiveGraph, position: int) -> None:
        """End an op as failed, because the engine has. Does not raise."""
        if run.states[position].ended:
            return
        op = run.graph.ops[position]
        try:
            self._finish(run, position, dict.fromkeys(range(*op.rows), RowError.INTERNAL))
        except Exception:  # noqa: BLE001 - nobody may wait for it for ever
            run.states[position] = OpState.FAILED
            _log.exception("transfer op failed graph=%d path=%s", run.graph.graph_id, op.path.value)

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

    def _forget_if_ended(self, run: ActiveGraph) -> None:
        if run.ended(every):
            self._runs.pop(run.graph.graph_id, None)

    def _wake_threads(self) -> None:
        for queue in self._queues.values():
            queue.work.notify_all()

    # -- for its threads (`OpBooks`) ----------------------------------------------------------

    def now(self) -> float:
        return self._clock()

    def take(self, path: Path) -> list[TakenOp]:
        queue = self._queues[path]
        with self._lock:
            while not (taken := queue.take()):
                if (self._closed or self._stopped) and queue.is_empty:
                    break
                queue.work.wait()
            loads = (op for op in taken if op.run.graph.priority is Priority.LOAD)
            self._order += sum(op.run.nbytes[op.position] for op in loads)
            return taken

    def note_issued(self, joined: Sequence[TakenOp], copies: Issued) -> None:
        with self._lock:
            for taken in joined:
                taken.run.states[taken.position] = OpState.ISSUED
                taken.run.issued[taken.position] = copies
            self._changed.notify_all()

    def end(self, joined: Sequence[TakenOp], failed: Sequence[dict[int, RowError]]) -> None:
        queue = self._queues[joined[0].op.path]
        with self._lock:
            for taken, errors in zip(joined, failed, strict=True):
                queue.has_ended(taken)
                self._finish(taken.run, taken.position, {**taken.upstream, **errors})
                self._advance(taken.run)
                self._forget_if_ended(taken.run)
            queue.work.notify_all()
            self._changed.notify_all()

    def give_up(self, joined: Sequence[TakenOp]) -> None:
        with self._lock:
            for taken in joined:
                self._give_up(taken.run, taken.position)
            self._changed.notify_all()

    def stop(self, name: str, error: BaseException) -> None:
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
