"""Resume points in the manager: saved whole or not at all, and found by the longest boundary."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from kvcore.errors import TransferError
from kvcore.index import Event
from kvcore.manager import HOST, Hit, WritePolicy
from kvcore.manager.base import Source
from kvcore.model.points import PointShape, StateGroup, point_keys
from kvcore.tiers.base import BlockRecord
from kvcore.transfer.graph import RowError, Span
from support.manager import NAMESPACE, ManagerRig, chain
from support.transfers import load_blocks

ROWS = 3


def point_shape(rows: int = ROWS, every: int = 1) -> PointShape:
    return PointShape((StateGroup(1, ("s",), 10 * rows),), 10, every)


def rig_of(host: int = 32, disk: int = 64, *, every: int = 1, **options: object) -> ManagerRig:
    return ManagerRig(host, disk, points=point_shape(every=every), **options)  # type: ignore[arg-type]


def saved(rig: ManagerRig, keys: list[bytes], *boundaries: int) -> None:
    for blocks in boundaries:
        assert rig.save_point(keys, blocks) is not None
        rig.drain()


def found(rig: ManagerRig, keys: list[bytes], limit: int | None = None) -> Hit:
    return rig.manager.get_match(keys, NAMESPACE, limit)


class Depths(NamedTuple):
    blocks: int
    depth: int
    point: int
    reached: int


def depths(hit: Hit) -> Depths:
    return Depths(hit.blocks, hit.depth, hit.point, hit.reached)


# --- lookup -----------------------------------------------------------------------------------


def test_a_prompt_goes_on_from_the_last_boundary_with_a_point() -> None:
    rig, keys = rig_of(), chain(*range(8))
    saved(rig, keys, 2, 5)
    hit = found(rig, keys)
    assert depths(hit) == Depths(blocks=5, depth=5 + ROWS, point=ROWS, reached=5)
    assert list(hit.keys) == [*keys[:5], *point_keys(keys[4], ROWS)]
    assert hit.sources == (Source(HOST, 0, 5 + ROWS),)


@pytest.mark.parametrize(
    ("limit", "blocks"), [(None, 5), (9, 5), (5, 5), (4, 2), (2, 2), (1, 0), (0, 0)]
)
def test_a_point_behind_the_limit_is_not_found(limit: int | None, blocks: int) -> None:
    rig, keys = rig_of(), chain(*range(8))
    saved(rig, keys, 2, 5)
    hit = found(rig, keys, limit)
    point = ROWS if blocks else 0
    reached = 5 if limit is None else min(5, limit)
    assert depths(hit) == Depths(blocks, blocks + point, point, reached)


def test_blocks_without_a_point_are_reached_but_nothing_is_found() -> None:
    rig, keys = rig_of(), chain(*range(6))
    rig.save(keys[:4])
    rig.drain()
    hit = found(rig, keys)
    assert depths(hit) == Depths(0, 0, 0, reached=4)
    assert hit.sources == ()
    saved(rig, keys, 3)
    assert depths(found(rig, keys)) == Depths(3, 3 + ROWS, ROWS, reached=4)


def test_a_point_of_another_prompt_that_begins_alike_is_found() -> None:
    rig = rig_of()
    saved(rig, chain(1, 2, 3, 4), 2, 4)
    assert found(rig, chain(1, 2, 9)).blocks == 2
    assert found(rig, chain(1, 9, 9)).blocks == 0


def test_only_boundaries_at_which_the_engine_has_points_are_looked_at() -> None:
    """Whatever lies behind other blocks, the engine could not go on there."""
    rig, keys = rig_of(every=2), chain(*range(8))
    saved(rig, keys, 3, 4, 7)
    assert found(rig, keys).blocks == 4
    assert found(rig, keys, 3).blocks == 0


def test_what_is_expected_ends_in_a_point_that_is_there_or_comes() -> None:
    """Else another engine would be promised what never comes."""
    rig, keys = rig_of(every=2), chain(*range(8))
    assert rig.manager.expected(keys) == 0
    rig.save(keys)
    rig.drain()
    assert rig.manager.index.held(HOST, keys) == 8
    assert rig.manager.expected(keys) == 0, "blocks without a point"
    saved(rig, keys, 2)
    assert rig.manager.expected(keys) == 2
    assert rig.save_point(keys, 6) is not None
    assert rig.manager.expected(keys) == 6, "it is being saved"
    assert rig.manager.expected(keys[:5]) == 2
    assert found(rig, keys).blocks == 2
    rig.drain()
    assert rig.manager.expected([*keys[:4], *chain(9, 10)]) == 2


def test_a_model_without_points_does_not_look_at_the_limit() -> None:
    rig, keys = ManagerRig(), chain(1, 2, 3)
    rig.save(keys)
    rig.drain()
    assert depths(found(rig, keys, 1)) == Depths(3, 3, 0, reached=3)


def test_a_point_is_not_found_before_its_last_row_is_there() -> None:
    rig, keys = rig_of(), chain(1, 2, 3)
    rig.save_point(keys, 3)
    assert found(rig, keys).depth == 0
    rig.drain()
    assert found(rig, keys).blocks == 3


# --- saves ------------------------------------------------------------------------------------


def test_a_save_says_where_its_point_begins() -> None:
    rig, keys = rig_of(), chain(*range(6))
    first = rig.save_point(keys, 2)
    assert first is not None
    assert (first.num_rows, first.point) == (2 + ROWS, 2)
    rig.drain()
    second = rig.save_point(keys, 5)
    assert second is not None
    assert list(second.keys) == [*keys[2:5], *point_keys(keys[4], ROWS)]
    assert second.point == 3
    rig.drain()
    assert rig.save_point(keys, 5) is None, "it is there"


def test_of_a_point_whose_first_rows_are_there_the_others_are_saved() -> None:
    rig, keys = rig_of(disk=0), chain(1, 2)
    saved(rig, keys, 2)
    rig.manager.invalidation.evict(HOST, list(point_keys(keys[1], ROWS))[1:])
    assert found(rig, keys).depth == 0
    graph = rig.save_point(keys, 2)
    assert graph is not None
    assert graph.keys == point_keys(keys[1], ROWS)[1:]
    assert graph.point == -1, "row 0 of the point is before row 0 of the graph"
    rig.drain()
    assert found(rig, keys).blocks == 2


@pytest.mark.parametrize("blocks", [1, 2, 3, 4, 5, 9])
def test_a_point_is_saved_whole_or_not_at_all(blocks: int) -> None:
    rig, keys = rig_of(host=6, disk=0), chain(*range(10))
    planned = rig.manager.plan_save(keys, NAMESPACE, blocks, point=True)
    rig.manager.check_integrity()
    index = rig.manager.index
    if blocks + ROWS <= 6:
        assert planned is not None
        assert planned.blocks == Span(0, blocks + ROWS)
        rig.manager.drop(planned)
    else:
        assert planned is None
        skipped = rig.metrics.snapshot()["kvcore_save_skipped_total"]
        assert set(skipped) == {"no_room"}
        assert skipped["no_room"] >= blocks + ROWS - 6
    assert index.num_used(HOST) == 0, "slots stay reserved"
    assert len(index) == 0
    assert rig.manager.in_flight == 0


def test_what_is_in_use_leaves_no_room_for_half_a_point() -> None:
    """The slots that were free for the first rows are free again, for somebody else's blocks."""
    rig, old, keys = rig_of(host=6, disk=0), chain(7, 8, 9), chain(1, 2)
    rig.save(old)
    rig.drain()
    pin = rig.manager.index.pin(HOST, old[-1])
    assert rig.save_point(keys, 2) is None
    assert rig.manager.index.num_free(HOST) == 3
    assert rig.metrics.snapshot()["kvcore_save_skipped_total"] == {"no_room": 2}
    rig.manager.index.unpin(pin)
    assert rig.save_point(keys, 2) is not None
    rig.drain()
    assert found(rig, keys).blocks == 2


