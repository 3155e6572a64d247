"""Fusion in the reference engine: what to reuse (leader), and the blend itself (each rank).

    prompt  ├── exact prefix ──┼─ gap ─┼── chunk ──┼── chunk ──┼─ question ─┤
            0               exact                           stop
                               └── made by the blend ──────────┘ └ by the engine's own forward

The KV from the first chunk on is approximate: the request is told so (`approximate_from`), and
neither the engine's prefix cache nor kvcore takes it for exact.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kvcore.config import Config
from kvcore.connector.fusion_scheduler import BlendPlan, Chunks
from kvcore.errors import KVCoreError
from kvcore.fusion.fusor import Attend, DecoderLayers, Fusor, Job, State
from kvcore.fusion.gate import Gate
from kvcore.fusion.ops import FusionOps
from kvcore.fusion.plan import LayerKV
from kvcore.fusion.rope import Rope
from kvcore.fusion.segments import Reusable, SegmentBook
from kvcore.fusion.select import Ratio, Selector
from kvcore.fusion.staging import Place, PlacedChunks, PrefixReader, Staging
from kvcore.manager import Manager
from kvcore.model.keys import KeyChain
from kvcore.model.shape import BlockShape
from kvcore.testing.engine.model import RankModel
from kvcore.testing.engine.requests import Request
from kvcore.testing.engine.transport import DirectTransport
from kvcore.transfer.graph import Span, TransferGraph, UnitTable
from kvcore.worker import KVWorker

__all__ = ["BlendPlan", "FusionLeader", "Order", "RankBlender", "RankLayers"]

_log = logging.getLogger("kvcore.testing.engine")


@dataclass
class Order:
    """A blend whose chunks are on their way, by ``graphs`` under their ids; ``staging`` is one a
    rank."""

    request: Request
    plan: BlendPlan
    places: list[Place]
    graphs: dict[int, TransferGraph]
    staging: list[Staging]


class FusionLeader:
    """Finds chunks and orders blends. Engine thread only; no call waits."""

    def __init__(
        self,
        config: Config,
        manager: Manager,
        transport: DirectTransport,
        segments: SegmentBook,
        shapes: Sequence[BlockShape],
        device: torch.device,
        layer_steps: Sequence[Span],
    ) -> None:
        self._settings = config.fusion
        self._manager = manager
        self._transport = transport
        self._shapes = shapes
        self._device = device
        self._block = config.block.tokens
        self._layer_steps = tuple(layer_steps)
        nbytes = sum(shape.nbytes for shape in shapes)
        self.chunks = Chunks(config.fusion, config.block.tokens, nbytes, manager, segments)

    def plan(self, request: Request, chain: KeyChain, exact: int) -> BlendPlan | None:
        """What to blend of a prompt whose first ``exact`` tokens are held exactly."""
        wishes = request.fusion
        if not wishes.enabled or request.answer:  # a preempted request goes on exactly
            return None
        found = self.chunks.find(request.tokens, wishes, chain.namespace, exact)
        ratio = self._settings.ratio if wishes.ratio is None else wishes.ratio
        return self.chunks.plan(found, exact, len(request.tokens) - 1, ratio)

    # -- orders -----------------------------------------------------------------------------

    def order(self, request: Request, plan: BlendPlan) -> Order:
        """Start the copies of a plan's chunks. One that cannot be had is computed with the rest."""
        rows = sum(
            len(self.chunks.blocks(chunk.source_start, chunk.length)) for chunk in plan.chunks
        )
        staging = [Staging(shape, rows, self._device) for shape in self._shapes]
        order = Order(request, plan, [], {}, staging)
        row = 0
        with self._transport.into([one.groups for one in staging]):
            for chunk in plan.chunks:
                try:
                    graph = self._load(chunk, row)
                except KVCoreError as error:
                    _log.warning("a chunk is computed, since it cannot be loaded: %s", error)
                    continue
                blocks = self.chunks.blocks(chunk.source_start, chunk.length)
                first = (row - blocks.start) * self._block + chunk.source_start
                distance = chunk.prompt_start - chunk.source_start
                order.places.append(Place(first, chunk.length, chunk.prompt_start, distance))
                order.graphs[graph.graph_id] = graph
                row += len(blocks)
        request.approximate_from = plan.chunks[0].prompt_start
        request.blended_tokens = plan.reused
        return order

    def _load(self, chunk: Reusable, row: int) -> TransferGraph:
        hit, start, stop = self.chunks.source(chunk)
        units = np.arange(row, row + stop - start, dtype=np.int64)[:, None]
        return self._manager.launch_load(
            hit, start, stop, [UnitTable.of(units, self._block)], layers=self._layer_steps
        )


