"""The worker side of every connector: graphs in, reports out, loads that are tried again.

    plan ──▶ open and forget tiers ──▶ submit saves, loads, chunks of blends
    forward ── wait for a layer of its loads; a copy from host memory that failed is tried again
    poll ──▶ reports, each passed on once it is certain

An adapter subclasses `StepWorker`. It says when the engine calls, what a failed load means there,
and how many attempts a load has.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

from kvcore.connector.fusion_messages import BlendOrder, BlendReport
from kvcore.connector.fusion_worker import FusionWorker, RefusingFusionWorker
from kvcore.connector.messages import WorkPlan
from kvcore.transfer.graph import OpReport, TransferGraph
from kvcore.worker.lifecycle import RankParts, close_worker, open_tiers

__all__ = ["ATTEMPTS", "RETRY_WAIT_S", "Load", "StepWorker"]

_log = logging.getLogger("kvcore.connector.worker")

ATTEMPTS = 3
"""Attempts of a load from host memory in an engine that cannot look the request up again."""

RETRY_WAIT_S = 0.02
"""Seconds to wait for a report at a time, and for room in a full queue before the next attempt."""

_R = TypeVar("_R", str, int)


@dataclass(eq=False)
class Load(Generic[_R]):
    """A load that is under way, or a chunk of a blend.

    ``left`` counts the ops of this attempt that have not ended. Only those that touch the engine's
    pages count: a read from a medium that hangs has no page. ``request_id`` is the request that is
    parked for the load, None if this step waits for it. Only loads whose ops all copy from host
    memory may have more than one of ``attempts``: a graph is submitted again as a whole.
    """

    graph: TransferGraph
    request_id: _R | None = None
    attempts: int = 1
    attempt: int = 1
    cancelled: bool = False
    left: int = 0
    passed: int = 0
    reports: list[OpReport] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Start counting an attempt."""
        self.left = sum(op.path.touches_device for op in self.graph.ops)
        self.passed, self.reports = 0, []

    @property
    def graph_id(self) -> int:
        return self.graph.graph_id

    @property
    def failed(self) -> bool:
        """Whether a copy of this attempt has failed."""
        return any(report.failed for report in self.reports)

    @property
    def may_retry(self) -> bool:
        return self.attempt < self.attempts and not self.cancelled

    def take(self, report: OpReport) -> None:
        """Take in the end of one of the graph's ops."""
        self.reports.append(report)
        op = next(op for op in self.graph.ops if op.op_id == report.op_id)
        self.left -= op.path.touches_device

    def pass_on(self) -> list[OpReport]:
        """Return the reports of this attempt that were not returned before."""
        found = self.reports[self.passed :]
        self.passed = len(self.reports)
        return found


