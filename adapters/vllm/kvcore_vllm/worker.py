"""The data plane inside a vLLM worker: runs step plans around the model's forward.

handle_preemptions   fences, loads and early saves start        (before the forward)
start_load_kv        blends
wait_for_layer_load  a layer of a sync load has landed
wait_for_save        late saves start                           (after the forward)
get_finished         async loads that ended; an empty step waits briefly for one
"""

from __future__ import annotations

import itertools
from collections import deque

from kvcore.connector.forward_timer import ForwardClock
from kvcore.connector.fusion_messages import BlendOrder, BlendReport, pages_made
from kvcore.connector.fusion_worker import FusionWorker, RefusingFusionWorker
from kvcore.telemetry.metrics import Metrics
from kvcore.transfer.graph import SKIP, OpReport, RowError, TransferGraph
from kvcore.worker import KVWorker, RefusingWorker, refuse
from kvcore.worker.lifecycle import TierOpener, close_worker, open_tiers
from kvcore_vllm.messages import RankReport, StepNews, StepPlan

IDLE_WAIT_S = 0.002
"""How long a step without tokens waits for a transfer to end, instead of spinning."""

TAINTED_STEPS = 3
"""Steps whose saves are dropped when a sync load failed: the one that failed, and those that the
scheduler had already planned on top of it."""


