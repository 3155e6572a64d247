"""Chunks in the pages of a request, against the reference's placed cache."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

transformers: Any = pytest.importorskip("transformers")

from kvcore.errors import LayoutError  # noqa: E402  # after the skip
from kvcore.fusion.fusor import Fusor  # noqa: E402
from kvcore.fusion.gate import Gate, GateAction  # noqa: E402
from kvcore.fusion.ops import Place  # noqa: E402
from kvcore.fusion.placed import PlacedChunks, in_slots  # noqa: E402
from kvcore.fusion.plan import Cached, ChunkKV, Fresh, LayerKV, Prefix, PromptPlan  # noqa: E402
from kvcore.fusion.reference import Decoder  # noqa: E402
from kvcore.fusion.rope import Pairing, Rope  # noqa: E402
from kvcore.fusion.select import KeyDeviation, Ratio, runs  # noqa: E402
from kvcore.memory.copy.reference import ReferenceOps  # noqa: E402
from kvcore.memory.layout import Axis, KVLayout, KVView, Plane, arena_layout  # noqa: E402
from kvcore.model.shape import BlockShape  # noqa: E402
from kvcore_devtools.fusion import (  # noqa: E402
    DIM,
    KV_HEADS,
    LAYERS,
    THETA,
    ReferenceLayers,
    ReferencePlaced,
    World,
    close,
    job_of,
    make_model,
    words,
)
from support.budget import examples  # noqa: E402

BLOCK = 4
SHAPE = BlockShape(LAYERS, KV_HEADS, DIM, BLOCK, "float32")
WORLD = World(Decoder(make_model("llama")))
ROPES = [Rope(DIM, DIM, Pairing.NEOX, THETA)] * LAYERS
OPS = ReferenceOps()


def arena_of(chunk: ChunkKV, blocks: int) -> KVView:
    """The first blocks of a chunk as canonical blocks, one a slot."""
    layout = arena_layout(SHAPE, blocks)
    flat = torch.empty(blocks * SHAPE.nbytes // 4)
    canonical = flat.view(blocks, LAYERS, KV_HEADS, 2, BLOCK, DIM)
    for layer, kv in enumerate(chunk.layers):
        for part, rows in enumerate((kv.keys, kv.values)):
            held = rows[: blocks * BLOCK].view(blocks, BLOCK, KV_HEADS, DIM)
            canonical[:, layer, :, part] = held.transpose(1, 2)
    return KVView(layout, [flat])


PAGE = 8


def pages_like(count: int, kv_heads: int = KV_HEADS, dims: tuple[int, int] = (DIM, DIM)) -> KVView:
    """An engine's pages [pages, tokens, heads, k and v] a layer, of values that are no numbers."""
    planes, tensors, width = [], [], sum(dims)
    for index in range(LAYERS):
        tensors.append(torch.full((count, PAGE, kv_heads, width), float("nan")))
        row = kv_heads * width
        planes.append(
            tuple(
                Plane(index, at, PAGE * row, width, Axis(row), Axis(1), dim)
                for at, dim in zip((0, dims[0]), dims, strict=True)
            )
        )
    return KVView(KVLayout("float32", count, PAGE, kv_heads, tuple(planes)), tensors)


