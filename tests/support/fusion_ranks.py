"""Tensor-parallel ranks as threads, with collectives that notice a rank that is out of step.

Every collective has to be called by all ranks, with the same kind and shape, and none may wait for
a rank that has ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kvcore.connector.fusion_messages import BlendOrder, ChunkLoad
from kvcore.connector.fusion_worker import EngineLayers, ServedRequest
from kvcore.errors import RankLostError
from kvcore.fusion.attend import Attention
from kvcore.fusion.decoder import Attend, HiddenState
from kvcore.fusion.ops import FusionOps, TorchFusion
from kvcore.fusion.plan import LayerKV
from kvcore.fusion.rope import Pairing, Rope
from kvcore.memory.copy.reference import ReferenceOps
from kvcore.memory.device import device_of
from kvcore.memory.layout import KVView, sglang_layout
from kvcore.model.keys import pack_tokens
from kvcore.telemetry.timeline import Tracer
from kvcore.transfer.graph import SKIP, Priority, TransferGraph, UnitTable

LAYERS, HEADS, DIM, PAGE, TOKENS = 4, 2, 16, 4, 40
ROPE = Rope(DIM, DIM, Pairing.NEOX, 1e4)


class OutOfStep(BaseException):
    """A collective that its ranks do not call alike, or for which they would wait for ever."""


class Died(BaseException):
    """The engine has ended, because one of its ranks did."""


class Matcher:
    """Collectives of some ranks."""

    def __init__(self, ranks: int) -> None:
        self._ready = threading.Condition()
        self._ranks = ranks
        self._calls: list[dict[int, tuple[Any, Any]]] = []
        self._at = [0] * ranks
        self._ended: dict[int, bool] = {}  # rank: it ended the engine

    def meet(self, rank: int, kind: Any, value: Any) -> list[Any]:
        """Return the values of all ranks. Blocks until each has called."""
        with self._ready:
            number = self._at[rank]
            self._at[rank] += 1
            while len(self._calls) <= number:
                self._calls.append({})
            call = self._calls[number]
            call[rank] = kind, value
            self._ready.notify_all()
            while len(call) < self._ranks:
                if any(self._ended.values()):
                    raise Died
                if self._ended:
                    raise OutOfStep(f"rank {rank} waits in {kind} for one that has ended")
                if not self._ready.wait(60):
                    raise OutOfStep(f"rank {rank} hangs in {kind}")
            if len({kind for kind, _ in call.values()}) > 1:
                raise OutOfStep(f"collective {number}: {call}")
            return [call[n][1] for n in range(self._ranks)]

    def end(self, rank: int, engine: bool) -> None:
        """Tell that a rank has ended, and whether the engine ends with it."""
        with self._ready:
            self._ended[rank] = engine
            self._ready.notify_all()


def together(ranks: int, run: Callable[[int, Matcher], Any]) -> list[Any]:
    """Return what ``run(rank, matcher)`` returned or raised, for each rank.

    A RankLostError ends the engine, and so the other ranks too.
    """
    matcher = Matcher(ranks)

    def ran(rank: int) -> Any:
        try:
            made = run(rank, matcher)
        except BaseException as error:
            matcher.end(rank, engine=isinstance(error, RankLostError))
            raise
        matcher.end(rank, engine=False)
        return made

    with ThreadPoolExecutor(ranks) as pool:
        running = [pool.submit(ran, rank) for rank in range(ranks)]
    return [one.exception() or one.result() for one in running]


class Sites:
    """The places at which a rank may fail, counted as they are passed; it fails at one of them."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.passed: list[str] = []
        self._fails_at = fails_at

    def hit(self, name: str) -> None:
        self.passed.append(name)
        if len(self.passed) - 1 == self._fails_at:
            raise RuntimeError(f"no memory on this rank, in {name}")


