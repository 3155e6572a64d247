"""A rank's worker whose errors do not end vLLM.

    begin ──▶ the ledger takes the plan's promises ──▶ the worker carries it out
                             │ any call raises
                             ▼
    no copy may still touch a page ──▶ every open promise is told as failed ──▶ the leader stops

The ledger is apart from the worker's own books, which an error leaves in an unknown state. vLLM
computes what was promised, as after a load that failed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvcore.connector.fusion_messages import BlendReport
from kvcore.connector.messages import StepReport
from kvcore.connector.rank_guard import RankGuard
from kvcore.transfer.graph import OpReport, RowError, TransferGraph, UnitTable
from kvcore_vllm.messages import StepPlan
from kvcore_vllm.worker import WorkerConnector

__all__ = ["WorkerGuard"]


class _Ledger:
    """What was promised to vLLM, and to the leader, and has not been told yet."""

    def __init__(self) -> None:
        self.waiting: dict[str, None] = {}  # requests that wait for a load or a blend
        self.blends: dict[str, None] = {}
        self.in_step: list[TransferGraph] = []
        self.unfilled: list[int] = []
        self.open: dict[int, TransferGraph] = {}
        self._ended: dict[int, set[int]] = {}

    def promise(self, plan: StepPlan) -> None:
        between = [*plan.async_loads, *plan.blend_loads]
        self.waiting.update((name, None) for name, _ in between)
        self.waiting.update(dict.fromkeys(plan.failed_loads))
        self.blends.update((order.request_id, None) for order in plan.blends)
        self.waiting.update(self.blends)
        self.in_step, self.unfilled = list(plan.sync_loads), list(plan.unfilled)
        graphs = [*plan.sync_loads, *(graph for _, graph in between), *plan.fetches, *plan.spills]
        graphs += [*plan.early_saves, *plan.late_saves]
        graphs += [chunk.graph for order in plan.blends for chunk in order.chunks]
        self.open.update((graph.graph_id, graph) for graph in graphs)

    def told(self, report: StepReport) -> None:
        for blend in report.blends:
            self.blends.pop(blend.request_id, None)
        for op in report.reports:
            graph = self.open.get(op.graph_id)
            if graph is None:
                continue
            ended = self._ended.setdefault(op.graph_id, set())
            ended.add(op.op_id)
            if len(ended) == len(graph.ops):
                del self.open[op.graph_id], self._ended[op.graph_id]

    def take_report(self) -> StepReport | None:
        """Return all that is open as refused, and forget it."""
        reports = [
            OpReport(graph.graph_id, op.op_id, dict.fromkeys(range(*op.rows), RowError.REFUSED))
            for graph in self.open.values()
            for op in graph.ops
            if op.op_id not in self._ended.get(graph.graph_id, ())
        ]
        blends = [BlendReport(name, ok=False, arrived=False) for name in self.blends]
        self.open, self._ended, self.blends = {}, {}, {}
        return StepReport(reports, blends=blends) if reports or blends else None

    def take_waiting(self) -> set[str]:
        waiting, self.waiting = set(self.waiting), {}
        return waiting

    def take_pages(self, pages_of: Callable[[Sequence[UnitTable]], list[int]]) -> set[int]:
        """Return the pages that the step's loads were to fill, and forget them."""
        pages = {page for graph in self.in_step for page in pages_of(graph.units)}
        pages.update(self.unfilled)
        self.in_step, self.unfilled = [], []
        return pages


class WorkerGuard:
    """Passes vLLM's calls on to a `WorkerConnector` until one of them raises.

    The methods are the worker's. ``stopped`` says why it is no longer called.
    """

    def __init__(self, worker: WorkerConnector) -> None:
        self._worker = worker
        self._ledger = _Ledger()
        self._rank = RankGuard(worker, lambda: self._ledger.open)
        self._run = self._rank.run

    @property
    def stopped(self) -> str:
        return self._rank.stopped

    # -- before the forward -----------------------------------------------------------------

    def begin(self, plan: StepPlan) -> None:
        self._ledger.promise(plan)
        self._rank.expect(plan.blends)
        self._run("handle_preemptions", lambda: self._worker.tend_tiers(plan), None, always=True)
        self._run("handle_preemptions", lambda: self._worker.begin(plan), None)

    def start(self, request_ids: Sequence[str], *, layerwise: bool) -> None:
        """Make the step's blends, before that wait for the sync loads unless ``layerwise``."""

        def start() -> None:
            self._worker.request_ids = request_ids
            if not layerwise:
                self._worker.wait_for_loads()
            self._worker.blend()

        self._run("start_load_kv", start, None)
        self._rank.meet()

    def wait_for_layer(self, layer_name: str) -> None:
        self._run("wait_for_layer_load", lambda: self._worker.wait_for_layer(layer_name), None)

    # -- after the forward ------------------------------------------------------------------

    def stop_clock(self) -> None:
        self._run("finish_forward", self._worker.stop_clock, None)

    def end_forward(self) -> None:
        self._run("wait_for_save", self._worker.end_forward, None)

    def finished_loads(self) -> tuple[set[str], set[str]]:
        nothing: tuple[set[str], set[str]] = (set(), set())
        finished, failed = self._run("get_transfer_results", self._worker.finished_loads, nothing)
        if self.stopped:
            waiting = self._ledger.take_waiting()
            return waiting, waiting
        for name in finished:
            self._ledger.waiting.pop(name, None)
        return finished, failed

    def take_bad_pages(self) -> set[int]:
        bad = self._run("get_block_ids_with_load_errors", self._worker.take_bad_pages, set[int]())
        pages = self._ledger.take_pages(self._worker.pages_of)
        return pages if self.stopped else bad

    def take_report(self) -> StepReport | None:
        report = self._run("build_connector_worker_meta", self._worker.take_report, None)
        if self.stopped:
            return self._ledger.take_report()
        if report is not None:
            self._ledger.told(report)
        return report

    # -- upkeep -----------------------------------------------------------------------------

    def quiesce(self, timeout: float) -> bool:
        return self._worker.quiesce(timeout)

    def weights_changed(self) -> None:
        self._run("an update of weights", self._worker.weights_changed, None)

    def close(self) -> None:
        self._run("shutdown", self._worker.close, None, always=True)
