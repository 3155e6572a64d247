"""Blends on a rank: the orders of a step, carried out before the engine's forward.

begin    staging is made and the chunks' copies start
run      layer by layer: wait, recompute, write to the engine's pages

A blend that fails leaves its request to the engine: the adapter is told which pages hold nothing.
"""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvcore.config import Config
from kvcore.connector.fusion_messages import FULL_LAYERS, BlendOrder, BlendReport, pages_made
from kvcore.fusion.fusor import DecoderLayers, Fusor, Job, Outcome
from kvcore.fusion.gate import Gate
from kvcore.fusion.ops import FusionOps
from kvcore.fusion.plan import LayerKV
from kvcore.fusion.rope import Rope
from kvcore.fusion.select import Ratio, Selector
from kvcore.fusion.staging import Place, PlacedChunks, PrefixReader, Staging
from kvcore.model.shape import BlockShape
from kvcore.transfer.graph import OpReport, RowError
from kvcore.worker import KVWorker, refuse

__all__ = ["Blends", "EngineLayers", "RefusingBlends", "Served"]

PROFILED_ROWS = (16, 64, 256)
"""Rows that the layers are timed with at start."""

_log = logging.getLogger("kvcore.fusion")


class Served(NamedTuple):
    """The request that layers are run for: ``pages`` [1, n] of the engine's, ``lora`` its adapter's
    number there, 0 for none."""

    request_id: str
    pages: Tensor
    page_tokens: int
    lora: int = 0


class EngineLayers(DecoderLayers):
    """An engine's decoder on one rank, and its pages. Used from the model's thread only."""

    @abstractmethod
    def serving(self, served: Served) -> AbstractContextManager[None]:
        """Run layers for one request in this block."""

    @abstractmethod
    def write(self, layer: int, kv: LayerKV, slots: Tensor) -> None:
        """Write K and V [rows, kv_heads, dim] to the engine's ``slots`` [rows] of a layer."""


