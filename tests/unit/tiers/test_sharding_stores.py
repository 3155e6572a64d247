"""Parts of blocks in a store: any number of ranks reads what any other wrote."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.errors import BlockMissing, CorruptBlock, TierError, TierUnavailable
from kvcore.model.parts import Part, evenly
from kvcore.plugins import TierContext
from kvcore.tiers.base import BlockRead
from kvcore.tiers.disk import Geometry
from kvcore.tiers.remote import Item, Shard, StoreFinder, StoreOptions, StoreTier
from kvcore.tiers.remote.memory import MemoryStore
from kvcore.tiers.remote.shard_registry import NBYTES, PLACES, ShardRegistry, pack, unpack
from kvcore.tiers.remote.tier import StoreKind, prepare
from kvcore.tiers.sharding import is_tiling, splits_of
from support.budget import examples
from support.sharding import (
    PARTS,
    SHAPE,
    WHOLE,
    block_of,
    geometries,
    key_of,
    spans,
    taken,
    to_write,
)

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
    finder = StoreFinder(store, shards_of(geometry), name="far", registry=registry)
    query = finder.ask([key_of(seed) for seed in seeds])
    assert query is not None
    limit = time.monotonic() + 60
    while not query.ended and time.monotonic() < limit:
        finder.wait(0.1)
    assert query.ended
    assert not query.failed
    finder.close()
    return query.found


@pytest.mark.slow
@settings(max_examples=examples(40))
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
    finder = StoreFinder(store, shards_of(ONE), name="far", registry=registry)
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


@pytest.mark.slow
@settings(max_examples=examples(40))
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
    finder = StoreFinder(
        leader, shards_of(ONE), name="far", registry=registry_of_store(leader, ONE)
    )
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
