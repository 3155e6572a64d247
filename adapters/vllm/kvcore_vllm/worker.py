"""The data plane inside a vLLM worker: it carries out step plans around the model's forward.

handle_preemptions    starts early saves and loads, follows fences      (before the forward)
start_load_kv         makes blends               (before the forward if the step has sync loads)
wait_for_layer_load   follows the sync loads' copies of a layer
finish_forward        the forward has been launched: late saves precede blends      (V2 only)
wait_for_save         starts late saves                                 (after the forward)
get_transfer_results  returns async loads that ended; an empty step waits briefly for one

To *follow* copies is to let the engine's stream wait for them; this thread waits only until they
were issued. With speculative decoding vLLM calls wait_for_save last, after it has asked for all
results.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from kvcore.connector.forward_timer import ForwardTimer
from kvcore.connector.fusion_messages import BlendReport
from kvcore.connector.fusion_worker import FusionWorker, RefusingFusionWorker
from kvcore.connector.messages import StepReport
from kvcore.connector.worker import IDLE_WAIT_S, Load, StepWorker
from kvcore.transfer.graph import SKIP, UnitTable
from kvcore.worker.lifecycle import RankParts
from kvcore_vllm.messages import StepPlan


class WorkerConnector(StepWorker[str]):
    """The worker half of one rank. Called from the model runner's thread only.

    A load has one attempt: vLLM computes what is missing, or looks it up again. ``layer_of`` maps
    the engine's layer names to canonical layers. ``page_tokens`` is the size of a scheduler block
    of each layer group, in tokens. ``clock`` times the forwards that a plan asks for.
    ``request_ids`` are the requests of the current forward in the order of their rows, if the
    runner told them. With ``follow_saves`` the engine goes on when the saves of a step have read
    their pages, because its next step may write to them before it calls `begin`.
    """

    def __init__(
        self,
        parts: RankParts,
        blends: FusionWorker | RefusingFusionWorker,
        *,
        layer_of: dict[str, int],
        page_tokens: tuple[int, ...],
        clock: ForwardTimer[int],
        follow_saves: bool = False,
    ) -> None:
        super().__init__(parts, blends)
        self._layer_of = layer_of
        self._page_tokens = page_tokens
        self._clock = clock
        self._follow_saves = follow_saves
        self.request_ids: Sequence[str] = ()
        self._plan = StepPlan()
        self._sync: list[Load[str]] = []
        self._prefixes: dict[str, Load[str]] = {}  # exact tokens before a blend, by request
        self._made: list[BlendReport] = []
        self._finished: set[str] = set()
        self._failed: set[str] = set()
        self._bad_pages: set[int] = set()
        self._launched = False  # this step's forward, as far as the runner has said so
        self._saving: list[int] = []  # the late saves that this step has started
        self._tainted = False  # a sync load of this step has failed
        self._number = 0  # of the last plan
        self._weights = self._told_weights = 0  # the first plan with these weights, if they changed

    # -- before the forward -----------------------------------------------------------------

    def begin(self, plan: StepPlan) -> None:
        """Start the work that precedes this step's forward.

        Whatever the step writes to a page, it writes after the saves of its fence have read it: a
        save that waits in the queue is issued first, and this thread waits for no more than that.
        """
        self._plan, self._number = plan, plan.number
        self._launched, self._saving = False, []
        self._finished.update(plan.failed_loads)
        self._failed.update(plan.failed_loads)
        self._bad_pages.update(plan.unfilled)
        self._tainted = bool(plan.unfilled)
        if plan.weights < self._weights:
            self._decline(plan)
        self._submit_saves(plan.early_saves)
        self._worker.follow(*plan.fence)
        self._cancel(plan.cancel)
        together = self._worker.wave()
        for graph in plan.sync_loads:
            self._sync.append(self._expect(graph))
            self._submit(graph, together)
        for request_id, graph in plan.async_loads:
            self._expect(graph, request_id)
            self._submit(graph)
        for request_id, graph in plan.blend_loads:
            self._prefixes[request_id] = self._expect(graph)
            self._submit(graph)
        for graph in itertools.chain(plan.fetches, plan.spills):
            self._submit(graph)
        self._begin_blends(self._blends, plan.blends)
        if plan.timed and not self._sync:  # without loads the next call is the forward's launch
            self._clock.start(plan.timed)

    def _decline(self, plan: StepPlan) -> None:
        """Fail the loads, blends and saves of a plan that was made before weights were changed."""
        for graph in plan.sync_loads:
            self._sync.append(self._expect(graph))
        for request_id, graph in plan.async_loads:
            self._expect(graph, request_id)
        parked = [graph for _, graph in (*plan.async_loads, *plan.blend_loads)]
        chunks = [chunk.graph for order in plan.blends for chunk in order.chunks]
        self._refuse([*plan.early_saves, *plan.late_saves, *plan.sync_loads, *parked, *chunks])
        for order in plan.blends:
            self._finished.add(order.request_id)
            self._failed.add(order.request_id)
            self._made.append(BlendReport(order.request_id, ok=False, arrived=False))
        plan.early_saves, plan.late_saves, plan.sync_loads = [], [], []
        plan.async_loads, plan.blend_loads, plan.blends = [], [], []

    def weights_changed(self) -> None:
        """Record that the model's weights are being changed, between two steps.

        The leader learns of it with the next report. What it plans before that loads and saves
        nothing.
        """
        self._weights = self._number + 1

    def blend(self) -> None:
        """Carry out the step's blends. Blocks. Does nothing the second time in a step.

        Requests wait for their blends as for async loads. One whose blend failed is told as failed.

        If the forward has been launched, the saves of what it computed are started first: they
        would wait for the blend, which is queued behind the forward. Fusion is not for models with
        a draft model, which writes its KV later than that.
        """
        orders, self._plan.blends = self._plan.blends, []
        if not orders:
            return
        if self._launched:
            self._start_saves()
        prefixes, self._prefixes = self._prefixes, {}
        self._blends.run(lambda layer: self._wait_layer(list(prefixes.values()), layer))
        self._lose(orders)
        self._wait_loads(list(prefixes.values()))
        self._lost.update(request_id for request_id, load in prefixes.items() if load.failed)
        reports = self.take_blends()
        self._made += reports
        self._finished.update(report.request_id for report in reports)
        self._failed.update(report.request_id for report in reports if not report.ok)

    def wait_for_layer(self, layer_name: str) -> None:
        """Follow the sync loads' copies of the layer of this name."""
        layer = self._layer_of.get(layer_name)
        if self._sync and layer is not None:
            self._wait_layer(self._sync, layer)

    def wait_for_loads(self) -> None:
        """Follow the sync loads. Those that fail have failed when this returns."""
        self._wait_loads(self._sync)

    # -- after the forward ------------------------------------------------------------------

    def forward_launched(self) -> None:
        """Stop timing the forward. What is queued from here on comes after what it computes."""
        self._clock.stop()
        self._launched = True

    def end_forward(self) -> None:
        """Follow the sync loads, then start the saves of what the forward computed."""
        self._clock.stop()
        self.request_ids = ()
        self._start_saves()
        if self._follow_saves:
            self._worker.follow(*self._saving)

    def _start_saves(self) -> None:
        """Follow the sync loads, then start the late saves, if they have not been started.

        Drops the saves if the forward may have computed on KV that did not arrive.
        """
        self.wait_for_loads()
        self._collect()
        self._sync.clear()
        saves, self._plan.late_saves = self._plan.late_saves, []
        tainted, self._tainted = self._tainted, False
        if tainted:
            self._refuse(saves)
            return
        self._submit_saves(saves)
        self._saving += [graph.graph_id for graph in saves]

    def _unfilled(self, load: Load[str]) -> list[int]:
        """Return the scheduler blocks from the first row on that failed in a load."""
        first = min(row for report in load.reports for row in report.failed)
        return self.pages_of(load.graph.units, first)

    def pages_of(self, units: Sequence[UnitTable], first: int = 0) -> list[int]:
        """Return the scheduler blocks of rows ``first`` and after."""
        pages: list[int] = []
        for table, page_tokens in zip(units, self._page_tokens, strict=True):
            rows = table.array()[first:].ravel()
            pages += (rows[rows != SKIP] // (page_tokens // table.unit_tokens)).tolist()
        return pages

    def finished_loads(self) -> tuple[set[str], set[str]]:
        """Return the requests whose async load or blend has ended, and those for which it failed.

        Each request is returned once. An empty step blocks up to `IDLE_WAIT_S` for one. Follows the
        sync loads: if one fails, `take_bad_pages` must name its pages in this step.
        """
        self.wait_for_loads()
        if self._plan.empty_step and not self._finished:
            self._worker.wait_report(IDLE_WAIT_S)
        self._collect()
        finished, self._finished = self._finished, set()
        failed, self._failed = self._failed & finished, self._failed - finished
        return finished, failed

    def take_bad_pages(self) -> set[int]:
        """Return and forget the scheduler blocks that a sync load left unfilled."""
        pages, self._bad_pages = self._bad_pages, set()
        return pages

    def take_report(self) -> StepReport | None:
        """Return what ended since the last call, for the scheduler, or None if nothing did."""
        self._collect()
        reports = self._take_reports()
        blends, self._made = self._made, []
        forwards, profile = self._clock.take(), self.take_profile()
        times = self.take_blend_times()
        changed, self._told_weights = self._weights > self._told_weights, self._weights
        if not (reports or blends or forwards or profile or times or changed):
            return None
        return StepReport(
            reports, self.metrics.delta(), blends, forwards, profile, times, self._weights
        )

    def _ended(self, load: Load[str]) -> None:
        if load.request_id is not None:
            self._finished.add(load.request_id)
            if load.failed:
                self._failed.add(load.request_id)
        elif load.failed and load in self._sync:  # what the step computes from its pages is wrong
            self._tainted = True
            self._bad_pages.update(self._unfilled(load))
