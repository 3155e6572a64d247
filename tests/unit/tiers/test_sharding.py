"""Parts of blocks: any number of ranks reads what any other wrote, on disk and in stores.

The naive twin is a numpy array of the whole block, [layers, heads, bytes]: a part is a slice of it.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.errors import BlockMissing, CorruptBlock, LayoutError, TierError, TierUnavailable
from kvcore.model.parts import Part, evenly
from kvcore.model.shape import BlockShape
from kvcore.model.spec import LayerGroup, ModelDescription, even_stages
from kvcore.plugins import TierContext
from kvcore.testing.tier_contract import NAMESPACE
from kvcore.tiers.base import BlockRead, BlockWrite, SlotError
from kvcore.tiers.disk import Geometry, prepare_store
from kvcore.tiers.remote import Finder, Item, Shard, StoreOptions, StoreTier
from kvcore.tiers.remote.memory import MemoryStore
from kvcore.tiers.remote.shard_registry import NBYTES, PLACES, ShardRegistry, pack, unpack
from kvcore.tiers.remote.tier import StoreKind, prepare
from kvcore.tiers.sharding import cover, is_tiling, places, runs, splits_of
from support.disk import open_tier

SHAPE = BlockShape(layers=5, kv_heads=4, head_dim=6, block_tokens=4, dtype="bfloat16")
HEAD = SHAPE.head_nbytes
WHOLE = Part.whole(SHAPE)
Block = np.ndarray[Any, np.dtype[np.uint8]]


def block_of(seed: int) -> Block:
    """[layers, heads, bytes]"""
    size = (SHAPE.layers, SHAPE.kv_heads, HEAD)
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def taken(block: Block, part: Part) -> bytes:
    """Take a part of a block, the naive way."""
    return block[slice(*part.layers), slice(*part.heads)].tobytes()


def key_of(seed: int) -> bytes:
    return bytes([seed]) * 16


def spans(size: int) -> st.SearchStrategy[tuple[tuple[int, int], ...]]:
    """Draw a division of [0, size) into spans."""
    inner = st.sets(st.integers(1, size - 1))
    return inner.map(lambda cuts: tuple(pairwise([0, *sorted(cuts), size])))


def anywhere(size: int) -> st.SearchStrategy[tuple[int, int]]:
    edges = st.tuples(st.integers(0, size), st.integers(0, size))
    return edges.filter(lambda pair: pair[0] != pair[1]).map(lambda pair: (min(pair), max(pair)))


PARTS = st.builds(Part, anywhere(SHAPE.kv_heads), anywhere(SHAPE.layers))


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    """Draw ranks that divide heads and layers in any way, some of them holding the same part."""
    cut = draw(spans(SHAPE.kv_heads)), draw(spans(SHAPE.layers))
    places = [(heads, layers) for layers, heads in product(cut[1], cut[0])]
    copies = draw(st.integers(1, 2))
    ranks = [place for place in places for _ in range(copies)]
    return Geometry(SHAPE, b"model", tuple(h for h, _ in ranks), layers=tuple(n for _, n in ranks))


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


def to_write(slot: int, seed: int, part: Part) -> BlockWrite:
    data = memoryview(taken(block_of(seed), part))
    return BlockWrite(slot, key_of(seed), bytes(16), NAMESPACE, [data])


def write_to_disk(folder: Path, geometry: Geometry, seeds: Sequence[int]) -> None:
    store = prepare_store(folder, geometry, ROOM)
    for rank, part in enumerate(geometry.parts):
        tier = open_tier(store, geometry, rank)
        writes = [to_write(slot, seed, part) for slot, seed in enumerate(seeds)]
        assert tier.write(writes) == [None] * len(seeds)
        tier.close()
    store.close()


@pytest.mark.usefixtures("kept_queues")
@settings(max_examples=25)
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


# -- in a store ---------------------------------------------------------------------------------

OPTIONS = StoreOptions(splits_s=0.001, retries=0)


def shards_of(geometry: Geometry) -> list[Shard]:
    return Shard.all_of(geometry, "kvcore")


def registry_of_store(
    store: MemoryStore, geometry: Geometry, *, announces: bool = False
) -> ShardRegistry:
    return ShardRegistry(store, shards_of(geometry), every_s=1e-9, announces=announces)


def store_tier(store: MemoryStore, geometry: Geometry, rank: int) -> StoreTier:
    registry = registry_of_store(store, geometry)
    return StoreTier(store, Shard.of(geometry, rank, "kvcore"), OPTIONS, registry=registry)


def write_to_store(store: MemoryStore, geometry: Geometry, seeds: Sequence[int]) -> None:
    registry_of_store(store, geometry, announces=True).refresh()
    for rank, part in enumerate(geometry.parts):
        tier = store_tier(store, geometry, rank)
        assert tier.write([to_write(0, seed, part) for seed in seeds]) == [None] * len(seeds)
        tier.close()


def read_from_store(store: MemoryStore, geometry: Geometry, rank: int, seed: int) -> bytes:
    """Read twice: the split that was found is tried first then. Raise the tier's error."""
    tier = store_tier(store, geometry, rank)
    size = geometry.shard_shape(rank).nbytes
    intos = [bytearray(size) for _ in range(2)]
    try:
        for into in intos:
            half = size // 2
            pieces = [memoryview(into)[:half], memoryview(into)[half:]]
            (error,) = tier.read([BlockRead(3, key_of(seed), pieces)])
            if error is not None:
                raise error
    finally:
        tier.close()
    assert intos[0] == intos[1]
    return bytes(intos[0])


