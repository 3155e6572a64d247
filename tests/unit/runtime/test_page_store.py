"""Pages under an engine's own keys in one tier behave like a dictionary, except for evictions."""

from __future__ import annotations

import random
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.config import load_config
from kvcore.errors import ConfigError, TierError, TierUnavailable
from kvcore.index import BlockIndex, TierSpec
from kvcore.memory.buffers import Buffers
from kvcore.model.shape import BlockShape
from kvcore.runtime.page_store import PageStore, ignored_settings, open_pages, page_settings
from kvcore.tiers.base import BlockRead, BlockWrite, Tier
from kvcore.tiers.disk import Geometry
from kvcore.tiers.memory import MemoryTier
from kvcore.tiers.remote.memory import shared_store

SHAPE = BlockShape(2, 1, 16, 4, "bfloat16", kv_factor=1)
GEOMETRY = Geometry(SHAPE, b"pages of a test.", ((0, 1),))
SLOT_AND_RECORD = 4096 + 128
"""Bytes of a page of ``SHAPE`` on disk."""
SLOTS = 6


def store_of(tier: Tier, slots: int = SLOTS) -> PageStore:
    return PageStore(BlockIndex([TierSpec("tier", slots)]), tier, b"identity")


@pytest.fixture
def store() -> PageStore:
    return store_of(MemoryTier(SLOTS, SHAPE.nbytes))


def page(content: object) -> Buffers:
    """Return a page with unique content, in three runs."""
    data = random.Random(str(content)).randbytes(SHAPE.nbytes)
    return [memoryview(data)[:60], memoryview(data)[60:100], memoryview(data)[100:]]


def blank() -> Buffers:
    return [memoryview(bytearray(part.nbytes)) for part in page("")]


def text(buffers: Buffers) -> bytes:
    return b"".join(bytes(part) for part in buffers)


def put(store: PageStore, keys: Sequence[str]) -> list[bool]:
    return store.put(keys, [page(key) for key in keys])


def got(store: PageStore, keys: Sequence[str]) -> list[str]:
    """Return the keys that were found, after checking that the bytes are those stored."""
    buffers = [blank() for _ in keys]
    found = store.get(keys, buffers)
    for key, there, buffer in zip(keys, found, buffers, strict=True):
        assert not there or text(buffer) == text(page(key))
    return [key for key, there in zip(keys, found, strict=True) if there]


def test_after_a_renewal_keys_mean_other_pages(store: PageStore) -> None:
    other = [page("other")]
    assert put(store, ["a", "b"]) == [True, True]
    store.renew()
    assert store.leading(["a"]) == 0
    assert store.get(["a"], [blank()]) == [False]
    assert store.put(["a"], other) == [True]
    back = blank()
    assert store.get(["a"], [back]) == [True]
    assert text(back) == text(other[0])
    store.renew()
    assert store.leading(["a"]) == 0
    store.check_integrity()


