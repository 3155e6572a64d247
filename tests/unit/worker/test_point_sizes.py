"""Ends of windows, and states, that engines with other numbers of ranks wrote.

The naive twin is the whole cache of a layer. Of a window it is [pages, all KV heads, tokens, K and
V], and of states each array of the whole model: a rank's pages are its heads and its part of each
section, as vLLM's loader of weights gives them out.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.errors import LayoutError
from kvcore.memory.arena import HostArena
from kvcore.memory.copy.native import NativeOps
from kvcore.memory.copy.reference import ReferenceOps
from kvcore.memory.layout import KVView, from_strides
from kvcore.memory.points import PointCopies, point_copies
from kvcore.memory.runs import SlotPlace
from kvcore.model.points import PointShape, RowHeads, StateGroup, WindowGroup, over_stages
from kvcore.model.shape import BlockShape
from kvcore.model.spec import LayerGroup, ModelDescription, even_stages
from kvcore.runtime.build import geometry
from kvcore.testing.tier_contract import NAMESPACE
from kvcore.tiers.base import BlockRead, BlockWrite
from kvcore.tiers.disk import prepare_store
from kvcore.tiers.remote import Shard, StoreOptions, StoreTier
from kvcore.tiers.remote.memory import MemoryStore
from kvcore.tiers.remote.shard_registry import ShardRegistry
from support.budget import examples
from support.disk import open_tier

BLOCK, PAGES, LAYERS = 4, 5, 2
WINDOW = tuple(f"w{i}" for i in range(3))
"""Layers with a window: one row has two of them, and another one the third."""
STATES = tuple(f"s{i}" for i in range(3))
SECTIONS, TAPS = (2, 2, 3), 3
"""Channels that a KV head has of each section of a convolution, which has three tokens of them."""
MATRIX = (2, 5, 3)
"""What a KV head has of the other array: two heads of the layer, of 5 by 3 numbers each."""
KV, WINDOWS = LayerGroup(0, BLOCK, (0, 1)), LayerGroup(1, BLOCK, (), of="windows")
OPTIONS = StoreOptions(splits_s=0.001, retries=0)
SIZES = st.sampled_from([1, 2, 4, 8])


class Whole(NamedTuple):
    """The pages of every layer, of the whole model.

    ``windows`` are [pages, heads, tokens, K and V], ``conv`` [pages, taps, channels] and ``matrix``
    [pages, heads of the layer, 5, 3].
    """

    windows: list[torch.Tensor]
    conv: list[torch.Tensor]
    matrix: list[torch.Tensor]


def sections(own: int, taps_last: bool) -> tuple[int, ...]:
    """The bytes of each section of a state on a rank with ``own`` KV heads."""
    item, *inner = 2, *MATRIX
    conv = [own * n * item * (TAPS if taps_last else 1) for n in SECTIONS]
    return (*(conv if taps_last else conv * TAPS), own * 4 * int(np.prod(inner)))


def model(
    heads: int, ranks: int, stages: int = 1, states: bool = False, taps_last: bool = False
) -> ModelDescription:
    shape = BlockShape(LAYERS, heads, 6, BLOCK, "float32")
    own = max(heads // ranks, 1)
    window = replace(shape, layers=1, kv_heads=own)
    seen = (WindowGroup(1, WINDOW, window, before=5, by_heads=True),)
    cut = sections(own, taps_last)
    kept = (StateGroup(2, STATES, sum(cut), cut),) if states else ()
    told = RowHeads(own, window.head_nbytes) if states else None
    point = PointShape(kept, LAYERS * window.nbytes, 1, seen, heads=told)
    layers = even_stages(LAYERS, stages)
    rows = [(stop - start) * window.nbytes for start, stop in layers]
    names = [{*WINDOW, *STATES}]
    if stages > 1:
        names = [{*WINDOW[:2], STATES[0]}, {*WINDOW[2:], *STATES[1:]}]
    whole, parts = over_stages(point, names, rows)
    groups = (KV, WINDOWS, LayerGroup(2, BLOCK, (), of="states"))[: 3 if states else 2]
    return ModelDescription(
        shape, groups, b"model", ranks * stages, stages=layers, point=whole, stage_points=parts
    )


def whole(heads: int, seed: int) -> Whole:
    rng = np.random.default_rng(seed)

    def drawn(names: tuple[str, ...], *size: int) -> list[torch.Tensor]:
        return [torch.from_numpy(rng.random((PAGES, *size), dtype=np.float32)) for _ in names]

    conv = drawn(STATES, TAPS, heads * sum(SECTIONS))
    matrix = drawn(STATES, heads * MATRIX[0], *MATRIX[1:])
    return Whole(
        drawn(WINDOW, heads, BLOCK, 12), [layer.to(torch.bfloat16) for layer in conv], matrix
    )


def states_of(
    described: ModelDescription, number: int, content: Whole, taps_last: bool
) -> list[torch.Tensor]:
    """The pages of states of a rank, [pages, bytes]: each section of an array is split evenly."""
    point, ranks = described.rank_point(number), described.tensor_ranks
    assert point is not None
    place, pages = number % ranks, []
    borders = list(accumulate((described.shape.kv_heads * n for n in SECTIONS), initial=0))
    for name in (name for group in point.states for name in group.names):
        conv, matrix = content.conv[STATES.index(name)], content.matrix[STATES.index(name)]
        parts = [conv[..., a:b].chunk(ranks, -1)[place] for a, b in pairwise(borders)]
        array = torch.cat(parts, -1)
        array = array.transpose(1, 2) if taps_last else array
        own = [array, matrix.chunk(ranks, 1)[place]]
        flat = [part.contiguous().flatten(1).view(torch.uint8) for part in own]
        pages.append(torch.cat(flat, 1))
    return pages


class Rank:
    """Pages of one rank's layers with a window and with states, and what is copied of them."""

    def __init__(
        self, described: ModelDescription, number: int, content: Whole, taps_last: bool = False
    ) -> None:
        self.model, self.number = described, number
        tp, heads = described.tensor_ranks, described.shape.kv_heads
        first = number % tp * heads // tp
        last = first + max(heads // tp, 1)
        point = described.rank_point(number)
        assert point is not None
        [window] = point.windows
        seen = [content.windows[WINDOW.index(name)] for name in window.names]
        self.pages = [layer[:, first:last].clone() for layer in seen]
        view = KVView(from_strides(self.pages, window.shape), self.pages)
        states = states_of(described, number, content, taps_last) if point.states else []
        self.copies: PointCopies = point_copies(point, {2: states}, {1: view})
        self.pages += states
        self.rows = point.rows(9)
        self.taps_last = taps_last

    def copy(self, arena: KVView, slot_nbytes: int, page: int, save: bool) -> None:
        """Copy one page of states, and the windows of it and the one before, to slots or back."""
        ops = ReferenceOps() if page % 2 else NativeOps()
        views = self.copies.in_memory(arena, SlotPlace(slot_nbytes))
        rows = [(part.row,) for part in self.copies.states]
        rows += [part.rows for part in self.copies.windows]
        parts, memories = (
            [*self.copies.states, *self.copies.windows],
            [*views.states, *views.windows],
        )
        for part, memory, own in zip(parts, memories, rows, strict=True):
            slots = np.array(own, dtype=np.int64)
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


class Sizes(NamedTuple):
    """The numbers of ranks that write and read points, and what these have."""

    heads: int
    writers: int
    readers: int
    stages: int
    states: bool
    taps_last: bool
    seed: int

    def ranks(self, number: int, content: Whole) -> list[Rank]:
        described = model(self.heads, number, self.stages, self.states, self.taps_last)
        return [
            Rank(described, rank, content, self.taps_last) for rank in range(number * self.stages)
        ]


@st.composite
def all_sizes(draw: st.DrawFn) -> Sizes:
    """Ranks that share a head share its windows. States need ranks with heads of their own."""
    heads, writers, readers = draw(SIZES), draw(SIZES), draw(SIZES)
    states = max(writers, readers) <= heads and draw(st.booleans())
    stages, taps_last, seed = draw(st.integers(1, 2)), draw(st.booleans()), draw(st.integers(0, 9))
    return Sizes(heads, writers, readers, stages, states, taps_last, seed)


def assert_loaded(ranks: list[Rank], content: Whole, before: Whole, source: int, to: int) -> None:
    """The pages of the point came, and no other page changed."""
    expected = Whole(*([layer.clone() for layer in kind] for kind in before))
    for kind, every in zip(expected, content, strict=True):
        for distance in range(2 if kind is expected.windows else 1):
            for one, other in zip(kind, every, strict=True):
                one[to - distance] = other[source - distance]
    for rank in ranks:
        right = Rank(rank.model, rank.number, expected, rank.taps_last).pages
        assert all(map(torch.equal, rank.pages, right)), rank.number


def through_a_store(sizes: Sizes) -> None:
    content, before = whole(sizes.heads, sizes.seed), whole(sizes.heads, sizes.seed + 100)
    store = MemoryStore()
    saved_in_a_store(store, sizes.ranks(sizes.writers, content), 3)
    found = sizes.ranks(sizes.readers, before)
    loaded_from_a_store(store, found, 2)
    assert_loaded(found, content, before, 3, 2)


@given(all_sizes())
@settings(max_examples=examples(60), deadline=None)
def test_a_store_gives_points_that_any_number_of_ranks_wrote(sizes: Sizes) -> None:
    through_a_store(sizes)


@given(all_sizes())
@settings(max_examples=examples(60), deadline=None)
def test_a_servers_memory_gives_points_that_any_number_of_ranks_wrote(sizes: Sizes) -> None:
    """Its slots have whole blocks, of which each rank sees its heads and layers."""
    content, before = whole(sizes.heads, sizes.seed), whole(sizes.heads, sizes.seed + 100)
    ranks = sizes.ranks(sizes.writers, content)
    arena = HostArena(ranks[0].model.shape, ranks[0].rows, huge_pages=False)
    found = sizes.ranks(sizes.readers, before)
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
    for state, told in (
        (StateGroup(2, ("s",), 9), None),
        (StateGroup(2, ("s",), 9, (9,)), RowHeads(1, window.shape.head_nbytes)),
    ):
        states = replace(shared.point, states=(state,), counts=None, heads=told)
        with pytest.raises(LayoutError, match="same part of a block"):
            replace(shared, point=states, stage_points=())


@pytest.mark.parametrize(("writers", "readers"), [(1, 2), (2, 1), (2, 4)])
def test_a_disk_gives_points_that_another_number_of_ranks_wrote(
    writers: int, readers: int, tmp_path: Path
) -> None:
    sizes = Sizes(4, writers, readers, 1, True, False, 0)
    content, before, room = whole(4, 0), whole(4, 100), 1 << 20
    for number, page, source in ((writers, 3, content), (readers, 2, before)):
        found, save = sizes.ranks(number, source), page == 3
        told = geometry(found[0].model)
        store = prepare_store(tmp_path, told, room)
        places = {record.key[0]: record.slot for record in store.records}
        assert sorted(places) == ([] if save else list(range(found[0].rows)))
        for rank in found:
            tier = open_tier(store, told, rank.number)
            arena = HostArena(rank.model.rank_shape(rank.number), rank.rows, huge_pages=False)
            view = KVView(arena.layout(), [arena.tensor()])
            if save:
                rank.copy(view, arena.slot_nbytes, page, save)
            for row in range(rank.rows):
                key, own = bytes([row]) * 16, buffers(rank, arena, row)
                if save:
                    assert tier.write([BlockWrite(row, key, bytes(16), NAMESPACE, own)]) == [None]
                else:
                    assert tier.read([BlockRead(places[row], key, own)]) == [None]
            if not save:
                rank.copy(view, arena.slot_nbytes, page, save)
            tier.close()
            arena.close()
        store.close()
    assert_loaded(found, content, before, 3, 2)


@pytest.mark.parametrize("mistake", ["one section", "k and v exchanged", "channels first"])
def test_mistaken_sections_show(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this the tests above would prove nothing. At one size it does not show."""
    right = sections

    def wrong(own: int, taps_last: bool) -> tuple[int, ...]:
        q, k, v, *rest = right(own, taps_last)
        if mistake == "one section":
            return (sum(right(own, taps_last)),)
        return (q, v, k, *rest) if mistake == "k and v exchanged" else right(own, taps_last=True)

    monkeypatch.setattr(f"{__name__}.sections", wrong)
    through_a_store(Sizes(4, 2, 2, 1, True, False, 0))
    with pytest.raises(AssertionError):
        through_a_store(Sizes(4, 1, 2, 1, True, False, 0))


def test_states_that_are_cut_for_other_heads_than_blocks_are_refused() -> None:
    whole = model(2, 1, states=True)
    assert whole.point is not None
    point = replace(whole.point, heads=RowHeads(1, whole.shape.head_nbytes), counts=None)
    with pytest.raises(LayoutError, match="cannot be cut as blocks are"):
        replace(whole, point=point, stage_points=())


def test_windows_with_other_heads_than_blocks_are_not_cut_as_these() -> None:
    whole = model(2, 1)
    assert whole.point is not None
    [window] = whole.point.windows
    for shape in (window.shape.with_heads(1), replace(window.shape, head_dim=3, v_head_dim=3)):
        seen = (replace(window, shape=shape),)
        point = replace(whole.point, windows=seen, counts=None)
        with pytest.raises(LayoutError, match="cannot be cut as blocks are"):
            replace(whole, point=point, stage_points=())