def test_a_point_that_never_fits_evicts_nothing() -> None:
    """Else each try, one a prompt, would empty host memory for nothing."""
    rig, old, long = rig_of(host=8, disk=0), chain(7), chain(*range(6))
    saved(rig, old, 1)
    assert rig.save_point(long, 6) is None
    assert found(rig, old).blocks == 1
    assert rig.metrics.snapshot()["kvcore_save_skipped_total"] == {"no_room": 6 + ROWS}
    rig.save(long)  # as many blocks as there is room for, without a point
    rig.drain()
    assert found(rig, long).reached == 6


def test_a_point_that_is_over_a_quota_evicts_nothing() -> None:
    rig, old, keys = rig_of(disk=0), chain(7), chain(1, 2, 3)
    saved(rig, old, 1)
    rig.manager.invalidation.set_quota(HOST, "ann", [NAMESPACE], 3 + ROWS - 1)
    assert rig.save_point(keys, 3) is None
    assert found(rig, old).blocks == 1
    rig.manager.invalidation.set_quota(HOST, "ann", [NAMESPACE], 3 + ROWS)
    saved(rig, keys, 3)
    assert found(rig, keys).blocks == 3


# --- loads ------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [0, 1, 4])
def test_a_load_brings_blocks_and_the_whole_point(start: int) -> None:
    rig, keys = rig_of(), chain(*range(6))
    saved(rig, keys, 2, 5)
    graph = rig.load_point(keys, start)
    assert graph is not None
    assert graph.point == 5 - start
    rig.drain()
    assert rig.loaded(graph) == [*keys[start:5], *point_keys(keys[4], ROWS)]


