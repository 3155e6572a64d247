"""The worker side of every connector: it takes graphs in, repeats failed loads, and reports.

    plan ──▶ open tiers, forget slots ──▶ submit saves, loads, chunks of blends
    forward ──▶ follow a layer of the loads; repeat a copy from host memory that failed
    poll ──▶ reports, each passed on once its result is final

On a GPU the engine's thread does not wait for copies. It waits until the device has them in a queue
and lets the engine's stream wait for the rest. A load that has come so far can fail only if the
device does, and then every later call to the device fails too.

An adapter subclasses `StepWorker`. The subclass maps the engine's calls to these methods, and
decides what a failed load means and how many attempts a load has.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

from kvcore.connector.fusion_messages import BlendOrder, BlendReport, BlendTime
from kvcore.connector.fusion_worker import FusionWorker, RefusingFusionWorker
from kvcore.connector.messages import WorkPlan
from kvcore.memory.device import Event
from kvcore.transfer.graph import OpReport, RowError, TransferGraph
from kvcore.worker import refuse
from kvcore.worker.lifecycle import RankParts, close_worker, open_tiers

__all__ = ["ATTEMPTS", "IDLE_WAIT_S", "RETRY_WAIT_S", "Load", "StepWorker"]

_log = logging.getLogger("kvcore.connector.worker")

ATTEMPTS = 3
"""Attempts for a load from host memory in an engine that cannot look the request up again."""

IDLE_WAIT_S = 0.002
"""Longest wait of a step without a batch for a transfer to end, in seconds, instead of spinning."""

RETRY_WAIT_S = 0.05
"""Longest wait for one report in seconds, and for room in a full queue before the next attempt."""

_R = TypeVar("_R", str, int)


@dataclass(eq=False)
class Load(Generic[_R]):
    """A load in flight, or a chunk of a blend.

    ``request_id`` is the request that is parked for the load; None if this step waits for it.
    Copies of every attempt begin ``after`` the same event: nothing writes to the pages later.
    ``attempts`` is the most times that the graph is submitted. ``cancelled`` says that the leader
    has cancelled it. ``left`` counts the ops of this
    attempt that have not ended. It leaves out ops that do not touch the engine's pages, so that a
    medium that hangs holds no page. ``passed`` counts the reports that `pass_on` has returned.
    """

    graph: TransferGraph
    request_id: _R | None = None
    after: Event | None = None
    attempts: int = 1
    attempt: int = 1
    cancelled: bool = False
    left: int = 0
    passed: int = 0
    reports: list[OpReport] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Start to count an attempt."""
        self.left = sum(op.path.touches_device for op in self.graph.ops)
        self.passed, self.reports = 0, []

    @property
    def graph_id(self) -> int:
        """The id of the graph."""
        return self.graph.graph_id

    @property
    def failed(self) -> bool:
        """True if an op of this attempt has failed so far."""
        return any(report.failed for report in self.reports)

    @property
    def may_retry(self) -> bool:
        """True if the graph may be submitted again after this attempt."""
        return self.attempt < self.attempts and not self.cancelled

    def take(self, report: OpReport) -> None:
        """Record the end of one of the graph's ops."""
        self.reports.append(report)
        op = next(op for op in self.graph.ops if op.op_id == report.op_id)
        self.left -= op.path.touches_device

    def pass_on(self) -> list[OpReport]:
        """Return the reports of this attempt that no earlier call returned."""
        found = self.reports[self.passed :]
        self.passed = len(self.reports)
        return found


def chunks_of(orders: Iterable[BlendOrder]) -> list[TransferGraph]:
    """Return the graphs that load the chunks of blends."""
    return [chunk.graph for order in orders for chunk in order.chunks]


def _refused(report: OpReport) -> OpReport:
    """Return a report in which rows that were cancelled were refused."""
    failed: dict[int, RowError] = {
        row: RowError.REFUSED if error is RowError.CANCELLED else error
        for row, error in report.failed.items()
    }
    return OpReport(report.graph_id, report.op_id, failed)