class NaiveStore:
    """The reference: a dictionary that evicts its least recently used page."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.pages: OrderedDict[str, None] = OrderedDict()

    def put(self, keys: Sequence[str]) -> list[bool]:
        self.get(keys)
        new: list[str] = []
        for key in keys:
            if key not in self.pages and self._has_room(new):
                self.pages[key] = None
                new.append(key)
        for key in reversed(new):
            self.pages.move_to_end(key)
        return [key in self.pages for key in keys]

    def _has_room(self, new: list[str]) -> bool:
        """Make room, if needed, by evicting the oldest page that is not new."""
        oldest = next((key for key in self.pages if key not in new), None)
        if len(self.pages) >= self.slots and oldest is not None:
            del self.pages[oldest]
        return len(self.pages) < self.slots

    def get(self, keys: Sequence[str]) -> list[str]:
        for key in reversed(keys):
            if key in self.pages:
                self.pages.move_to_end(key)
        return [key for key in keys if key in self.pages]


def some(longest: int) -> st.SearchStrategy[list[str]]:
    return st.lists(st.sampled_from("abcdefghij"), max_size=longest)


@given(st.lists(st.tuples(st.sampled_from(["put", "get", "clear"]), some(9)), max_size=25))
def test_it_does_what_a_dictionary_does(steps: list[tuple[str, list[str]]]) -> None:
    store, naive = store_of(MemoryTier(SLOTS, SHAPE.nbytes)), NaiveStore(SLOTS)
    for what, keys in steps:
        if what == "put":
            assert put(store, keys) == naive.put(keys)
        elif what == "get":
            assert got(store, keys) == naive.get(keys)
        else:
            store.clear()
            naive.pages.clear()
        held = [key in naive.pages for key in keys]
        assert store.leading(keys) == ([*held, False]).index(False)
        assert store.counts().held == len(naive.pages) <= SLOTS
        store.check_integrity()


def test_where_room_is_short_the_first_pages_are_kept(store: PageStore) -> None:
    """A prefix is useful without what follows it, but not the other way round."""
    keys = [str(i) for i in range(SLOTS + 3)]
    assert put(store, keys) == [True] * SLOTS + [False] * 3
    assert store.leading(keys) == SLOTS
    put(store, ["other"])
    assert store.leading(keys) == SLOTS - 1


def test_pages_that_are_there_do_not_make_room_for_those_that_follow_them(
    store: PageStore,
) -> None:
    put(store, ["a", "b"])
    put(store, ["x", "y"])
    assert put(store, ["a", "b", "c", "d", "e", "f"]) == [True] * 6
    assert store.leading(["a", "b", "c", "d", "e", "f"]) == 6


def test_the_identity_keeps_pages_apart(store: PageStore) -> None:
    """Two models share one medium: equal engine keys never return the other model's page."""
    tier = MemoryTier(SLOTS, SHAPE.nbytes)
    index = BlockIndex([TierSpec("tier", SLOTS)])
    one, two = PageStore(index, tier, b"one"), PageStore(index, tier, b"two")
    put(one, ["a"])
    assert one.leading(["a"]) == 1
    assert two.leading(["a"]) == 0
    assert got(two, ["a"]) == []


class Unreliable(MemoryTier):
    """A tier that fails on request, and returns corrupt pages for the named slots."""

    def __init__(self) -> None:
        super().__init__(SLOTS, SHAPE.nbytes)
        self.error: TierError | Exception | None = None
        self.asked = 0

    def _outcome(self, requests: Sequence[object]) -> list[TierError | None] | None:
        self.asked += 1
        if isinstance(self.error, TierError):
            return [self.error] * len(requests)
        if self.error is not None:
            raise self.error
        return None

    def write(self, requests: Sequence[BlockWrite]) -> list[TierError | None]:
        return self._outcome(requests) or super().write(requests)

    def read(self, requests: Sequence[BlockRead]) -> list[TierError | None]:
        return self._outcome(requests) or super().read(requests)


@pytest.mark.parametrize("error", [TierUnavailable("no disk"), RuntimeError("a bug")])
def test_a_failed_write_is_not_found_and_leaks_nothing(error: Exception) -> None:
    tier = Unreliable()
    store = store_of(tier)
    tier.error = error
    assert put(store, ["a", "b"]) == [False, False]
    assert store.leading(["a"]) == 0
    tier.error = None
    assert put(store, [str(i) for i in range(SLOTS)]) == [True] * SLOTS
    store.check_integrity()


@pytest.mark.parametrize("error", [TierUnavailable("no disk"), RuntimeError("a bug")])
def test_a_failed_read_finds_nothing_and_the_pages_stay(error: Exception) -> None:
    tier = Unreliable()
    store = store_of(tier)
    put(store, ["a", "b"])
    tier.error = error
    assert got(store, ["a", "b"]) == []
    tier.error = None
    assert got(store, ["a", "b"]) == ["a", "b"]
    put(store, [str(i) for i in range(SLOTS)])  # no page stayed pinned
    assert store.leading(["a"]) == 0


def test_a_medium_that_keeps_failing_is_left_alone() -> None:
    tier = Unreliable()
    store = store_of(tier)
    put(store, ["a"])
    tier.error = TierUnavailable("no disk")
    for _ in range(3):
        assert got(store, ["a"]) == []
    asked = tier.asked
    assert store.leading(["a"]) == 0
    assert got(store, ["a"]) == []
    assert put(store, ["b"]) == [False]
    assert tier.asked == asked


def test_pages_cleared_while_they_are_written_are_not_found_later() -> None:
    class Slow(MemoryTier):
        def write(self, requests: Sequence[BlockWrite]) -> list[TierError | None]:
            cleared = threading.Thread(target=slow.clear)
            cleared.start()
            cleared.join()
            return super().write(requests)

    tier = Slow(SLOTS, SHAPE.nbytes)
    slow = store_of(tier)
    assert put(slow, ["a", "b"]) == [False, False]
    assert tier.scan() == []
    slow.check_integrity()


