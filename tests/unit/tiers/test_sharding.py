"""Parts of blocks: any number of ranks reads from disk what any other wrote."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.errors import LayoutError
from kvcore.model.parts import Part
from kvcore.model.shape import BlockShape
from kvcore.model.spec import LayerGroup, ModelDescription, even_stages
from kvcore.tiers.base import BlockRead, SlotError
from kvcore.tiers.disk import Geometry, prepare_store
from kvcore.tiers.sharding import cover, is_tiling, places, runs
from support.budget import examples
from support.disk import open_tier
from support.sharding import (
    HEAD,
    PARTS,
    SHAPE,
    WHOLE,
    block_of,
    geometries,
    key_of,
    taken,
    to_write,
)

# -- parts --------------------------------------------------------------------------------------


@given(held=PARTS, wanted=PARTS, cuts=st.sets(st.integers(0, SHAPE.nbytes)))
def test_what_two_parts_share_is_laid_where_it_belongs(
    held: Part, wanted: Part, cuts: set[int]
) -> None:
    """The memory may be in any pieces. Bytes that the parts do not share stay as they are."""
    block = block_of(0)
    value = taken(block, held)
    size = wanted.shape(SHAPE).nbytes
    into = bytearray(b"\xee" * (size + 7))  # padding after it
    edges = [0, *sorted(cut for cut in cuts if 0 < cut < len(into)), len(into)]
    buffers = [memoryview(into)[a:b] for a, b in pairwise(edges)]
    for at, piece in places(runs(held, wanted, HEAD), buffers):
        piece[:] = value[at : at + len(piece)]
    expected = np.full_like(block, 0xEE)
    common = held.overlap(wanted)
    if common is not None:
        place = slice(*common.layers), slice(*common.heads)
        expected[place] = block[place]
    assert bytes(into) == taken(expected, wanted) + b"\xee" * 7


@given(held=PARTS, wanted=PARTS)
def test_runs_are_as_few_as_can_be(held: Part, wanted: Part) -> None:
    found = runs(held, wanted, HEAD)
    for before, after in pairwise(found):
        source, target = before.source + before.nbytes, before.target + before.nbytes
        assert (source, target) != (after.source, after.target)
    if held == wanted:
        assert len(found) == 1


@given(geometries(), PARTS)
def test_a_cover_holds_each_element_once(geometry: Geometry, wanted: Part) -> None:
    seen = np.zeros((SHAPE.layers, SHAPE.kv_heads), int)
    for number in cover(geometry.parts, wanted):
        part = geometry.parts[number].overlap(wanted)
        assert part is not None, "nothing of it is wanted"
        seen[slice(*part.layers), slice(*part.heads)] += 1
    assert seen.sum() == wanted.size
    assert seen.max() == 1


@pytest.mark.parametrize(
    "parts",
    [
        [Part((0, 2), (0, 5))],
        [Part((0, 4), (0, 3)), Part((0, 4), (4, 5))],
        [Part((0, 3), (0, 5)), Part((2, 4), (0, 5))],
        [],
    ],
    ids=["half", "hole", "overlap", "none"],
)
def test_parts_that_are_no_split_are_refused(parts: list[Part]) -> None:
    assert not is_tiling(parts, SHAPE)
    with pytest.raises(SlotError, match="no shards hold"):
        cover(parts, WHOLE)
    assert is_tiling([Part((0, 4), (0, 3)), Part((0, 4), (3, 5))], SHAPE)
    assert not is_tiling([WHOLE._replace(layers=(0, 6))], SHAPE)


@pytest.mark.parametrize(("layers", "stages"), [(4, 2), (5, 2), (7, 3), (3, 3), (8, 1)])
def test_stages_share_the_layers_and_ranks_the_heads(layers: int, stages: int) -> None:
    shape = BlockShape(layers, 2, 8, 16, "float16")
    groups = (
        LayerGroup(0, 16, tuple(range(0, layers, 2)), tuple(f"e{i}" for i in range(0, layers, 2))),
        LayerGroup(1, 16, tuple(range(1, layers, 2))),
    )
    spans = even_stages(layers, stages)
    model = ModelDescription(shape, groups, b"model", 2 * stages, stages=spans)
    assert is_tiling([model.part(rank) for rank in range(model.world_size)], shape)
    assert [model.head_range(rank) for rank in range(4)] == [(0, 1), (1, 2)] * 2
    for rank in range(model.world_size):
        here = range(*model.layer_range(rank))
        kept = [layer for group in model.rank_groups(rank) for layer in group.layers]
        assert sorted(kept) == list(here)
        first = model.rank_groups(rank)[0]
        assert first.names == tuple(f"e{layer}" for layer in first.layers)
        assert model.rank_shape(rank).layers == len(here)


@pytest.mark.parametrize("stages", [((0, 2),), ((0, 2), (3, 4)), ((0, 4), (4, 4)), ((1, 4),)])
def test_stages_that_do_not_share_the_layers_are_refused(stages: Any) -> None:
    with pytest.raises(LayoutError, match="pipeline stages"):
        ModelDescription(BlockShape(4, 2, 8, 16, "float16"), (), b"model", 2, stages=stages)
    even, shape = even_stages(4, 2), BlockShape(4, 2, 8, 16, "float16")
    with pytest.raises(LayoutError, match="equally many ranks"):
        ModelDescription(shape, (), b"model", 3, stages=even)


# -- on disk ------------------------------------------------------------------------------------

ROOM = 1 << 20


def write_to_disk(folder: Path, geometry: Geometry, seeds: Sequence[int]) -> None:
    store = prepare_store(folder, geometry, ROOM)
    for rank, part in enumerate(geometry.parts):
        tier = open_tier(store, geometry, rank)
        writes = [to_write(slot, seed, part) for slot, seed in enumerate(seeds)]
        assert tier.write(writes) == [None] * len(seeds)
        tier.close()
    store.close()


@pytest.mark.slow
@pytest.mark.usefixtures("kept_queues")
@settings(max_examples=examples(25))
@given(written=geometries(), read=geometries())
def test_any_split_on_disk_is_read_at_any_other(written: Geometry, read: Geometry) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_to_disk(Path(folder), written, [1, 2])
        store = prepare_store(Path(folder), read, ROOM)
        assert sorted(record.key for record in store.records) == [key_of(1), key_of(2)]
        for rank, part in enumerate(read.parts):
            tier = open_tier(store, read, rank)
            for record in store.records:
                into = bytearray(part.shape(SHAPE).nbytes)
                assert tier.read([BlockRead(record.slot, record.key, [memoryview(into)])]) == [None]
                assert into == taken(block_of(record.key[0]), part)
            tier.close()
        store.close()


def test_a_store_of_stages_says_so_and_others_are_as_before() -> None:
    """A kvcore that knows no stages must not mistake half of the layers for all."""
    staged = Geometry(SHAPE, b"model", ((0, 4), (0, 4)), layers=((0, 2), (2, 5)))
    assert staged.to_json()["version"] == 2
    assert Geometry.from_json(staged.to_json()) == staged
    assert staged.shard_name(0) != staged.shard_name(1)
    plain = Geometry(SHAPE, b"model", ((0, 2), (2, 4)))
    assert plain.to_json()["version"] == 1
    assert "layers" not in plain.to_json()
    assert staged.base == plain.base
    assert Geometry(SHAPE, b"model", plain.heads, layers=((0, 5), (0, 5))) == plain
