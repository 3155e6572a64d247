"""Slots of a pool, and runs of slots."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.errors import CapacityError, ConfigError
from kvcore.index.slots import SlotPool, slot_runs


def test_pool_budget_is_hard_and_double_free_asserts() -> None:
    pool = SlotPool(3)
    slots = pool.allocate(3).tolist()
    with pytest.raises(CapacityError, match="1 slots asked for, 0 of 3"):
        pool.allocate(1)
    pool.free(slots[0])
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(slots[0])
    with pytest.raises(ConfigError, match="at least 1 slot"):
        SlotPool(0)


@pytest.mark.parametrize("seed", range(10))
def test_pool_against_a_set(seed: int) -> None:
    rng, pool, used = random.Random(seed), SlotPool(20), set[int]()
    for _ in range(200):
        if rng.random() < 0.5 and pool.num_free:
            new = pool.allocate(rng.randint(1, pool.num_free)).tolist()
            assert new == sorted(new)
            assert not used & set(new)
            used |= set(new)
        elif rng.random() < 0.3:
            slot = rng.randrange(20)
            assert pool.claim(slot) == (slot not in used)
            used.add(slot)
        elif used:
            slot = rng.choice(sorted(used))
            pool.free(slot)
            used.remove(slot)
        pool.check_integrity(sorted(used))
    assert np.all(pool.allocate(pool.num_free) >= 0)


@given(st.lists(st.integers(0, 20) | st.integers(1 << 40, (1 << 40) + 5)))
def test_runs_of_slots_are_those_slots_and_do_not_touch(slots: list[int]) -> None:
    runs = slot_runs(slots)
    assert [slot for run in runs for slot in range(*run)] == sorted(set(slots))
    assert all(a.stop < b.start for a, b in itertools.pairwise(runs))
