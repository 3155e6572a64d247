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

import numpy as np
import torch
from torch import Tensor

from kvcore.block import KeyChain
from kvcore.config import Config
from kvcore.errors import KVCoreError
from kvcore.fusion.fusor import Attend, DecoderLayers, Fusor, Job, State
from kvcore.fusion.gate import Gate
from kvcore.fusion.plan import LayerKV
from kvcore.fusion.rope import Rope
from kvcore.fusion.segments import Reusable, Segments
from kvcore.fusion.select import Ratio, Selector
from kvcore.fusion.staging import Place, PlacedChunks, PrefixReader, Staging
from kvcore.layout import BlockShape
from kvcore.manager import HOST, Hit, KVManager
from kvcore.testing.engine.model import RankModel
from kvcore.testing.engine.requests import Request
from kvcore.testing.engine.transport import DirectTransport
from kvcore.transfer.graph import Span, UnitTable
from kvcore.worker import KVWorker

__all__ = ["BlendPlan", "FusionLeader", "Order", "RankBlender", "RankLayers"]

_log = logging.getLogger("kvcore.testing.engine")


@dataclass(frozen=True)
class BlendPlan:
    """What a request's blend is made of: KV for [exact, stop), ``chunks`` ascending."""

    exact: int
    stop: int
    ratio: float
    chunks: tuple[Reusable, ...]

    @property
    def reused(self) -> int:
        return sum(chunk.length for chunk in self.chunks)


@dataclass
class Order:
    """A blend whose chunks are on their way: ``staging`` is one a rank."""

    request: Request
    plan: BlendPlan
    places: list[Place]
    graphs: list[int]
    staging: list[Staging]