class TorchCalls(TorchFunctionMode):
    """Every call of torch by this thread is a site."""

    def __init__(self, sites: Sites) -> None:
        super().__init__()
        self._sites = sites

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._sites.hit(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


class Layers(EngineLayers):
    """Layers of one rank. A vocabulary-parallel embedding, and two sums over the ranks a layer."""

    collective = True

    def __init__(self, rank: int, matcher: Matcher, sites: Sites) -> None:
        self.layers = LAYERS
        self.attention = (Attention(0.25),) * LAYERS
        self._rank, self._matcher, self._sites = rank, matcher, sites
        self.written: dict[int, LayerKV] = {}

    def _sum(self, kind: str, value: Tensor) -> Tensor:
        found = self._matcher.meet(self._rank, (kind, tuple(value.shape)), value)
        return sum(found[1:], found[0])

    @contextmanager
    def serving(self, served: ServedRequest) -> Iterator[None]:
        self._sites.hit("serving")
        yield

    def embed(self, tokens: Tensor) -> Tensor:
        self._sites.hit("embed")
        shares = tokens[:, None].float().sin() * torch.arange(1.0, 9.0)
        return self._sum("embed", shares)

    def run(self, layer: int, positions: Tensor, state: HiddenState, attend: Attend) -> HiddenState:
        self._sites.hit("before attention")
        rows = len(positions)
        wide = (state.hidden.sum(dim=1, keepdim=True) * (layer + 1 + self._rank)).cos()
        every = torch.arange(HEADS * DIM) / 7.0
        q, k, v = ((wide * (n + 1) * every).sin().view(rows, HEADS, DIM) for n in range(3))
        attended = attend(q, k, v).flatten(1)
        self._sites.hit("after attention")
        hidden = state.hidden + self._sum("o_proj", attended[:, :8])
        self._sites.hit("in the MLP")
        return HiddenState(hidden + self._sum("mlp", hidden.tanh()), None)

    def write(self, layer: int, kv: LayerKV, slots: Tensor) -> None:
        self._sites.hit("write")
        self.written[layer] = LayerKV(kv.keys.clone(), kv.values.clone())

    def reduce(self, scores: Tensor) -> Tensor:
        self._sites.hit("reduce")
        return self._sum("reduce", scores)

    def agree(self, well: bool) -> bool:
        self._sites.hit("agree")
        return all(self._matcher.meet(self._rank, "agree", well))


class Group(NamedTuple):
    view: KVView


class Worker:
    """What a fusion worker asks of a rank's worker."""

    def __init__(self, sites: Sites) -> None:
        pages = [torch.zeros(TOKENS + PAGE, HEADS, DIM) for _ in range(2 * LAYERS)]
        layout = sglang_layout(pages[:LAYERS], pages[LAYERS:], PAGE, "float32")
        self.groups = [Group(KVView(layout, pages))]
        self.tracer = Tracer()
        self.ops = ReferenceOps()
        self.device = device_of(torch.device("cpu"))
        self._sites = sites

    def wave(self) -> None:
        self._sites.hit("wave")

    def mark(self) -> None:
        self._sites.hit("mark")

    def submit(self, graph: TransferGraph, wave: None, after: None) -> list[Any]:
        self._sites.hit("submit")
        units = graph.units[0].array().ravel()
        generator = torch.Generator().manual_seed(graph.num_rows)
        for memory in self.groups[0].view.tensors:
            chunk = torch.rand(len(units), *memory.shape[1:], generator=generator)
            memory[units[units >= 0]] = chunk[units >= 0]
        return []

    def wait_layer(self, graph_id: int, layer: int) -> None:
        self._sites.hit("wait_layer")

    def follow(self, graph_id: int) -> None:
        pass


class Hit(TorchFusion):
    """Torch's operations, each of them a site."""

    def __init__(self, sites: Sites) -> None:
        self._sites = sites

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in FusionOps.__abstractmethods__:
            return found

        def call(*args: Any, **named: Any) -> Any:
            self._sites.hit(name)
            return found(*args, **named)

        return call


def chunk_graph(number: int, blocks: int) -> TransferGraph:
    """Return a graph of so many blocks, without ops and without pages."""
    none, nowhere = (-1,) * blocks, np.full((blocks, 1), SKIP, dtype=np.int64)
    keys, units = (b"",) * blocks, (UnitTable.of(nowhere, PAGE),)
    return TransferGraph(number, Priority.LOAD, b"", b"", keys, none, none, units, ())


ORDER = BlendOrder(
    "r", pack_tokens(list(range(TOKENS))), 4, 4, 36, list(range(1, 11)), 0.3,
    [
        ChunkLoad(chunk_graph(1, 3), 0, 12, 6, 3),
        ChunkLoad(chunk_graph(2, 4), 1, 14, 20, -2),
    ],
)  # fmt: skip
