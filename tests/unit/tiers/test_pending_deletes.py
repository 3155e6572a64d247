"""What was to be removed from a store that was down: it is removed when the store is back."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvcore.config import Config, load_config
from kvcore.errors import TierUnavailable
from kvcore.model.parts import Part
from kvcore.model.shape import BlockShape
from kvcore.plugins import PluginManager
from kvcore.runtime.tiers import PreparedBacking, prepare_backings
from kvcore.testing.waiting import until
from kvcore.tiers.disk import Geometry
from kvcore.tiers.remote import Item, Shard, StoreFinder
from kvcore.tiers.remote import lookup as finder
from kvcore.tiers.remote.memory import MemoryStore
from kvcore.tiers.remote.pending_deletes import PendingDeletes

SHAPE = BlockShape(1, 1, 16, 8, "float32")
SHARD = Shard("kvcore", "base", Part.whole(SHAPE), SHAPE)
KEYS = [bytes([n]) * 16 for n in range(6)]


class Deaf(MemoryStore):
    """Removes nothing while it is told to be so."""

    deaf = True
    asked = 0

    def delete(self, names: Sequence[str]) -> None:
        self.asked += 1
        if self.deaf:
            raise TierUnavailable("down")
        super().delete(names)


def fill(store: Deaf, keys: Sequence[bytes]) -> None:
    store.put([Item(SHARD.name(key), [memoryview(b"?")]) for key in keys])


def found(made: StoreFinder, keys: Sequence[bytes] = KEYS) -> int:
    query = made.ask(keys)
    assert query is not None
    while not query.ended:
        made.wait(60.0)
    return query.found


def test_it_is_not_found_and_removed_when_the_store_takes_it() -> None:
    store = Deaf()
    made = StoreFinder(store, [SHARD], name="far")
    fill(store, KEYS)
    assert found(made) == 6
    made.delete(KEYS[2:])
    assert found(made) == 2, "the store holds all of them"
    assert len(store.values) == 6
    store.deaf = False
    assert found(made) == 2
    made.close()
    assert len(store.values) == 2
    fresh = StoreFinder(store, [SHARD], name="far")
    fill(store, KEYS)
    assert found(fresh) == 6, "nothing is owed"
    fresh.close()


def test_what_was_removed_late_may_be_written_again() -> None:
    store = Deaf()
    made = StoreFinder(store, [SHARD], name="far")
    fill(store, KEYS)
    made.delete(KEYS)
    assert found(made) == 0
    store.deaf = False
    assert found(made) == 0
    assert found(made) == 0, "and it is done by now"
    fill(store, KEYS)
    assert found(made) == 6
    asked = store.asked
    assert found(made) == 6
    assert store.asked == asked, "it is not removed again and again"
    made.close()


def test_the_store_is_closed_after_the_last_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Deaf()
    asked: list[int] = []
    monkeypatch.setattr(store, "close", lambda: asked.append(store.asked))
    made = StoreFinder(store, [SHARD], name="far")
    made.delete(KEYS)
    made.close()
    assert asked == [1]


def test_what_is_owed_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finder, "MAX_PENDING_DELETES", 4)
    store = Deaf()
    made = StoreFinder(store, [SHARD], name="far")
    fill(store, KEYS)
    made.delete(KEYS)
    assert found(made) == 2
    assert list(made._pending) == KEYS[2:]
    made.close()


# -- over lives of a leader ----------------------------------------------------------------------


def record(folder: Path, *what: str) -> PendingDeletes:
    return PendingDeletes([folder], *(what or ("far", "model")))


def test_what_a_leader_owed_when_it_ended_the_next_one_pays(tmp_path: Path) -> None:
    """Without anyone's query: other hosts find it until then."""
    store = Deaf()
    fill(store, KEYS)
    first = StoreFinder(store, [SHARD], name="far", pending_deletes=record(tmp_path))
    first.delete(KEYS[2:])
    assert found(first) == 2
    first.close()
    second = StoreFinder(store, [SHARD], name="far", pending_deletes=record(tmp_path))
    assert found(second) == 2, "it knows, though the store is down still"
    assert len(store.values) == 6
    second.close()
    store.deaf = False
    third = StoreFinder(store, [SHARD], name="far", pending_deletes=record(tmp_path))
    until(lambda: len(store.values) == 2)
    third.close()
    assert not list(tmp_path.iterdir()), "nothing is owed"