class FusionLeader:
    """Finds chunks and orders blends. Engine thread only; no call waits."""

    def __init__(
        self,
        config: Config,
        manager: KVManager,
        transport: DirectTransport,
        segments: Segments,
        shapes: Sequence[BlockShape],
        device: torch.device,
        layer_steps: Sequence[Span],
    ) -> None:
        self._settings = config.fusion
        self._block = config.block.tokens
        self._manager = manager
        self._transport = transport
        self._segments = segments
        self._shapes = shapes
        self._device = device
        self._layer_steps = tuple(layer_steps)

    def learn(self, chain: KeyChain, start: int, stop: int, tokens: Sequence[int]) -> None:
        """Blocks [start, stop) of a chain are stored; ``tokens`` are those of the request."""
        self._segments.add(chain.namespace.digest, chain.keys[:stop], start, tokens)

    def forget(self) -> None:
        """Nothing of what was learned is stored any more."""
        self._segments.clear()

    def close(self) -> None:
        self._segments.close()

    # -- what to blend ----------------------------------------------------------------------

    def plan(self, request: Request, chain: KeyChain, exact: int) -> BlendPlan | None:
        """What to blend of a prompt whose first ``exact`` tokens are held exactly."""
        wishes, prompt = request.fusion, request.tokens
        if not wishes.enabled or request.answer:  # a preempted request goes on exactly
            return None
        if wishes.chunks is None:
            digest = chain.namespace.digest
            found = self._segments.find(digest, prompt, self._held, exact, len(prompt) - 1)
        else:
            marked = [self._marked(prompt, chain, a, b) for a, b in wishes.chunks]
            found = [chunk for chunk in marked if chunk is not None]
        chunks = self._usable(found, exact, len(prompt) - 1)
        if sum(chunk.length for chunk in chunks) < self._settings.min_tokens:
            return None
        ratio = self._settings.ratio if wishes.ratio is None else wishes.ratio
        stop = chunks[-1].prompt_start + chunks[-1].length
        return BlendPlan(exact, stop, ratio, tuple(chunks))

    def _held(self, key: bytes) -> bool:
        return key in self._manager.index

    def _marked(
        self, prompt: Sequence[int], chain: KeyChain, start: int, stop: int
    ) -> Reusable | None:
        """A marked text, where it was computed on its own behind what is configured."""
        behind = self._settings.behind
        own = KeyChain(chain.namespace, self._block)
        own.extend([*behind, *prompt[start:stop]])
        depth = self._manager.get_match(own.keys, chain.namespace.digest).depth
        length = min(depth * self._block - len(behind), stop - start)
        if length < self._settings.min_tokens:
            return None
        last = (len(behind) + length - 1) // self._block
        return Reusable(start, length, len(behind), own.keys[last])

    def _usable(self, found: Sequence[Reusable], exact: int, limit: int) -> list[Reusable]:
        """What of the chunks lies in [exact, limit) and fits the staging."""
        usable, left = [], self._settings.staging_max
        for chunk in found:
            a = max(chunk.prompt_start, exact)
            b = min(chunk.prompt_start + chunk.length, limit)
            moved = chunk.source_start + a - chunk.prompt_start
            nbytes = sum(shape.nbytes for shape in self._shapes) * len(self._blocks(moved, b - a))
            if b - a < self._settings.min_tokens or nbytes > left:
                continue
            chain = self._manager.index.path(chunk.last_key)
            usable.append(Reusable(a, b - a, moved, chain[(moved + b - a - 1) // self._block]))
            left -= nbytes
        return usable

    def _blocks(self, start: int, length: int) -> range:
        """Blocks of a chain that hold tokens [start, start + length)."""
        return range(start // self._block, -(-(start + length) // self._block))

    def source(self, chunk: Reusable) -> tuple[Hit, int, int]:
        """A chunk's chain as the tiers hold it, and its blocks there."""
        index = self._manager.index
        blocks = self._blocks(chunk.source_start, chunk.length)
        chain, namespace = index.path(chunk.last_key), index.namespace_of(chunk.last_key)
        return self._manager.get_match(chain, namespace), blocks.start, blocks.stop

    def in_host(self, plan: BlendPlan) -> BlendPlan | None:
        """The plan with the chunks that are in host memory; None when too little is left."""
        chunks = []
        for chunk in plan.chunks:
            hit, start, stop = self.source(chunk)
            if hit.depth >= stop and set(hit.blocks_by_tier(start, stop)) <= {HOST}:
                chunks.append(chunk)
        if sum(chunk.length for chunk in chunks) < self._settings.min_tokens:
            return None
        stop = chunks[-1].prompt_start + chunks[-1].length
        return BlendPlan(plan.exact, stop, plan.ratio, tuple(chunks))

    # -- orders -----------------------------------------------------------------------------

    def order(self, request: Request, plan: BlendPlan) -> Order:
        """Start the copies of a plan's chunks. One that cannot be had is computed with the rest."""
        rows = sum(len(self._blocks(chunk.source_start, chunk.length)) for chunk in plan.chunks)
        staging = [Staging(shape, rows, self._device) for shape in self._shapes]
        order = Order(request, plan, [], [], staging)
        row = 0
        for chunk in plan.chunks:
            try:
                graph_id = self._load(chunk, row, staging)
            except KVCoreError as error:
                _log.warning("a chunk is computed, since it cannot be loaded: %s", error)
                continue
            blocks = self._blocks(chunk.source_start, chunk.length)
            first = (row - blocks.start) * self._block + chunk.source_start
            distance = chunk.prompt_start - chunk.source_start
            order.places.append(Place(first, chunk.length, chunk.prompt_start, distance))
            order.graphs.append(graph_id)
            row += len(blocks)
        request.approximate_from = plan.chunks[0].prompt_start
        request.blended_tokens = plan.reused
        return order

    def _load(self, chunk: Reusable, row: int, staging: Sequence[Staging]) -> int:
        hit, start, stop = self.source(chunk)
        units = np.arange(row, row + stop - start, dtype=np.int64)[:, None]
        with self._transport.into([one.groups for one in staging]):
            graph = self._manager.launch_load(
                hit, start, stop, [UnitTable.of(units, self._block)], layers=self._layer_steps
            )
        return graph.graph_id


class RankLayers(DecoderLayers):
    """A rank's layers, lent to a blend."""

    def __init__(self, model: RankModel) -> None:
        self._model = model
        self.layers = model.model.spec.layers
        self.attention = (model.model.spec.attention,) * self.layers

    def embed(self, tokens: Tensor) -> Tensor:
        return self._model.embed(tokens)

    def run(self, layer: int, positions: Tensor, state: State, attend: Attend) -> State:
        return State(self._model.layer(layer, positions, state.hidden, attend), None)

    def reduce(self, scores: Tensor) -> Tensor:
        return self._model.reduce(scores)


class RankBlender:
    """Carries out orders on one rank. Rank's thread only."""

    def __init__(
        self, config: Config, rank: int, model: RankModel, worker: KVWorker, selector: Selector
    ) -> None:
        self._rank = rank
        self._model = model
        self._worker = worker
        self._selector = selector
        self._spread = config.fusion.spread
        self._gate = None if config.fusion.gate is None else Gate(config.fusion.gate)
        self._fusor = Fusor(RankLayers(model))

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
        placed = PlacedChunks(len(tokens), staging, order.places, self.ropes(), prefix, wait, sink)
        budget = Ratio(plan.ratio, self._spread)
        self._fusor.blend(_job(tokens, order), placed, self._selector, budget, self._gate)


def _job(tokens: Tensor, order: Order) -> Job:
    device = tokens.device
    none = [torch.empty(0, dtype=torch.int64, device=device)]
    rows = [torch.arange(p.position, p.position + p.length, device=device) for p in order.places]
    offsets = [torch.arange(p.length, device=device) for p in order.places]
    plan = order.plan
    return Job(tokens, plan.exact, plan.stop, torch.cat(rows or none), torch.cat(offsets or none))