def found(store: MemoryStore, geometry: Geometry, seeds: Sequence[int]) -> int:
    """Return how many blocks, from the first on, the leader finds."""
    registry = registry_of_store(store, geometry)
    finder = Finder(store, shards_of(geometry), name="far", registry=registry)
    query = finder.ask([key_of(seed) for seed in seeds])
    assert query is not None
    limit = time.monotonic() + 60
    while not query.ended and time.monotonic() < limit:
        finder.wait(0.1)
    assert query.ended
    assert not query.failed
    finder.close()
    return query.found


@settings(max_examples=40)
@given(written=geometries(), read=geometries(), gone=st.integers(0, 99))
def test_any_split_in_a_store_is_read_at_any_other(
    written: Geometry, read: Geometry, gone: int
) -> None:
    """If a block lacks a value, the leader does not find it, and a rank that needs it misses."""
    store = MemoryStore()
    write_to_store(store, written, [1, 2])
    assert found(store, read, [1, 2, 3]) == 2
    for rank, part in enumerate(read.parts):
        for seed in (1, 2):
            assert read_from_store(store, read, rank, seed) == taken(block_of(seed), part)
        with pytest.raises(BlockMissing):
            read_from_store(store, read, rank, 3)
    shards = shards_of(written)
    dropped = shards[gone % len(shards)]
    del store.values[dropped.name(key_of(2))]
    assert found(store, read, [1, 2]) == 1
    for rank, part in enumerate(read.parts):
        if part.overlap(dropped.part) is not None:
            with pytest.raises(BlockMissing):
                read_from_store(store, read, rank, 2)
        else:
            assert read_from_store(store, read, rank, 2) == taken(block_of(2), part)


ONE = Geometry(SHAPE, b"model", ((0, 4),))
TWO = Geometry(SHAPE, b"model", ((0, 2), (2, 4)))
STAGED = Geometry(SHAPE, b"model", ((0, 4), (0, 4)), layers=((0, 2), (2, 5)))


@pytest.mark.parametrize("reads", [ONE, STAGED], ids=["put together", "taken out"])
def test_a_damaged_part_makes_a_miss_and_is_removed(reads: Geometry) -> None:
    store = MemoryStore()
    write_to_store(store, TWO, [1])
    name = shards_of(TWO)[1].name(key_of(1))
    store.values[name] = store.values[name][:-1] + b"\x00"
    with pytest.raises(CorruptBlock):
        read_from_store(store, reads, len(reads.parts) - 1, 1)
    assert name not in store.values
    assert found(store, reads, [1]) == 0


def test_parts_of_one_size_are_told_apart_by_what_stands_in_their_values() -> None:
    """For the case that a store returns one for the other."""
    stages = Geometry(SHAPE, b"model", ((0, 4),) * 2, layers=((0, 2), (2, 4)))
    others = Geometry(SHAPE, b"other", ((0, 4),) * 2, layers=((0, 2), (2, 4)))
    shards = [shard for each in (stages, others, TWO) for shard in shards_of(each)]
    assert len({shard.digest for shard in shards}) == len(shards) == 6


def test_a_split_that_begins_later_is_found() -> None:
    store = MemoryStore()
    tier = store_tier(store, ONE, 0)
    into = bytearray(SHAPE.nbytes)
    request = BlockRead(0, key_of(1), [memoryview(into)])
    assert isinstance(tier.read([request])[0], BlockMissing)
    write_to_store(store, STAGED, [1])
    write_to_store(store, TWO, [2])
    assert tier.read([request, request._replace(key=key_of(2))]) == [None, None]
    write_to_store(store, ONE, [4])
    assert tier.read([request._replace(key=key_of(4))]) == [None]
    assert into == block_of(4).tobytes()
    tier.close()


