"""The data plane inside a TensorRT-LLM rank: runs step plans around the model's forward.

    start_load_kv         early saves, fences, loads begin; blends       (before the forward)
    wait_for_layer_load   a layer of a sync load has landed
    end of the forward    late saves begin
    get_finished          what ended; ids of parked requests, each once

Every rank sees the same plans and the same news, so all agree on which graphs are open. While any
is, the ranks' reports are gathered inside get_finished, which the engine calls on all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvcore.connector.fusion_messages import BlendOrder, BlendReport
from kvcore.connector.fusion_worker import PromisedFusionWorker
from kvcore.connector.step_transport import Quorum
from kvcore.errors import TransferError
from kvcore.telemetry.metrics import Data, Metrics
from kvcore.transfer.graph import OpReport, RowError, TransferGraph
from kvcore.worker import KVWorker, RefusingWorker, refuse
from kvcore.worker.lifecycle import TierOpener, close_worker, open_tiers
from kvcore_trtllm.messages import StepNews, StepPlan, decode_news

_log = logging.getLogger("kvcore.trtllm.worker")

IDLE_WAIT_S = 0.002
"""How long an iteration without a batch waits for a transfer to end, instead of spinning."""

ATTEMPTS = 3
"""How often a load from host memory is tried before the requests of its step fail."""

RETRY_WAIT_S = 0.05

Allgather = Callable[[bytes], list[bytes]]
Listener = Callable[[list[OpReport], list[Data]], None]


class Tally:
    """Which ops have ended on all ranks. Every rank keeps the same one."""

    def __init__(self, ranks: int, allgather: Allgather) -> None:
        self._ranks = ranks
        self._allgather = allgather
        self._open: set[tuple[int, int]] = set()
        self._quorum = Quorum(ranks)

    def expect(self, graph: TransferGraph) -> None:
        """Ops of ``graph`` are open from now on; call it on all ranks."""
        for op in graph.ops:
            self._open.add((graph.graph_id, op.op_id))

    def exchange(self, news: StepNews) -> tuple[list[OpReport], list[Data]] | None:
        """Gather news of all ranks: the ops that ended on all of them, and all counts.

        None, without a word to the others, when no op is open: ``news`` then keeps.
        """
        if not self._open:
            return None
        encoded = msgspec.msgpack.encode(news)
        everyone = self._allgather(encoded) if self._ranks > 1 else [encoded]
        ended: list[OpReport] = []
        counted: list[Data] = []
        for payload in everyone:
            theirs = decode_news(payload)
            counted.append(theirs.counted)
            ended += [whole for report in theirs.reports if (whole := self._quorum.add(report))]
        self._open.difference_update((report.graph_id, report.op_id) for report in ended)
        return ended, counted


@dataclass
class _Load:
    """A load under way. ``reports`` are held back until it is certain: a failed one is retried."""

    graph: TransferGraph
    request_id: int | None
    left: int
    attempt: int = 1
    cancelled: bool = False
    waited: set[int] = field(default_factory=set)
    reports: list[OpReport] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        return any(report.failed for report in self.reports)


@dataclass
class _Chunk:
    """A chunk on its way into a blend's staging; ``left`` counts its ops."""

    left: int
    failed: bool = False


