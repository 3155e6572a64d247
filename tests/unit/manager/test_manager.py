"""The leader against simulated media, case by case."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.errors import CapacityError, KVCoreError, TransferError
from kvcore.index import Evicted
from kvcore.manager import HOST, Event, Readiness, WritePolicy
from kvcore.manager import manager as manager_module
from kvcore.manager.base import Room
from kvcore.manager.remote_lookup import Believed
from kvcore.transfer.graph import Path, Span, TransferGraph
from kvcore.transfer.plan import layer_steps
from support.clock import Clock
from support.manager import NAMESPACE, ManagerRig, chain
from support.transfers import load_blocks


def test_a_saved_chain_comes_back_from_host() -> None:
    rig = ManagerRig()
    keys = chain(1, 2, 3, 4)
    rig.save(keys)
    assert rig.manager.get_match(keys, NAMESPACE).depth == 0, "published before its bytes are there"
    rig.drain()
    graph = rig.load([*keys, b"?" * 16])
    assert graph is not None
    rig.drain()
    assert rig.loaded(graph) == keys
    assert {op.path for op in graph.ops} == {Path.H2D}
    assert rig.manager.in_flight == 0


def test_a_prefix_is_shared_and_saved_once() -> None:
    rig = ManagerRig()
    rig.save(chain(1, 2, 3))
    rig.drain()
    second = rig.save(chain(1, 2, 9))
    assert second is not None
    assert second.keys == tuple(chain(1, 2, 9)[2:])
    assert rig.save(chain(1, 2)) is None


def test_a_block_being_saved_is_not_saved_again() -> None:
    rig = ManagerRig()
    rig.save(chain(1, 2))
    assert rig.save(chain(1, 2)) is None
    child = rig.save(chain(1, 2, 3))
    assert child is not None
    assert child.num_rows == 1
    rig.drain(3)
    assert rig.manager.get_match(chain(1, 2, 3), NAMESPACE).depth == 3


def test_a_planned_load_keeps_its_blocks_until_it_is_launched_well_or_not() -> None:
    rig = ManagerRig()
    keys = chain(1, 2)
    rig.save(keys)
    rig.drain()
    pins = rig.manager.index._tables[0].pins
    hit = rig.manager.get_match(keys, NAMESPACE)
    rig.manager.drop(rig.manager.plan_load(hit, Span(0, 2)))
    assert not pins
    planned = rig.manager.plan_load(hit, Span(0, 2))
    assert pins
    assert rig.manager.in_flight == 0
    with pytest.raises(TransferError, match="touches the device but the graph has no unit table"):
        rig.manager.launch(planned)
    assert not pins
    with pytest.raises(KeyError):  # exactly once
        rig.manager.drop(planned)


def test_a_load_that_no_step_waits_for_is_cut() -> None:
    rig = ManagerRig(host=8)  # its copies have 2 blocks
    keys = chain(1, 2, 3, 4, 5)
    rig.save(keys)
    rig.drain()
    hit = rig.manager.get_match(keys, NAMESPACE)
    planned = rig.manager.plan_load(hit, Span(0, 5))
    assert [tuple(op.rows) for op in planned.graph.ops] == [(0, 2), (2, 4), (4, 5)]
    rig.manager.drop(planned)
    step = rig.manager.plan_load(hit, Span(0, 5), layers=layer_steps(2))
    assert {tuple(op.rows) for op in step.graph.ops} == {(0, 5)}
    rig.manager.drop(step)


@pytest.mark.parametrize("blocks", [(0, 3), (2, 2), (-1, 1)])
def test_what_a_hit_does_not_cover_is_not_planned(blocks: tuple[int, int]) -> None:
    rig = ManagerRig()
    rig.save(chain(1, 2))
    rig.drain()
    hit = rig.manager.get_match(chain(1, 2, 3), NAMESPACE)
    with pytest.raises(TransferError, match="of 2"):
        rig.manager.plan_load(hit, Span(*blocks))
    rig.manager.check_integrity()
    assert not rig.manager.index._tables[0].pins


@pytest.mark.parametrize("write", WritePolicy)
def test_a_save_that_is_dropped_leaves_nothing_reserved(write: WritePolicy) -> None:
    rig = ManagerRig(host=3, write=write)
    old, keys = chain(7, 8), chain(1, 2, 3)
    rig.save(old)
    rig.drain()
    planned = rig.manager.plan_save(keys, NAMESPACE, 3)
    assert planned is not None
    assert planned.blocks == Span(0, 3)
    rig.manager.drop(planned)
    rig.manager.check_integrity()
    assert rig.manager.get_match(old, NAMESPACE).in_host == 0, "room was made for it"
    assert rig.metrics.snapshot()["kvcore_save_skipped_total"] == {"aborted": 3}
    rig.save(keys)
    rig.drain()
    assert rig.manager.get_match(keys, NAMESPACE).depth == 3


def test_a_fetch_that_hangs_is_given_up_and_its_tier_is_blamed() -> None:
    """Its read may never end, and no worker reports a deadline for what runs already."""
    rig, keys = ManagerRig(host=4, disk=16), chain(1, 2, 3)
    on_disk(rig, keys)
    hit = rig.manager.get_match(keys, NAMESPACE)
    for _ in range(2):
        planned = rig.manager.plan_fetch(hit, 1 if not rig.manager.in_flight else 3, deadline_s=2.0)
        assert planned is not None
        rig.manager.launch(planned)
    breaker = rig.manager.tiers.breakers.reads["disk"]
    failures: list[str] = []
    breaker.failed = lambda: failures.append("disk")  # type: ignore[method-assign]
    rig.now = 1.9
    rig.manager.maintain()
    assert not failures
    rig.now = 2.1
    for _ in range(3):
        rig.manager.maintain()
    assert failures == ["disk"] * 2, "each once"
    rig.drain()
    assert failures == ["disk"] * 2
    assert rig.manager.index.held(HOST, keys) == 3, "what came late is kept"


def test_a_child_is_never_published_before_its_parent() -> None:
    rig = ManagerRig(disk=0)
    rig.save(chain(1, 2))
    rig.save(chain(1, 2, 3))
    rig.media.step(1)  # the child's copy ends first
    rig.manager.pump()
    assert rig.manager.get_match(chain(1, 2, 3), NAMESPACE).depth == 0
    rig.drain()
    assert rig.manager.get_match(chain(1, 2, 3), NAMESPACE).depth == 3


def test_what_left_host_memory_is_loaded_from_disk_and_kept_again() -> None:
    rig = ManagerRig(host=4, disk=16)
    old, new = chain(1, 2, 3, 4), chain(7, 8, 9, 10)
    for keys in (old, new):
        rig.save(keys)
        rig.drain()
    hit = rig.manager.get_match(old, NAMESPACE)
    assert hit.blocks_by_tier() == {"disk": 4}
    graph = rig.load(old)
    assert graph is not None
    rig.drain()
    assert rig.loaded(graph) == old
    assert rig.manager.get_match(old, NAMESPACE).blocks_by_tier() == {HOST: 4}
    assert rig.metrics.snapshot()["kvcore_evictions_total"] == {HOST: 8}


def test_a_load_larger_than_the_host_tier_passes_through_staging() -> None:
    rig = ManagerRig(host=4, disk=32)
    keys = chain(*range(12))
    for stop in (4, 8, 12):
        rig.save(keys[:stop])
        rig.drain()
        if stop < 12:
            rig.load(keys[:stop])
            rig.drain()
    depth = rig.manager.get_match(keys, NAMESPACE).depth
    graph = rig.load(keys)
    assert graph is not None
    rig.drain(5)
    assert rig.loaded(graph) == keys[:depth]
    rig.manager.check_integrity()


@pytest.mark.parametrize("start", [1, 2, 3])
@pytest.mark.parametrize("device", [0, 4])
def test_a_load_may_begin_behind_what_the_engine_holds(start: int, device: int) -> None:
    rig = ManagerRig(host=4, disk=16, device=device)
    old = chain(1, 2, 3, 4)
    for keys in (old, chain(7, 8, 9, 10)):
        rig.save(keys)
        rig.drain()
    graph = rig.load(old, start)
    assert graph is not None
    rig.drain()
    assert rig.loaded(graph) == old[start:]


def test_a_read_takes_no_more_blocks_than_there_is_staging() -> None:
    assert ManagerRig(staging=2, batch=3).manager.flights.batch == 2
    assert ManagerRig(staging=4, batch=3).manager.flights.batch == 3


def test_a_load_that_rescues_a_block_on_its_way_out_leaves_no_slot_reserved() -> None:
    """The block before those that it wanted to keep in host memory is published again."""
    rig = ManagerRig(host=8, disk=16)
    keys = chain(*range(8))
    rig.save(keys)
    rig.drain()
    index = rig.manager.index
    index.evictions.evict(HOST, 1)
    eviction = index.evictions.begin(HOST, 1)
    assert [block.key for block in eviction.blocks] == [keys[6]]
    graph = rig.load(keys, 6)
    assert graph is not None
    rig.drain()
    assert rig.loaded(graph) == keys[6:]
    index.evictions.finish(eviction)
    rig.manager.clear()
    assert index.num_used(HOST) == 0, "a reservation leaked"


def test_what_another_load_brings_to_host_memory_is_coming() -> None:
    rig = ManagerRig(host=4, disk=16)
    old = chain(1, 2, 3, 4)
    for keys in (old, chain(7, 8, 9, 10)):
        rig.save(keys)
        rig.drain()
    manager = rig.manager
    hit = manager.get_match(old, NAMESPACE)
    assert not manager.coming(hit, 4), "nothing brings it"
    assert rig.fetch(old, lambda: None)
    assert [manager.coming(hit, stop) for stop in (0, 1, 4)] == [False, True, True]
    rig.drain()
    assert not manager.coming(manager.get_match(old, NAMESPACE), 4), "it is there"


def test_a_lookup_that_is_no_longer_true_leaves_nothing_pinned() -> None:
    """The first source is still held and is pinned; the second has left its tier."""
    rig = ManagerRig(host=4, disk=16)
    old = chain(1, 2, 3, 4)
    rig.save(old)
    rig.drain()
    rig.save(chain(7, 8))
    rig.drain()
    hit = rig.manager.get_match(old, NAMESPACE)
    assert hit.blocks_by_tier() == {HOST: 2, "disk": 2}
    stale = replace(hit, keys=(*old[:3], b"gone" * 4))
    with pytest.raises(KVCoreError, match="not published"):
        load_blocks(rig.manager, stale, 0, 4, rig.units(4))
    assert rig.manager.in_flight == 0
    rig.save(chain(21, 22, 23, 24))  # needs every slot, so none may be pinned
    rig.drain()
    assert rig.manager.get_match(chain(21, 22, 23, 24), NAMESPACE).blocks_by_tier() == {HOST: 4}


def test_a_fetch_stops_in_host_memory_and_a_full_one_is_no_error() -> None:
    rig = ManagerRig(host=4, disk=16)
    old, new = chain(1, 2, 3, 4), chain(7, 8, 9, 10)
    for keys in (old, new):
        rig.save(keys)
        rig.drain()
    ended: list[bool] = []
    assert rig.fetch(old, lambda: ended.append(True))
    assert {op.path for _, op in rig.media.todo} == {Path.DISK2H}
    assert not rig.fetch(new, lambda: None), "no slot is free"
    rig.drain()
    assert ended == [True]
    assert rig.manager.get_match(old, NAMESPACE).blocks_by_tier() == {HOST: 4}
    assert not rig.fetch(old, lambda: None), "it is there"
    rig.manager.check_integrity()


def test_a_quota_makes_a_save_shorter_and_counts_what_was_not_saved() -> None:
    rig = ManagerRig()
    rig.manager.invalidation.set_quota(HOST, "ann", [NAMESPACE], 3)
    rig.save(chain(1, 2, 3, 4, 5))
    rig.drain()
    assert rig.manager.get_match(chain(1, 2, 3, 4, 5), NAMESPACE).depth == 3
    assert rig.metrics.snapshot()["kvcore_save_skipped_total"] == {"no_room": 2}


def test_write_back_keeps_what_host_memory_has_no_room_for() -> None:
    rig = ManagerRig(host=8, disk=32, write=WritePolicy.WRITE_BACK)
    first = chain(1, 2, 3, 4, 5, 6, 7, 8)
    rig.save(first)
    rig.drain()
    assert rig.manager.index.num_used("disk") == 0
    rig.manager.maintain()
    assert rig.manager.index.num_free(HOST) == 0, "its bytes are not on the disk yet"
    assert rig.save(chain(9)) is None
    rig.drain()
    assert rig.manager.index.num_used("disk") > 0
    hit = rig.manager.get_match(first, NAMESPACE)
    assert hit.depth == 8
    assert rig.manager.index.num_free(HOST) > 0
    graph = rig.load(first)
    assert graph is not None
    rig.drain()
    assert rig.loaded(graph) == first


def test_selective_writes_wait_for_the_second_use() -> None:
    rig = ManagerRig(host=8, disk=32, write=WritePolicy.SELECTIVE, admit=2)
    keys = chain(1, 2, 3)
    rig.save(keys)
    rig.drain()
    assert rig.manager.index.num_used("disk") == 0
    rig.load(keys)
    rig.drain()
    assert rig.manager.index.num_used("disk") == 3


def test_a_second_backing_tier_is_written_behind_the_first() -> None:
    rig = ManagerRig(host=8, disk=16, far=16)
    rig.save(chain(1, 2, 3))
    rig.drain()
    assert rig.manager.index.num_used("far") == 3


def test_staging_in_use_is_a_named_refusal_that_leaves_nothing_behind() -> None:
    rig = ManagerRig(host=2, disk=16, staging=3)
    long, other = chain(1, 2, 3, 4, 5), chain(6, 7)
    rig.save(long[:2])
    rig.drain()
    rig.save(other)
    rig.drain()
    hit = rig.manager.get_match(long, NAMESPACE)
    rig.manager.flights.staging.clear()
    blocker = rig.manager.get_match(other, NAMESPACE)
    pin = rig.manager.index.pin(HOST, other[-1])
    with pytest.raises(CapacityError, match=r"host\.capacity"):
        load_blocks(rig.manager, hit, 0, 2, rig.units(2))
    rig.manager.index.unpin(pin)
    assert blocker.depth == 2
    assert rig.manager.in_flight == 0
    rig.manager.check_integrity()


def test_a_load_waits_only_for_what_will_come() -> None:
    """ "Later" must be followed by "ready" when the loads in flight end, or a request starves."""
    rig = ManagerRig(host=2, disk=16, staging=2, batch=2)
    long, other = chain(1, 2, 3, 4, 5), chain(6, 7)
    for keys in (long[:2], other):
        rig.save(keys)
        rig.drain()
    hit = rig.manager.get_match(long, NAMESPACE)
    pin = rig.manager.index.pin(HOST, other[-1])
    assert rig.manager.can_load(hit, 0, 2) is Readiness.READY
    load_blocks(rig.manager, hit, 0, 2, rig.units(2))
    assert rig.manager.can_load(hit, 0, 2) is Readiness.LATER
    rig.drain()
    assert rig.manager.can_load(hit, 0, 2) is Readiness.READY
    rig.manager.flights.staging.clear()
    assert rig.manager.can_load(hit, 0, 2) is Readiness.NEVER
    rig.manager.index.unpin(pin)


def test_cancel_returns_everything() -> None:
    rig = ManagerRig(host=4, disk=16)
    keys = chain(1, 2, 3, 4)
    for saved in (keys, chain(7, 8, 9, 10)):
        rig.save(saved)
        rig.drain()
    graph = rig.load(keys)
    assert graph is not None
    rig.manager.cancel(graph.graph_id)
    assert not rig.media.todo, "nothing of it is carried out any more"
    assert rig.manager.wait(graph.graph_id, timeout=5)
    assert rig.manager.in_flight == 0
    rig.manager.check_integrity()
    assert rig.manager.get_match(keys, NAMESPACE).depth == 4


def test_clear_forgets_a_namespace() -> None:
    rig = ManagerRig()
    rig.save(chain(1, 2))
    rig.drain()
    assert len(rig.media.tiers["disk"]) == 2
    told: list[Event] = []
    rig.manager.index.watch(told.append)
    assert rig.manager.clear(NAMESPACE) == 4, "two blocks in each of two tiers"
    assert rig.manager.get_match(chain(1, 2), NAMESPACE).depth == 0
    assert not rig.media.tiers["disk"], "they would come back with a restart"
    assert {(e.stored, e.tier, len(e.keys)) for e in told} == {
        (False, "host", 2),
        (False, "disk", 2),
    }


@pytest.mark.parametrize("again", [(0,), (1, 2, 0), (0, 0, 0, 2)])
@pytest.mark.parametrize("copied", [True, False])
def test_host_slots_of_what_was_cleared_are_not_reused_while_it_is_written(
    again: tuple[int, ...], copied: bool
) -> None:
    """A slot that is reused too early would put another block's bytes under the cleared key.

    A restart would find them by that key, wrong and with a valid checksum.
    """
    rig = ManagerRig(host=6, disk=10, batch=3)
    rig.save(chain(0, 0, 0, 0))
    if copied:
        rig.media.step(0)
        rig.manager.pump()
    rig.manager.clear()
    if not copied:
        rig.media.step(0)
        rig.manager.pump()
    rig.save(chain(*again))
    for pick in (50, 9, 3):
        rig.media.step(pick)  # asserts that a tier is given what is its
        rig.manager.check_integrity()
    rig.drain()
    rig.manager.clear()
    rig.manager.check_integrity()
    assert rig.manager.index.num_used(HOST) == 0


def test_a_cleared_tier_is_told_in_a_few_words() -> None:
    """Slots are sent as runs, because a tier may have millions, and every worker gets them."""
    rig = ManagerRig(host=6, disk=1_000_000)
    rig.save(chain(1, 2, 3))
    rig.drain()
    rig.manager.clear()
    assert rig.media.invalidated == [("disk", [(0, 1_000_000)])]
    assert not rig.media.tiers["disk"]


def test_what_is_written_after_a_clear_does_not_come_back() -> None:
    rig = ManagerRig(host=6, disk=10)
    rig.save(chain(1, 2, 3, 4))
    rig.manager.clear()
    rig.drain()
    assert not rig.media.tiers["disk"], "a restart would find these"
    rig.save(chain(1, 2))
    rig.drain()
    assert {key for key, _ in rig.media.tiers["disk"].values()} == set(chain(1, 2))


def test_a_load_reads_its_own_blocks_though_they_were_cleared() -> None:
    rig = ManagerRig(host=4, disk=16)
    keys = chain(1, 2, 3, 4)
    for saved in (keys, chain(7, 8, 9, 10)):
        rig.save(saved)
        rig.drain()
    graph = rig.load(keys)
    assert graph is not None
    rig.media.step(0)  # a batch has come from the disk, into host memory
    rig.manager.pump()
    rig.manager.clear()
    rig.save(chain(5, 6, 7))
    for _ in range(8):
        rig.media.step(50)  # asserts what is copied to the device
    rig.drain()
    rig.manager.check_integrity()


@given(st.integers(1, 30), st.integers(0, 30))
def test_hit_counts_blocks_by_tier(host: int, disk: int) -> None:
    rig = ManagerRig(host=64, disk=128)
    keys = chain(*range(host + disk))
    rig.save(keys)
    rig.drain()
    hit = rig.manager.get_match(keys, NAMESPACE)
    assert sum(hit.blocks_by_tier(1, host).values()) == host - 1


def paths(graph: TransferGraph) -> set[Path]:
    return {op.path for op in graph.ops}


def on_disk(rig: ManagerRig, keys: list[bytes]) -> None:
    """Put blocks into the disk tier only."""
    rig.save(keys)
    rig.drain()
    rig.manager.invalidation.evict(HOST, keys)
    assert rig.manager.get_match(keys, NAMESPACE).blocks_by_tier() == {"disk": len(keys)}


def test_a_load_goes_past_host_memory_and_leaves_nothing_there() -> None:
    rig, keys = ManagerRig(host=8, disk=16, batch=4, device=4), chain(1, 2, 3, 4, 5)
    on_disk(rig, keys)
    graph = rig.load(keys)
    assert graph is not None
    assert paths(graph) == {Path.DISK2D, Path.D2D}
    assert set(graph.host_slots) == {-1}
    assert set(graph.staged) == {0, 1}, "half of the places are left for another load"
    rig.drain()
    assert rig.loaded(graph) == keys
    assert rig.manager.index.held(HOST, keys) == 0
    assert sorted(rig.manager.flights.device) == [0, 1, 2, 3]


def test_what_host_memory_holds_is_loaded_from_there() -> None:
    rig, keys = ManagerRig(host=8, disk=16, device=4), chain(1, 2, 3, 4)
    on_disk(rig, keys)
    rig.save(keys[:2])
    rig.drain()
    graph = rig.load(keys)
    assert graph is not None
    copied = {(op.path, op.rows) for op in graph.ops if op.path.touches_device}
    assert copied == {(Path.H2D, Span(0, 2)), (Path.D2D, Span(2, 4))}
    assert graph.staged[:2] == graph.host_slots[2:] == (-1, -1)
    rig.drain()
    assert rig.loaded(graph) == keys


def test_loads_beyond_the_places_on_the_device_go_through_host_memory() -> None:
    rig = ManagerRig(host=8, disk=16, device=2)
    chains = [chain(i, 9) for i in range(3)]
    for keys in chains:
        on_disk(rig, keys)
    graphs = [rig.load(keys) for keys in chains]
    ways = [paths(graph) for graph in graphs if graph is not None]
    assert ways == [{Path.DISK2D, Path.D2D}] * 2 + [{Path.DISK2H, Path.H2D}]
    rig.drain()
    assert [rig.loaded(graph) for graph in graphs if graph is not None] == chains


def test_what_is_brought_to_be_kept_goes_to_host_memory() -> None:
    rig, keys = ManagerRig(host=8, disk=16, device=4), chain(1, 2, 3)
    on_disk(rig, keys)
    planned = rig.manager.plan_fetch(rig.manager.get_match(keys, NAMESPACE), 2)
    assert planned is not None
    assert paths(rig.manager.launch(planned)) == {Path.DISK2H}
    rig.drain()
    assert rig.manager.index.held(HOST, keys) == 2


def test_what_goes_on_in_a_remote_tier_goes_through_host_memory() -> None:
    rig, keys = ManagerRig(host=8, disk=16, far=16, device=4), chain(1, 2, 3, 4)
    on_disk(rig, keys[:2])
    rig.save(keys)
    rig.drain()
    rig.manager.invalidation.evict(HOST, keys)
    rig.manager.invalidation.evict("disk", keys[2:])
    found = rig.manager.get_match(keys, NAMESPACE).blocks_by_tier()
    assert found == {"disk": 2, "far": 2}
    graph = rig.load(keys)
    assert graph is not None
    assert not any(op.path.is_staged for op in graph.ops)
    rig.drain()
    assert rig.manager.index.held(HOST, keys) == 4


def test_a_block_that_rotted_on_its_way_past_host_memory_is_forgotten() -> None:
    rig, keys = ManagerRig(host=8, disk=16, device=4), chain(1, 2, 3)
    on_disk(rig, keys)
    [slot] = rig.manager.index.slots("disk", keys, 1, 2).tolist()
    rig.media.tiers["disk"][slot] = (keys[1], b"rot")
    graph = rig.load(keys)
    assert graph is not None
    rig.drain()
    assert rig.loaded(graph) == [keys[0], None, keys[2]]
    assert rig.manager.get_match(keys, NAMESPACE).depth == 1


def test_room_is_what_is_free_or_given_back() -> None:
    """By hand: reads pass through staging, or go into as many free slots of the host tier."""
    READY, NEVER = Readiness.READY, Readiness.NEVER
    room = Room(full=False, free=3, staging=False, lent=False)
    assert [room.admits(below) for below in (0, 3, 4)] == [READY, READY, NEVER]
    assert room._replace(lent=True).admits(4) is Readiness.LATER
    assert room._replace(staging=True).admits(4) is READY
    full = room._replace(full=True)
    assert full.admits(0) is Readiness.LATER
    assert full._replace(moving=False).admits(0) is NEVER


def test_what_is_to_be_done_now_and_then_is_done_at_each_maintenance() -> None:
    manager, done = ManagerRig().manager, []
    manager.upkeep += [lambda: done.append("one"), lambda: done.append("other")]
    manager.maintain()
    assert done == ["one", "other"]


class Store:
    """A view of a store that has answered, or not, and says what it was asked."""

    def __init__(self, asking: bool, found: Believed | None = None) -> None:
        self._asking, self._found = asking, found
        self.asked: list[tuple[Any, ...]] = []

    def ask(self, *given: Any) -> bool:
        self.asked.append(given)
        return self._asking

    def settle(self, keys: Sequence[bytes], namespace: bytes) -> Believed | None:
        assert namespace == NAMESPACE
        return self._found


def with_stores(rig: ManagerRig, *stores: Store) -> None:
    lookups: Any = dict(zip(("disk", "far"), stores, strict=False))
    rig.manager.tiers = replace(rig.manager.tiers, lookups=lookups)


@pytest.mark.parametrize("asking", [(False, False), (False, True), (True, False), (True, True)])
def test_every_store_is_asked_for_what_is_not_held(asking: tuple[bool, bool]) -> None:
    rig = ManagerRig(far=16)
    stores = [Store(one) for one in asking]
    keys = chain(1, 2)
    rig.save(keys[:1])
    rig.drain()
    with_stores(rig, *stores)
    hit = rig.manager.get_match(keys, NAMESPACE)
    assert rig.manager.ask_stores(hit, 1) is any(asking)
    assert [store.asked for store in stores] == [[(hit.keys, None, NAMESPACE, 1)]] * 2


@pytest.mark.parametrize(("saved", "computed"), [(2, 0), (0, 2), (1, 2), (0, 3)])
def test_no_store_is_asked_for_what_is_held_or_computed(saved: int, computed: int) -> None:
    rig, keys, store = ManagerRig(), chain(1, 2), Store(asking=True)
    rig.save(keys[:saved])
    rig.drain()
    with_stores(rig, store)
    assert not rig.manager.ask_stores(rig.manager.get_match(keys, NAMESPACE), computed)
    assert not store.asked


def test_what_a_store_answered_is_counted_once() -> None:
    rig = ManagerRig(far=16)
    gone = Evicted(key=b"k" * 16, parent=b"p" * 16, namespace=NAMESPACE, slot=0)
    with_stores(rig, Store(True), Store(False, Believed(0, 0, [gone], "late")))
    rig.manager.get_match(chain(1), NAMESPACE)
    told = rig.metrics.snapshot()
    assert told["kvcore_store_lookups_total"] == {"far|late": 1}
    assert told["kvcore_evictions_total"] == {"far": 1}


def test_silent_stores_are_waited_for_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time to wait is for all stores, not for each."""
    clock = Clock()
    waited: list[float] = []

    class Silent:
        def wait(self, timeout: float) -> bool:
            waited.append(timeout)
            clock.now += timeout
            return False

    monkeypatch.setattr(manager_module.time, "monotonic", clock)  # type: ignore[attr-defined]
    manager = ManagerRig().manager
    lookups: Any = {"near": Silent(), "far": Silent()}
    manager.tiers = replace(manager.tiers, lookups=lookups)
    assert not manager.wait_stores(0.5)
    assert waited == [0.5, 0.0]
