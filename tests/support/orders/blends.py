"""Blends on a recorded rank: layers of a small model, a leader that orders blends, and an oracle.

The fusion worker and the walk through the layers are kvcore's. The model's layers and
its write to the pages are the engine's, and are played.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from kvcore.config import Config
from kvcore.connector import fusion_worker
from kvcore.connector.fusion_messages import FULL_LAYERS, BlendOrder, ChunkLoad
from kvcore.connector.fusion_worker import EngineLayers, FusionWorker, ServedRequest
from kvcore.fusion.attend import Attention
from kvcore.fusion.decoder import Attend, HiddenState
from kvcore.fusion.fusor import Fusor
from kvcore.fusion.gate import Gate
from kvcore.fusion.ops import TorchFusion
from kvcore.fusion.placed import PlacedChunks, in_slots
from kvcore.fusion.plan import LayerKV
from kvcore.fusion.rope import Pairing, Rope
from kvcore.fusion.select import (
    KeyValueDeviation,
    Ratio,
    RelativeDeviation,
    Selector,
    runs,
)
from kvcore.memory.copy.reference import ReferenceOps
from kvcore.memory.device import CpuDevice, serve_devices
from kvcore.memory.layout import KVView, from_strides
from kvcore.model.keys import pack_tokens
from kvcore.model.shape import BlockShape
from kvcore.transfer.graph import SKIP
from kvcore.transfer.plan import build_load, layer_steps
from kvcore_devtools.gpu import GpuRank, Machine
from kvcore_devtools.gpu.memory import tensor_spans, together
from support.orders.books import Books, Request, Step

__all__ = ["BLENDED", "BlendBooks", "BlendRank", "ToyLayers", "blends_of"]

BLENDED = BlockShape(layers=3, kv_heads=2, head_dim=4, block_tokens=4, dtype="float32")
QUESTION = 3
"""Tokens after the last one that a blend makes KV for."""
HIDDEN = 8
SELECTORS = (runs, KeyValueDeviation, RelativeDeviation)


class BlendRank(GpuRank):
    """A rank on a device that torch calls the CPU. Its blocks hold numbers of a model's size.

    ``made`` has what blends make, by the number that the block gets.
    """

    def __init__(self, machine: Machine, **options: Any) -> None:
        self.made: dict[int, list[Tensor]] = {}
        super().__init__(machine, shape=BLENDED, device=torch.device("cpu"), **options)

    def layer(self, *given: Any, **options: Any) -> None:
        super().layer(*given, **options)
        self._activate()

    def replay(self, *given: Any, **options: Any) -> None:
        super().replay(*given, **options)
        self._activate()

    def _activate(self) -> None:
        """Use memory for a while, as a forward does for its activations."""
        torch.ones(64, device="cpu").mul_(2)

    def bytes_of(self, block: int, layer: int) -> Tensor:
        if block in self.made:
            return self.made[block][layer]
        size = self.caches[layer][0].shape
        numbers = np.random.default_rng([block, layer]).standard_normal(size, dtype=np.float32)
        return torch.from_numpy(numbers)


class Unwaited(TorchFusion):
    """Torch's operations, with attention for which the host does not wait, as a GPU's kernel."""

    def attend(
        self, queries: Tensor, positions: Tensor, kv: LayerKV, attention: Attention
    ) -> Tensor:
        seen = torch.arange(len(kv.keys), device=kv.keys.device) <= positions[:, None]
        q, k, v = (part.transpose(0, 1)[None] for part in (queries, kv.keys, kv.values))
        out = functional.scaled_dot_product_attention(
            q, k, v, seen[None, None], scale=attention.scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)


class ToyLayers(EngineLayers):
    """A model's layers. ``written`` are the pages that blends write to, by request.

    A request in ``failing`` fails: its context cannot be entered (-1), or the write of a
    layer raises.
    """

    def __init__(self, rank: GpuRank) -> None:
        self.layers = rank.shape.layers
        self.attention = (Attention(0.5),) * self.layers
        self.max_rows = 12
        self.written: dict[str, list[int]] = {}
        self.failing: dict[str, int] = {}
        self._rank = rank
        self._request = ""

    @contextmanager
    def serving(self, served: ServedRequest) -> Iterator[None]:
        if self.failing.get(served.request_id) == -1:
            raise RuntimeError("no memory for the request's metadata")
        self._request = served.request_id
        yield
        self._request = ""

    def embed(self, tokens: Tensor) -> Tensor:
        every = torch.arange(1.0, HIDDEN + 1, device=tokens.device)
        return (tokens[:, None].float() * every).sin()

    def run(self, layer: int, positions: Tensor, state: HiddenState, attend: Attend) -> HiddenState:
        shape = self._rank.shape
        width = shape.kv_heads * shape.head_dim
        wide = (state.hidden.sum(dim=1, keepdim=True) * (layer + 1)).cos()
        every = torch.arange(1.0, width + 1, device=wide.device) / 7.0
        q, k, v = (
            (wide * (n + 1) * every).sin().view(-1, shape.kv_heads, shape.head_dim)
            for n in range(3)
        )
        attended = attend(q, k, v).flatten(1)
        return HiddenState((state.hidden + attended[:, :HIDDEN]).tanh(), None)

    def write(self, layer: int, kv: LayerKV, slots: Tensor) -> None:
        rank, alias = self._rank, self._rank.machine.allocator.alias
        if self.failing.get(self._request) == layer:
            raise RuntimeError("a kernel of the engine could not be launched")
        keys, values, places = map(alias, (kv.keys, kv.values, slots))
        size = rank.shape.block_tokens

        def run() -> None:
            page, token = places // size, places % size
            rank.caches[layer][page, :, token] = torch.cat((keys, values), dim=-1)

        rank.machine.launch(
            "the engine's write of a blend",
            run,
            reads=together(map(tensor_spans, (kv.keys, kv.values, slots))),
            writes=rank.places(self.written[self._request], [layer]),
        )


def ropes(shape: BlockShape) -> list[Rope]:
    return [Rope(shape.head_dim, shape.head_dim, Pairing.NEOX, 1e4)] * shape.layers


def blends_of(rank: BlendRank, seed: int) -> FusionWorker:
    """Return a rank's fusion worker. The seed chooses the selector, and whether there is a gate.

    The host waits for the device at a gate.
    """
    gate = 0.05 if seed % 4 == 3 else None
    config = Config.model_validate({"fusion": {"enabled": True, "adaptive": False, "gate": gate}})
    return FusionWorker(
        config,
        rank.worker,
        ToyLayers(rank),
        ropes(rank.shape),
        SELECTORS[seed % len(SELECTORS)](),
        rank.shape.block_tokens,
        Unwaited(),
    )


def expected(
    rank: BlendRank, blends: FusionWorker, order: BlendOrder, prefix: Sequence[int],
    chunks: Sequence[int],
) -> list[list[Tensor]]:  # fmt: skip
    """Return what a blend makes, by page and layer, from blocks by their numbers.

    It is computed without a worker, streams or copies, on the CPU.
    """
    shape, machine = rank.shape, rank.machine
    size = len(order.pages), shape.kv_heads, shape.block_tokens, sum(shape.dims())
    pages = [torch.zeros(size) for _ in range(shape.layers)]
    for place, block in enumerate(prefix):
        for layer in range(shape.layers):
            pages[layer][place] = rank.bytes_of(block, layer)
    view, slots = KVView(from_strides(pages, shape), pages), np.arange(order.stop)
    places = in_slots(slots, 0, order.readable)
    for block, chunk in zip(chunks, order.chunks, strict=True):
        alone = [rank.bytes_of(block, layer)[None] for layer in range(shape.layers)]
        source, stop = KVView(from_strides(alone, shape), alone), chunk.position + chunk.length
        here, there = np.arange(chunk.length) + chunk.first, slots[chunk.position : stop]
        ReferenceOps().copy_blocks(source, here, view, there, unit_tokens=1)
        places += in_slots(slots, chunk.position, stop, chunk.distance)
    done: list[LayerKV] = []

    def sink(layer: int, kv: LayerKV) -> None:
        part = slice(order.exact, order.stop)
        del done[layer:]  # of a walk that has started over
        done.append(LayerKV(kv.keys[part].clone(), kv.values[part].clone()))
        page, token = slots[part] // shape.block_tokens, slots[part] % shape.block_tokens
        pages[layer][page, :, token] = torch.cat(done[layer], dim=-1)

    job = fusion_worker._job(order, torch.device("cpu"))
    selector: Selector = blends._selector
    placed = PlacedChunks(
        len(job.tokens),
        view,
        places,
        ropes(shape),
        lambda layer: None,
        sink,
        ReferenceOps(),
        Unwaited(),
        again=selector.needs_question,
        over=blends._gate is not None,
    )
    gate: Gate | None = blends._gate
    budget = Ratio(order.ratio, blends._spread, FULL_LAYERS)
    Fusor(ToyLayers(rank), ops=Unwaited()).blend(job, placed, selector, budget, gate)
    assert machine.host().device == machine.index
    made = [torch.cat(kv, dim=-1).unflatten(0, (-1, shape.block_tokens)) for kv in done]
    return [[kv[i].transpose(0, 1) for kv in made] for i in range(made[0].shape[0])]


class BlendBooks(Books):
    """A leader that also orders blends, a ``failing`` share of which fails.

    Half of the slots hold blocks from the start. ``at_once`` returns a context in which torch runs
    at once (`queued_torch`).
    """

    def __init__(
        self,
        rank: BlendRank,
        seed: int,
        blends: FusionWorker,
        at_once: Any,
        *,
        failing: float = 0.2,
        share: float = 0.7,
        **options: Any,
    ) -> None:
        super().__init__(rank, seed, **options)
        self.rank: BlendRank = rank
        self.blends = blends
        self.count = 0
        self._at_once = at_once
        self._failing, self._share = failing, share
        self._made: dict[str, dict[int, int]] = {}
        with at_once():
            for _ in range(rank.arena.num_slots // 2):
                self._blocks += 1
                slot = self._room.pop()
                rank.fill(slot, self._blocks)
                self.published[self._blocks] = slot

    def _begin(self, step: Step) -> bool:
        if not self.published or self._random.random() > self._share:
            return super()._begin(step)
        prefix = self._random.sample([*self.published], min(len(self.published), self._some()))
        chunks = [self._random.choice([*self.published]) for _ in range(1 + self._some())]
        gap = self._random.randrange(3)  # fresh tokens in the middle
        count = len(chunks) + bool(gap)
        if len(self._free) < len(prefix) + count:
            return False
        self._names += 1
        request = Request(f"blend {self._names}", parked=True)
        pages = [self._give(step) for _ in prefix]
        if prefix:
            graph = self._load(prefix, pages)
            assert graph is not None
            step.blend_loads.append((request.name, graph))
        request.pages = dict(zip(pages, prefix, strict=True))
        self._blend(request, step, chunks, [self._give(step) for _ in range(count)], gap)
        self.requests.append(request)
        return True

    def _some(self) -> int:
        return self._random.randrange(3)

    def _blend(
        self, request: Request, step: Step, chunks: list[int], pages: list[int], gap: int
    ) -> None:
        """Order a blend of ``chunks``, of which the last one is late by ``gap`` tokens."""
        size, rank, layers = self.rank.shape.block_tokens, self.rank, self.blends._layers
        exact = len(request.pages) * size
        stop = exact + len(pages) * size
        loads = []
        for place, block in enumerate(chunks):
            slot, number = self.published[block], self._number()
            graph = build_load(
                number, self._chain([block]), [slot], [], batch_rows=2,
                layers=layer_steps(rank.shape.layers),
            ).bind(rank.units([SKIP]))  # fmt: skip
            self._fly(graph, (), [slot])
            position = exact + place * size + (gap if place == len(chunks) - 1 else 0)
            first, length = 0, size
            distance = self._random.choice([0, 5, -3])
            loads.append(ChunkLoad(graph, first, length, position, distance))
        tokens = [self._random.randrange(1000) for _ in range(stop + QUESTION)]
        order = BlendOrder(
            request.name, pack_tokens(tokens), exact, exact, stop, [*request.pages, *pages],
            self._random.choice([0.0, 0.3, 0.6]), loads,
        )  # fmt: skip
        assert isinstance(layers, ToyLayers)
        layers.written[request.name] = pages
        step.blends.append(order)
        self.count += 1
        if self._random.random() < self._failing:
            step.failing.add(request.name)
            layers.failing[request.name] = self._random.randrange(-1, rank.shape.layers - 1)
        self._blocks += len(pages)
        numbers = range(self._blocks - len(pages) + 1, self._blocks + 1)
        self._made[request.name] = dict(zip(pages, numbers, strict=True))
        with self._at_once(), _plain_cpu():
            made = expected(rank, self.blends, order, [*request.pages.values()], chunks)
        rank.made.update(zip(numbers, made, strict=True))

    def arrived(self, names: Any, failed: Any = ()) -> None:
        super().arrived(names)
        for request in [one for one in self.requests if one.name in self._made]:
            if request.name in names:
                made = self._made.pop(request.name)
                request.pages.update(made)
                if request.name in failed:
                    self._end(request)


@contextmanager
def _plain_cpu() -> Iterator[None]:
    undo = serve_devices("cpu", CpuDevice)
    try:
        yield
    finally:
        undo()
