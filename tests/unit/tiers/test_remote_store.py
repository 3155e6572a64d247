"""Remote stores over the naive one: names, frames, retries, their options."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.config import load_config
from kvcore.errors import BlockMissing, ConfigError, CorruptBlock, TierError, TierUnavailable
from kvcore.model.shape import BlockShape
from kvcore.plugins import PluginManager, TierContext
from kvcore.runtime.tiers import prepare_backings
from kvcore.testing.store_contract import StoreContract
from kvcore.tiers.base import BlockRead, BlockWrite, SlotError
from kvcore.tiers.disk import Geometry
from kvcore.tiers.remote import BlockStore, Item, Shard, StoreOptions, StoreTier
from kvcore.tiers.remote.format import HEADER_NBYTES, Header
from kvcore.tiers.remote.memory import MemoryStore, shared_store
from kvcore.tiers.remote.options import read_options
from support.stores import GEOMETRY, SHAPE, SHARD, SPACE, Flaky, key_of

SLOT = 4096


class TestMemoryStore(StoreContract):
    shared = MemoryStore()

    def make_store(self) -> BlockStore:
        return self.shared


def data_of(seed: int) -> bytes:
    return random.Random(~seed).randbytes(SHARD.block_nbytes)


def to_write(seed: int) -> BlockWrite:
    padded = data_of(seed).ljust(SLOT, b"\xff")
    return BlockWrite(seed, key_of(seed), key_of(seed - 1), SPACE, [memoryview(padded)])


def read_one(tier: StoreTier, seed: int, slot: int = 0) -> bytes:
    """A block as the tier has it, and proof that the slot's padding was let be."""
    into = bytearray(b"\xee" * SLOT)
    (error,) = tier.read([BlockRead(slot, key_of(seed), [memoryview(into)])])
    if error is not None:
        raise error
    assert set(into[SHARD.block_nbytes :]) <= {0xEE}
    return bytes(into[: SHARD.block_nbytes])


@pytest.fixture
def store() -> Flaky:
    return Flaky()


@pytest.fixture
def tier(store: Flaky) -> Iterator[StoreTier]:
    tier = StoreTier(store, SHARD, StoreOptions(), slot_nbytes=SLOT, sleep=lambda _: None)
    yield tier
    tier.close()


