"""The leader while media fail: corrupt blocks, dead tiers, late reads."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore._util.circuit_breaker import Breaker, BreakerState
from kvcore.errors import TransferError
from kvcore.manager import HOST, Readiness, WritePolicy
from kvcore.manager.inflight import STALLED_S
from kvcore.transfer.graph import OpReport, Path, RowError
from support.manager import NAMESPACE, ManagerRig, chain
from support.transfers import load_blocks, save_blocks


def test_a_failed_save_publishes_what_came_before_it_only() -> None:
    rig = ManagerRig()
    rig.save(chain(1))
    rig.drain()
    rig.media.fail_next = RowError.INTERNAL
    rig.save(chain(1, 2, 3))
    rig.drain()
    assert rig.manager.get_match(chain(1, 2, 3), NAMESPACE).depth == 1
    rig.save(chain(1, 2, 3))
    rig.drain()
    assert rig.manager.get_match(chain(1, 2, 3), NAMESPACE).depth == 3


@given(
    blocks=st.integers(1, 8),
    copy=st.none() | st.integers(1, 4),
    fails=st.dictionaries(
        st.integers(0, 7), st.sampled_from([RowError.INTERNAL, RowError.CANCELLED]), max_size=2
    ),
    disk=st.booleans(),
    picks=st.randoms(use_true_random=False),
)
def test_the_parts_of_a_save_are_published_at_once(
    blocks: int,
    copy: int | None,
    fails: dict[int, RowError],
    disk: bool,
    picks: random.Random,
) -> None:
    """With the last one, in whatever order they end, as a save in one part that fails there."""
    rig = ManagerRig(disk=16 if disk else 0, copy=copy)
    keys = chain(*range(blocks))
    graph = rig.save(keys)
    assert graph is not None
    copies = [op for op in graph.ops if op.path is Path.D2H]
    assert len(copies) == (1 if copy is None else -(-blocks // copy))
    picks.shuffle(copies)
    for op in copies:
        assert rig.manager.get_match(keys, NAMESPACE).depth == 0, "half of a save is published"
        assert rig.save(keys) is None, "its blocks are saved twice"
        failed = {row: fails[row] for row in range(*op.rows) if row in fails}
        rig.manager.complete(OpReport(graph.graph_id, op.op_id, failed))
        rig.manager.check_integrity()
    good = min([row for row in fails if row < blocks], default=blocks)
    assert rig.manager.index.held(HOST, keys) == good
    for op in graph.ops:
        if op.path is Path.H2DISK:
            failed = {row: RowError.UPSTREAM for row in range(*op.rows) if row in fails}
            rig.manager.complete(OpReport(graph.graph_id, op.op_id, failed))
    assert rig.manager.in_flight == 0
    assert rig.manager.index.held(HOST, keys) == good
    rig.manager.check_integrity()
    rig.manager.clear()
    assert rig.manager.index.num_used(HOST) == 0, "a slot is left over"


def test_a_rotten_block_is_quarantined_with_all_that_stands_on_it() -> None:
    rig = ManagerRig(host=4, disk=16)
    keys = chain(1, 2, 3, 4)
    rig.save(keys)
    rig.drain()
    rig.save(chain(7, 8, 9, 10))
    rig.drain()
    slot = rig.manager.index.slots("disk", keys, 2, 3).tolist()[0]
    rig.media.tiers["disk"][slot] = (keys[2], b"rot")
    rig.load(keys)
    rig.drain()
    assert rig.manager.get_match(keys, NAMESPACE).depth == 2
    assert rig.metrics.snapshot()["kvcore_corrupt_blocks_total"] == {"disk": 1}
    assert any(not event.stored and keys[2] in event.keys for event in rig.events)


def test_a_dead_tier_is_left_alone_then_probed() -> None:
    rig = ManagerRig(host=4, disk=16)
    keys = chain(1, 2, 3, 4)
    rig.save(keys)
    rig.drain()
    rig.save(chain(7, 8, 9, 10))
    rig.drain()
    rig.media.dead.add("disk")
    for _ in range(3):
        rig.load(keys)
        rig.drain()
    assert rig.manager.get_match(keys, NAMESPACE).depth == 0, "a dead tier still promises blocks"
    rig.now += 10
    rig.media.dead.clear()
    graph = rig.load(keys)
    assert graph is not None, "the tier was never probed again"
    rig.drain()
    assert rig.loaded(graph) == keys
    assert rig.manager.get_match(keys, NAMESPACE).depth == 4


@pytest.mark.parametrize("why", [RowError.DEADLINE, RowError.CANCELLED])
def test_nothing_waits_for_a_load_that_was_given_up(why: RowError) -> None:
    """A read hangs and keeps the staging slots. Another request is computed instead of waiting."""
    rig = ManagerRig(host=2, disk=16, staging=2, batch=2)
    long, other = chain(1, 2, 3, 4, 5), chain(6, 7)
    for keys in (long[:2], other):
        rig.save(keys)
        rig.drain()
    hit = rig.manager.get_match(long, NAMESPACE)
    pin = rig.manager.index.pin(HOST, other[-1])
    graph = load_blocks(rig.manager, hit, 0, 2, rig.units(2))
    reads = [op for op in graph.ops if op.path.reads_tier]
    for op in graph.ops:
        if op not in reads:
            rig.media.reports.append(
                OpReport(graph.graph_id, op.op_id, dict.fromkeys(range(*op.rows), why))
            )
    assert rig.manager.can_load(hit, 0, 2) is Readiness.LATER
    rig.manager.pump()
    assert rig.manager.can_load(hit, 0, 2) is Readiness.NEVER
    for op in reads:  # it comes back after all
        rig.media.reports.append(OpReport(graph.graph_id, op.op_id, {}))
    rig.manager.pump()
    assert rig.manager.can_load(hit, 0, 2) is Readiness.READY
    rig.manager.index.unpin(pin)
    rig.manager.check_integrity()


def test_nothing_waits_behind_saves_that_do_not_end() -> None:
    """Writes to the disk hang, so saves fill the graphs in flight.

    Loads wait as long as some graphs end, but not forever.
    """
    rig = ManagerRig(host=16, disk=16)
    rig.manager.flights._max_in_flight = 3
    rig.save(chain(1, 2))
    rig.drain()
    hit = rig.manager.get_match(chain(1, 2), NAMESPACE)
    rig.now = 100.0  # idle for long
    for i in range(3):
        rig.save(chain(10 + i))
    assert rig.manager.can_load(hit, 0, 2) is Readiness.LATER
    rig.now += 2 * STALLED_S
    assert rig.manager.can_load(hit, 0, 2) is Readiness.NEVER
    assert rig.media.step(0)
    rig.manager.pump()
    assert rig.manager.can_load(hit, 0, 2) is not Readiness.NEVER
    rig.drain()
    assert rig.manager.can_load(hit, 0, 2) is Readiness.READY


def test_breaker_backs_off_further_each_time_a_probe_fails() -> None:
    now = [0.0]
    breaker = Breaker("t", threshold=2, pause=5, max_pause=12, clock=lambda: now[0])
    breaker.failed()
    assert breaker.allows()
    breaker.failed()
    assert breaker.state is BreakerState.OPEN
    for pause in (5, 10, 12, 12):
        now[0] += pause - 0.1
        assert not breaker.allows()
        now[0] += 0.2
        assert breaker.state is BreakerState.HALF_OPEN
        breaker.started()
        assert not breaker.allows(), "one probe at a time"
        breaker.failed()
    now[0] += 13
    breaker.started()
    breaker.succeeded()
    assert breaker.state is BreakerState.CLOSED


@pytest.mark.parametrize("found", ["corrupt", "missing", "cancelled"])
def test_a_probe_that_ends_without_failing_leaves_the_tier_usable(found: str) -> None:
    """The medium answered, or was not asked at all. Neither may disable it for good."""
    rig = ManagerRig(host=4, disk=16)
    keys = chain(1, 2, 3, 4)
    for saved in (keys, chain(7, 8, 9, 10)):
        rig.save(saved)
        rig.drain()
    breaker = rig.manager.tiers.breakers.reads["disk"]
    for _ in range(3):
        breaker.failed()
    rig.now = 6
    graph = rig.load(keys)
    assert graph is not None
    assert not breaker.allows(), "one probe at a time"
    if found == "cancelled":
        rig.manager.cancel(graph.graph_id)
    else:
        rig.media.fail_next = RowError(found)
    rig.drain()
    assert breaker.allows()


def late_load(rig: ManagerRig, keys: list[bytes]) -> list[OpReport]:
    """Give up a load while its read runs; return what the read reports when it ends after all."""
    hit = rig.manager.get_match(keys, NAMESPACE)
    graph = load_blocks(rig.manager, hit, 0, hit.depth, rig.units(hit.depth))
    rig.media.todo = [todo for todo in rig.media.todo if todo[0] is not graph]
    reads = [op for op in graph.ops if op.path.reads_tier]
    assert reads
    rig.media.reports += [
        OpReport(graph.graph_id, op.op_id, dict.fromkeys(range(*op.rows), RowError.DEADLINE))
        for op in graph.ops
        if op not in reads
    ]
    rig.manager.pump()
    return [OpReport(graph.graph_id, op.op_id, {}) for op in reads]


def test_reads_that_are_always_late_are_not_tried_for_ever() -> None:
    """Reads succeed after their deadline; writes between them succeed in time."""
    rig = ManagerRig(host=4, disk=64)
    rig.save(chain(1, 2, 3, 4))
    rig.drain()
    for turn in range(3):
        rig.save(chain(*range(10 * turn + 10, 10 * turn + 14)))
        rig.drain()
        assert rig.manager.get_match(chain(1, 2, 3, 4), NAMESPACE).depth == 4
        rig.media.reports += late_load(rig, chain(1, 2, 3, 4))
        rig.manager.pump()
        rig.manager.index.evictions.evict(HOST, 4)  # what came late is in host memory
    assert rig.manager.get_match(chain(1, 2, 3, 4), NAMESPACE).depth == 0
    assert rig.manager.index.held(HOST, chain(1, 2, 3, 4)) == 0
    rig.now = 6  # a probe: in time at last
    assert rig.load(chain(1, 2, 3, 4)) is not None
    rig.drain()
    rig.manager.index.evictions.evict(HOST, 4)
    assert rig.manager.get_match(chain(1, 2, 3, 4), NAMESPACE).depth == 4
    rig.manager.check_integrity()


def test_a_full_disk_is_still_read() -> None:
    rig = ManagerRig(host=4, disk=64)
    rig.save(chain(1, 2, 3, 4))
    rig.drain()
    for turn in range(4):
        rig.save(chain(10 + turn))
        rig.media.step(0)  # to host memory
        rig.media.fail_next = RowError.IO
        rig.drain()
    written = len(rig.media.done)
    rig.save(chain(20))
    rig.drain()
    assert len(rig.media.done) == written + 1, "it is not written to any more"
    rig.manager.index.evictions.evict(HOST, 4)
    assert rig.manager.get_match(chain(1, 2, 3, 4), NAMESPACE).depth == 4
    assert rig.load(chain(1, 2, 3, 4)) is not None
    rig.drain()
    assert rig.manager.get_match(chain(1, 2, 3, 4), NAMESPACE).sources[0].tier == HOST


def test_a_block_that_a_store_dropped_is_no_failure_of_the_store() -> None:
    rig = ManagerRig(host=4, disk=16)
    keys = chain(1, 2, 3, 4)
    for saved in (keys, chain(7, 8, 9, 10)):
        rig.save(saved)
        rig.drain()
    for _ in range(2):
        rig.manager.tiers.breakers.reads["disk"].failed()
    rig.media.fail_next = RowError.MISSING
    rig.load(keys)
    rig.drain()
    assert rig.manager.get_match(keys, NAMESPACE).depth < 4
    rig.manager.tiers.breakers.reads["disk"].failed()
    assert rig.manager.tiers.breakers.reads["disk"].state is BreakerState.CLOSED
    assert "kvcore_corrupt_blocks_total" not in rig.metrics.snapshot()
    rig.manager.check_integrity()


@pytest.mark.parametrize("write", WritePolicy)
def test_a_save_that_cannot_be_planned_leaves_no_slot_reserved(write: WritePolicy) -> None:
    rig = ManagerRig(write=write)
    keys = chain(1, 2, 3)
    with pytest.raises(TransferError):
        save_blocks(
            rig.manager, keys, NAMESPACE, 3, lambda start, stop: rig.units(stop - start + 1)
        )
    rig.manager.check_integrity()
    rig.save(keys)
    rig.drain()
    assert rig.manager.get_match(keys, NAMESPACE).depth == 3


@pytest.mark.parametrize("device", [0, 4])
def test_a_load_that_cannot_be_planned_leaves_no_slot_reserved(device: int) -> None:
    rig = ManagerRig(host=4, disk=16, device=device)
    keys = chain(1, 2, 3, 4)
    rig.save(keys)
    rig.drain()
    rig.save(chain(7, 8, 9, 10))
    rig.drain()
    hit = rig.manager.get_match(keys, NAMESPACE)
    with pytest.raises(TransferError):
        load_blocks(rig.manager, hit, 0, 4, rig.units(5))
    rig.manager.check_integrity()
    graph = rig.load(keys)
    assert graph is not None
    rig.drain()
    assert rig.loaded(graph) == keys
    assert rig.manager.get_match(keys, NAMESPACE).in_host == (0 if device else 4), "and kept"
