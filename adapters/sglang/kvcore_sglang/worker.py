"""The data plane of one rank: carries out orders around the engine's forward.

    load   start ──▶ wait_layer(0) ... wait_layer(n - 1) ──▶ finish       (layer by layer)
    blend  before the forward, while its loads land
    save   submit at the insert; its pages stay locked in the tree until its copy has ended

A load from host memory that fails is tried again before anything is computed from it. What became
of it is reported once that is certain.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from kvcore.connector.forward_timer import ForwardClock
from kvcore.connector.fusion_messages import BlendOrder, BlendReport
from kvcore.connector.fusion_worker import FusionWorker, RefusingFusionWorker
from kvcore.telemetry.rates import Part
from kvcore.transfer.graph import OpReport, TransferGraph
from kvcore.worker import KVWorker
from kvcore.worker.lifecycle import TierOpener, close_worker, open_tiers
from kvcore_sglang.messages import Order

_log = logging.getLogger("kvcore.sglang.worker")

ATTEMPTS = 3
"""How often a load from host memory is tried before its requests are computed again."""

RETRY_WAIT_S = 0.02

Fence = Callable[[], AbstractContextManager[object]]
"""Context in which what is submitted is ordered after the engine's work so far."""


@dataclass
class _Load:
    """A load under way. ``reports`` are held back until it is certain: a failed one is retried."""

    graph: TransferGraph
    left: int
    attempt: int = 1
    reports: list[OpReport] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        return any(report.failed for report in self.reports)


