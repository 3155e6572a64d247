"""What was to be removed from a store that was down: it is removed when the store is back."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvcore.errors import TierUnavailable
from kvcore.layout import BlockShape
from kvcore.tiers.remote import Finder, Item, Shard, finder
from kvcore.tiers.remote.memory import MemoryStore
from kvcore.tiers.shards import Part

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


def found(made: Finder, keys: Sequence[bytes] = KEYS) -> int:
    question = made.ask(keys)
    assert question is not None
    while not question.ended:
        made.wait(60.0)
    return question.found


def test_it_is_not_found_and_removed_when_the_store_takes_it() -> None:
    store = Deaf()
    made = Finder(store, [SHARD], name="far")
    fill(store, KEYS)
    assert found(made) == 6
    made.delete(KEYS[2:])
    assert found(made) == 2, "the store holds all of them"
    assert len(store.values) == 6
    store.deaf = False
    assert found(made) == 2
    made.close()
    assert len(store.values) == 2
    fresh = Finder(store, [SHARD], name="far")
    fill(store, KEYS)
    assert found(fresh) == 6, "nothing is owed"
    fresh.close()


def test_what_was_removed_late_may_be_written_again() -> None:
    store = Deaf()
    made = Finder(store, [SHARD], name="far")
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


def test_what_is_owed_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finder, "OWED_KEPT", 4)
    store = Deaf()
    made = Finder(store, [SHARD], name="far")
    fill(store, KEYS)
    made.delete(KEYS)
    assert found(made) == 2
    assert list(made._owed) == KEYS[2:]
    made.close()
