"""Ends of windows that engines with other numbers of ranks wrote.

The naive twin is the whole cache of a layer, [pages, all KV heads, tokens, K and V]: a rank's pages
are its heads of it, as vLLM's loader of weights gives them out.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.errors import LayoutError
from kvcore.memory.arena import HostArena
from kvcore.memory.copy.reference import ReferenceOps
from kvcore.memory.layout import KVView, from_strides
from kvcore.memory.points import PointCopies, point_copies
from kvcore.memory.runs import SlotPlace
from kvcore.model.points import PointShape, StateGroup, WindowGroup, over_stages
from kvcore.model.shape import BlockShape
from kvcore.model.spec import LayerGroup, ModelDescription, even_stages
from kvcore.runtime.build import geometry
from kvcore.testing.tier_contract import NAMESPACE
from kvcore.tiers.base import BlockRead, BlockWrite
from kvcore.tiers.remote import Shard, StoreOptions, StoreTier
from kvcore.tiers.remote.memory import MemoryStore
from kvcore.tiers.remote.shard_registry import ShardRegistry
from support.budget import examples

BLOCK, PAGES, LAYERS = 4, 5, 2
WINDOW = tuple(f"w{i}" for i in range(3))
"""Layers with a window: one row has two of them, and another one the third."""
GROUPS = (LayerGroup(0, BLOCK, (0, 1)), LayerGroup(1, BLOCK, (), of="windows"))
OPTIONS = StoreOptions(splits_s=0.001, retries=0)
SIZES = st.sampled_from([1, 2, 4, 8])
Whole = list[torch.Tensor]


def model(heads: int, ranks: int, stages: int = 1) -> ModelDescription:
    shape = BlockShape(LAYERS, heads, 6, BLOCK, "float32")
    own = max(heads // ranks, 1)
    window = replace(shape, layers=1, kv_heads=own)
    seen = (WindowGroup(1, WINDOW, window, before=5, by_heads=True),)
    point = PointShape((), LAYERS * window.nbytes, 1, seen)
    layers = even_stages(LAYERS, stages)
    rows = [(stop - start) * window.nbytes for start, stop in layers]
    names = [set(WINDOW)] if stages == 1 else [set(WINDOW[:2]), set(WINDOW[2:])]
    whole, parts = over_stages(point, names, rows)
    return ModelDescription(
        shape, GROUPS, b"model", ranks * stages, stages=layers, point=whole, stage_points=parts
    )


def whole(heads: int, seed: int) -> Whole:
    rng = np.random.default_rng(seed)
    size = (PAGES, heads, BLOCK, 12)
    return [torch.from_numpy(rng.random(size, dtype=np.float32)) for _ in WINDOW]


class Rank:
    """Pages of one rank's layers with a window, and what is copied of them."""

    def __init__(self, described: ModelDescription, number: int, content: Whole) -> None:
        self.model, self.number = described, number
        tp, heads = described.tensor_ranks, described.shape.kv_heads
        first = number % tp * heads // tp
        last = first + max(heads // tp, 1)
        point = described.rank_point(number)
        assert point is not None
        [window] = point.windows
        own = [content[WINDOW.index(name)] for name in window.names]
        self.pages = [layer[:, first:last].clone() for layer in own]
        view = KVView(from_strides(self.pages, window.shape), self.pages)
        self.copies: PointCopies = point_copies(point, {}, {1: view})
        self.rows = point.rows(9)

    def copy(self, arena: KVView, slot_nbytes: int, page: int, save: bool) -> None:
        """Copy the windows of one page, and of the one before it, to slots or back."""
        ops, windows = ReferenceOps(), self.copies.windows
        views = self.copies.in_memory(arena, SlotPlace(slot_nbytes)).windows
        for part, memory in zip(windows, views, strict=True):
            slots = np.array(part.rows, dtype=np.int64)
            pages = page - np.arange(len(slots), dtype=np.int64)
            pairs = (part.pages, pages, memory, slots)
            if save:
                ops.copy_blocks(*pairs)
            else:
                ops.copy_blocks(memory, slots, part.pages, pages)


def saved_in_a_store(store: MemoryStore, ranks: list[Rank], page: int) -> None:
    for rank in ranks:
        tier, arena, view = opened(store, rank)
        rank.copy(view, arena.slot_nbytes, page, save=True)
        writes = [
            BlockWrite(row, bytes([row]) * 16, bytes(16), NAMESPACE, buffers(rank, arena, row))
            for row in range(rank.rows)
        ]
        assert tier.write(writes) == [None] * rank.rows
        tier.close()
        arena.close()


def loaded_from_a_store(store: MemoryStore, ranks: list[Rank], page: int) -> None:
    for rank in ranks:
        tier, arena, view = opened(store, rank)
        for row in range(rank.rows):
            read = BlockRead(row, bytes([row]) * 16, buffers(rank, arena, row))
            assert tier.read([read]) == [None]
        rank.copy(view, arena.slot_nbytes, page, save=False)
        tier.close()
        arena.close()


def buffers(rank: Rank, arena: HostArena, row: int) -> list[memoryview]:
    size = rank.model.rank_shape(rank.number).nbytes
    return [memoryview(arena.slot_buffers(row)[0]).cast("B")[:size]]


def opened(store: MemoryStore, rank: Rank) -> tuple[StoreTier, HostArena, KVView]:
    described, number = rank.model, rank.number
    told = geometry(described)
    shards = Shard.all_of(told, "kvcore")
    registry = ShardRegistry(store, shards, every_s=1e-9, announces=True)
    registry.refresh()
    tier = StoreTier(store, Shard.of(told, number, "kvcore"), OPTIONS, registry=registry)
    arena = HostArena(described.rank_shape(number), rank.rows, huge_pages=False)
    return tier, arena, KVView(arena.layout(), [arena.tensor()])


def ranks_of(described: ModelDescription, content: Whole) -> list[Rank]:
    return [Rank(described, number, content) for number in range(described.world_size)]


def assert_loaded(ranks: list[Rank], content: Whole, before: Whole, source: int, to: int) -> None:
    """The pages of the window came, and no other page changed."""
    expected = [layer.clone() for layer in before]
    for distance in range(2):
        for one, other in zip(expected, content, strict=True):
            one[to - distance] = other[source - distance]
    for rank in ranks:
        right = Rank(rank.model, rank.number, expected).pages
        assert all(map(torch.equal, rank.pages, right)), rank.number


@given(
    heads=SIZES,
    writers=SIZES,
    readers=SIZES,
    stages=st.sampled_from([1, 2]),
    seed=st.integers(0, 9),
)
@settings(max_examples=examples(60), deadline=None)
def test_a_store_gives_windows_that_any_number_of_ranks_wrote(
    heads: int, writers: int, readers: int, stages: int, seed: int
) -> None:
    content, before, store = whole(heads, seed), whole(heads, seed + 100), MemoryStore()
    saved_in_a_store(store, ranks_of(model(heads, writers, stages), content), 3)
    found = ranks_of(model(heads, readers, stages), before)
    loaded_from_a_store(store, found, 2)
    assert_loaded(found, content, before, 3, 2)


@given(
    heads=SIZES,
    writers=SIZES,
    readers=SIZES,
    stages=st.sampled_from([1, 2]),
    seed=st.integers(0, 9),
)
@settings(max_examples=examples(60), deadline=None)
def test_a_servers_memory_gives_windows_that_any_number_of_ranks_wrote(
    heads: int, writers: int, readers: int, stages: int, seed: int
) -> None:
    """Its slots have whole blocks, of which each rank sees its heads and layers."""
    content, before = whole(heads, seed), whole(heads, seed + 100)
    ranks = ranks_of(model(heads, writers, stages), content)
    arena = HostArena(ranks[0].model.shape, ranks[0].rows, huge_pages=False)
    found = ranks_of(model(heads, readers, stages), before)
    for rank, page in [*((rank, 3) for rank in ranks), *((rank, 2) for rank in found)]:
        part = rank.model.part(rank.number)
        layout = arena.layout().select_heads(*part.heads).select_layers(range(*part.layers))
        rank.copy(KVView(layout, [arena.tensor()]), arena.slot_nbytes, page, save=page == 3)
    assert_loaded(found, content, before, 3, 2)
    arena.close()


def test_ranks_that_keep_the_same_heads_share_the_rows_of_windows_and_not_of_states() -> None:
    shared = model(2, 4)
    assert shared.part(0) == shared.part(1)
    assert shared.point is not None
    [window] = shared.point.windows
    apart = replace(window, by_heads=False)
    with pytest.raises(LayoutError, match="same part of a block"):
        replace(shared, point=replace(shared.point, windows=(apart,)), stage_points=())
    states = replace(shared.point, states=(StateGroup(2, ("s",), 9),), counts=None)
    with pytest.raises(LayoutError, match="same part of a block"):
        replace(shared, point=states, stage_points=())


def test_windows_with_other_heads_than_blocks_are_not_cut_as_these() -> None:
    whole = model(2, 1)
    assert whole.point is not None
    [window] = whole.point.windows
    for shape in (window.shape.with_heads(1), replace(window.shape, head_dim=3, v_head_dim=3)):
        seen = (replace(window, shape=shape),)
        point = replace(whole.point, windows=seen, counts=None)
        with pytest.raises(LayoutError, match="cannot be cut as blocks are"):
            replace(whole, point=point, stage_points=())