class RankWorker:
    """One per rank. Thread-safe: the scheduler's thread and the one that speaks to the leader.

    ``blends`` make KV of stored chunks, where this rank's model is one that they are right for.
    ``clock`` times this rank's forwards, where they are to be timed.
    """

    def __init__(
        self,
        worker: KVWorker,
        open_tier: TierOpener,
        fence: Fence = contextlib.nullcontext,
        blends: FusionWorker | RefusingFusionWorker | None = None,
        clock: ForwardClock[Sequence[Part]] | None = None,
    ) -> None:
        self._worker = worker
        self._open_tier = open_tier
        self._fence = fence
        self._blends = RefusingFusionWorker(1) if blends is None else blends
        self._clock = clock
        self._chunks: set[int] = set()  # graphs of the blends that are being made
        self._spoiled: set[str] = set()  # requests whose chunks did not land
        self._lock = threading.RLock()
        self._loads: dict[int, _Load] = {}
        self._failed: set[int] = set()
        self._reports: list[OpReport] = []

    # -- orders -----------------------------------------------------------------------------

    def carry_out(self, order: Order) -> None:
        """Everything of an order but loads. Does I/O only where it opens tiers or forgets."""
        open_tiers(self._worker, self._open_tier, order.open_tiers)
        for name, slots in order.forget:
            self._worker.forget(name, slots)
        for graph_id in order.cancel:
            self._worker.cancel(graph_id)
        if order.now:
            self._submit(order.graphs)
        elif order.graphs:
            with self._fence():
                self._submit(order.graphs)

    def start_loads(self, graphs: Sequence[TransferGraph]) -> None:
        """Begin copying into the engine's pages. Does not block."""
        with self._lock:
            for graph in graphs:
                self._loads[graph.graph_id] = _Load(graph, len(graph.ops))
        with self._fence():
            self._submit(graphs)

    def _submit(self, graphs: Iterable[TransferGraph]) -> None:
        for graph in graphs:
            refused = self._worker.submit(graph)
            with self._lock:
                for report in refused:
                    self._take(report)

    # -- loads ------------------------------------------------------------------------------

    def wait_layer(self, graph_ids: Iterable[int], layer: int) -> None:
        """Block until these loads have copied ``layer``, tried again where the copy failed."""
        for graph_id in graph_ids:
            self._worker.wait_layer(graph_id, layer)
            self._collect()
            load = self._loads.get(graph_id)
            if load is not None and (load.failed or load.attempt > 1):
                self._settle(graph_id)

    def finish(self, graph_ids: Iterable[int]) -> bool:
        """Block until these loads write no more; whether all of them landed."""
        graph_ids = list(graph_ids)
        for graph_id in graph_ids:
            self._settle(graph_id)
        with self._lock:
            failed = self._failed.intersection(graph_ids)
            self._failed -= failed
        return not failed

    def _settle(self, graph_id: int) -> None:
        """Block until a load has ended for good."""
        while graph_id in self._loads:
            self._worker.wait_device(graph_id)
            self._collect()
            if graph_id in self._loads:
                self._worker.wait_report(RETRY_WAIT_S)

    # -- blends -----------------------------------------------------------------------------

    def blend(self, orders: Sequence[BlendOrder], landed: Callable[[int], None]) -> bool:
        """Make the KV of these orders in the engine's pages; whether all of it is good. Blocks.

        ``landed(layer)`` blocks until the batch's loads hold a layer. To be called where the
        forward is, before it.
        """
        graphs = {chunk.graph.graph_id for order in orders for chunk in order.chunks}
        with self._lock:
            self._chunks |= graphs
        refused = self._blends.begin(orders)
        with self._lock:
            for report in refused:
                self._take(report)
        unfilled = self._blends.run(landed)
        self._collect()
        with self._lock:
            failed = self._failed & graphs
            self._failed -= graphs
            self._chunks -= graphs
        for order in orders:
            if not failed.isdisjoint(chunk.graph.graph_id for chunk in order.chunks):
                self._spoiled.add(order.request_id)
        return not unfilled and not failed

    def take_blends(self) -> list[BlendReport]:
        """What became of the blends since the last call. Scheduler's thread only."""
        spoiled, self._spoiled = self._spoiled, set()
        return [
            BlendReport(report.request_id, ok=False, arrived=False)
            if report.request_id in spoiled
            else report
            for report in self._blends.take_reports()
        ]

    def take_profile(self) -> list[tuple[int, float]]:
        """(rows, seconds) of the layers, timed when the blends were made. Told once."""
        return self._blends.take_profile()

    # -- forwards ---------------------------------------------------------------------------

    @property
    def times_forwards(self) -> bool:
        """Whether forwards of this rank are timed."""
        return self._clock is not None

    @contextlib.contextmanager
    def forward(self, parts: Sequence[Part]) -> Iterator[None]:
        """The block is a forward over these parts, in which nothing is waited for. Scheduler's
        thread only."""
        if self._clock is None:
            yield
            return
        self._clock.start(parts)
        yield
        self._clock.stop()

    def take_forwards(self) -> list[tuple[Sequence[Part], float]]:
        """(parts, seconds) of forwards that ended since the last call. Does not block."""
        return [] if self._clock is None else self._clock.take()

    # -- reports ----------------------------------------------------------------------------

    def wait_report(self, timeout: float) -> bool:
        """Block until an op has ended, at most ``timeout`` seconds."""
        return self._worker.wait_report(timeout)

    def wait_graph(self, timeout: float) -> bool:
        """Block until a graph has ended that was not polled since, at most ``timeout`` seconds."""
        return self._worker.wait_graph(timeout)

    def poll(self) -> list[OpReport]:
        """Reports of the ops that ended since the last call. Does not block."""
        self._collect()
        with self._lock:
            reports, self._reports = self._reports, []
        return reports

    def _collect(self) -> None:
        with self._lock:
            for report in self._worker.poll():
                self._take(report)

    def _take(self, report: OpReport) -> None:
        load = self._loads.get(report.graph_id)
        if load is None:
            if report.failed and report.graph_id in self._chunks:
                self._failed.add(report.graph_id)
            self._reports.append(report)
            return
        load.reports.append(report)
        load.left -= 1
        if load.left:
            return
        if load.failed and load.attempt < ATTEMPTS:
            _log.warning("a load failed and is tried again graph=%d", load.graph.graph_id)
            load.attempt += 1
            load.left, load.reports = len(load.graph.ops), []
            self._submit([load.graph])
            return
        del self._loads[load.graph.graph_id]
        if load.failed:
            self._failed.add(load.graph.graph_id)
        self._reports += load.reports

    def quiesce(self, timeout: float) -> bool:
        """Block until this rank copies neither from nor to the engine's pages; False after
        ``timeout`` seconds. A medium that hangs has no page."""
        limit = time.monotonic() + timeout
        while self._worker.engine.on_device:
            if time.monotonic() >= limit:
                return False
            time.sleep(RETRY_WAIT_S / 10)
        return True

    def close(self) -> None:
        """Finish saves in flight and flush them. Blocks."""
        close_worker(self._worker)