class Request:
    """A request whose pages lie anywhere, with an exact prefix and chunks loaded into them."""

    def __init__(self, tokens: int, pages: list[int]) -> None:
        self.view = pages_like(max(pages) + 1)
        positions = np.arange(tokens)
        self.slots = np.array(pages)[positions // PAGE] * PAGE + positions % PAGE
        self.tokens = tokens
        self.places: list[Place] = []

    def load(self, chunk: ChunkKV, start: int, length: int, position: int, distance: int) -> None:
        """Copy tokens [start, start + length) of a chunk, token by token, as a graph does."""
        blocks = -(-(start + length) // BLOCK)
        arena = arena_of(chunk, blocks)
        here, there = np.arange(start, start + length), self.slots[position:][:length]
        OPS.copy_blocks(arena, here, self.view, there, unit_tokens=1)
        self.places += in_slots(self.slots, position, position + length, distance)

    def placed(self, **options: Any) -> PlacedChunks:
        options = {"landed": lambda _: None, "sink": self.write, "copies": OPS} | options
        return PlacedChunks(self.tokens, self.view, self.places, ROPES, **options)

    def write(self, layer: int, kv: LayerKV) -> None:
        """Write all positions, as an engine does."""
        for part in range(2):
            rows = self.view.tensors[layer].flatten(0, 1)
            rows[self.slots, :, part * DIM : (part + 1) * DIM] = kv[part]


@settings(max_examples=examples(25), deadline=None)
@given(
    prefix=st.integers(0, 20),
    cuts=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 20), st.integers(0, 6)), max_size=3),
    seed=st.integers(0, 3),
    again=st.booleans(),
)
def test_chunks_stand_where_the_reference_places_them(
    prefix: int, cuts: list[tuple[int, int, int]], seed: int, again: bool
) -> None:
    """Chunks cut at any token of their blocks, between fresh tokens, behind a prefix."""
    segments: list[Any] = [Prefix(WORLD.chunk(9, prefix))] if prefix else []
    loads, position = [], prefix
    for number, (start, length, gap) in enumerate(cuts):
        whole = WORLD.chunk(number + seed, 32)
        part = whole.part(start, min(start + length, 32))
        segments += [Fresh(words(gap, 50 + number)), Cached(part)]
        position += gap
        loads.append((whole, start, len(part.tokens), position, position - start))
        position += len(part.tokens)
    plan = PromptPlan([*segments, Fresh(words(3, 99))])
    request = Request(len(plan), [5, 2, 7, 8, 1, 0, 9, 12, 11, 10, 3, 4])
    for layer, kv in enumerate(WORLD.chunk(9, prefix).layers if prefix else ()):
        request.view.tensors[layer].flatten(0, 1)[request.slots[:prefix]] = torch.cat(kv, dim=-1)
    request.places += in_slots(request.slots, 0, prefix)
    for load in loads:
        request.load(*load)
    waited: list[int] = []
    written: list[tuple[int, LayerKV]] = []
    placed = request.placed(
        landed=waited.append, sink=lambda layer, kv: written.append((layer, kv)), again=again
    )
    expected = WORLD.make(plan).placed
    known = torch.cat([plan.rows(Prefix), plan.rows(Cached)])
    before = [tensor.clone() for tensor in request.view.tensors]
    for layer in (0, 1, LAYERS - 1, 0):  # a layer may be asked for again
        kv = placed.layer(layer)
        close(kv.keys[known], expected[layer].keys[known], 1e-5)
        assert torch.equal(kv.values[known], expected[layer].values[known])
        assert not kv.keys.isnan().any()
        kv.keys.fill_(7.0)  # the caller may write to it
        kv.values.fill_(7.0)
    assert waited == [0, 1, LAYERS - 1, 0]
    placed.write(3, kv)
    assert written[0][0] == 3
    exact = request.slots[:prefix]
    for tensor, old in zip(request.view.tensors, before, strict=True):
        now = tensor.flatten(0, 1)[exact].view(torch.int32)
        assert torch.equal(now, old.flatten(0, 1)[exact].view(torch.int32)), "others read it"


def test_a_walk_that_starts_over_reads_what_was_stored() -> None:
    """Layers are written with other rows at each walk; the next one finds the chunk as it was."""
    request = Request(20, [3, 0, 2])
    request.load(WORLD.chunk(1, 16), 2, 10, 5, 3)
    placed = request.placed(again=True, over=True)
    stored = [LayerKV(*(part.clone() for part in placed.layer(n))) for n in range(LAYERS)]
    for rows in ([5, 6, 14], [9], []):
        for layer, cached in enumerate(stored):
            kv, chosen = placed.layer(layer), torch.tensor(rows, dtype=torch.int64)
            for now, then in zip(kv, cached, strict=True):
                assert torch.equal(now[5:15], then[5:15])
            placed.keep(layer, chosen)
            for part in kv:
                part[chosen] = float(layer)
            placed.write(layer, kv)