def test_threads_that_read_write_and_clear_never_see_a_wrong_page(store: PageStore) -> None:
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        picks = random.Random(seed)
        try:
            for _ in range(150):
                keys = [picks.choice("abcdefghijkl") for _ in range(4)]
                if picks.random() < 0.5:
                    put(store, keys)
                else:
                    got(store, keys)
                if picks.random() < 0.02:
                    store.clear()
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]
    store.check_integrity()


# -- on disk ------------------------------------------------------------------------------------


def opened(folder: Path, pages: int, identity: bytes = b"identity", share: int = 1) -> PageStore:
    capacity = pages * share * SLOT_AND_RECORD + 4096 * share
    config = load_config(overrides={"disk": {"path": str(folder), "capacity": capacity}}, env={})
    return open_pages(config, GEOMETRY, identity, share)


def test_a_restart_finds_what_was_stored(tmp_path: Path) -> None:
    first = opened(tmp_path, 8)
    assert put(first, ["a", "b", "c"]) == [True] * 3
    first.close()
    assert first.leading(["a"]) == 0
    assert put(first, ["d"]) == [False]
    again = opened(tmp_path, 8)
    assert got(again, ["a", "b", "c", "d"]) == ["a", "b", "c"]
    again.clear()
    again.close()
    last = opened(tmp_path, 8)
    assert last.leading(["a"]) == 0
    last.close()


def test_a_rotten_page_is_dropped_and_can_be_stored_again(tmp_path: Path) -> None:
    first = opened(tmp_path, 8)
    put(first, ["a", "b"])
    first.close()
    [data] = tmp_path.rglob("shard-0.data")
    with data.open("r+b") as file:
        file.seek(4096 + 33)
        file.write(b"rotten")
    again = opened(tmp_path, 8)
    found = got(again, ["a", "b"])
    assert len(found) == 1
    assert again.counts().corrupt == 1
    lost = "a" if found == ["b"] else "b"
    assert again.leading([lost]) == 0
    assert put(again, [lost]) == [True]
    assert got(again, ["a", "b"]) == ["a", "b"]
    again.close()


def test_stores_that_share_a_folder_stay_within_its_capacity(tmp_path: Path) -> None:
    """Stores divide the capacity as ranks do, and together stay within it."""
    shapes = [Geometry(SHAPE, bytes([rank]) * 16, ((0, 1),)) for rank in range(2)]
    capacity = 2 * (5 * SLOT_AND_RECORD + 4096)
    config = load_config(overrides={"disk": {"path": str(tmp_path), "capacity": capacity}}, env={})
    stores = [open_pages(config, shape, b"identity", share=2) for shape in shapes]
    keys = [str(i) for i in range(20)]
    for store in stores:
        put(store, keys)
        assert store.counts().held == 5
    used = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
    assert used <= capacity
    for store in stores:
        store.close()


# -- in a store that others write to ------------------------------------------------------------


def shared(name: str, pages: int = 8, identity: bytes = b"identity") -> PageStore:
    table = {"plugin": "memory-store", "capacity": pages * 4096, "options": {"name": name}}
    config = load_config(overrides={"tiers": {"shared": table}}, env={})
    return open_pages(config, GEOMETRY, identity)


@pytest.fixture
def values(request: pytest.FixtureRequest) -> dict[str, bytes]:
    """The values of the store that is named after the test."""
    return shared_store(request.node.name).values


def test_pages_that_others_wrote_are_found_and_not_written_again(
    request: pytest.FixtureRequest, values: dict[str, bytes]
) -> None:
    name = request.node.name
    first, second, other = shared(name), shared(name), shared(name, identity=b"other")
    assert put(first, ["a", "b"]) == [True, True]
    assert not second.holds("a")
    assert second.ask(["a", "c", "b"]) == [True, False, True]
    assert second.holds("a")
    assert got(second, ["a", "b", "c"]) == ["a", "b"]
    assert other.leading(["a"]) == 0
    first.close()
    again = shared(name)
    assert again.leading(["a", "b", "c"]) == 2, "after a restart"
    before = dict(values)
    values.clear()
    assert got(again, ["a"]) == []
    assert not again.holds("a")
    assert again.leading(["a"]) == 0, "the store has lost it"
    values.update(before)
    assert again.leading(["a", "b"]) == 2
    for store in (second, other, again):
        store.check_integrity()
        store.close()