class StepWorker(Generic[_R]):
    """One rank's worker, driven by the steps of an engine.

    A load's reports are passed on as they come in. While the load may still be repeated, they are
    held back until its attempt has succeeded.

    The lock guards the loads and the reports, so that two threads may submit, cancel and collect.
    A subclass says which thread calls what.
    """

    attempts: ClassVar[int] = 1
    """Attempts for a load from host memory. 1 fits an engine that asks again for what is missing.
    """

    def __init__(
        self, parts: RankParts, blends: FusionWorker | RefusingFusionWorker | None = None
    ) -> None:
        self._worker = parts.worker
        self.metrics = parts.metrics
        self._open_tier = parts.open_tier
        self._blends = RefusingFusionWorker(1) if blends is None else blends
        self._lock = threading.RLock()
        self._loads: dict[int, Load[_R]] = {}
        self._chunks: dict[int, Load[_R]] = {}  # by graph, until `_arrived` is called for the order
        self._todo: dict[int, TransferGraph] = {}  # work that was taken on and not begun
        self._lost: set[str] = set()  # requests whose chunks did not arrive
        self._abandoned = False
        self._given_up: set[int] = set()  # cancelled because of an error
        self._polled: deque[OpReport] = deque()  # not taken in yet
        self._reports: list[OpReport] = []

    # -- work -------------------------------------------------------------------------------

    def open(self, tiers: Mapping[str, dict[str, Any]]) -> None:
        """Open tiers by name with the options that the leader sent. Does I/O.

        A tier that cannot be opened is logged, and fails every read and write.
        """
        open_tiers(self._worker, self._open_tier, tiers)

    def tend_tiers(self, plan: WorkPlan) -> None:
        """Open the tiers that a plan names, then make its slots of tiers unreadable. Does I/O.

        A rank that has stopped does this too: what was cleared must not come back with a restart.
        """
        self.open(plan.open_tiers)
        for name, slots in plan.invalidate:
            self._worker.invalidate(name, slots)

    def _cancel(self, graph_ids: Iterable[int]) -> None:
        """Cancel graphs. Ops that run are finished; a load is not repeated.

        The load is marked first: another thread may take its report before `cancel` returns.
        """
        for graph_id in graph_ids:
            with self._lock:
                if (load := self._loads.get(graph_id)) is not None:
                    load.cancelled = True
            self._worker.cancel(graph_id)

    def enter_device(self) -> None:
        """Make the rank's device the current one of the calling thread, one of kvcore's own.

        Without it, a thread that asks an event would end a capture in a thread of the engine.
        """
        self._worker.enter_device()

    def _mark(self) -> Event | None:
        """Return an event after the engine's work so far; None if there is no device."""
        return self._worker.mark()

    def _submit(
        self, graph: TransferGraph, wave: int | None = None, after: Event | None = None
    ) -> None:
        """Start a graph. If the worker refuses it, its failed ops are reported.

        Its copies run after the engine's work so far, unless ``after`` is given. Does not block,
        except up to `RETRY_WAIT_S` for each further attempt of a refused load.
        """
        if after is None and graph.units:
            after = self._mark()
        with self._lock:
            if (load := self._loads.get(graph.graph_id)) is not None:
                load.after = after = load.after or after
        refused = self._worker.submit(graph, wave=wave, after=after)
        with self._lock:
            self._todo.pop(graph.graph_id, None)
            for report in refused:
                self._take(report)

    def _submit_saves(self, graphs: Iterable[TransferGraph]) -> None:
        """Start the saves of a step. Those that wait for the device together are copied at once.

        Blocks as `_submit` does.
        """
        saves = list(graphs)
        if saves:
            together, after = self._worker.wave(), self._mark()
            for graph in saves:
                self._submit(graph, together, after)

    def take_on(self, graphs: Iterable[TransferGraph], orders: Iterable[BlendOrder] = ()) -> None:
        """Record the graphs and blends that this step begins. Call before anything can fail."""
        taken = [*graphs, *chunks_of(orders)]
        self._todo.update((graph.graph_id, graph) for graph in taken)

    def refuse_rest(
        self, orders: Sequence[BlendOrder] | None = None, error: RowError = RowError.REFUSED
    ) -> None:
        """Report what was taken on and not begun as failed by ``error``.

        If ``orders`` are given, only their chunks. By the default error the leader learns that this
        rank does no more work, and stops.
        """
        rest = self._todo.values() if orders is None else chunks_of(orders)
        self._refuse([graph for graph in rest if graph.graph_id in self._todo], error)

    def _expect(self, graph: TransferGraph, request_id: _R | None = None) -> Load[_R]:
        """Treat the reports of ``graph`` as those of a load. Call before `_submit`.

        A graph that also reads a tier has one attempt. It is submitted as a whole, and its reads
        may still be in flight when its copies have ended.
        """
        repeatable = all(op.path.touches_device for op in graph.ops)
        load = Load(graph, request_id, attempts=self.attempts if repeatable else 1)
        with self._lock:
            self._loads[graph.graph_id] = load
        return load

    # -- waiting ----------------------------------------------------------------------------

    def quiesce(self, timeout: float) -> bool:
        """Block the host until this rank no longer copies from or to the engine's pages.

        Returns False after ``timeout`` seconds. Reads and writes of tiers do not count: they do not
        touch the engine's pages.
        """
        return self._worker.wait_idle(timeout)

    def abandon(self, graph_ids: Iterable[int], timeout: float) -> bool:
        """Cancel graphs because of an error, repeat no load any more, and `quiesce`.

        What is cancelled here is reported as refused: an engine still counts on a load whose
        request was not aborted.
        """
        with self._lock:  # a load that is being repeated is submitted by now, or never
            self._abandoned = True
            graph_ids = list(graph_ids)
            self._given_up.update(
                graph_id
                for graph_id in graph_ids
                if (load := self._loads.get(graph_id)) is not None and not load.cancelled
            )
        for graph_id in graph_ids:
            self._worker.cancel(graph_id)
        return self.quiesce(timeout)

    def open_loads(self) -> list[int]:
        """Return the graphs of the loads and chunks whose reports are not final."""
        with self._lock:
            return list(self._loads)

    def _refuse(self, graphs: Iterable[TransferGraph], error: RowError = RowError.UPSTREAM) -> None:
        """Report graphs as failed for good instead of starting them."""
        with self._lock:
            for graph in graphs:
                self._todo.pop(graph.graph_id, None)
                if (load := self._loads.get(graph.graph_id)) is not None:
                    load.attempts = load.attempt
                for report in refuse(graph, error):
                    self._take(report)

    def _wait_layer(self, loads: Sequence[Load[_R]], layer: int) -> None:
        """Let the current stream wait until each of ``loads`` has copied all up to ``layer``.

        Blocks the host until that was issued. A load of which a copy has failed is settled.
        """
        for load in loads:
            self._worker.wait_layer(load.graph_id, layer)
        self._settle_failed(loads)

    def _wait_loads(self, loads: Sequence[Load[_R]]) -> None:
        """Let the current stream wait for ``loads``, as `_wait_layer` does for a layer.

        Afterwards `Load.failed` is final.
        """
        for load in loads:
            self._worker.follow(load.graph_id)
        self._settle_failed(loads)

    def _settle_failed(self, loads: Sequence[Load[_R]]) -> None:
        if loads:
            self._collect()
        for load in loads:
            if load.failed or load.attempt > 1:  # it may be a copy that is needed now
                self._settle(load)

    def _settle(self, load: Load[_R]) -> None:
        """Block the host until ``load`` has ended, after its last attempt if it fails."""
        while self._loads.get(load.graph_id) is load:
            self._worker.wait_device(load.graph_id)
            self._collect()
            if self._loads.get(load.graph_id) is load and load.left:
                self._worker.wait_report(RETRY_WAIT_S)

    # -- blends -----------------------------------------------------------------------------

    def _begin_blends(
        self, blends: FusionWorker | RefusingFusionWorker, orders: Sequence[BlendOrder]
    ) -> None:
        """Start to copy the chunks of ``orders`` into the pages of their requests."""
        with self._lock:
            for order in orders:
                for chunk in order.chunks:
                    load: Load[_R] = Load(chunk.graph)
                    self._loads[load.graph_id] = self._chunks[load.graph_id] = load
                    self._todo.pop(load.graph_id, None)
        refused = blends.begin(orders, self._mark)
        with self._lock:
            for report in refused:
                self._take(report)

    def _arrived(self, order: BlendOrder) -> bool:
        """Let the current stream wait for an order's chunks; return True if none has failed.

        Call exactly once for each order that was begun.
        """
        chunks = [self._chunks.pop(chunk.graph.graph_id) for chunk in order.chunks]
        self._wait_loads(chunks)
        return not any(chunk.failed for chunk in chunks)

    def _lose(self, orders: Iterable[BlendOrder]) -> list[BlendOrder]:
        """Return the orders whose blends were made without all of their chunks.

        Their KV is wrong: `take_blends` reports them as failed. Call once for each order, after the
        blends were made.
        """
        lost = [order for order in orders if not self._arrived(order)]
        self._lost.update(order.request_id for order in lost)
        return lost

    def take_blends(self) -> list[BlendReport]:
        """Return and forget the results of the blends since the last call.

        A blend that was made without its chunks counts as failed.
        """
        lost, self._lost = self._lost, set()
        return [
            BlendReport(report.request_id, ok=False, arrived=False)
            if report.request_id in lost
            else report
            for report in self._blends.take_reports()
        ]

    def decline_blends(self, orders: Sequence[BlendOrder]) -> None:
        """Tell the other ranks that this one makes no more of a step's blends. A collective."""
        self._blends.decline(orders)

    @property
    def meets_others(self) -> bool:
        """True if other ranks may wait for this one before a blend."""
        return self._blends.meets_others

    @property
    def can_blend(self) -> bool:
        """True if this rank can make blends."""
        return isinstance(self._blends, FusionWorker)

    def warm_up_blends(self, *, timed: bool) -> None:
        """Prepare blends, if every rank can make them. See `FusionWorker.warm_up`. A collective."""
        if isinstance(self._blends, FusionWorker):
            self._blends.warm_up(timed=timed)

    def take_profile(self) -> list[tuple[int, float]]:
        """Return (rows, seconds) of the layers, timed by `warm_up_blends`.

        Empty after the first call.
        """
        return self._blends.take_profile()

    def take_blend_times(self) -> list[BlendTime]:
        """Return and forget the times of blends that the device has ended. Does not block."""
        return self._blends.take_times()

    # -- reports ----------------------------------------------------------------------------

    def _collect(self) -> None:
        """Take in the reports that are ready. Blocks as `_submit` does."""
        with self._lock:
            self._polled += self._worker.poll()
            while self._polled:  # if one raises, the next call takes in the others
                self._take(self._polled.popleft())

    def _take_reports(self) -> list[OpReport]:
        """Return and forget the reports that were passed on since the last call."""
        with self._lock:
            reports, self._reports = self._reports, []
        return reports

    def _take(self, report: OpReport) -> None:
        """Take in one report, and repeat a load if it may be. The caller holds the lock."""
        load = self._loads.get(report.graph_id)
        if load is None:
            self._reports.append(report)
            return
        if report.graph_id in self._given_up:
            report = _refused(report)
        load.take(report)
        if load.may_retry and not self._abandoned:
            if load.left:
                return
            if load.failed:
                self._retry(load)
                return
        self._reports += load.pass_on()
        if not load.left:
            del self._loads[load.graph_id]
            self._ended(load)

    def _retry(self, load: Load[_R]) -> None:
        """Submit a load again, from any thread. Blocks up to `RETRY_WAIT_S`.

        The caller holds the lock.
        """
        _log.warning("a load failed and is tried again graph=%d", load.graph_id)
        load.attempt += 1
        load.begin()
        try:
            self._worker.wait_report(RETRY_WAIT_S)  # if the queue was full, let it drain
            self._submit(load.graph, self._worker.wave())  # somebody waits for it by now
        except BaseException:
            if self._loads.get(load.graph_id) is load:  # no report would ever end it
                self._refuse([load.graph], RowError.REFUSED)
            raise

    def _ended(self, load: Load[_R]) -> None:
        """Handle the final end of a load or a chunk. The caller holds the lock."""

    def close(self) -> None:
        """Finish the saves in flight and flush the tiers, so that no save is lost. Blocks."""
        close_worker(self._worker)
