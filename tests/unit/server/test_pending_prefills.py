"""What is promised at a server and being saved there: for how long that is waited for."""

from __future__ import annotations

import pytest

from kvcore.index import BlockIndex, Reservation, TierSpec
from kvcore.manager.base import HOST, Promise
from kvcore.model.keys import KeyChain, Namespace
from kvcore.model.points import PointCounts
from kvcore.server.pending_prefills import MAX_AWAITED, PendingPrefills
from support.clock import Clock

NAMESPACE = b"n" * 16


def keys_of(seed: int, blocks: int = 6) -> list[bytes]:
    chain = KeyChain(Namespace(b"model"), 16)
    chain.extend([seed + 1] * 16 * blocks)
    return list(chain.keys)


@pytest.fixture
def clock() -> Clock:
    return Clock(0.0)


@pytest.fixture
def index() -> BlockIndex:
    return BlockIndex([TierSpec(HOST, 100)])


@pytest.fixture
def awaited(index: BlockIndex, clock: Clock) -> PendingPrefills:
    return PendingPrefills(index, clock=clock)


def saving(index: BlockIndex, keys: list[bytes], stop: int) -> Reservation:
    return index.lifecycle.reserve(HOST, keys, 0, stop, NAMESPACE)


def test_it_comes_until_it_is_there(index: BlockIndex, awaited: PendingPrefills) -> None:
    keys = keys_of(1)
    assert not awaited.coming(keys, 0), "nothing was promised"
    save = saving(index, keys, 4)
    awaited.expect(keys, Promise(4, 60.0))
    assert awaited.coming(keys, 0)
    assert awaited.coming(keys, 3)
    index.lifecycle.commit(save)
    assert not awaited.coming(keys, 4)
    assert len(awaited) == 0


def test_more_than_was_promised_is_not_waited_for(
    index: BlockIndex, awaited: PendingPrefills
) -> None:
    keys = keys_of(1)
    saving(index, keys, 6)
    awaited.expect(keys, Promise(4, 60.0))
    assert awaited.coming(keys, 3)
    assert not awaited.coming(keys, 4)


def test_a_save_that_ends_in_nothing_ends_the_waiting(
    index: BlockIndex, awaited: PendingPrefills
) -> None:
    keys = keys_of(1)
    save = saving(index, keys, 4)
    awaited.expect(keys, Promise(4, 60.0))
    assert awaited.coming(keys, 0)
    index.lifecycle.abort(save)
    assert not awaited.coming(keys, 0)
    saving(index, keys, 4)
    assert not awaited.coming(keys, 0), "it was given up"


POINTS = PointCounts(every=2, state_rows=3)


def test_a_point_comes_with_all_its_rows(index: BlockIndex, clock: Clock) -> None:
    """Blocks of the same prompt that are saved without it are not waited for."""
    awaited = PendingPrefills(index, POINTS, clock=clock)
    keys = keys_of(1)
    awaited.expect(keys, Promise(4, 60.0))
    shorter = index.lifecycle.reserve(HOST, POINTS.chain(keys, 2), 0, 5, NAMESPACE)
    assert not awaited.coming(keys, 0), "nobody saves the promised one"
    rows = POINTS.chain(keys, 4)
    save = index.lifecycle.reserve(HOST, rows, 2, len(rows), NAMESPACE)
    awaited.expect(keys, Promise(4, 60.0))
    assert awaited.coming(keys, 0)
    assert awaited.coming(keys, 2), "a shorter one is there"
    index.lifecycle.commit(shorter)
    assert awaited.coming(keys, 2)
    index.lifecycle.commit(save)
    assert not awaited.coming(keys, 4)
    assert len(awaited) == 0


@pytest.mark.parametrize("blocks", [3, 7, 8])
def test_a_point_that_can_never_come_is_not_waited_for(
    index: BlockIndex, clock: Clock, blocks: int
) -> None:
    awaited = PendingPrefills(index, POINTS, clock=clock)
    awaited.expect(keys_of(1), Promise(blocks, 60.0))
    assert len(awaited) == 0


def test_a_promise_has_its_time(index: BlockIndex, awaited: PendingPrefills, clock: Clock) -> None:
    keys = keys_of(1)
    saving(index, keys, 4)
    awaited.expect(keys, Promise(4, 60.0))
    clock.now = 59.9
    assert awaited.coming(keys, 0)
    clock.now = 60.0
    assert not awaited.coming(keys, 0)


def test_prompts_that_nobody_asks_for_again_take_no_room(
    index: BlockIndex, awaited: PendingPrefills
) -> None:
    first = keys_of(0)
    saving(index, first, 6)
    for seed in range(MAX_AWAITED + 1):
        awaited.expect(keys_of(seed), Promise(6, 60.0))
    assert len(awaited) == MAX_AWAITED
    assert not awaited.coming(first, 0)
