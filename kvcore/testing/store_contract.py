"""The contract of every remote store, as pytest tests to subclass in a test file.

class TestMyStore(StoreContract):
    def make_store(self):
        return MyStore(...)

Needs pytest. The tests share one store, and each uses its own names. Faults of a server (it dies,
hangs or evicts) belong in the store's own tests.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvcore.errors import BlockMissing, CorruptBlock, TierUnavailable
from kvcore.model.parts import Part
from kvcore.model.shape import BlockShape
from kvcore.tiers.base import BlockRead, BlockWrite
from kvcore.tiers.disk import Geometry
from kvcore.tiers.remote import BlockStore, Item, Shard, ShardRegistry, StoreOptions, StoreTier

__all__ = ["StoreContract", "fetch", "value"]


def value(seed: int, nbytes: int) -> bytes:
    """Return ``nbytes`` random bytes. Equal arguments give equal bytes."""
    return random.Random(seed).randbytes(nbytes)


def fetch(store: BlockStore, name: str, nbytes: int) -> bytes:
    """Return a value of the store. Raises the store's error."""
    into = bytearray(nbytes)
    (error,) = store.get([Item(name, [memoryview(into)])])
    if error is not None:
        raise error
    return bytes(into)


def put(store: BlockStore, values: dict[str, bytes]) -> None:
    """Store ``values`` in one batch, and assert that all are stored."""
    items = [Item(name, [memoryview(data)]) for name, data in values.items()]
    assert store.put(items) == [None] * len(items)


SHAPE = BlockShape(layers=4, kv_heads=2, head_dim=8, block_tokens=16, dtype="bfloat16")


def _size(heads: Sequence[tuple[int, int]], layers: Sequence[tuple[int, int]]) -> Geometry:
    ranks = list(itertools.product(layers, heads))
    return Geometry(
        SHAPE, b"contract", tuple(h for _, h in ranks), layers=tuple(n for n, _ in ranks)
    )


SIZES = [
    _size(heads, layers)
    for heads in ([(0, 2)], [(0, 1), (1, 2)])
    for layers in ([(0, 4)], [(0, 1), (1, 4)])
]
"""Geometries of one and two ranks, with one and two pipeline stages."""


def _taken(block: bytes, part: Part) -> bytes:
    """Return one part of a whole block, computed the naive way."""
    whole = np.frombuffer(block, np.uint8).reshape(SHAPE.layers, SHAPE.kv_heads, -1)
    return whole[slice(*part.layers), slice(*part.heads)].tobytes()


def _tier(store: BlockStore, geometry: Geometry, rank: int, prefix: str) -> StoreTier:
    """Return the tier of a rank. It starts no thread, so it need not be closed."""
    shards = Shard.all_of(geometry, prefix)
    registry = ShardRegistry(store, shards, every_s=60)
    return StoreTier(
        store, Shard.of(geometry, rank, prefix), StoreOptions(parallel=1), registry=registry
    )