def test_a_call_that_fails_has_no_other_part_of_it_still_writing(
    store: Flaky, tier: StoreTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch goes as several requests; a client's own exception ends one. The slots of the others
    are given to somebody else as soon as the batch has failed."""
    tier.write([to_write(seed) for seed in range(4)])
    running, ended = threading.Event(), threading.Event()
    get = store.get

    def failing(items: Sequence[Item]) -> list[TierError | None]:
        if items[0].name == SHARD.name(key_of(0)):
            assert running.wait(60)
            raise ValueError("a client has a fault")
        running.set()
        for _ in range(1000):  # gives way until the failure has long been seen
            time.sleep(0)
        found = get(items)
        ended.set()
        return found

    monkeypatch.setattr(store, "get", failing)
    into = [bytearray(SLOT) for _ in range(2)]
    with pytest.raises(ValueError, match="has a fault"):
        tier.read([BlockRead(i, key_of(i), [memoryview(into[i])]) for i in range(2)])
    assert ended.is_set()


# -- names --------------------------------------------------------------------------------------


def test_a_name_tells_all_that_the_bytes_depend_on() -> None:
    other_model = Geometry(SHAPE, b"other", GEOMETRY.heads)
    other_shape = Geometry(BlockShape(3, 2, 16, 16, "bfloat16"), b"model", GEOMETRY.heads)
    whole = Geometry(SHAPE, b"model", ((0, 2),))
    shards = [
        Shard.of(GEOMETRY, 0, "kvcore"),
        Shard.of(GEOMETRY, 1, "kvcore"),
        Shard.of(whole, 0, "kvcore"),
        Shard.of(other_model, 0, "kvcore"),
        Shard.of(other_shape, 0, "kvcore"),
    ]
    names = {shard.name(key) for shard in shards for key in (key_of(1), key_of(2))}
    assert len(names) == 10
    assert len({shard.digest for shard in shards}) == 5
    assert Shard.of(GEOMETRY, 0, "mine").digest == SHARD.digest
    assert all(len(name) <= 200 for name in names)


def test_ranks_with_the_same_heads_share_a_value() -> None:
    doubled = Geometry(SHAPE, b"model", ((0, 1), (0, 1), (1, 2), (1, 2)))
    assert len(Shard.all_of(doubled, "kvcore")) == 2
    assert Shard.all_of(doubled, "kvcore") == Shard.all_of(GEOMETRY, "kvcore")


# -- frames -------------------------------------------------------------------------------------


@given(st.integers(0, 1 << 60), st.tuples(*[st.binary(min_size=16, max_size=16)] * 5))
def test_a_header_comes_back(nbytes: int, digests: tuple[bytes, ...]) -> None:
    header = Header(nbytes, *digests)
    packed = header.pack()
    assert len(packed) == HEADER_NBYTES
    assert Header.unpack(packed) == header


def test_the_format_is_what_the_page_says() -> None:
    """A change of these bytes makes every stored value unreadable: raise the version."""
    header = Header(5, b"k" * 16, b"p" * 16, b"n" * 16, b"s" * 16, b"c" * 16)
    assert header.pack().hex() == (
        "4b565231" "0100" "0000" "0500000000000000" + "6b" * 16 + "70" * 16 + "6e" * 16
        + "73" * 16 + "63" * 16 + "00" * 24 + "57d9b7b39c8ecbe1"
    )  # fmt: skip


@given(seed=st.integers(0, 3), position=st.integers(0, 10_000), flip=st.integers(1, 255))
def test_any_changed_byte_is_a_miss_and_the_value_is_removed(
    seed: int, position: int, flip: int
) -> None:
    store = MemoryStore()
    tier = StoreTier(store, SHARD, StoreOptions(), slot_nbytes=SLOT)
    assert tier.write([to_write(seed)]) == [None]
    [name] = store.values
    damaged = bytearray(store.values[name])
    # Only flags and padding of the header are not covered: they say nothing yet.
    position %= len(damaged)
    covered = not (6 <= position < 8 or 96 <= position < 120)
    damaged[position] ^= flip
    store.values[name] = bytes(damaged)
    if covered or position < 8:
        with pytest.raises(CorruptBlock):
            read_one(tier, seed)
        assert not store.values
    else:
        assert read_one(tier, seed) == data_of(seed)
    tier.close()


def test_another_blocks_value_is_not_taken(tier: StoreTier, store: Flaky) -> None:
    assert tier.write([to_write(1), to_write(2)]) == [None, None]
    one, two = SHARD.name(key_of(1)), SHARD.name(key_of(2))
    store.values[one] = store.values[two]
    with pytest.raises(CorruptBlock, match=key_of(2).hex()):
        read_one(tier, 1)
    assert list(store.values) == [two]


def test_another_shards_value_is_not_taken(store: Flaky) -> None:
    """Two shards have the same size: only what the header says tells them apart."""
    tiers = [
        StoreTier(store, Shard.of(GEOMETRY, rank, "kvcore"), StoreOptions(), slot_nbytes=SLOT)
        for rank in range(2)
    ]
    assert tiers[0].write([to_write(1)]) == [None]
    [value] = store.values.values()
    store.values[Shard.of(GEOMETRY, 1, "kvcore").name(key_of(1))] = value
    with pytest.raises(CorruptBlock, match="shard"):
        read_one(tiers[1], 1)
    assert read_one(tiers[0], 1) == data_of(1)
    for tier in tiers:
        tier.close()


# -- the tier -----------------------------------------------------------------------------------


@pytest.mark.parametrize("parallel", [1, 3, 64])
def test_a_batch_is_written_and_read_by_key_not_by_slot(store: Flaky, parallel: int) -> None:
    tier = StoreTier(store, SHARD, StoreOptions(parallel=parallel), slot_nbytes=SLOT)
    assert tier.write([to_write(seed) for seed in range(10)]) == [None] * 10
    buffers = [bytearray(SLOT) for _ in range(10)]
    reads = [BlockRead(7, key_of(9 - i), [memoryview(b)]) for i, b in enumerate(buffers)]
    assert tier.read(reads) == [None] * 10
    assert [bytes(b[: SHARD.block_nbytes]) for b in buffers] == [data_of(9 - i) for i in range(10)]
    tier.close()
    tier.close()


def test_a_layerwise_arena_gives_a_block_in_pieces(tier: StoreTier) -> None:
    data = memoryview(data_of(3))
    third = len(data) // 3
    pieces = [data[:third], data[third : 2 * third], data[2 * third :]]
    assert tier.write([to_write(3)._replace(buffers=pieces)]) == [None]
    assert read_one(tier, 3) == data_of(3)
    back = [memoryview(bytearray(third)) for _ in range(3)]
    assert tier.read([BlockRead(0, key_of(3), back)]) == [None]
    assert b"".join(back) == data_of(3)


def test_one_bad_request_does_not_fail_the_others(tier: StoreTier) -> None:
    short = to_write(1)._replace(buffers=[memoryview(bytes(10))])
    errors = tier.write([to_write(0), short, to_write(2)])
    assert [type(error) for error in errors] == [type(None), SlotError, type(None)]
    good, bad = bytearray(SLOT), bytearray(10)
    reads = [
        BlockRead(0, key_of(0), [memoryview(bad)]),
        BlockRead(0, key_of(1), [memoryview(good)]),
        BlockRead(0, key_of(2), [memoryview(good)]),
    ]
    assert [type(e) for e in tier.read(reads)] == [SlotError, BlockMissing, type(None)]
    assert bytes(good[: SHARD.block_nbytes]) == data_of(2)


def test_a_request_that_finds_no_store_is_repeated(tier: StoreTier, store: Flaky) -> None:
    store.planned = [TierUnavailable("a blink"), TierUnavailable("another")]
    assert tier.write([to_write(0)]) == [None]
    assert store.calls == 3


def test_it_gives_up_after_its_retries(tier: StoreTier, store: Flaky) -> None:
    store.down = True
    (error,) = tier.write([to_write(0)])
    assert isinstance(error, TierUnavailable)
    assert store.calls == 3
    with pytest.raises(TierUnavailable):
        read_one(tier, 0)


def test_it_gives_up_at_its_deadline() -> None:
    store, now = Flaky(), [0.0]
    options = StoreOptions(retries=10, deadline_s=1)
    tier = StoreTier(
        store, SHARD, options, slot_nbytes=SLOT, clock=lambda: now[0],
        sleep=lambda pause: now.__setitem__(0, now[0] + pause),
    )  # fmt: skip
    store.down = True
    tier.write([to_write(0)])
    assert 3 <= store.calls < 8
    assert now[0] < 1
    tier.close()


def test_what_is_missing_is_not_asked_for_twice(tier: StoreTier, store: Flaky) -> None:
    with pytest.raises(BlockMissing):
        read_one(tier, 5)
    assert store.calls == 1


# -- options ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"timout_s": 1}, r"\[tiers.far.options\]: timout_s: .*did you mean timeout_s"),
        ({"quux": 1}, "quux: there is no such option; supported are .*prefix"),
        ({"retries": -1}, "retries: given -1; supported is a whole number from 0 to 10"),
        ({"timeout_s": 0.0}, "timeout_s: given 0.0; supported is a number above 0"),
        ({"prefix": "a b"}, "prefix: given 'a b'"),
    ],
)
def test_options_that_do_not_fit_are_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_options(StoreOptions, TierContext("far", GEOMETRY, 1 << 20, options))


def test_it_comes_through_the_plugins_door() -> None:
    plugin = PluginManager(entry_points=[]).tier("memory-store")
    context = TierContext("far", GEOMETRY, 64 * SLOT, {"name": "door"})
    assert plugin.prepare is not None
    prepared = plugin.prepare(context)
    tier = plugin.factory(context)
    try:
        assert tier.write([to_write(0)]) == [None]
        assert list(shared_store("door").values) == [SHARD.name(key_of(0))]
        assert prepared.finder is not None
        assert prepared.num_slots == context.num_slots
    finally:
        tier.close()
        prepared.release()


# -- the page -----------------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["redis", "objects", "files.store", "mooncake"])
def test_the_pages_name_every_option_with_its_default(module: str) -> None:
    """The options of every store are on one page, a store's own on a page of its name."""
    docs = Path(__file__).parents[3] / "docs"
    own = docs / f"remote-{module.partition('.')[0]}.md"
    page = (docs / "remote.md").read_text() + own.read_text()
    kind = import_module(f"kvcore.tiers.remote.{module}").KIND
    for name, field in kind.options.model_fields.items():
        rows = [line for line in page.splitlines() if line.startswith(f"| `{name}` |")]
        assert rows, name
        default = field.get_default()
        if isinstance(default, (float, str)) and not name.startswith("lend"):
            shown = f'`"{default}"`' if isinstance(default, str) else f"`{default}`"
            assert any(row.split("|")[2].strip() == shown for row in rows), (name, shown)


def test_a_store_whose_client_is_missing_is_left_out_by_name(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    tiers = {"far": {"plugin": "redis", "capacity": "1MiB"}}
    plugins = PluginManager(entry_points=[])
    assert prepare_backings(load_config(None, {"tiers": tiers}), GEOMETRY, plugins) == []
    assert "the tier far is off" in caplog.text
    assert "pip install redis" in caplog.text