def test_a_leader_that_is_killed_owes_as_much(tmp_path: Path) -> None:
    store = Deaf()
    fill(store, KEYS)
    killed = StoreFinder(store, [SHARD], name="far", pending_deletes=record(tmp_path))
    killed.delete(KEYS)
    assert found(killed) == 0
    assert killed._pending_file is not None
    killed._pending_file.close()  # the kernel drops its lock
    store.deaf = False
    fresh = StoreFinder(store, [SHARD], name="far", pending_deletes=record(tmp_path))
    until(lambda: not store.values)
    fresh.close()
    killed.close()


def test_a_store_that_is_back_is_paid_though_nobody_asks_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(finder, "DELETE_RETRY_S", 0.05)
    store = Deaf()
    fill(store, KEYS)
    made = StoreFinder(store, [SHARD], name="far")
    made.delete(KEYS)
    until(lambda: store.asked >= 2)
    store.deaf = False
    until(lambda: not store.values)
    made.close()


def test_leaders_that_live_keep_their_notes_to_themselves(tmp_path: Path) -> None:
    first, second = record(tmp_path), record(tmp_path)
    first.add(KEYS[:2])
    second.add(KEYS[2:4])
    third, other = record(tmp_path), record(tmp_path, "far", "another model")
    assert third.read() == other.read() == []
    first.close()
    second.close()
    third.close()
    other.close()
    heir = record(tmp_path)
    assert sorted(heir.read()) == KEYS[:4]
    heir.replace(KEYS[5:])
    heir.close()
    again = record(tmp_path)
    assert again.read() == KEYS[5:]
    again.replace([])
    assert not list(tmp_path.iterdir())


def test_a_note_that_was_cut_says_what_it_can(tmp_path: Path) -> None:
    first = record(tmp_path)
    first.add(KEYS[:2])
    first.close()
    [file] = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-3])
    second = record(tmp_path)
    assert second.read() == KEYS[:1]
    second.add(KEYS[3:4])
    second.close()
    assert record(tmp_path).read() == [KEYS[0], KEYS[3]], "and is written on where it broke off"


def test_the_next_best_folder_takes_it_and_none_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    made = PendingDeletes([tmp_path / "file", tmp_path / "new"], "far")
    made.add(KEYS)
    assert [path.parent for path, _ in made._held] == [tmp_path / "new"]
    made.close()
    assert not caplog.text
    PendingDeletes([tmp_path / "file"], "far").add(KEYS)
    assert "6 pending deletes cannot be recorded" in caplog.text


def test_a_record_that_is_removed_is_made_anew(tmp_path: Path) -> None:
    made = record(tmp_path)
    made.add(KEYS[:2])
    for file in tmp_path.iterdir():
        file.unlink()
    made.add(KEYS[2:])
    made.close()
    assert record(tmp_path).read() == KEYS[2:]


def test_what_was_asked_of_a_thread_that_died_is_owed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = StoreFinder(Deaf(), [SHARD], name="far", pending_deletes=record(tmp_path))

    def dies(round_: object) -> None:
        made.delete(KEYS)
        raise RuntimeError("planted")

    monkeypatch.setattr(made, "_ask", dies)
    query = made.ask(KEYS)
    assert query is not None
    until(lambda: query.ended)
    made.close()
    assert query.failed
    assert record(tmp_path).read() == KEYS


def test_a_note_does_not_grow_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finder, "MAX_PENDING_DELETES", 4)
    store = Deaf()
    made = StoreFinder(store, [SHARD], name="far", pending_deletes=record(tmp_path))
    for number in range(40):
        made.delete([bytes([number]) * 16])
        assert found(made) == 0
    assert made._pending_file is not None
    assert len(made._pending_file) <= 9
    made.close()
    assert record(tmp_path).read()[-4:] == [bytes([n]) * 16 for n in range(36, 40)]