def test_blocks_are_removed_in_all_their_parts() -> None:
    store = MemoryStore()
    write_to_store(store, TWO, [1])
    write_to_store(store, ONE, [1])
    registry = registry_of_store(store, ONE)
    registry.refresh()
    finder = Finder(store, shards_of(ONE), name="far", registry=registry)
    finder.delete([key_of(1)])
    finder.close()
    assert not [name for name in store.values if "/splits/" not in name]


# -- who writes at which size -------------------------------------------------------------------


@given(geometries())
def test_a_split_comes_back_and_no_changed_byte_is_taken(geometry: Geometry) -> None:
    shard = shards_of(geometry)[0]
    split = tuple(sorted(shard.part for shard in shards_of(geometry)))
    packed = pack(shard.base, split)
    assert packed is not None
    assert len(packed) == NBYTES
    assert unpack(packed, shard) == split
    for at in (0, 4, 9, 100, NBYTES - 1):
        changed = bytearray(packed)
        changed[at] ^= 1
        assert unpack(bytes(changed), shard) is None


def test_what_is_no_split_of_these_blocks_is_not_taken() -> None:
    shard = Shard.of(ONE, 0, "kvcore")
    other = Geometry(SHAPE, b"other", ((0, 4),))
    half = (Part((0, 2), (0, 5)),)
    for value in (pack(other.base, (WHOLE,)), pack(ONE.base, half), b"\0" * NBYTES):
        assert value is not None
        assert unpack(value, shard) is None
    packed = pack(ONE.base, (WHOLE,))
    assert packed is not None
    for text in ('{"base":"x","parts":[[[0,1e999],[0,1]]]}', "[" * 4000, "{}", "3", "[]"):
        body = packed[:8] + text.encode().ljust(NBYTES - 16, b"\0")
        hostile = body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")
        assert unpack(hostile, shard) is None, text[:40]
    many = tuple(Part((0, 1), (i, i + 1)) for i in range(400))
    assert pack(ONE.base, many) is None


def test_splits_are_put_once_and_again_when_they_are_gone() -> None:
    store = MemoryStore()
    for geometry in (ONE, TWO, ONE, STAGED, TWO):
        registry_of_store(store, geometry, announces=True).refresh()
    assert len(store.values) == 3
    one = registry_of_store(store, ONE, announces=True)
    assert one.refresh()
    assert len(one.others) == 2
    store.values.clear()
    assert not one.refresh(), "what was known is known"
    assert len(store.values) == 1
    assert len(one.others) == 2


def test_a_store_is_asked_for_splits_now_and_then_only() -> None:
    now, store = [0.0], MemoryStore()
    registry = ShardRegistry(store, shards_of(ONE), every_s=5, clock=lambda: now[0])
    assert not registry.refresh()
    write_to_store(store, TWO, [1])
    now[0] = 4.9
    assert not registry.refresh()
    now[0] = 5.1
    assert registry.refresh()