class WorkerSide:
    """One per rank. Called from the model runner's thread only.

    ``layer_of`` maps the engine's layer names to canonical layers, ``page_tokens`` is the size of
    a scheduler block of each layer group in tokens.
    """

    def __init__(
        self,
        worker: KVWorker | RefusingWorker,
        *,
        layer_of: dict[str, int],
        page_tokens: tuple[int, ...],
        metrics: Metrics,
        open_tier: TierOpener,
        blends: FusionWorker | RefusingFusionWorker,
        clock: ForwardClock[int],
    ) -> None:
        self._worker = worker
        self._layer_of = layer_of
        self._metrics = metrics
        self._open_tier = open_tier
        self._blends = blends
        self._plan = StepPlan()
        self._sync: dict[int, TransferGraph] = {}
        self._async: dict[int, tuple[str, TransferGraph]] = {}
        self._device_left: dict[int, int] = {}
        self._reports: deque[OpReport] = deque()
        self._finished: set[str] = set()
        self._failed: set[str] = set()
        self._bad_pages: set[int] = set()
        self._page_tokens = page_tokens
        self._tainted = 0
        self._failing: set[int] = set()
        self._chunks: dict[int, BlendOrder] = {}  # this step's blends by the graphs they read
        self._lost: set[str] = set()  # requests whose chunks did not come
        self._clock = clock

    # -- before the forward -----------------------------------------------------------------

    def begin(self, plan: StepPlan) -> None:
        """Start what must start before this step's forward. Blocks on fences only."""
        self._plan = plan
        self._tend_tiers(plan)
        for graph in plan.early_saves:
            self._submit(graph)
        for graph_id in plan.fence:
            self._worker.wait_device(graph_id)
        for graph_id in plan.cancel:
            self._worker.cancel(graph_id)
        self._finished.update(plan.failed_loads)
        self._failed.update(plan.failed_loads)
        together = self._worker.wave()
        for graph in plan.sync_loads:
            self._sync[graph.graph_id] = graph
            self._submit(graph, together)
        for request_id, graph in plan.async_loads:
            self._async[graph.graph_id] = (request_id, graph)
            self._device_left[graph.graph_id] = sum(op.path.touches_device for op in graph.ops)
            self._submit(graph)
        for graph in itertools.chain(plan.fetches, plan.spills):
            self._submit(graph)
        self._begin_blends(plan)
        if not plan.blends:  # without loads vLLM's next call comes when the forward is launched
            self._start_clock()

    def _tend_tiers(self, plan: StepPlan) -> None:
        open_tiers(self._worker, self._open_tier, plan.open_tiers)
        for name, slots in plan.forget:
            self._worker.forget(name, slots)

    def _begin_blends(self, plan: StepPlan) -> None:
        self._chunks = {
            chunk.graph.graph_id: order for order in plan.blends for chunk in order.chunks
        }
        for report in self._blends.begin(plan.blends):
            self._take(report)

    def blend(self) -> None:
        """Carry out the step's blends. Blocks; the forward starts afterwards."""
        if self._plan.blends:
            pages = self._blends.run(self._wait_for_canonical)
            if pages:
                self._tainted = TAINTED_STEPS
                self._bad_pages.update(pages)
            self._start_clock()

    def _start_clock(self) -> None:
        """The forward is next, if this is not a step in which computing waits for loads."""
        if self._plan.timed and not self._sync:
            self._clock.start(self._plan.timed)

    def _wait_for_canonical(self, layer: int) -> None:
        for graph_id in self._sync:
            self._worker.wait_layer(graph_id, layer)

    def _submit(self, graph: TransferGraph, wave: int | None = None) -> None:
        for report in self._worker.submit(graph, wave=wave):
            self._take(report)

    def wait_for_layer(self, layer_name: str) -> None:
        """Block until this layer of every sync load has landed."""
        if not self._sync:
            return
        layer = self._layer_of.get(layer_name)
        if layer is None:
            return
        self._wait_for_canonical(layer)

    def wait_for_loads(self) -> None:
        """Block until every sync load has landed."""
        for graph_id in self._sync:
            self._worker.wait_device(graph_id)

    # -- after the forward ------------------------------------------------------------------

    def end_forward(self) -> None:
        """Start the saves of what the forward computed, unless it computed on a failed load."""
        self._clock.stop()
        self.wait_for_loads()
        self._collect()
        self._sync.clear()
        saves, self._plan.late_saves = self._plan.late_saves, []
        if self._tainted:
            self._tainted -= 1
            for graph in saves:
                self._reports += refuse(graph, RowError.UPSTREAM)
            return
        for graph in saves:
            self._submit(graph)

    def finished_loads(self) -> tuple[set[str], set[str]]:
        """(requests whose async load ended, those of them that failed), each told once."""
        if self._plan.empty_step and not self._finished:
            self._worker.wait_report(IDLE_WAIT_S)
        self._collect()
        finished, self._finished = self._finished, set()
        failed, self._failed = self._failed & finished, self._failed - finished
        return finished, failed

    def take_bad_pages(self) -> set[int]:
        """Scheduler blocks that a sync load of this step left unfilled."""
        pages, self._bad_pages = self._bad_pages, set()
        return pages

    def take_news(self) -> StepNews | None:
        """What ended since the last call, for the scheduler; None when there is nothing to say."""
        self._collect()
        blends, forwards = self._take_blends(), self._clock.take()
        profile = self._blends.take_profile()
        if not (self._reports or blends or forwards or profile):
            return None
        reports = [RankReport(r) for r in self._reports]
        self._reports.clear()
        return StepNews(reports, self._metrics.delta(), blends, forwards, profile)

    def _take_blends(self) -> list[BlendReport]:
        """What became of the blends. One made without its chunks is worth nothing."""
        lost, self._lost = self._lost, set()
        return [
            BlendReport(report.request_id, ok=False, arrived=False)
            if report.request_id in lost
            else report
            for report in self._blends.take_reports()
        ]

    def close(self) -> None:
        """Finish saves in flight and flush them; nothing that was saved is lost."""
        close_worker(self._worker)

    # -- reports ----------------------------------------------------------------------------

    def _collect(self) -> None:
        for report in self._worker.poll():
            self._take(report)

    def _take(self, report: OpReport) -> None:
        self._reports.append(report)
        if report.graph_id in self._sync:
            self._take_sync(report, self._sync[report.graph_id])
        elif report.graph_id in self._async:
            self._take_async(report, *self._async[report.graph_id])
        elif report.failed and report.graph_id in self._chunks:
            self._tainted = TAINTED_STEPS
            order = self._chunks[report.graph_id]
            self._lost.add(order.request_id)
            self._bad_pages.update(pages_made(order, self._page_tokens[0]))

    def _take_sync(self, report: OpReport, graph: TransferGraph) -> None:
        if not report.failed:
            return
        self._tainted = TAINTED_STEPS
        for table, page_tokens in zip(graph.units, self._page_tokens, strict=True):
            per_page = page_tokens // table.unit_tokens
            units = table.array()[min(report.failed) :].ravel()
            self._bad_pages.update((units[units != SKIP] // per_page).tolist())

    def _take_async(self, report: OpReport, request_id: str, graph: TransferGraph) -> None:
        op = next(op for op in graph.ops if op.op_id == report.op_id)
        if not op.path.touches_device:
            return
        if report.failed:
            self._failing.add(report.graph_id)
        self._device_left[report.graph_id] -= 1
        if self._device_left[report.graph_id]:
            return
        del self._device_left[report.graph_id]
        del self._async[report.graph_id]
        self._finished.add(request_id)
        if report.graph_id in self._failing:
            self._failing.discard(report.graph_id)
            self._failed.add(request_id)
