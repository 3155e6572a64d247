"""Fusion in the reference engine: the plan of a blend (leader) and the blend itself (each rank).

The KV from the first chunk on is approximate. The request records that in `approximate_from`, and
neither the engine's prefix cache nor kvcore treats it as exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kvcore.config import Config
from kvcore.connector.fusion_messages import BlendOrder, BlendPlan, slots_of
from kvcore.connector.fusion_scheduler import FusionRequest, FusionScheduler
from kvcore.connector.fusion_worker import EngineLayers, FusionWorker, ServedRequest
from kvcore.fusion.decoder import Attend, HiddenState
from kvcore.fusion.ops import FusionOps
from kvcore.fusion.plan import LayerKV
from kvcore.fusion.rope import Rope
from kvcore.fusion.select import Selector
from kvcore.model.keys import KeyChain
from kvcore.testing.engine.model import RankModel
from kvcore.testing.engine.requests import Request
from kvcore.testing.engine.transport import DirectTransport
from kvcore.transfer.graph import TransferGraph
from kvcore.worker import KVWorker

__all__ = ["Order", "RankBlender", "RankLayers", "ReferenceFusionScheduler"]


@dataclass
class Order:
    """A blend whose chunks are being copied by ``graphs``, which are by their ids."""

    request: Request
    blend: BlendOrder
    graphs: dict[int, TransferGraph]


@dataclass(eq=False, kw_only=True)
class ReferenceFusionScheduler(FusionScheduler):
    """Finds chunks and orders blends. Engine thread only; no call waits."""

    transport: DirectTransport

    def plan_blend(self, request: Request, chain: KeyChain, exact: int) -> BlendPlan | None:
        """Plan a blend of a prompt whose first ``exact`` tokens have exact KV."""
        if request.answer:  # a preempted request goes on exactly
            return None
        return self.plan(_fusion_request(request), request.tokens, chain.namespace, exact)

    def order_blend(self, request: Request, plan: BlendPlan) -> Order:
        """Start the copies of a plan's chunks into the request's pages."""
        wanted = _fusion_request(request)
        blend = self.order(wanted, request.tokens, plan, request.pages)
        slots = slots_of(blend, self.traits.page_tokens)
        graphs = [chunk.into(slots) for chunk in blend.chunks]
        self.transport.submit_together(graphs)
        request.approximate_from = plan.chunks[0].prompt_start
        request.blended_tokens = plan.reused
        return Order(request, blend, {graph.graph_id: graph for graph in graphs})


def _fusion_request(request: Request) -> FusionRequest:
    return FusionRequest(str(request.request_id), request.fusion)


class RankLayers(EngineLayers):
    """A rank's layers, run by a blend with the LoRA weights in ``lora``."""

    def __init__(self, model: RankModel) -> None:
        self.lora: Path | None = None
        self._model = model
        self.layers = model.model.spec.layers
        self.attention = (model.model.spec.attention,) * self.layers
        self.collective = model.kv_heads < model.model.spec.kv_heads

    @contextmanager
    def serving(self, served: ServedRequest) -> Iterator[None]:
        yield

    def embed(self, tokens: Tensor) -> Tensor:
        return self._model.embed(tokens)

    def run(self, layer: int, positions: Tensor, state: HiddenState, attend: Attend) -> HiddenState:
        adapted = self._model.adapted([(len(positions), self.lora)])
        return HiddenState(self._model.layer(layer, positions, state.hidden, attend, adapted), None)

    def write(self, layer: int, kv: LayerKV, slots: Tensor) -> None:
        self._model.write(layer, slots, kv.keys, kv.values)

    def reduce(self, scores: Tensor) -> Tensor:
        return self._model.reduce(scores)

    def agree(self, well: bool) -> bool:
        return not self._model.reduce(torch.tensor([float(not well)])).item()


class RankBlender(FusionWorker):
    """Carries out the orders of one rank while their chunks are being loaded.

    Rank's thread only.
    """

    def __init__(
        self,
        config: Config,
        rank: int,
        model: RankModel,
        worker: KVWorker,
        selector: Selector,
        ops: FusionOps,
    ) -> None:
        self.ops = ops
        self._rank = rank
        self._model = model
        self._lent = RankLayers(model)
        pages = model.page_tokens
        super().__init__(config, worker, self._lent, self.ropes(), selector, pages, ops)

    def ropes(self) -> Sequence[Rope | None]:
        """Return the rotations of cached K, one a layer."""
        return self._model.model.spec.ropes

    def blend(self, order: Order, landed: Callable[[int], None]) -> bool:
        """Fill the request's pages for [exact, stop); returns True if that succeeded.

        ``landed(layer)`` blocks until the exact prefix holds a layer.
        """
        self._lent.lora = order.request.lora
        try:
            return self._done(order.blend, True, landed)
        finally:
            self.take_reports()