class StepWorker(Generic[_R]):
    """One rank's worker as an engine's step drives it.

    Reports of a load are passed on as they come, unless the load may be tried again: then they are
    held back until its attempt has succeeded.

    Thread-safe only in what takes in reports; a subclass says which of its calls come from where.
    """

    attempts: ClassVar[int] = 1
    """Attempts of a load. One is right if the engine asks again for what did not arrive."""

    def __init__(
        self, parts: RankParts, blends: FusionWorker | RefusingFusionWorker | None = None
    ) -> None:
        self._worker = parts.worker
        self.metrics = parts.metrics
        self._open_tier = parts.open_tier
        self._blends = RefusingFusionWorker(1) if blends is None else blends
        self._lock = threading.RLock()
        self._loads: dict[int, Load[_R]] = {}
        self._chunks: dict[int, Load[_R]] = {}  # by graph, until asked whether they arrived
        self._lost: set[str] = set()  # requests whose chunks did not arrive
        self._reports: list[OpReport] = []

    # -- work -------------------------------------------------------------------------------

    def open(self, tiers: Mapping[str, dict[str, Any]]) -> None:
        """Open tiers with what their leader's part says. Does I/O. One that cannot be opened is
        named in the log, and fails every read and write."""
        open_tiers(self._worker, self._open_tier, tiers)

    def _tend_tiers(self, plan: WorkPlan) -> None:
        """Open the tiers that a plan names, and make slots of tiers unreadable. Does I/O."""
        self.open(plan.open_tiers)
        for name, slots in plan.forget:
            self._worker.forget(name, slots)

    def _cancel(self, graph_ids: Iterable[int]) -> None:
        for graph_id in graph_ids:
            self._worker.cancel(graph_id)
            if (load := self._loads.get(graph_id)) is not None:
                load.cancelled = True

    def _submit(self, graph: TransferGraph, wave: int | None = None) -> None:
        """Start a graph. Does not block; what refuses it is reported."""
        refused = self._worker.submit(graph, wave=wave)
        with self._lock:
            for report in refused:
                self._take(report)

    def _expect(self, graph: TransferGraph, request_id: _R | None = None) -> Load[_R]:
        """Take the reports of ``graph`` for those of a load from now on. Call before `_submit`."""
        load = Load(graph, request_id, self.attempts)
        with self._lock:
            self._loads[graph.graph_id] = load
        return load

    # -- waiting ----------------------------------------------------------------------------

    def _wait_layer(self, loads: Sequence[Load[_R]], layer: int) -> None:
        """Block until ``loads`` have copied ``layer``, or have failed for good."""
        for load in loads:
            self._worker.wait_layer(load.graph_id, layer)
        if loads:
            self._collect()
        for load in loads:
            if load.failed or load.attempt > 1:  # this layer's copy may be one that failed
                self._settle(load)

    def _settle(self, load: Load[_R]) -> None:
        """Block until ``load`` has ended for good, however."""
        while self._loads.get(load.graph_id) is load:
            self._worker.wait_device(load.graph_id)
            self._collect()
            if self._loads.get(load.graph_id) is load and load.left:
                self._worker.wait_report(RETRY_WAIT_S)

    # -- blends -----------------------------------------------------------------------------

    def _begin_blends(
        self, blends: FusionWorker | RefusingFusionWorker, orders: Sequence[BlendOrder]
    ) -> None:
        """Start the copies of the orders' chunks into staging."""
        with self._lock:
            for order in orders:
                for chunk in order.chunks:
                    load: Load[_R] = Load(chunk.graph)
                    self._loads[load.graph_id] = self._chunks[load.graph_id] = load
        refused = blends.begin(orders)
        with self._lock:
            for report in refused:
                self._take(report)

    def _arrived(self, order: BlendOrder) -> bool:
        """Block until the copies of an order's chunks have ended; return True if all succeeded.
        Call once for each order that was begun."""
        chunks = [self._chunks.pop(chunk.graph.graph_id) for chunk in order.chunks]
        for chunk in chunks:
            self._settle(chunk)
        return not any(chunk.failed for chunk in chunks)

    def _lose(self, orders: Iterable[BlendOrder]) -> list[BlendOrder]:
        """Return those of the orders carried out whose chunks had not arrived: their KV is wrong,
        and is reported so."""
        lost = [order for order in orders if not self._arrived(order)]
        self._lost.update(order.request_id for order in lost)
        return lost

    def take_blends(self) -> list[BlendReport]:
        """Return what became of the blends since the last call. One made without its chunks counts
        as failed."""
        lost, self._lost = self._lost, set()
        return [
            BlendReport(report.request_id, ok=False, arrived=False)
            if report.request_id in lost
            else report
            for report in self._blends.take_reports()
        ]

    def take_profile(self) -> list[tuple[int, float]]:
        """Return (rows, seconds) of the layers, timed when the blends were made. Empty after the
        first call."""
        return self._blends.take_profile()

    # -- reports ----------------------------------------------------------------------------

    def _collect(self) -> None:
        """Take in the reports that are there. Does not block."""
        with self._lock:
            for report in self._worker.poll():
                self._take(report)

    def _take_reports(self) -> list[OpReport]:
        """Return the reports passed on since the last call."""
        with self._lock:
            reports, self._reports = self._reports, []
        return reports

    def _take(self, report: OpReport) -> None:
        """Take in one report. The caller holds the lock."""
        load = self._loads.get(report.graph_id)
        if load is None:
            self._reports.append(report)
            return
        load.take(report)
        if load.may_retry:
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
        _log.warning("a load failed and is tried again graph=%d", load.graph_id)
        load.attempt += 1
        load.begin()
        self._worker.wait_report(RETRY_WAIT_S)  # if the queue was full, let it drain
        self._submit(load.graph)

    def _ended(self, load: Load[_R]) -> None:
        """Note the end of a load or a chunk, which is certain now. The caller holds the lock."""

    def close(self) -> None:
        """Finish what is being saved and flush it: nothing that was saved is lost. Blocks."""
        close_worker(self._worker)