def test_a_corrupt_page_leaves_the_shared_store(
    request: pytest.FixtureRequest, values: dict[str, bytes]
) -> None:
    store = shared(request.node.name)
    put(store, ["a"])
    [name] = [name for name, value in values.items() if len(value) > SHAPE.nbytes]
    values[name] = values[name][:-1] + bytes([values[name][-1] ^ 1])
    assert got(store, ["a"]) == []
    assert store.counts().corrupt == 1
    assert store.leading(["a"]) == 0
    assert put(store, ["a"]) == [True]
    store.close()


def test_what_was_cleared_is_not_found_again_in_the_shared_store(
    request: pytest.FixtureRequest,
) -> None:
    name = request.node.name
    first, second = shared(name), shared(name)
    put(first, ["a"])
    second.clear()
    assert second.leading(["a"]) == 0
    first.clear()
    first.close()
    again = shared(name)
    assert again.leading(["a"]) == 0
    for store in (again, second):
        store.close()


def test_lookups_that_fail_find_nothing_and_those_that_work_do_not_hide_failing_reads(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = request.node.name
    store, made = shared(name), shared_store(name)
    put(store, ["a"])

    def fails(*_: object) -> list[TierError | None]:
        raise TierUnavailable("the store is down")

    with monkeypatch.context() as patch:
        patch.setattr(made, "exists", fails)
        assert store.leading(["a", "b"]) == 1
    assert got(store, ["a"]) == ["a"]
    monkeypatch.setattr(made, "get", fails)
    for _ in range(3):
        assert store.leading(["a", "b"]) == 1
        assert got(store, ["a"]) == []
    assert store.leading(["a"]) == 0, "it is left alone"
    store.close()


def test_settings_without_a_use_are_named(caplog: pytest.LogCaptureFixture) -> None:
    given = {
        "disk": {"path": "/kv", "write": "selective", "to_device": "off"},
        "tiers": {"shared": {"plugin": "redis", "admit_after": 3}},
        "host": {"capacity": "1GiB"},
        "transfer": {"load_deadline_s": 3, "copy_threads": 2},
        "namespace": {"secret": "x" * 16},
        "block": {"tokens": 32},
    }
    assert ignored_settings(given) == [
        "block.tokens",
        "disk.to_device",
        "disk.write",
        "host.capacity",
        "tiers.shared.admit_after",
        "transfer.copy_threads",
    ]
    assert page_settings(given, "the test").transfer.load_deadline_s == 3
    assert "are ignored: block.tokens, disk.to_device, disk.write" in caplog.text
    caplog.clear()
    page_settings({"disk": {"path": "/kv"}}, "the test")
    assert not caplog.records


def test_a_folder_that_is_taken_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcore.tiers.disk.store._POLL_S", 0.01)
    monkeypatch.setattr("time.monotonic", iter(range(0, 100_000, 10)).__next__)
    first = opened(tmp_path, 8)
    with pytest.raises(TierUnavailable, match="cannot be used"):
        opened(tmp_path, 8)
    first.close()


def test_one_backing_tier_is_needed(tmp_path: Path) -> None:
    for overrides in ({}, {"disk": {"path": str(tmp_path)}, "tiers": {"more": {"plugin": "disk"}}}):
        with pytest.raises(ConfigError, match="supported is exactly one"):
            open_pages(load_config(overrides=overrides, env={}), GEOMETRY, b"identity")


@pytest.mark.parametrize(
    ("given", "policy"),
    [
        ({}, "lru"),
        ({"policy": "arc"}, "arc"),
        ({"policy": "lfu"}, "lfu"),
        ({"policy_options": {"max_uses": 2}}, "lfu"),
    ],
    ids=str,
)
@pytest.mark.parametrize("place", ["disk", "tiers"])
def test_the_oldest_pages_go_unless_a_policy_is_chosen(
    place: str, given: dict[str, Any], policy: str, tmp_path: Path
) -> None:
    """The default policy would leave holes in prompts: pages do not say how they hang together."""
    capacity = {"capacity": "1MiB", **given}
    disk = {"disk": {"path": str(tmp_path), **capacity}}
    store = {"plugin": "memory-store", "options": {"name": policy}}
    config = load_config(
        overrides=disk if place == "disk" else {"tiers": {"far": {**store, **capacity}}}, env={}
    )
    pages = open_pages(config, GEOMETRY, b"identity")
    [tier] = pages._index.tiers
    assert pages._index.policy(tier).name == policy
    pages.close()