class RankLayers(DecoderLayers):
    """A rank's layers, lent to a blend of a request with these LoRA weights."""

    def __init__(self, model: RankModel, lora: Path | None = None) -> None:
        self._model = model
        self._lora = lora
        self.layers = model.model.spec.layers
        self.attention = (model.model.spec.attention,) * self.layers

    def embed(self, tokens: Tensor) -> Tensor:
        return self._model.embed(tokens)

    def run(self, layer: int, positions: Tensor, state: State, attend: Attend) -> State:
        adapted = self._model.adapted([(len(positions), self._lora)])
        return State(self._model.layer(layer, positions, state.hidden, attend, adapted), None)

    def reduce(self, scores: Tensor) -> Tensor:
        return self._model.reduce(scores)

    def agree(self, well: bool) -> bool:
        return not self._model.reduce(torch.tensor([float(not well)])).item()


class RankBlender:
    """Carries out orders on one rank, by ``ops``. Rank's thread only."""

    def __init__(
        self,
        config: Config,
        rank: int,
        model: RankModel,
        worker: KVWorker,
        selector: Selector,
        ops: FusionOps,
    ) -> None:
        self._rank = rank
        self._model = model
        self._worker = worker
        self._selector = selector
        self._spread = config.fusion.spread
        self._gate = None if config.fusion.gate is None else Gate(config.fusion.gate)
        self.ops = ops

    def ropes(self) -> Sequence[Rope | None]:
        """What cached K is moved by, one a layer."""
        return self._model.model.spec.ropes

    def blend(self, order: Order, landed: Callable[[int], None]) -> bool:
        """Fill the request's pages for [exact, stop); whether that went well.

        ``landed(layer)`` blocks until the exact prefix holds a layer.
        """
        try:
            self._blend(order, landed)
        except Exception:  # noqa: BLE001 - selectors of others: the engine computes instead
            _log.exception("blend failed request=%s", order.request.request_id)
            return False
        finally:
            self.drop(order)
        return True

    def drop(self, order: Order) -> None:
        """Let go of the order's staging, once nothing is copied to it any more."""
        for graph_id in order.graphs:
            self._worker.release(graph_id)

    @torch.inference_mode()
    def _blend(self, order: Order, landed: Callable[[int], None]) -> None:
        request, plan, model = order.request, order.plan, self._model
        tokens = torch.tensor(request.tokens, device=model.model.device)
        made = torch.arange(plan.exact, plan.stop, device=tokens.device)
        slots = model.slots(request.pages, made)

        def wait(layer: int) -> None:
            landed(layer)
            for graph_id in order.graphs:
                self._worker.wait_layer(graph_id, layer)

        def sink(layer: int, kv: LayerKV) -> None:
            model.write(layer, slots, kv.keys[made], kv.values[made])

        shape = model.model.block_shape(model.page_tokens).with_heads(model.kv_heads)
        view = self._worker.groups[0].view
        prefix = PrefixReader(self._worker.ops, view, shape, request.pages, plan.exact)
        staging = order.staging[self._rank]
        placed = PlacedChunks(
            len(tokens), staging, order.places, self.ropes(), prefix, wait, sink, self.ops
        )
        budget = Ratio(plan.ratio, self._spread)
        fusor = Fusor(RankLayers(model, request.lora), ops=self.ops)
        fusor.blend(_job(tokens, order), placed, self._selector, budget, self._gate)


def _job(tokens: Tensor, order: Order) -> Job:
    device = tokens.device
    none = [torch.empty(0, dtype=torch.int64, device=device)]
    rows = [torch.arange(p.position, p.position + p.length, device=device) for p in order.places]
    offsets = [torch.arange(p.length, device=device) for p in order.places]
    plan = order.plan
    return Job(tokens, plan.exact, plan.stop, torch.cat(rows or none), torch.cat(offsets or none))
