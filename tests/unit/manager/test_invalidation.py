"""What a store deletes if blocks are removed while they are written, and how removals count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from kvcore._util.circuit_breaker import TierBreakers
from kvcore.index import BlockIndex, Reservation, TierSpec
from kvcore.manager import HOST, Backing
from kvcore.manager.invalidation import Invalidation
from kvcore.manager.lower_tiers import LowerTiers
from kvcore.telemetry.metrics import Metrics
from support.manager import NAMESPACE, ManagerRig, Media, chain

KEYS = chain(1, 2, 3, 4)


class Lookup:
    def __init__(self) -> None:
        self.deleted: list[bytes] = []

    def delete(self, keys: Sequence[bytes]) -> None:
        self.deleted += keys

    def absent(self, key: bytes) -> None:
        """Do nothing: no test here looks the block up again."""


class Writing:
    """Four blocks of a prompt that are being written to a store by two graphs."""

    def __init__(self) -> None:
        self.index = BlockIndex([TierSpec("host", 4), TierSpec("far", 8)])
        self.lookup = Lookup()
        tiers = LowerTiers({}, TierBreakers([]), {"far": cast(Any, self.lookup)})
        self.invalidation = Invalidation(self.index, Media(), tiers, Metrics())
        self.first = self.index.lifecycle.reserve("far", KEYS, 0, 2, NAMESPACE)
        self.second = self.index.lifecycle.reserve("far", KEYS, 2, 4, NAMESPACE)

    def end(self, reservation: Reservation, failed_from: int | None = None) -> None:
        self.invalidation.invalidate_removed(reservation)
        self.index.lifecycle.commit(reservation, failed_from)
        self.index.check_integrity()


@pytest.fixture
def writing() -> Writing:
    return Writing()


def test_what_stands_on_a_write_that_failed_is_nobodys_to_remove(writing: Writing) -> None:
    writing.end(writing.first, failed_from=1)
    writing.end(writing.second, failed_from=2)
    assert not writing.lookup.deleted, "of use to whoever writes the others"


def test_what_stands_on_a_block_that_was_lost_is_nobodys_to_remove(writing: Writing) -> None:
    writing.end(writing.first)
    writing.invalidation.invalidate("far", KEYS[1])
    writing.end(writing.second)
    assert not writing.lookup.deleted


@pytest.mark.parametrize("how", ["clear", "clear of a tier", "clear of a namespace", "drop"])
@pytest.mark.parametrize("failed", [False, True])
def test_what_was_cleared_while_it_was_written_is_removed(
    writing: Writing, how: str, failed: bool
) -> None:
    writing.end(writing.first, failed_from=1 if failed else None)
    if how == "drop":
        writing.invalidation.delete("far", KEYS[:1])
    elif how == "clear of a namespace":
        writing.invalidation.clear(NAMESPACE)
    else:
        writing.invalidation.clear(tier="far" if how == "clear of a tier" else None)
    writing.end(writing.second)
    assert set(KEYS[2:]) <= set(writing.lookup.deleted), "it would come back"


def test_a_clear_after_all_of_it_was_given_up_reaches_what_is_still_written(
    writing: Writing,
) -> None:
    writing.end(writing.first, failed_from=0)
    writing.invalidation.clear(NAMESPACE)  # the index knows of none of its blocks
    writing.end(writing.second)
    assert writing.lookup.deleted == KEYS[2:]


class Record:
    """The clears of a disk, as they are written down."""

    def __init__(self) -> None:
        self.told: list[tuple[object, ...]] = []

    def cleared(self, namespace: bytes | None, writing: Sequence[int] = ()) -> None:
        self.told.append((namespace, *sorted(writing)))

    def landed(self, slots: Sequence[int]) -> None:
        self.told.append(("landed", *sorted(slots)))


@pytest.fixture
def record(writing: Writing) -> Record:
    record = Record()
    tiers = LowerTiers({"far": Backing("far", clears=record)}, TierBreakers([]), cast(Any, {}))
    writing.invalidation = Invalidation(writing.index, Media(), tiers, Metrics())
    return record


def test_a_write_that_fails_after_a_clear_is_not_a_clear(writing: Writing, record: Record) -> None:
    writing.end(writing.first)
    writing.end(writing.second)
    writing.invalidation.clear(NAMESPACE)
    third = writing.index.lifecycle.reserve("far", KEYS, 0, 2, NAMESPACE)
    fourth = writing.index.lifecycle.reserve("far", KEYS, 2, 4, NAMESPACE)
    writing.end(third, failed_from=1)
    writing.end(fourth)
    assert record.told == [(NAMESPACE,)], "what was stored since the clear is worth keeping"


def test_a_clear_names_the_slots_that_are_still_written(writing: Writing, record: Record) -> None:
    writing.end(writing.first)
    slots = writing.second.slots.tolist()
    writing.invalidation.clear(NAMESPACE)
    assert record.told == [(NAMESPACE, *slots)]
    writing.invalidation.clear()
    writing.end(writing.second)
    assert record.told[1:] == [(None, *slots), ("landed", *slots)]


CLEARED = "kvcore_cleared_blocks_total"
EVICTED = "kvcore_evictions_total"
LOST = "kvcore_lost_blocks_total"


@pytest.mark.parametrize(
    ("how", "cleared"),
    [
        ("clear", {HOST: 4, "disk": 4}),
        ("clear of a namespace", {HOST: 4, "disk": 4}),
        ("clear of a tier", {"disk": 4}),
        ("drop", {HOST: 3}),
        ("discard", {HOST: 4}),
    ],
)
def test_removal_on_request_counts_as_cleared_and_not_as_evicted(
    how: str, cleared: dict[str, int]
) -> None:
    rig = ManagerRig()
    rig.save(KEYS)
    rig.drain()
    if how == "drop":
        rig.manager.invalidation.delete(HOST, KEYS[1:2])
    elif how == "discard":
        rig.manager.invalidation.evict(HOST, KEYS)
    else:
        rig.manager.clear(
            NAMESPACE if how == "clear of a namespace" else None,
            "disk" if how == "clear of a tier" else None,
        )
    counted = rig.metrics.snapshot()
    assert counted.get(CLEARED) == cleared
    assert EVICTED not in counted, "an operator would read that the tier is too small"


def test_a_lost_block_and_its_descendants_count_as_lost_and_not_as_evicted() -> None:
    rig = ManagerRig()
    rig.save(KEYS)
    rig.drain()
    rig.manager.invalidation.invalidate("disk", KEYS[1])
    counted = rig.metrics.snapshot()
    assert counted.get(LOST) == {"disk": 3}
    assert not {EVICTED, CLEARED} & set(counted)


def test_blocks_over_a_lowered_quota_count_as_evicted() -> None:
    rig = ManagerRig()
    rig.save(KEYS)
    rig.drain()
    rig.manager.invalidation.set_quota(HOST, "ann", [NAMESPACE], 3)
    counted = rig.metrics.snapshot()
    assert counted[EVICTED] == {HOST: 1}
    assert CLEARED not in counted