def test_a_load_of_the_point_alone_is_for_who_has_the_blocks() -> None:
    rig, keys = rig_of(), chain(1, 2)
    saved(rig, keys, 2)
    hit = found(rig, keys)
    graph = load_blocks(rig.manager, hit, 2, hit.depth, rig.units(ROWS))
    assert graph.point == 0
    rig.drain()
    assert rig.loaded(graph) == list(point_keys(keys[1], ROWS))


@pytest.mark.parametrize("span", [(0, 2), (0, 4), (1, 4), (2, 4), (3, 5), (4, 5)])
def test_a_load_of_half_a_point_is_refused(span: tuple[int, int]) -> None:
    rig, keys = rig_of(), chain(1, 2)
    saved(rig, keys, 2)
    hit = found(rig, keys)
    assert hit.depth == 5
    with pytest.raises(TransferError, match="without all of the resume point"):
        rig.manager.plan_load(hit, Span(*span))
    rig.manager.check_integrity()
    assert not rig.manager.index._tables[0].pins
    assert rig.manager.in_flight == 0


# --- where rows are ---------------------------------------------------------------------------


def test_without_its_last_row_a_point_is_not_found_though_all_blocks_are_there() -> None:
    rig, keys = rig_of(disk=0), chain(*range(5))
    saved(rig, keys, 2, 4)
    [evicted] = rig.manager.index.evictions.evict_blocks(HOST, point_keys(keys[3], ROWS)[-1:])
    assert evicted.key == point_keys(keys[3], ROWS)[-1]
    assert depths(found(rig, keys)) == Depths(2, 2 + ROWS, ROWS, reached=4)


def test_blocks_are_not_evicted_before_the_points_behind_them() -> None:
    rig, keys = rig_of(disk=0), chain(1, 2)
    saved(rig, keys, 2)
    gone = [block.key for block in rig.manager.index.evictions.evict(HOST, 5)]
    assert gone == [*point_keys(keys[1], ROWS)[::-1], keys[1], keys[0]]


@pytest.mark.parametrize("here", range(2 + ROWS))
def test_rows_in_two_tiers_are_found_and_loaded_together(here: int) -> None:
    """``here`` blocks and rows are in host memory, and all of them are on disk."""
    rig, keys = rig_of(), chain(1, 2)
    saved(rig, keys, 2)
    whole = [*keys, *point_keys(keys[1], ROWS)]
    rig.manager.invalidation.evict(HOST, whole[here:])
    hit = found(rig, keys)
    assert depths(hit) == Depths(2, 5, ROWS, reached=2)
    both = {HOST: here, "disk": len(whole) - here}
    assert hit.blocks_by_tier() == {tier: count for tier, count in both.items() if count}
    graph = rig.load_point(keys)
    assert graph is not None
    rig.drain()
    assert rig.loaded(graph) == whole
    assert found(rig, keys).blocks_by_tier() == {HOST: 5}, "it is kept"


