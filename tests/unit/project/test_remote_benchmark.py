"""The benchmark of remote stores moves what it says, and compares with the right way."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("rich")

from benchmarks import remote
from benchmarks.remote import KVCORE, Memory, Way, batches, kvcore_way, measure
from kvcore.errors import BlockMissing
from kvcore.model.shape import BlockShape
from kvcore.tiers.remote import StoreOptions
from kvcore.tiers.remote.memory import MemoryStore

SHAPE = BlockShape(2, 2, 8, 16, "bfloat16")


def test_kvcores_way_brings_back_what_it_put() -> None:
    memory = Memory(5, SHAPE.nbytes)
    before, slots = bytes(memory.pages.view), [3, 0, 4, 1, 2]
    store = MemoryStore()
    with kvcore_way(store, StoreOptions(), SHAPE, memory, batch=2) as way:
        way.put(7, slots)
        memory.pages.view[:] = bytes(len(before))
        with pytest.raises(BlockMissing):
            way.get(8, slots)
        way.get(7, slots)
        assert bytes(memory.pages.view) == before
        way.drop(7, slots)
        assert not store.values


def test_ratios_are_to_the_best_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are made up: 2 s for kvcore, 1 s and 4 s for the others, puts and gets alike."""
    taken = {KVCORE: 2.0, "fast": 1.0, "slow": 4.0}
    now = [0.0]
    monkeypatch.setattr(remote.time, "perf_counter", lambda: now[0])
    seen: list[int] = []

    def way(seconds: float) -> Way:
        def move(turn: int, slots: Any) -> None:
            now[0] += seconds

        return Way(move, move, lambda turn, slots: seen.append(turn))

    found = measure({name: way(s) for name, s in taken.items()}, 3, [0], int(4e9))
    assert found[KVCORE] == (2.0, 0.5, 2.0, 0.5)
    assert found["fast"] == (4.0, 1.0, 4.0, 1.0)
    assert found["slow"] == (1.0, 0.25, 1.0, 0.25)
    assert len(seen) == len(set(seen)) == 4 * 3, "names are never used again"


def test_batches_cover_everything_once() -> None:
    assert batches([1, 2, 3, 4, 5], 2) == [[1, 2], [3, 4], [5]]
    assert batches([], 2) == []
