"""Runs transfer graphs: one queue per path, each op started when its deps have ended.

    order   priority ──▶ wave ──▶ first layer ──▶ arrival

A wave is a set of graphs that are waited for together, layer by layer: the loads of a step, or the
chunks of a blend. Layer 0 of all graphs of a wave is copied before layer 1 of any of them, and an
earlier wave before a later one.

    op      created ──▶ ready ──▶ running ──▶ completed | failed
                  └───────┴──▶ cancelled (by the caller, a deadline, or close)

A row that fails does not stop the others: ops that depend on it skip that row and report it as
failed upstream. The outcome of each op is reported as an ``OpReport``.

Thread safety: every public method may be called from any thread. Executors are called from the
engine's own threads, never under its lock, and may block.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections.abc import Callable, Mapping, Set
from enum import Enum
from typing import NamedTuple, Protocol

from kvcore._util.cpus import settle_thread
from kvcore.errors import CapacityError, TransferError
from kvcore.transfer.graph import OpReport, Path, RowError, TransferGraph, TransferOp

_log = logging.getLogger("kvcore.transfer")


class OpState(Enum):
    """State of an op in flight."""

    CREATED = "created"
    READY = "ready"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        """True for the final states."""
        return self in (OpState.COMPLETED, OpState.FAILED, OpState.CANCELLED)


class Executor(Protocol):
    """Moves the bytes of one path."""

    def run(self, graph: TransferGraph, op: TransferOp, rows: list[int]) -> dict[int, RowError]:
        """Copy ``rows`` of ``op`` and return the rows that failed. Blocks until they are copied."""
        ...


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


class _ActiveGraph:
    """A graph in flight. All fields are guarded by the engine's lock."""

    def __init__(self, graph: TransferGraph, deadline: float | None, wave: int) -> None:
        self.graph = graph
        self.deadline = deadline
        self.wave = wave
        self.states = [OpState.CREATED] * len(graph.ops)
        self.index = {op.op_id: i for i, op in enumerate(graph.ops)}
        self.failed: dict[int, RowError] = {}

    def ended(self, which: Callable[[TransferOp], bool] = lambda op: True) -> bool:
        pairs = zip(self.graph.ops, self.states, strict=True)
        return all(state.ended for op, state in pairs if which(op))

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
    At most ``queue_depth`` ops are in flight. ``observer`` is called for every op that ran.
    ``near`` are cores that the threads prefer (`settle_thread`).
    """

    def __init__(
        self,
        executors: Mapping[Path, Executor],
        *,
        threads: Mapping[Path, int] | None = None,
        queue_depth: int = 4096,
        observer: Callable[[OpTiming], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        near: Set[int] = frozenset(),
    ) -> None:
        self._near = near
        self._executors = dict(executors)
        self._depth = queue_depth
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
        self._threads = [
            threading.Thread(
                target=self._serve, args=(path,), name=f"kvcore-{path.value}-{n}", daemon=True
            )
            for path in self._executors
            for n in range((threads or {}).get(path, 1))
        ]
        for thread in self._threads:
            thread.start()

    # -- submitting -------------------------------------------------------------------------

    def wave(self) -> int:
        """Return a new wave, which comes after every earlier wave."""
        with self._lock:
            return self._next()

    def submit(self, graph: TransferGraph, wave: int | None = None) -> None:
        """Start ``graph`` in ``wave``, or in a wave of its own. Does not block.

        Raises CapacityError if the ops in flight would exceed ``queue_depth``. Raises TransferError
        if the graph is malformed, uses a path without executor, or if its id is in flight.
        """
        graph.check()
        if missing := {op.path.value for op in graph.ops} - {p.value for p in self._executors}:
            have = sorted(path.value for path in self._executors)
            raise TransferError(
                f"graph {graph.graph_id} needs paths {sorted(missing)}; this engine has {have}"
            )
        with self._lock:
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
            run = _ActiveGraph(graph, deadline, self._next() if wave is None else wave)
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
        return self._wait(graph_id, lambda op: True, timeout)

    def wait_device(self, graph_id: int, timeout: float | None = None) -> bool:
        """Wait as ``wait`` does, only for the ops that touch the device."""
        return self._wait(graph_id, lambda op: op.path.touches_device, timeout)

    def wait_layer(self, graph_id: int, layer: int, timeout: float | None = None) -> bool:
        """Wait as ``wait`` does, only for the device ops that carry ``layer``."""

        def carries(op: TransferOp) -> bool:
            touches = op.path.touches_device
            return touches and (op.layers is None or op.layers.covers(layer))

        return self._wait(graph_id, carries, timeout)

    def wait_report(self, timeout: float) -> bool:
        """Block until a report can be polled, at most ``timeout`` seconds; True if so."""
        with self._lock:
            return self._changed.wait_for(lambda: bool(self._reports), timeout)

    def wait_graph(self, timeout: float) -> bool:
        """Block until a graph has ended whose last reports are not polled, or ``timeout`` seconds.

        For callers that cannot use part of a graph: each wake-up takes the interpreter from threads
        that read.
        """

        def ended() -> bool:
            return any(report.graph_id not in self._runs for report in self._reports)

        with self._lock:
            return self._changed.wait_for(ended, timeout)

    def poll(self) -> list[OpReport]:
        """Take the reports of the ops that ended since the last call. Does not block."""
        with self._lock:
            self._expire(self._clock())
            reports, self._reports = self._reports, []
            return reports

    # -- looking ----------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Number of ops submitted that have not ended."""
        with self._lock:
            return self._live_ops

    @property
    def on_device(self) -> int:
        """Number of ops in flight that touch the device.

        Until they have ended, the pages of the engine that they use are not free.
        """
        with self._lock:
            return sum(
                op.path.touches_device and not state.ended
                for run in self._runs.values()
                for op, state in zip(run.graph.ops, run.states, strict=True)
            )

    def close(self, *, drain: bool = True, timeout: float | None = 30.0) -> bool:
        """Stop the threads. With ``drain``, saves and spills in flight are finished first.

        Returns True if everything ended within ``timeout`` seconds. A thread stuck in a hung device
        is left behind; it is a daemon.
        """
        limit = None if timeout is None else self._clock() + timeout
        with self._lock:
            if not drain:
                for run in list(self._runs.values()):
                    self._cancel(run, RowError.CANCELLED)
            self._changed.wait_for(lambda: not self._runs, timeout)
            for run in list(self._runs.values()):
                self._cancel(run, RowError.CANCELLED)
            self._closed = True
            for condition in self._work.values():
                condition.notify_all()
        for thread in self._threads:
            thread.join(None if limit is None else max(0.0, limit - self._clock()))
        return not any(thread.is_alive() for thread in self._threads)

    def check_integrity(self) -> None:
        """Raise TransferError unless the counters agree with the graphs in flight."""
        with self._lock:
            live = sum(1 for r in self._runs.values() for s in r.states if not s.ended)
            ready = sum(1 for r in self._runs.values() for s in r.states if s is OpState.READY)
            queued = sum(
                1
                for path, queue in self._queues.items()
                for *_, graph_id, position in queue
                if graph_id in self._runs and self._runs[graph_id].states[position] is OpState.READY
            )
        if live != self._live_ops or ready != queued:
            raise TransferError(
                f"{live} ops live but {self._live_ops} counted; {ready} ready but {queued} queued"
            )

    # -- under the lock ---------------------------------------------------------------------

    def _wait(
        self, graph_id: int, which: Callable[[TransferOp], bool], timeout: float | None
    ) -> bool:
        limit = None if timeout is None else self._clock() + timeout
        with self._lock:
            while (run := self._runs.get(graph_id)) is not None and not run.ended(which):
                now = self._clock()
                self._expire(now)
                if run.ended(which):
                    return True
                if limit is not None and now >= limit:
                    return False
                ends = [t for t in (limit, run.deadline) if t is not None and t > now]
                self._changed.wait(min(ends) - now if ends else None)
            return True

    def _next(self) -> int:
        self._order += 1
        return self._order

    def _advance(self, run: _ActiveGraph) -> None:
        """Queue every op of ``run`` that has become ready."""
        for position in run.runnable():
            op = run.graph.ops[position]
            run.states[position] = OpState.READY
            layer = 0 if op.layers is None else op.layers.start
            rank = run.graph.priority.value, run.wave, layer, self._next()
            heapq.heappush(self._queues[op.path], (*rank, run.graph.graph_id, position))
            self._work[op.path].notify()

    def _finish(self, run: _ActiveGraph, position: int, failed: dict[int, RowError]) -> None:
        op = run.graph.ops[position]
        if not failed:
            run.states[position] = OpState.COMPLETED
        elif any(e in (RowError.CANCELLED, RowError.DEADLINE) for e in failed.values()):
            run.states[position] = OpState.CANCELLED
        else:
            run.states[position] = OpState.FAILED
        for row, error in failed.items():
            run.failed.setdefault(row, error)
        self._live_ops -= 1
        self._reports.append(OpReport(run.graph.graph_id, op.op_id, failed))

    def _cancel(self, run: _ActiveGraph, why: RowError) -> None:
        for position, state in enumerate(run.states):
            if state in (OpState.CREATED, OpState.READY):
                op = run.graph.ops[position]
                self._finish(run, position, dict.fromkeys(range(*op.rows), why))
        self._forget_if_ended(run)
        self._changed.notify_all()

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
        if run.ended():
            self._runs.pop(run.graph.graph_id, None)

    # -- threads ----------------------------------------------------------------------------

    def _serve(self, path: Path) -> None:
        settle_thread(background=path.writes_tier, near=self._near)
        while (taken := self._take(path)) is not None:
            run, position = taken
            op = run.graph.ops[position]
            upstream = {row: RowError.UPSTREAM for row in range(*op.rows) if row in run.failed}
            rows = [row for row in range(*op.rows) if row not in upstream]
            started = self._clock()
            failed = self._execute(run.graph, op, rows)
            seconds = self._clock() - started
            with self._lock:
                self._finish(run, position, {**upstream, **failed})
                self._advance(run)
                self._forget_if_ended(run)
                self._changed.notify_all()
            if self._observer is not None:
                graph_id = run.graph.graph_id
                self._observer(OpTiming(op, len(rows), len(failed), seconds, graph_id, started))

    def _take(self, path: Path) -> tuple[_ActiveGraph, int] | None:
        """Block until an op of ``path`` is ready; None when the engine closes."""
        queue = self._queues[path]
        with self._lock:
            while True:
                while queue:
                    *_, graph_id, position = heapq.heappop(queue)
                    run = self._runs.get(graph_id)
                    if run is not None and run.states[position] is OpState.READY:
                        run.states[position] = OpState.RUNNING
                        return run, position
                if self._closed:
                    return None
                self._work[path].wait()

    def _execute(
        self, graph: TransferGraph, op: TransferOp, rows: list[int]
    ) -> dict[int, RowError]:
        if not rows:
            return {}
        try:
            return self._executors[op.path].run(graph, op, rows)
        except Exception:  # noqa: BLE001 - thread boundary: the op fails, its queue continues
            _log.exception("transfer op failed graph=%d path=%s", graph.graph_id, op.path.value)
            return dict.fromkeys(rows, RowError.IO if op.tier else RowError.INTERNAL)