def test_a_point_on_a_tier_that_is_not_read_now_is_not_found() -> None:
    rig, keys = rig_of(), chain(*range(5))
    saved(rig, keys, 2, 4)
    rig.manager.invalidation.evict(HOST, list(point_keys(keys[3], ROWS)))
    assert found(rig, keys).blocks == 4
    breaker = rig.manager.tiers.breakers.reads["disk"]
    for _ in range(3):
        breaker.failed()
    assert not breaker.allows()
    assert depths(found(rig, keys)) == Depths(2, 2 + ROWS, ROWS, reached=4)
    rig.manager.invalidation.evict(HOST, list(point_keys(keys[1], ROWS))[-1:])
    assert depths(found(rig, keys)) == Depths(0, 0, 0, reached=4)
    rig.now += 1000
    assert found(rig, keys).blocks == 4


@pytest.mark.parametrize("row", range(ROWS))
def test_a_row_that_rotted_takes_its_point_and_the_shorter_one_is_found(row: int) -> None:
    rig, keys = rig_of(), chain(*range(5))
    saved(rig, keys, 2, 4)
    bad = point_keys(keys[3], ROWS)
    rig.manager.invalidation.evict(HOST, [*keys, *bad])
    whole = [*keys[:4], *bad]
    [slot] = rig.manager.index.slots("disk", whole, 4 + row, 5 + row).tolist()
    rig.media.tiers["disk"][slot] = (bad[row], b"rot")
    graph = rig.load_point(keys)
    assert graph is not None
    rig.drain()
    assert rig.loaded(graph)[4 + row] is None
    assert depths(found(rig, keys)) == Depths(2, 2 + ROWS, ROWS, reached=4)
    assert rig.save_point(keys, 4) is not None, "the next who computes it saves it"
    rig.drain()
    assert found(rig, keys).blocks == 4


def test_a_save_of_which_a_copy_failed_leaves_no_point() -> None:
    rig, keys = rig_of(), chain(1, 2)
    rig.media.fail_next = RowError.INTERNAL
    rig.save_point(keys, 2)
    rig.drain()
    assert depths(found(rig, keys)) == Depths(0, 0, 0, 0)
    rig.manager.check_integrity()


def test_what_is_deleted_takes_the_points_that_continue_it() -> None:
    rig, keys = rig_of(), chain(*range(4))
    saved(rig, keys, 2, 3)
    for tier in (HOST, "disk"):
        rig.manager.invalidation.delete(tier, [keys[2]])
    assert found(rig, keys).blocks == 2
    assert rig.manager.clear(NAMESPACE) == 2 * (2 + ROWS)


@pytest.mark.parametrize("write", WritePolicy)
def test_points_go_down_with_their_blocks(write: WritePolicy) -> None:
    rig, keys = rig_of(host=16, write=write), chain(1, 2)
    saved(rig, keys, 2)
    if write is WritePolicy.WRITE_BACK:
        for name in range(3, 6):
            saved(rig, chain(name, 1), 2)
            rig.manager.maintain()
            rig.drain()
    rig.load_point(keys)
    rig.drain()
    whole = [*keys, *point_keys(keys[1], ROWS)]
    rig.manager.invalidation.evict(HOST, whole)
    assert found(rig, keys).blocks_by_tier() == {"disk": 5}


def test_after_a_restart_points_are_found_on_disk() -> None:
    old, keys = rig_of(), chain(*range(5))
    saved(old, keys, 2, 4)
    records = [
        BlockRecord(info.slots["disk"], info.key, info.parent, info.namespace, stamp)
        for stamp, info in enumerate(old.manager.index.admin.list_blocks())
    ]
    new = rig_of()
    new.media.tiers["disk"] = dict(old.media.tiers["disk"])
    assert new.manager.index.admin.restore("disk", records) == []
    hit = found(new, keys)
    assert (hit.blocks, hit.blocks_by_tier()) == (4, {"disk": 4 + ROWS})
    graph = new.load_point(keys)
    assert graph is not None
    new.drain()
    assert new.loaded(graph) == list(hit.keys)


def test_who_watches_the_index_sees_rows_as_blocks() -> None:
    """`kvcore.runtime.build` leaves them out for who publishes events."""
    rig, keys = rig_of(disk=0), chain(1, 2)
    saved(rig, keys, 2)
    assert rig.events == [Event(True, HOST, (*keys, *point_keys(keys[1], ROWS)))]