def test_an_engine_leaves_its_note_beside_its_disk_tier_or_with_the_server(tmp_path: Path) -> None:
    here = {"server": {"folder": str(tmp_path / "server")}}
    far = {"far": {"plugin": "memory-store", "options": {"name": "debts"}}}
    for tables in ({}, {"disk": {"path": str(tmp_path / "disk"), "capacity": "1MiB"}}):
        config = load_config(None, here | tables | {"tiers": far})
        prepared = {made.spec.name: made for made in backings(config)}
        lookup = prepared["far"].prepared.finder
        assert lookup is not None
        assert lookup._pending_file is not None
        lookup._pending_file.add(KEYS)
        folder = tmp_path / ("disk" if tables else "server")
        assert len(list(folder.glob("owed-*"))) == 1
        for made in prepared.values():
            made.prepared.release()
        again = {made.spec.name: made for made in backings(config)}
        until(lambda folder=folder: not list(folder.glob("owed-*")))
        for made in again.values():
            made.prepared.release()


def left_to(folder: Path, far: dict[str, Any]) -> list[bytes]:
    """What a leader with this store finds owed; it ends at once."""
    tables = {"server": {"folder": str(folder)}, "tiers": {"far": far}}
    [made] = backings(load_config(None, tables))
    lookup = made.prepared.finder
    assert lookup is not None
    assert lookup._pending_file is not None
    owed = list(lookup._pending)
    if not owed:
        lookup._pending_file.add(KEYS)
    made.prepared.release()
    return owed


@pytest.mark.parametrize(
    ("plugin", "store", "used", "other"),
    [
        ("objects", {"url": "s3://one"}, {"requests": 5}, {"url": "s3://other"}),
        ("redis", {"url": "redis://127.0.0.1:1"}, {"ttl_s": 60}, {"url": "redis://127.0.0.1:2"}),
    ],
)
def test_a_store_is_known_by_what_it_is_and_not_by_how_it_is_used(
    tmp_path: Path, plugin: str, store: dict[str, Any], used: dict[str, Any], other: dict[str, Any]
) -> None:
    """Nobody answers there: what is owed stays so."""
    pytest.importorskip({"objects": "obstore"}.get(plugin, plugin))
    nowhere = {"config": {"endpoint": "http://127.0.0.1:1", "region": "x"}}

    def far(**options: Any) -> dict[str, Any]:
        more = nowhere if plugin == "objects" else {}
        told = {**more, "timeout_s": 0.1, **options}
        return {"plugin": plugin, "capacity": "1MiB", "options": told}

    records = tmp_path / "records"
    assert left_to(records, far(**store)) == []
    assert left_to(records, far(**store, **used, retries=0, timeout_s=0.2)) == KEYS
    assert left_to(records, far(**store | other)) == []
    assert left_to(records, far(**store, prefix="another")) == []


def test_a_debt_to_a_store_that_nobody_uses_ends_some_day(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    records = {what: record(tmp_path, what, "model") for what in ("gone", "far", "held", "young")}
    paths = {}
    for what, made in records.items():
        made.add(KEYS)
        [(paths[what], _)] = made._held
    for what in ("gone", "far", "held"):
        os.utime(paths[what], (0, 0))
    for what in ("gone", "far", "young"):
        records[what].close()
    made = record(tmp_path)
    assert made.read() == KEYS
    assert [what for what, path in paths.items() if not path.exists()] == ["gone"]
    assert str(paths["gone"]) in caplog.text
    made.close()
    records["held"].close()
    assert record(tmp_path, "another").read() == []
    assert paths["far"].exists(), "its store is used"
    assert not paths["held"].exists()


def backings(config: Config) -> list[PreparedBacking]:
    return prepare_backings(config, Geometry(SHAPE, b"model", ((0, 1),)), PluginManager())