class RefusingBlends:
    """Stands in where this rank cannot blend (its log says why): the engine computes."""

    def __init__(self, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._orders: list[BlendOrder] = []

    def begin(self, orders: Sequence[BlendOrder]) -> list[OpReport]:
        self._orders += orders
        graphs = [chunk.graph for order in orders for chunk in order.chunks]
        return [report for graph in graphs for report in refuse(graph, RowError.CANCELLED)]

    def run(self, landed: Callable[[int], None]) -> list[int]:
        """The pages of every order: none was filled."""
        return [page for order in self._orders for page in pages_made(order, self._page_tokens)]

    def take_reports(self) -> list[BlendReport]:
        orders, self._orders = self._orders, []
        return [BlendReport(order.request_id, ok=False) for order in orders]

    def take_profile(self) -> list[tuple[int, float]]:
        return []


class Blends:
    """One per rank. Called from the model runner's thread only."""

    def __init__(
        self,
        config: Config,
        worker: KVWorker,
        layers: EngineLayers,
        ropes: Sequence[Rope | None],
        shape: BlockShape,
        selector: Selector,
        page_tokens: int,
        ops: FusionOps,
    ) -> None:
        self._worker = worker
        self._layers = layers
        self._ops = ops
        self._fusor = Fusor(layers, worker.tracer, ops)
        self._ropes = ropes
        self._shape = shape
        self._selector = selector
        self._spread = config.fusion.spread
        bound = config.fusion.gate
        self._gate = None if bound is None else Gate(bound)
        self._page_tokens = page_tokens
        self._view = worker.groups[0].view
        self._device = self._view.tensors[0].device
        self._orders: list[tuple[BlendOrder, Staging | None]] = []
        self._reports: list[BlendReport] = []
        self._profile = self._profiled() if config.fusion.adaptive else []

    def begin(self, orders: Sequence[BlendOrder]) -> list[OpReport]:
        """Start the copies of chunks into staging; returns reports of graphs that were refused."""
        refused: list[OpReport] = []
        for order in orders:
            staging = self._stage(order)
            self._orders.append((order, staging))
            together = self._worker.wave()
            for chunk in order.chunks:
                if staging is None:
                    refused += refuse(chunk.graph, RowError.CANCELLED)
                else:
                    refused += self._worker.submit(chunk.graph, staging.groups, together)
        return refused

    def _stage(self, order: BlendOrder) -> Staging | None:
        """Memory for the chunks of an order; None where there is none left."""
        try:
            return Staging(self._shape, max(order.blocks, 1), self._device)
        except (RuntimeError, MemoryError) as error:  # how torch says it, on a device and on a CPU
            _log.error("no memory for the chunks of request=%s: %s", order.request_id, error)
            return None

    def run(self, landed: Callable[[int], None]) -> list[int]:
        """Carry out the orders; returns the engine's pages that a failed blend left unfilled.

        ``landed(layer)`` blocks until the step's loads into the engine's own pages hold a layer.
        """
        failed: list[int] = []
        orders, self._orders = self._orders, []
        for order, staging in orders:
            # Layers are collectives, so all ranks walk or none.
            if not self._layers.agree(staging is not None) or not self._done(
                order, staging, landed
            ):
                self._reports.append(BlendReport(order.request_id, ok=False))
                failed += pages_made(order, self._page_tokens)
            for chunk in order.chunks:
                self._worker.release(chunk.graph.graph_id)
        return failed

    def _done(
        self, order: BlendOrder, staging: Staging | None, landed: Callable[[int], None]
    ) -> bool:
        assert staging is not None
        try:
            self._blend(order, staging, landed)
        except Exception:  # noqa: BLE001 - others' layers and selectors: the engine computes
            _log.exception("blend failed, computing instead request=%s", order.request_id)
            return False
        return True

    def take_reports(self) -> list[BlendReport]:
        """What became of the blends since the last call."""
        reports, self._reports = self._reports, []
        return reports

    def take_profile(self) -> list[tuple[int, float]]:
        """(rows, seconds) of the layers, timed when this was made. Told once."""
        profile, self._profile = self._profile, []
        return profile

    @torch.inference_mode()
    def _profiled(self) -> list[tuple[int, float]]:
        """Time the layers over some rows behind nothing. A collective; nothing is written.

        The first run, which may compile something, is not counted. Layers that fail here leave the
        controller to its guesses, and blends to fail one by one.
        """
        nowhere = torch.zeros(1, 1, dtype=torch.int64, device=self._device)
        try:
            with self._layers.serving(Served("profile", nowhere, self._page_tokens)):
                self._seconds(PROFILED_ROWS[0])
                return [(rows, self._seconds(rows)) for rows in PROFILED_ROWS]
        except Exception:  # noqa: BLE001 - others' layers: the engine must start all the same
            _log.exception("the model's layers could not be timed")
            return []

    def _seconds(self, rows: int) -> float:
        started = time.perf_counter()
        self._fusor.compute(torch.zeros(rows, dtype=torch.int64, device=self._device))
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - started

    @torch.inference_mode()
    def _blend(self, order: BlendOrder, staging: Staging, landed: Callable[[int], None]) -> None:
        job = _job(order, self._device)
        slots = self._slots(order)

        def wait(layer: int) -> None:
            landed(layer)
            for chunk in order.chunks:
                self._worker.wait_layer(chunk.graph.graph_id, layer)

        def sink(layer: int, kv: LayerKV) -> None:
            made = slice(order.exact, order.stop)
            self._layers.write(layer, LayerKV(kv.keys[made], kv.values[made]), slots)

        places = [
            Place(chunk.first, chunk.length, chunk.position, chunk.distance)
            for chunk in order.chunks
        ]
        placed = PlacedChunks(
            len(job.tokens),
            staging,
            places,
            self._ropes,
            self._prefix(order),
            wait,
            sink,
            self._ops,
            again=self._selector.needs_question or self._gate is not None,
        )
        budget = Ratio(order.ratio, self._spread, FULL_LAYERS)
        with self._layers.serving(self._served(order)):
            outcome = self._fusor.blend(job, placed, self._selector, budget, self._gate)
        self._report(order, job, outcome)

    def _served(self, order: BlendOrder) -> Served:
        pages = torch.tensor([order.pages], device=self._device)
        return Served(order.request_id, pages, self._page_tokens, order.lora)

    def _slots(self, order: BlendOrder) -> torch.Tensor:
        """Token slots of positions [exact, stop)."""
        positions = np.arange(order.exact, order.stop, dtype=np.int64)
        pages = np.asarray(order.pages, dtype=np.int64)
        slots = pages[positions // self._page_tokens] * self._page_tokens
        return torch.from_numpy(slots + positions % self._page_tokens).to(self._device)

    def _prefix(self, order: BlendOrder) -> PrefixReader:
        per_page = self._page_tokens // self._view.layout.page_tokens
        pages = np.asarray(order.pages, dtype=np.int64)[:, None] * per_page + np.arange(per_page)
        return PrefixReader(
            self._worker.ops, self._view, self._shape, pages.ravel().tolist(), order.readable
        )

    def _report(self, order: BlendOrder, job: Job, outcome: Outcome) -> None:
        timings = outcome.layers + outcome.abandoned
        later = [t.rows for t in outcome.layers[FULL_LAYERS:]]
        verdicts = outcome.verdicts
        report = BlendReport(
            order.request_id,
            share=outcome.share(job),
            rows=job.stop - job.exact,
            kept=round(sum(later) / max(len(later), 1)),
            ratio=verdicts[-1].ratio if verdicts else order.ratio,
            verdicts=[verdict.step.value for verdict in verdicts],
            reason=verdicts[-1].reason if verdicts else "",
            wait_s=sum(t.wait_s for t in timings),
            compute_s=sum(t.compute_s for t in timings),
            look_s=outcome.look_s,
        )
        self._reports.append(report)
        _log.debug(
            "blend request=%s tokens=%d..%d chunks=%d share=%.3f wait_s=%.4f compute_s=%.4f "
            "look_s=%.4f",
            order.request_id,
            order.exact,
            order.stop,
            len(order.chunks),
            report.share,
            report.wait_s,
            report.compute_s,
            report.look_s,
        )


def _job(order: BlendOrder, device: torch.device) -> Job:
    tokens = torch.from_numpy(np.frombuffer(order.tokens, dtype="<u4").astype(np.int64))
    rows = [np.arange(c.position, c.position + c.length, dtype=np.int64) for c in order.chunks]
    offsets = [np.arange(c.length, dtype=np.int64) for c in order.chunks]
    empty = [np.empty(0, dtype=np.int64)]
    return Job(
        tokens.to(device),
        order.readable,
        order.stop,
        torch.from_numpy(np.concatenate(rows or empty)).to(device),
        torch.from_numpy(np.concatenate(offsets or empty)).to(device),
    )