@pytest.mark.parametrize("larger", [0.3, 0.6])
@pytest.mark.parametrize("looks", [True, False])
def test_a_gated_blend_in_pages_is_that_over_an_unchanged_cache(looks: bool, larger: float) -> None:
    """Walks that start over read what was cached, although the pages were written meanwhile."""
    prefix, first, second = WORLD.chunk(9, 8), WORLD.chunk(0, 32), WORLD.chunk(1, 32)
    part = second.part(3, 30)
    parts = [Prefix(prefix), Cached(first), Fresh(words(5, 2)), Cached(part), Fresh(words(6, 3))]
    plan, exact = PromptPlan(parts), len(prefix.tokens)
    request = Request(len(plan), [5, 2, 7, 8, 1, 0, 9, 12, 11, 10])
    request.load(prefix, 0, exact, 0, 0)
    request.load(first, 0, 32, exact, exact)
    request.load(second, 3, 27, exact + 37, exact + 34)
    job, budget = job_of(plan), Ratio(0.15, spread=0.5)
    selector = runs() if looks else KeyDeviation()
    fusor, unchanged = Fusor(ReferenceLayers(WORLD.decoder)), ReferencePlaced(WORLD.make(plan))
    [said] = fusor.blend(job, unchanged, selector, budget, Gate(math.inf, depth=0.8)).verdicts
    gate = Gate(said.expected / 0.85 * (1 - larger) * 1.01, larger=(larger,), depth=0.8)
    placed = request.placed(again=looks, over=True)
    over, blended = (fusor.blend(job, one, selector, budget, gate) for one in (unchanged, placed))
    assert over.abandoned
    assert over.verdicts[0].action is GateAction.LARGER
    assert [one[:2] for one in over.verdicts] == [one[:2] for one in blended.verdicts]
    assert torch.equal(over.chosen, blended.chosen)
    for layer, kv in unchanged.written.items():
        rows = request.view.tensors[layer].flatten(0, 1)[request.slots[exact : job.stop]]
        close(rows, torch.cat(kv, dim=-1)[exact : job.stop], 1e-5)


@pytest.mark.parametrize("again", [False, True])
def test_layers_read_again_are_rotated_once(again: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    turned: list[int] = []
    shift = Rope.shift

    def counting(self: Rope, keys: torch.Tensor, distance: int) -> torch.Tensor:
        turned.append(distance)
        return shift(self, keys, distance)

    monkeypatch.setattr(Rope, "shift", counting)
    request = Request(16, [0, 3])
    request.load(WORLD.chunk(1, 16), 2, 10, 5, 3)
    placed = request.placed(again=again)
    first = [placed.layer(layer).keys.clone() for layer in range(LAYERS)]
    second = [placed.layer(layer).keys.clone() for layer in range(LAYERS)]
    for one, two in zip(first, second, strict=True):
        assert torch.equal(one, two)
    assert len(turned) == (LAYERS if again else 2 * LAYERS), "once a chunk, over all of its pages"


def test_a_chunk_at_its_own_place_keeps_its_bits() -> None:
    chunk, request = WORLD.chunk(1, 16), Request(16, [1, 0])
    request.load(chunk, 0, 16, 0, 0)
    placed = request.placed()
    for layer, kv in enumerate(chunk.layers):
        assert torch.equal(placed.layer(layer).keys, kv.keys)


@pytest.mark.parametrize("dims", [(DIM, 2 * DIM)])
def test_heads_of_several_sizes_are_refused(dims: tuple[int, int]) -> None:
    view = pages_like(1, dims=dims)
    with pytest.raises(LayoutError, match="K and V with equal head sizes"):
        PlacedChunks(4, view, [], ROPES, lambda _: None, lambda layer, kv: None, OPS)