class WorkerSide:
    """One per rank. Called from the executor's thread only.

    ``layers`` is the number of decoder layers whose hooks call `wait_for_layer`; ``layerwise`` says
    whether a load may still be under way when the forward begins. ``listener`` hears what ended on
    all ranks, ``on_blends`` what became of blends; only the leader's rank has them. ``blends`` is
    None where there is no fusion, and ``no_fusion`` says why.
    """

    def __init__(
        self,
        worker: KVWorker | RefusingWorker,
        tally: Tally,
        *,
        layers: int,
        layerwise: bool,
        metrics: Metrics,
        open_tier: TierOpener,
        blends: PromisedFusionWorker | None = None,
        no_fusion: str = "",
    ) -> None:
        self.blends = blends
        self.no_fusion = no_fusion
        self.on_blends: Callable[[list[BlendReport]], None] | None = None
        self._chunks: dict[int, _Chunk] = {}
        self._worker = worker
        self._tally = tally
        self._layers = layers
        self._layerwise = layerwise
        self._metrics = metrics
        self._open_tier = open_tier
        self.listener: Listener | None = None
        self._plan = StepPlan()
        self._in_step = False
        self._loads: dict[int, _Load] = {}
        self._sync: dict[int, _Load] = {}
        self._saving: dict[int, set[int]] = {}  # request -> saves that read its pages
        self._saver: dict[int, int] = {}  # save -> request
        self._reports: list[OpReport] = []
        self._loaded: set[int] = set()  # ended, not told yet
        self._loads_asked: set[int] = set()
        self._saves_asked: set[int] = set()
        self._worked = False

    # -- before the forward -----------------------------------------------------------------

    def begin(self, plan: StepPlan) -> None:
        """Start what must start before this step's forward, and carry out its blends. Blocks on
        fences and blends, and on sync loads unless they are waited for layer by layer."""
        self._drop_late_saves()  # of a forward that failed
        self._plan, self._in_step, self._worked = plan, True, True
        self.open(plan.open_tiers)
        for name, slots in plan.forget:
            self._worker.forget(name, slots)
        for request_id, graph in plan.early_saves:
            self._save(request_id, graph)
        self._cancel(plan.cancel)
        for graph_id in plan.fence:
            self._pass(graph_id)
        for request_id, graph in plan.late_saves:
            self._expect_save(request_id, graph)
        for graph in plan.sync_loads:
            self._sync[graph.graph_id] = self._load(graph, None)
        for request_id, graph in plan.async_loads:
            self._load(graph, request_id)
        self._loaded.update(plan.lost_loads)
        for graph in plan.spills:
            self.start(graph)
        if plan.blends or not self._layerwise:
            self._settle_all()
        if plan.blends:
            self._blend(plan)

    def start(self, graph: TransferGraph) -> None:
        """Start a graph that touches no page of the engine's."""
        self._tally.expect(graph)
        self._submit(graph)

    def open(self, tiers: dict[str, dict[str, Any]]) -> None:
        """Open tiers with what the leader was told of them. One that cannot be had fails reads."""
        open_tiers(self._worker, self._open_tier, tiers)

    def _expect_save(self, request_id: int, graph: TransferGraph) -> None:
        self._tally.expect(graph)
        self._saving.setdefault(request_id, set()).add(graph.graph_id)
        self._saver[graph.graph_id] = request_id

    def _save(self, request_id: int, graph: TransferGraph) -> None:
        self._expect_save(request_id, graph)
        self._submit(graph)

    def _load(self, graph: TransferGraph, request_id: int | None) -> _Load:
        self._tally.expect(graph)
        load = self._loads[graph.graph_id] = _Load(graph, request_id, len(graph.ops))
        self._submit(graph)
        return load

    def _submit(self, graph: TransferGraph) -> None:
        for report in self._worker.submit(graph):
            self._take(report)

    def _cancel(self, graph_ids: Iterable[int]) -> None:
        for graph_id in graph_ids:
            self._worker.cancel(graph_id)
            if (load := self._loads.get(graph_id)) is not None:
                load.cancelled = True

    def _drop_late_saves(self) -> None:
        """Report the saves that wait for the forward as not done."""
        for _, graph in self._plan.late_saves:
            for report in refuse(graph, RowError.UPSTREAM):
                self._take(report)
        self._plan.late_saves = []

    # -- blends -----------------------------------------------------------------------------

    def _blend(self, plan: StepPlan) -> None:
        """Carry out the step's blends; where one cannot be made, nothing of the step gets out."""
        if self.blends is None:
            plan.broken = plan.broken or f"a blend was promised: {self.no_fusion}"
            return
        for graph in (chunk.graph for order in plan.blends for chunk in order.chunks):
            self._tally.expect(graph)
            self._chunks[graph.graph_id] = _Chunk(len(graph.ops))
        for report in self.blends.begin(plan.blends):
            self._take(report)
        try:
            self.blends.carry_out(self._arrived)
        except TransferError as error:
            plan.broken = plan.broken or str(error)
        self._chunks.clear()
        reports = self.blends.take_reports()
        if self.on_blends is not None:
            self.on_blends(reports)

    def _arrived(self, order: BlendOrder) -> bool:
        """Wait for an order's chunks; whether all came."""
        for chunk in order.chunks:
            graph_id = chunk.graph.graph_id
            while self._chunks[graph_id].left:
                self._worker.wait_device(graph_id)
                self._collect()
                if self._chunks[graph_id].left:
                    self._worker.wait_report(RETRY_WAIT_S)
        return not any(self._chunks[chunk.graph.graph_id].failed for chunk in order.chunks)

    # -- sync loads -------------------------------------------------------------------------

    def wait_for_layer(self, layer: int) -> None:
        """Block until this layer of every sync load has landed. Raises TransferError when one
        cannot be had: the engine then fails the step's requests."""
        for graph_id, load in self._sync.items():
            self._worker.wait_layer(graph_id, layer)
            load.waited.add(layer)
        if self._sync:
            self._collect()
            for load in self._sync.values():
                if load.failed or load.attempt > 1:  # this layer's copy may be one that failed
                    self._settle(load)

    def _settle_all(self) -> None:
        for load in list(self._sync.values()):
            self._settle(load)

    def _settle(self, load: _Load) -> None:
        """Block until ``load`` has ended well, trying again where it failed."""
        self._end(load)
        if load.failed:
            raise TransferError(
                f"KV in host memory could not be copied to the device in {ATTEMPTS} attempts: "
                f"{[report.failed for report in load.reports if report.failed][:1]}; the step's "
                "requests fail, for a wrong answer would be worse"
            )

    def _end(self, load: _Load) -> None:
        """Block until ``load`` has ended for good, however."""
        graph_id = load.graph.graph_id
        while graph_id in self._loads:
            self._worker.wait_device(graph_id)
            self._collect()
            if graph_id in self._loads and load.left:
                self._worker.wait_report(RETRY_WAIT_S)

    def _pass(self, graph_id: int) -> None:
        """Block until a graph uses pages no more that this step gives to others: a load that failed
        is tried again, and writes to them again. One that failed for good was counted on."""
        load = self._loads.get(graph_id)
        if load is None:
            self._worker.wait_device(graph_id)
            return
        self._end(load)
        if load.failed and not load.cancelled:
            self._plan.broken = self._plan.broken or (
                "KV that this step shares with a request that loads it did not arrive"
            )

    # -- after the forward ------------------------------------------------------------------

    def end_forward(self) -> None:
        """Start the saves of what the forward computed. Does nothing the second time.

        Raises TransferError where the forward computed on KV that had not arrived: TensorRT-LLM
        then answers the step's requests with an error.
        """
        if not self._in_step:
            return
        self._in_step = False
        try:
            self._check_step()
        except TransferError:
            self._drop_late_saves()
            raise
        finally:
            self._sync.clear()
        saves, self._plan.late_saves = self._plan.late_saves, []
        for _, graph in saves:
            self._submit(graph)

    def _check_step(self) -> None:
        if self._plan.broken:
            raise TransferError(self._plan.broken)
        loads = list(self._sync.values())
        self._settle_all()
        if self._layerwise and any(len(load.waited) < self._layers for load in loads):
            raise TransferError(
                "the engine ran its forward without calling the layers' hooks (a CUDA graph, or "
                "compiled code): set trtllm.layerwise = false"
            )

    # -- polling ----------------------------------------------------------------------------

    def finished(
        self, saving: Iterable[int], loading: Iterable[int]
    ) -> tuple[list[int], list[int]]:
        """Take in ids that wait for saves or loads; returns (saved, loaded), each id once."""
        self._saves_asked.update(saving)
        self._loads_asked.update(loading)
        if not self._worked and (self._saves_asked or self._loads_asked):
            self._worker.wait_report(IDLE_WAIT_S)
        self._worked = False
        self._collect()
        self._tell()
        saved = sorted(i for i in self._saves_asked if not self._saving.get(i))
        loaded = sorted(self._loads_asked & self._loaded)
        self._saves_asked.difference_update(saved)
        self._loads_asked.difference_update(loaded)
        self._loaded.difference_update(loaded)
        return saved, loaded

    def pump(self, timeout: float) -> None:
        """Wait for a report and pass on what ended. For a lone rank, between two steps."""
        self._worker.wait_report(timeout)
        self._collect()
        self._tell()

    def _tell(self) -> None:
        news = StepNews(self._reports, self._metrics.delta() if self._reports else {})
        told = self._tally.exchange(news)
        if told is None:
            return
        self._reports = []
        if self.listener is not None:
            self.listener(*told)

    # -- reports ----------------------------------------------------------------------------

    def _collect(self) -> None:
        for report in self._worker.poll():
            self._take(report)

    def _take(self, report: OpReport) -> None:
        load = self._loads.get(report.graph_id)
        if load is not None:
            self._take_load(load, report)
            return
        self._reports.append(report)
        if (chunk := self._chunks.get(report.graph_id)) is not None:
            chunk.left -= 1
            chunk.failed = chunk.failed or bool(report.failed)
        if report.op_id == 0 and report.graph_id in self._saver:
            request_id = self._saver.pop(report.graph_id)
            self._saving[request_id].discard(report.graph_id)
            if not self._saving[request_id]:
                del self._saving[request_id]

    def _take_load(self, load: _Load, report: OpReport) -> None:
        load.reports.append(report)
        load.left -= 1
        if load.left:
            return
        if load.failed and not load.cancelled and load.attempt < ATTEMPTS:
            _log.warning("a load failed and is tried again graph=%d", load.graph.graph_id)
            load.attempt += 1
            load.left, load.reports = len(load.graph.ops), []
            self._worker.wait_report(RETRY_WAIT_S)  # if the queue was full, let it drain
            self._submit(load.graph)
            return
        del self._loads[load.graph.graph_id]
        self._reports += load.reports
        if load.request_id is not None:
            self._loaded.add(load.request_id)

    def close(self) -> None:
        """Finish saves in flight and flush them; nothing that was saved is lost."""
        close_worker(self._worker)
