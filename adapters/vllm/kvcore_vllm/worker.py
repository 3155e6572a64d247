"""The data plane inside a vLLM worker: it carries out step plans around the model's forward.

handle_preemptions    waits for fences, starts loads and early saves    (before the forward)
start_load_kv         makes blends
wait_for_layer_load   waits until the sync loads have copied a layer
wait_for_save         starts late saves                                 (after the forward)
get_transfer_results  returns async loads that ended; an empty step waits briefly for one

With speculative decoding vLLM calls wait_for_save last, after it has asked for all results.
"""

from __future__ import annotations

import itertools

from kvcore.connector.forward_timer import ForwardTimer
from kvcore.connector.fusion_messages import pages_made
from kvcore.connector.fusion_worker import FusionWorker, RefusingFusionWorker
from kvcore.connector.messages import StepReport
from kvcore.connector.worker import Load, StepWorker
from kvcore.transfer.graph import SKIP, RowError
from kvcore.worker import refuse
from kvcore.worker.lifecycle import RankParts
from kvcore_vllm.messages import StepPlan

IDLE_WAIT_S = 0.002
"""Longest wait of a step without tokens for a transfer to end, in seconds, instead of spinning."""

TAINTED_STEPS = 3
"""Steps whose saves are dropped after a sync load or a blend failed: the step itself, and the steps
that the scheduler had already planned on top of it."""


class WorkerConnector(StepWorker[str]):
    """The worker half of one rank. Called from the model runner's thread only.

    A load has one attempt: vLLM computes what is missing, or looks it up again. ``layer_of`` maps
    the engine's layer names to canonical layers. ``page_tokens`` is the size of a scheduler block
    of each layer group, in tokens. ``clock`` times the forwards that a plan asks for.
    """

    def __init__(
        self,
        parts: RankParts,
        blends: FusionWorker | RefusingFusionWorker,
        *,
        layer_of: dict[str, int],
        page_tokens: tuple[int, ...],
        clock: ForwardTimer[int],
    ) -> None:
        super().__init__(parts, blends)
        self._layer_of = layer_of
        self._page_tokens = page_tokens
        self._clock = clock
        self._plan = StepPlan()
        self._sync: list[Load[str]] = []
        self._finished: set[str] = set()
        self._failed: set[str] = set()
        self._bad_pages: set[int] = set()
        self._tainted = 0

    # -- before the forward -----------------------------------------------------------------

    def begin(self, plan: StepPlan) -> None:
        """Start the work that precedes this step's forward. Blocks on fences only."""
        self._plan = plan
        self._tend_tiers(plan)
        for graph in plan.early_saves:
            self._submit(graph)
        for graph_id in plan.fence:
            self._worker.wait_device(graph_id)
        self._cancel(plan.cancel)
        self._finished.update(plan.failed_loads)
        self._failed.update(plan.failed_loads)
        if plan.unfilled:
            self._spoil(plan.unfilled)
        together = self._worker.wave()
        for graph in plan.sync_loads:
            self._sync.append(self._expect(graph))
            self._submit(graph, together)
        for request_id, graph in plan.async_loads:
            self._expect(graph, request_id)
            self._submit(graph)
        for graph in itertools.chain(plan.fetches, plan.spills):
            self._submit(graph)
        self._begin_blends(self._blends, plan.blends)
        if not plan.blends:  # without loads vLLM's next call comes when the forward is launched
            self._start_clock()

    def blend(self) -> None:
        """Carry out the step's blends. Blocks. Does nothing the second time in a step."""
        orders, self._plan.blends = self._plan.blends, []
        if not orders:
            return
        pages = self._blends.run(lambda layer: self._wait_layer(self._sync, layer))
        for order in self._lose(orders):
            pages += pages_made(order, self._page_tokens[0])
        if pages:
            self._spoil(pages)
        self._start_clock()

    def _spoil(self, pages: list[int]) -> None:
        """Record pages of this step that were not filled: what is computed from them is wrong."""
        self._tainted = TAINTED_STEPS
        self._bad_pages.update(pages)

    def _start_clock(self) -> None:
        """Start to time the forward, if the plan asks for it and the forward waits for no load."""
        if self._plan.timed and not self._sync:
            self._clock.start(self._plan.timed)

    def wait_for_layer(self, layer_name: str) -> None:
        """Block until every sync load has copied the layer of this name, or has failed."""
        layer = self._layer_of.get(layer_name)
        if self._sync and layer is not None:
            self._wait_layer(self._sync, layer)

    def wait_for_loads(self) -> None:
        """Block until every sync load has ended."""
        for load in self._sync:
            self._settle(load)

    # -- after the forward ------------------------------------------------------------------

    def end_forward(self) -> None:
        """Wait for the sync loads, then start the saves of what the forward computed.

        Drops the saves if the forward may have computed on KV that did not arrive.
        """
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

    def _unfilled(self, load: Load[str]) -> list[int]:
        """Return the scheduler blocks from the first row on that failed in a load."""
        first = min(row for report in load.reports for row in report.failed)
        pages: list[int] = []
        for table, page_tokens in zip(load.graph.units, self._page_tokens, strict=True):
            units = table.array()[first:].ravel()
            pages += (units[units != SKIP] // (page_tokens // table.unit_tokens)).tolist()
        return pages

    def finished_loads(self) -> tuple[set[str], set[str]]:
        """Return the requests whose async load has ended, and those of them whose load failed.

        Each request is returned once. An empty step blocks up to `IDLE_WAIT_S` for one.
        """
        if self._plan.empty_step and not self._finished:
            self._worker.wait_report(IDLE_WAIT_S)
        self._collect()
        finished, self._finished = self._finished, set()
        failed, self._failed = self._failed & finished, self._failed - finished
        return finished, failed

    def take_bad_pages(self) -> set[int]:
        """Return and forget the scheduler blocks that a sync load or a blend left unfilled."""
        pages, self._bad_pages = self._bad_pages, set()
        return pages

    def take_report(self) -> StepReport | None:
        """Return what ended since the last call, for the scheduler, or None if nothing did."""
        self._collect()
        reports = self._take_reports()
        blends, forwards, profile = self.take_blends(), self._clock.take(), self.take_profile()
        if not (reports or blends or forwards or profile):
            return None
        return StepReport(reports, self.metrics.delta(), blends, forwards, profile)

    def _ended(self, load: Load[str]) -> None:
        if load.request_id is not None:
            self._finished.add(load.request_id)
            if load.failed:
                self._failed.add(load.request_id)
        elif load.failed and load in self._sync:
            self._spoil(self._unfilled(load))
