"""Chunks on their way from canonical blocks into a prompt, against the reference's placed cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

transformers: Any = pytest.importorskip("transformers")

from kvcore.errors import LayoutError  # noqa: E402  # after the skip
from kvcore.fusion.plan import Cached, ChunkKV, Fresh, LayerKV, Prefix, PromptPlan  # noqa: E402
from kvcore.fusion.reference import Decoder  # noqa: E402
from kvcore.fusion.rope import Pairing, Rope  # noqa: E402
from kvcore.fusion.staging import ChunkStaging, PagedPrefix, Place, PlacedChunks  # noqa: E402
from kvcore.memory.copy.reference import ReferenceOps  # noqa: E402
from kvcore.memory.layout import Axis, KVLayout, KVView, Plane, arena_layout  # noqa: E402
from kvcore.model.shape import BlockShape  # noqa: E402
from kvcore_devtools.fusion import (  # noqa: E402
    DIM,
    KV_HEADS,
    LAYERS,
    THETA,
    World,
    close,
    make_model,
    words,
)

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


def paged(layers: tuple[LayerKV, ...], tokens: int, pages: list[int]) -> KVView:
    """An engine's pages [pages, tokens, k/v, heads, dim] a layer, with the first tokens in them."""
    planes, tensors = [], []
    for index, kv in enumerate(layers):
        tensor = torch.full((max(pages) + 1, 8, 2, KV_HEADS, DIM), float("nan"))
        for position in range(tokens):
            page, offset = pages[position // 8], position % 8
            tensor[page, offset, 0], tensor[page, offset, 1] = (
                kv.keys[position],
                kv.values[position],
            )
        row = 2 * KV_HEADS * DIM
        planes.append(
            tuple(
                Plane(index, part * KV_HEADS * DIM, 8 * row, DIM, Axis(row), Axis(1), DIM)
                for part in range(2)
            )
        )
        tensors.append(tensor)
    return KVView(KVLayout("float32", max(pages) + 1, 8, KV_HEADS, tuple(planes)), tensors)


@settings(max_examples=25, deadline=None)
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
    places, loads, row, position = [], [], 0, prefix
    for number, (start, length, gap) in enumerate(cuts):
        whole = WORLD.chunk(number + seed, 32)
        part = whole.part(start, min(start + length, 32))
        segments += [Fresh(words(gap, 50 + number)), Cached(part)]
        position += gap
        first, last = start // BLOCK, -(-(start + len(part.tokens)) // BLOCK)
        loads.append((arena_of(whole, 8), first, last, row))
        in_staging = row * BLOCK + start - first * BLOCK
        places.append(Place(in_staging, len(part.tokens), position, position - start))
        position += len(part.tokens)
        row += last - first
    plan = PromptPlan([*segments, Fresh(words(3, 99))])
    staging = ChunkStaging(SHAPE, max(row, 1), torch.device("cpu"))
    for arena, first, last, at in loads:
        units = np.arange(at, at + last - first)
        OPS.copy_blocks(arena, np.arange(first, last), staging.groups[0].view, units)
    pages = [5, 2, 7]
    held = WORLD.chunk(9, prefix).layers if prefix else WORLD.chunk(9, 1).layers
    view = paged(held, prefix, pages)
    waited: list[int] = []
    written: list[tuple[int, LayerKV]] = []
    placed = PlacedChunks(
        len(plan),
        staging,
        places,
        ROPES,
        PagedPrefix(view, pages, prefix),
        waited.append,
        lambda layer, kv: written.append((layer, kv)),
        OPS,
        again=again,
    )
    expected = WORLD.make(plan).placed
    known = torch.cat([plan.rows(Prefix), plan.rows(Cached)])
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


@pytest.mark.parametrize("again", [False, True])
def test_layers_read_again_are_rotated_once(again: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    turned: list[int] = []
    shift = Rope.shift

    def counting(self: Rope, keys: torch.Tensor, distance: int) -> torch.Tensor:
        turned.append(distance)
        return shift(self, keys, distance)

    monkeypatch.setattr(Rope, "shift", counting)
    chunk = WORLD.chunk(1, 16)
    staging = ChunkStaging(SHAPE, 4, torch.device("cpu"))
    OPS.copy_blocks(arena_of(chunk, 4), np.arange(4), staging.groups[0].view, np.arange(4))
    empty = PagedPrefix(paged(chunk.layers, 0, [0]), [], 0)
    places = [Place(2, 10, 5, 3)]
    placed = PlacedChunks(
        16, staging, places, ROPES, empty, lambda _: None, lambda layer, kv: None, OPS, again=again
    )
    first = [placed.layer(layer).keys.clone() for layer in range(LAYERS)]
    second = [placed.layer(layer).keys.clone() for layer in range(LAYERS)]
    for one, two in zip(first, second, strict=True):
        assert torch.equal(one, two)
    assert len(turned) == (LAYERS if again else 2 * LAYERS)


def test_a_chunk_at_its_own_place_keeps_its_bits() -> None:
    chunk = WORLD.chunk(1, 16)
    staging = ChunkStaging(SHAPE, 4, torch.device("cpu"))
    OPS.copy_blocks(arena_of(chunk, 4), np.arange(4), staging.groups[0].view, np.arange(4))
    empty = PagedPrefix(paged(chunk.layers, 0, [0]), [], 0)
    placed = PlacedChunks(
        16,
        staging,
        [Place(0, 16, 0, 0)],
        ROPES,
        empty,
        lambda layer: None,
        lambda layer, kv: None,
        OPS,
    )
    for layer, kv in enumerate(chunk.layers):
        assert torch.equal(placed.layer(layer).keys, kv.keys)


def test_latent_attention_has_no_staging() -> None:
    latent = BlockShape(2, 1, 8, 4, "float32", kv_factor=1)
    with pytest.raises(LayoutError, match="K and V with equal head sizes"):
        ChunkStaging(latent, 1, torch.device("cpu"))