def test_that_they_are_not_known_is_said_once_until_they_are(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore()
    registry = registry_of_store(store, ONE)

    def down(items: Sequence[Item]) -> list[TierError | None]:
        return [TierUnavailable("down")] * len(items)

    def said() -> int:
        return caplog.text.count("the splits of other engines cannot be read")

    for times in (1, 2):
        with monkeypatch.context() as patch:
            patch.setattr(store, "get", down)
            for _ in range(3):
                registry.refresh()
        assert said() == times
        registry.refresh()


class Lent(MemoryStore):
    """A store of nodes as a leader (``rank`` None) or a rank sees it. Only ranks keep values.

    Nodes say what they hold with each answer.
    """

    has_nodes = True

    def __init__(self, shared: MemoryStore, rank: int | None = 0) -> None:
        super().__init__()
        self.values = shared.values
        self.rank = rank
        self.announced: set[str] = set()

    @property
    def folders(self) -> set[str]:
        return self.announced

    def _announce(self) -> None:
        self.announced = {name.rpartition("/")[0] for name in self.values}

    def get(self, items: Sequence[Item]) -> list[TierError | None]:
        self._announce()
        return super().get(items)

    def exists(self, names: Sequence[str]) -> list[bool]:
        self._announce()
        return super().exists(names)

    def delete(self, names: Sequence[str]) -> None:
        self._announce()
        super().delete(names)

    def put(self, items: Sequence[Item]) -> list[TierError | None]:
        if self.rank is None:
            return [TierUnavailable("only ranks keep values")] * len(items)
        return super().put(items)


def test_in_a_store_of_nodes_a_leader_tells_nothing_and_is_not_said_to_be_wrong(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Because the leader keeps no values there."""
    shared = MemoryStore()
    kind = StoreKind(StoreOptions, lambda options, rank: Lent(shared, rank))
    leader = prepare(TierContext("far", ONE, 1 << 20), kind)
    assert leader.finder is not None
    query = leader.finder.ask([key_of(1)])
    assert query is not None
    while not query.ended:
        leader.finder.wait(1.0)
    assert not query.failed
    leader.release()
    assert "cannot be read" not in caplog.text
    assert not shared.values


@st.composite
def deployments(draw: st.DrawFn) -> Geometry:
    """Draw ranks and stages as engines have them."""
    heads = evenly(SHAPE.kv_heads, draw(st.integers(1, SHAPE.kv_heads)))
    places = [(h, layers) for layers in draw(spans(SHAPE.layers)) for h in heads]
    return Geometry(
        SHAPE, b"model", tuple(h for h, _ in places), layers=tuple(n for _, n in places)
    )


@settings(max_examples=40)
@given(written=deployments(), read=deployments(), gone=st.integers(0, 99))
def test_any_size_at_nodes_is_read_at_any_other(
    written: Geometry, read: Geometry, gone: int
) -> None:
    """The nodes say what they hold. Half a block does not count."""
    shared = MemoryStore()
    write_to_store(Lent(shared), written, [1, 2])
    assert not [name for name in shared.values if "/splits/" in name]
    assert found(Lent(shared, None), read, [1, 2, 3]) == 2
    for rank, part in enumerate(read.parts):
        for seed in (1, 2):
            assert read_from_store(Lent(shared), read, rank, seed) == taken(block_of(seed), part)
        with pytest.raises(BlockMissing):
            read_from_store(Lent(shared), read, rank, 3)
    shards = shards_of(written)
    dropped = shards[gone % len(shards)]
    del shared.values[dropped.name(key_of(2))]
    assert found(Lent(shared, None), read, [1, 2]) == 1
    for rank, part in enumerate(read.parts):
        if part.overlap(dropped.part) is not None:
            with pytest.raises(BlockMissing):
                read_from_store(Lent(shared), read, rank, 2)


@given(st.lists(deployments(), min_size=1, max_size=3), st.lists(PARTS, max_size=3))
def test_a_split_is_made_of_parts_that_are_a_block(
    deployed: list[Geometry], more: list[Part]
) -> None:
    parts = {part for geometry in deployed for part in geometry.parts} | set(more)
    made = list(splits_of(parts, SHAPE, 1000))
    assert len(made) == len(set(made))
    assert {tuple(sorted(geometry.parts)) for geometry in deployed} <= set(made)
    for split in made:
        assert is_tiling(split, SHAPE)
        assert set(split) <= parts


def test_how_many_splits_are_made_is_bounded_whatever_nodes_say() -> None:
    """Also for parts that are in no complete split."""
    deep = SHAPE.with_layers(60)
    dead = {Part((0, 4), (a, b)) for a in range(59) for b in range(a + 1, 60)}
    assert not list(splits_of(dead, deep, PLACES))
    every = dead | {Part((0, 4), (a, 60)) for a in range(60)}
    assert len(list(splits_of(every, deep, PLACES))) == PLACES
    store = Lent(MemoryStore())
    folder = shards_of(TWO)[0].folder.rpartition("/")[0]
    store.announced = {
        f"{folder}/{place}"
        for place in ("h0-9.l0-5", "h0-0.l0-5", "h00-4.l0-5", "h0-4.l0-99999999", "x", "h0-2.l0-5")
    } | {"kvcore/other/h0-4.l0-5"}
    registry = registry_of_store(store, TWO)
    assert not registry.refresh()
    assert registry.others == ()


def test_blocks_are_removed_from_nodes_of_other_sizes_that_had_not_been_heard_of() -> None:
    shared = MemoryStore()
    write_to_store(Lent(shared), TWO, [1])
    leader = Lent(shared, None)
    finder = Finder(leader, shards_of(ONE), name="far", registry=registry_of_store(leader, ONE))
    finder.delete([key_of(1)])
    finder.close()
    assert not shared.values


def test_places_that_are_taken_or_damaged_are_let_be(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    folder = f"kvcore/{ONE.base}/splits"
    taken_places = {f"{folder}/{i}": b"?" * (i * 10) for i in range(PLACES - 1)}
    store.values.update(taken_places)
    write_to_store(store, TWO, [1])
    assert read_from_store(store, ONE, 0, 1) == block_of(1).tobytes()
    assert taken_places.items() <= store.values.items()
    registry_of_store(store, STAGED, announces=True).refresh()
    assert "only engines with as many ranks" in caplog.text


def test_a_store_that_is_down_is_named_and_nothing_else(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvcore.errors import TierUnavailable

    store = MemoryStore()

    def down(items: Sequence[Item]) -> Any:
        raise TierUnavailable("told to be down")

    monkeypatch.setattr(store, "get", down)
    assert not registry_of_store(store, ONE, announces=True).refresh()
    assert "told to be down" in caplog.text
    assert not store.values