class StoreContract:
    """The tests. ``make_store`` opens a client of a running store.

    All clients must see the same values.
    """

    replaces = True
    """True if a second put of a name replaces the first value."""
    nbytes = 10_000
    """Size of a value in bytes: a block with its header."""

    def make_store(self) -> BlockStore:
        """Return a new client of the store. Must be overridden."""
        raise NotImplementedError

    @pytest.fixture
    def store(self) -> Iterator[BlockStore]:
        store = self.make_store()
        yield store
        store.close()

    @pytest.fixture
    def folder(self) -> str:
        """Return a name prefix that no other test uses."""
        return f"contract/{uuid.uuid4().hex}"

    def names(self, folder: str, count: int) -> list[str]:
        return [f"{folder}/h0-2.l0-4/{i:032x}" for i in range(count)]

    def values(self, names: Sequence[str]) -> dict[str, bytes]:
        return {name: value(i, self.nbytes) for i, name in enumerate(names)}

    def test_a_batch_comes_back_byte_for_byte(self, store: BlockStore, folder: str) -> None:
        values = self.values(self.names(folder, 20))
        put(store, values)
        buffers = {name: bytearray(self.nbytes) for name in reversed(values)}
        items = [Item(name, [memoryview(into)]) for name, into in buffers.items()]
        assert store.get(items) == [None] * len(items)
        assert {name: bytes(into) for name, into in buffers.items()} == values

    def test_another_client_finds_it(self, store: BlockStore, folder: str) -> None:
        values = self.values(self.names(folder, 3))
        put(store, values)
        other = self.make_store()
        try:
            assert other.exists(list(values)) == [True] * 3
            assert [fetch(other, name, self.nbytes) for name in values] == list(values.values())
        finally:
            other.close()

    def test_values_may_be_in_pieces_cut_differently(self, store: BlockStore, folder: str) -> None:
        [name] = self.names(folder, 1)
        data = memoryview(value(7, self.nbytes))
        third = self.nbytes // 3
        assert store.put([Item(name, [data[:128], data[128:third], data[third:]])]) == [None]
        front, back = bytearray(2 * third), bytearray(self.nbytes - 2 * third)
        assert store.get([Item(name, [memoryview(front), memoryview(back)])]) == [None]
        assert bytes(front + back) == bytes(data)

    def test_what_is_not_there_is_missing(self, store: BlockStore, folder: str) -> None:
        there, absent, last = self.names(folder, 3)
        values = self.values([there, last])
        put(store, values)
        assert store.exists([there, absent, last]) == [True, False, True]
        buffers = [bytearray(self.nbytes) for _ in range(3)]
        names = [there, absent, last]
        items = [Item(n, [memoryview(b)]) for n, b in zip(names, buffers, strict=True)]
        errors = store.get(items)
        assert [type(error) for error in errors] == [type(None), BlockMissing, type(None)]
        assert [bytes(buffers[0]), bytes(buffers[2])] == list(values.values())

    @pytest.mark.parametrize("more", [-1, 1])
    def test_a_value_of_another_size_is_not_taken(
        self, store: BlockStore, folder: str, more: int
    ) -> None:
        [name] = self.names(folder, 1)
        put(store, {name: value(0, self.nbytes)})
        with pytest.raises(CorruptBlock):
            fetch(store, name, self.nbytes + more)

    def test_bad_items_of_a_batch_leave_the_others_alone(
        self, store: BlockStore, folder: str
    ) -> None:
        names = self.names(folder, 5)
        sizes = [self.nbytes, 2 * self.nbytes, self.nbytes, self.nbytes // 2, self.nbytes]
        data = [value(i, size) for i, size in enumerate(sizes)]
        put(store, {names[i]: data[i] for i in (0, 1, 3, 4)})
        for _ in range(2):
            buffers = [bytearray(self.nbytes) for _ in names]
            items = [Item(n, [memoryview(b)]) for n, b in zip(names, buffers, strict=True)]
            errors = [type(error) for error in store.get(items)]
            good = type(None)
            assert errors == [good, CorruptBlock, BlockMissing, CorruptBlock, good]
            assert [bytes(buffers[0]), bytes(buffers[4])] == [data[0], data[4]]

    def test_one_value_of_a_name_stands(self, store: BlockStore, folder: str) -> None:
        [name] = self.names(folder, 1)
        for seed in range(3):
            put(store, {name: value(seed, self.nbytes)})
        stands = 2 if self.replaces else 0
        assert fetch(store, name, self.nbytes) == value(stands, self.nbytes)

    def test_what_is_removed_is_gone(self, store: BlockStore, folder: str) -> None:
        names = self.names(folder, 4)
        put(store, self.values(names))
        store.delete([names[1], names[3], f"{folder}/never-there"])
        store.delete([names[1]])
        assert store.exists(names) == [True, False, True, False]
        with pytest.raises(BlockMissing):
            fetch(store, names[1], self.nbytes)
        put(store, {names[1]: value(9, self.nbytes)})
        assert fetch(store, names[1], self.nbytes) == value(9, self.nbytes)

    def test_many_names_are_asked_for_at_once(self, store: BlockStore, folder: str) -> None:
        names = self.names(folder, 300)
        put(store, dict.fromkeys(names[::7], b"x" * 64))
        assert store.exists(names) == [i % 7 == 0 for i in range(300)]

    def test_empty_batches_do_nothing(self, store: BlockStore) -> None:
        assert store.put([]) == []
        assert store.get([]) == []
        assert store.exists([]) == []
        store.delete([])

    def test_threads_use_it_at_once(self, store: BlockStore, folder: str) -> None:
        def work(thread: int) -> None:
            name = f"{folder}/{thread}"
            for turn in range(5):
                data = value(100 * thread + turn, self.nbytes)
                put(store, {f"{name}.{turn}": data})
                assert fetch(store, f"{name}.{turn}", self.nbytes) == data

        with ThreadPoolExecutor(6) as pool:
            for done in [pool.submit(work, thread) for thread in range(6)]:
                done.result()

    def test_a_value_is_never_a_mix(self, store: BlockStore, folder: str) -> None:
        """With two writers of one name, readers see one value or the other.

        A server may refuse conflicting requests.
        """
        [name] = self.names(folder, 1)
        both = [bytes([n]) * self.nbytes for n in (1, 2)]
        put(store, {name: both[0]})

        def write(data: bytes) -> None:
            for _ in range(10):
                [error] = store.put([Item(name, [memoryview(data)])])
                assert error is None or isinstance(error, TierUnavailable), error

        with ThreadPoolExecutor(2) as pool:
            writers = [pool.submit(write, data) for data in both]
            for _ in range(10):
                with contextlib.suppress(TierUnavailable):
                    assert fetch(store, name, self.nbytes) in both
            for done in writers:
                done.result()
        assert fetch(store, name, self.nbytes) in both

    @pytest.mark.parametrize("written", SIZES)
    def test_any_size_reads_any_size(self, store: BlockStore, written: Geometry) -> None:
        """Values of any rank and stage count can be read with any other rank and stage count."""
        prefix, key = f"contract-{uuid.uuid4().hex[:8]}", uuid.uuid4().bytes
        block = value(1, SHAPE.nbytes)
        ShardRegistry(store, Shard.all_of(written, prefix), every_s=60, announces=True).refresh()
        for rank, part in enumerate(written.parts):
            data = memoryview(_taken(block, part))
            tier = _tier(store, written, rank, prefix)
            assert tier.write([BlockWrite(0, key, key, key, [data])]) == [None]
        for read in SIZES:
            for rank, part in enumerate(read.parts):
                into = memoryview(bytearray(part.shape(SHAPE).nbytes))
                tier = _tier(store, read, rank, prefix)
                assert tier.read([BlockRead(0, key, [into])]) == [None]
                assert bytes(into) == _taken(block, part)

    def test_it_can_be_closed_twice(self) -> None:
        store = self.make_store()
        store.exists(["contract/nothing"])
        store.close()
        store.close()
