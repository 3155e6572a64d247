"""A rank's worker whose errors do not end vLLM.

    promise ──▶ begin ──▶ the ledger takes the plan's graphs ──▶ the worker carries it out
                   │ any call raises, or the plan cannot be read
                   ▼
    no copy may still touch a page ──▶ every open promise is told as failed ──▶ the leader stops

The promises and the ledger are apart from the worker's own books, which an error leaves in an
unknown state. vLLM computes what was promised, as after a load that failed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvcore.connector.fusion_messages import BlendReport
from kvcore.connector.messages import StepReport
from kvcore.connector.rank_guard import RankGuard
from kvcore.transfer.graph import OpReport, RowError, TransferGraph
from kvcore_vllm.messages import KVCoreMetadata, Promises, StepPlan
from kvcore_vllm.worker import WorkerConnector

__all__ = ["WorkerGuard"]


class _Ledger:
    """What was promised to the leader, and has not been told yet."""

    def __init__(self) -> None:
        self.blends: dict[str, None] = {}
        self.open: dict[int, TransferGraph] = {}
        self._ended: dict[int, set[int]] = {}

    def promise(self, plan: StepPlan) -> None:
        self.blends.update((order.request_id, None) for order in plan.blends)
        between = [graph for _, graph in (*plan.async_loads, *plan.blend_loads)]
        graphs = [*plan.sync_loads, *between, *plan.fetches, *plan.spills]
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

    def take_report(self, stopped: str) -> StepReport | None:
        """Return all that is open as refused, and forget it."""
        reports = [
            OpReport(graph.graph_id, op.op_id, dict.fromkeys(range(*op.rows), RowError.REFUSED))
            for graph in self.open.values()
            for op in graph.ops
            if op.op_id not in self._ended.get(graph.graph_id, ())
        ]
        blends = [BlendReport(name, ok=False, arrived=False) for name in self.blends]
        self.open, self._ended, self.blends = {}, {}, {}
        if not (reports or blends or stopped):
            return None
        return StepReport(reports, blends=blends, stopped=stopped)


class WorkerGuard:
    """Passes vLLM's calls on to a `WorkerConnector` until one of them raises.

    The methods are the worker's. ``stopped`` says why it is no longer called. ``waiting`` are the
    requests, and ``pages`` the pages of the step, that vLLM counts on: see `Promises`.
    """

    def __init__(self, worker: WorkerConnector) -> None:
        self._worker = worker
        self._ledger = _Ledger()
        self._rank = RankGuard(worker, lambda: self._ledger.open)
        self._run = self._rank.run
        self._told = ""  # why it has stopped, as the leader knows it
        self.waiting: dict[str, None] = {}
        self.pages: set[int] = set()
        self._ended: set[str] = set()  # of ``waiting``, in this step

    @property
    def stopped(self) -> str:
        return self._rank.stopped

    def count_on(self, promises: Promises) -> None:
        """Record what vLLM counts on in a step. Call first of all; it cannot fail."""
        for name in self._ended:  # the step before has told vLLM
            self.waiting.pop(name, None)
        self._ended = set()
        self.waiting.update(dict.fromkeys(promises.waiting))
        self.pages = set(promises.pages)

    def halt(self, why: str, error: BaseException | None = None) -> None:
        """Stop the rank for a reason. Raises PagesInUse if a copy may still touch a page."""
        self._rank.halt(why, error)

    # -- before the forward -----------------------------------------------------------------

    def begin(self, metadata: KVCoreMetadata) -> None:
        """Begin the plan of a step, after `count_on`."""
        unread: list[Any] = [object() for _ in range(metadata.meetings)]  # told apart as objects
        self._rank.expect(unread)
        if metadata.stopped:
            self.halt(f"the scheduler's side has stopped ({metadata.stopped})")
        plan = self._run("handle_preemptions", metadata.plan, None, always=True)
        if plan is None:
            return
        self._rank.expect(plan.blends)
        self._run("handle_preemptions", lambda: self._ledger.promise(plan), None, always=True)
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

    def forward_launched(self) -> None:
        self._run("finish_forward", self._worker.forward_launched, None)

    def end_forward(self) -> None:
        self._run("wait_for_save", self._worker.end_forward, None)

    def finished_loads(self) -> tuple[set[str], set[str]]:
        nothing: tuple[set[str], set[str]] = (set(), set())
        finished, failed = self._run("get_transfer_results", self._worker.finished_loads, nothing)
        if self.stopped:
            return self.lost_requests()
        self._ended = finished
        return finished, failed

    def lost_requests(self) -> tuple[set[str], set[str]]:
        """Return all requests that wait, as ended and failed, and forget them."""
        waiting, self.waiting = set(self.waiting), {}
        return waiting, waiting

    def take_bad_pages(self) -> set[int]:
        bad = self._run("get_block_ids_with_load_errors", self._worker.take_bad_pages, set[int]())
        return self.lost_pages() if self.stopped else bad

    def lost_pages(self) -> set[int]:
        """Return the pages that the step's loads were to fill, and forget them."""
        pages, self.pages = self.pages, set()
        return pages

    def take_report(self) -> StepReport | None:
        report = self._run("build_connector_worker_meta", self._worker.take_report, None)
        if report is not None and not self.stopped:
            self._run("build_connector_worker_meta", lambda: self._ledger.told(report), None)
        return self.last_report() if self.stopped else report

    def last_report(self) -> StepReport | None:
        """Return what the leader waits for as refused, and once why the rank has stopped."""
        new, self._told = self.stopped if self._told != self.stopped else "", self.stopped
        refused = self._run(
            "its last report", lambda: self._ledger.take_report(new), None, always=True
        )
        return StepReport(stopped=new) if refused is None and new else refused

    # -- upkeep -----------------------------------------------------------------------------

    def quiesce(self, timeout: float) -> bool:
        return self._worker.quiesce(timeout)

    def weights_changed(self) -> None:
        self._run("an update of weights", self._worker.weights_changed, None)

    def close(self) -> None:
        self._run("shutdown", self._worker.close, None, always=True)
