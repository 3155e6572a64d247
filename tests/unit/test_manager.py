"""The leader against simulated media: whatever happens, a load brings the bytes of its own keys.

The media are dictionaries from place to content, and the content of a block is its key. Ops run in
any order their deps allow, some fail, some blocks rot on disk, requests save and load chains that
share prefixes. A slot handed out too early, a block published before its bytes are there, or a
source evicted while it is read shows as a wrong content on the device.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvcore.breaker import Breaker, BreakerState
from kvcore.errors import CapacityError, KVCoreError
from kvcore.flights import STALLED_S
from kvcore.index import BlockIndex, TierSpec
from kvcore.manager import (
    HOST,
    Backing,
    Event,
    KVManager,
    Readiness,
    WritePolicy,
)
from kvcore.metrics import Metrics
from kvcore.policy.admission import OnNthUse
from kvcore.pool import SlotRun
from kvcore.transfer.graph import (
    SKIP,
    OpReport,
    Path,
    RowError,
    TransferGraph,
    TransferOp,
    UnitTable,
)
from kvcore.transfer.plan import layer_steps

NAMESPACE = b"n" * 16


def chain(*names: int) -> list[bytes]:
    """Prefix keys of a sequence of block names: equal prefixes give equal keys."""
    keys, path = [], ()
    for name in names:
        path = (*path, name)
        keys.append(random.Random(repr(path)).randbytes(16))
    return keys


class Media:
    """A transport whose workers are dictionaries. Nothing runs until ``step`` is called."""

    def __init__(self) -> None:
        self.device: dict[int, bytes] = {}
        self.host: dict[int, bytes] = {}
        self.tiers: dict[str, dict[int, tuple[bytes, bytes]]] = {"disk": {}, "far": {}}
        self.todo: list[tuple[TransferGraph, TransferOp]] = []
        self.done: set[tuple[int, int]] = set()
        self.failed: dict[int, set[int]] = {}
        self.reports: list[OpReport] = []
        self.fail_next: RowError | None = None
        self.dead: set[str] = set()
        self.forgotten: list[tuple[str, list[SlotRun]]] = []

    def submit(self, graph: TransferGraph) -> None:
        graph.check()
        self.failed[graph.graph_id] = set()
        self.todo += [(graph, op) for op in graph.ops]

    def cancel(self, graph_id: int) -> None:
        for graph, op in [t for t in self.todo if t[0].graph_id == graph_id]:
            self.todo.remove((graph, op))
            self._end(graph, op, dict.fromkeys(range(*op.rows), RowError.CANCELLED))

    def forget(self, tier: str, slots: Sequence[SlotRun]) -> None:
        self.forgotten.append((tier, list(slots)))
        for run in slots:
            for slot in range(*run):
                self.tiers[tier].pop(slot, None)

    def wait_report(self, timeout: float) -> bool:
        self.step(0)
        return bool(self.reports)

    def poll(self) -> Sequence[OpReport]:
        reports, self.reports = self.reports, []
        return reports

    def step(self, pick: int) -> bool:
        """Run one runnable op."""
        ready = [
            (graph, op)
            for graph, op in self.todo
            if all((graph.graph_id, dep) in self.done for dep in op.deps)
        ]
        if not ready:
            return False
        graph, op = ready[pick % len(ready)]
        self.todo.remove((graph, op))
        failed = {r: RowError.UPSTREAM for r in range(*op.rows) if r in self.failed[graph.graph_id]}
        planted, self.fail_next = self.fail_next, None
        if op.tier in self.dead:
            planted = RowError.IO
        for row in range(*op.rows):
            if row not in failed:
                error = planted or self._move(graph, op, row)
                if error is not None:
                    failed[row] = error
        self._end(graph, op, failed)
        return True

    def drain(self, manager: KVManager, picks: random.Random) -> None:
        while self.step(picks.randrange(1 << 30)):
            if picks.random() < 0.5:
                manager.pump()
        manager.pump()
        if self.todo:
            self.drain(manager, picks)

    def _end(self, graph: TransferGraph, op: TransferOp, failed: dict[int, RowError]) -> None:
        self.failed[graph.graph_id] |= set(failed)
        self.done.add((graph.graph_id, op.op_id))
        self.reports.append(OpReport(graph.graph_id, op.op_id, failed))

    def _move(self, graph: TransferGraph, op: TransferOp, row: int) -> RowError | None:
        key, slot = graph.keys[row], graph.host_slots[row]
        if op.path is Path.D2H:
            self.host[slot] = self.device[int(graph.units[0].array()[row, 0])]
        elif op.path is Path.H2D:
            unit = int(graph.units[0].array()[row, 0])
            if unit != SKIP and (op.layers is None or op.layers.start == 0):
                self.device[unit] = self.host[slot]
                assert self.device[unit] == key, "wrong KV on the device"
        elif op.path.writes_tier:
            self.tiers[op.tier][graph.tier_slots[row]] = (key, self.host[slot])
            assert self.host[slot] == key, "wrong KV on its way to a tier"
        else:
            named, content = self.tiers[op.tier].get(graph.tier_slots[row], (b"", b""))
            if named != key or content != key:
                return RowError.CORRUPT
            self.host[slot] = content
        return None


class Rig:
    """A manager over small tiers, and an engine that computes and forgets blocks."""

    def __init__(
        self,
        host: int = 8,
        disk: int = 16,
        *,
        write: WritePolicy = WritePolicy.WRITE_THROUGH,
        far: int = 0,
        staging: int = 3,
        batch: int = 3,
        admit: int = 1,
    ) -> None:
        self.now = 0.0
        self.media = Media()
        self.metrics = Metrics()
        self.events: list[Event] = []
        specs = [TierSpec(HOST, host)]
        backing = []
        if disk:
            specs.append(TierSpec("disk", disk))
            admission = OnNthUse(admit, width=256)
            backing.append(Backing("disk", write=write, admission=admission))
        if far:
            specs.append(TierSpec("far", far))
            backing.append(Backing("far", Path.REMOTE2H, Path.H2REMOTE, WritePolicy.WRITE_THROUGH))
        self.manager = KVManager(
            BlockIndex(specs),
            self.media,
            backing=backing,
            staging_slots=range(host, host + staging),
            batch_blocks=batch,
            metrics=self.metrics,
            on_event=self.events.append,
            clock=lambda: self.now,
        )
        self._unit = 0

    def units(self, rows: int) -> list[UnitTable]:
        table = np.arange(self._unit, self._unit + rows, dtype=np.int64)[:, None]
        self._unit += rows
        return [UnitTable.of(table, 16)]

    def save(self, keys: list[bytes]) -> TransferGraph | None:
        def computed(start: int, stop: int) -> list[UnitTable]:
            tables = self.units(stop - start)
            for key, unit in zip(keys[start:stop], tables[0].array()[:, 0].tolist(), strict=True):
                self.media.device[unit] = key
            return tables

        return self.manager.launch_save(keys, NAMESPACE, len(keys), computed)

    def fetch(self, keys: list[bytes], on_end: Callable[[], object]) -> bool:
        hit = self.manager.get_match(keys, NAMESPACE)
        return self.manager.loads.fetch(hit, on_end=on_end)

    def load(self, keys: list[bytes], start: int = 0) -> TransferGraph | None:
        hit = self.manager.get_match(keys, NAMESPACE)
        ready = self.manager.can_load(hit, start, hit.depth) is Readiness.READY
        if hit.depth <= start or not ready:
            return None
        tables = self.units(hit.depth - start)
        return self.manager.launch_load(hit, start, hit.depth, tables, layers=layer_steps(4))

    def drain(self, seed: int = 0) -> None:
        self.media.drain(self.manager, random.Random(seed))

    def loaded(self, graph: TransferGraph) -> list[bytes | None]:
        return [self.media.device.get(unit) for unit in graph.units[0].array()[:, 0].tolist()]


def test_a_saved_chain_comes_back_from_host() -> None:
    rig = Rig()
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
    rig = Rig()
    rig.save(chain(1, 2, 3))
    rig.drain()
    second = rig.save(chain(1, 2, 9))
    assert second is not None
    assert second.keys == tuple(chain(1, 2, 9)[2:])
    assert rig.save(chain(1, 2)) is None


def test_a_block_being_saved_is_not_saved_again() -> None:
    rig = Rig()
    rig.save(chain(1, 2))
    assert rig.save(chain(1, 2)) is None
    child = rig.save(chain(1, 2, 3))
    assert child is not None
    assert child.num_rows == 1
    rig.drain(3)
    assert rig.manager.get_match(chain(1, 2, 3), NAMESPACE).depth == 3


def test_a_prepared_load_keeps_its_blocks_until_it_is_launched_well_or_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig()
    keys = chain(1, 2)
    rig.save(keys)
    rig.drain()
    pins = rig.manager.index._tables[0].pins
    hit = rig.manager.get_match(keys, NAMESPACE)
    rig.manager.drop_prepared(rig.manager.prepare_load(hit, 0, 2))
    assert not pins
    prepared = rig.manager.prepare_load(hit, 0, 2)
    assert pins

    def refused(*_: object, **__: object) -> None:
        raise CapacityError("the queue is full")

    monkeypatch.setattr(rig.manager, "launch_load", refused)
    with pytest.raises(CapacityError):
        rig.manager.launch_prepared(prepared, [])
    assert not pins


def test_a_child_is_never_published_before_its_parent() -> None:
    rig = Rig(disk=0)
    rig.save(chain(1, 2))
    rig.save(chain(1, 2, 3))
    rig.media.step(1)  # the child's copy ends first
    rig.manager.pump()
    assert rig.manager.get_match(chain(1, 2, 3), NAMESPACE).depth == 0
    rig.drain()
    assert rig.manager.get_match(chain(1, 2, 3), NAMESPACE).depth == 3


def test_a_failed_save_publishes_what_came_before_it_only() -> None:
    rig = Rig()
    rig.save(chain(1))
    rig.drain()
    rig.media.fail_next = RowError.INTERNAL
    rig.save(chain(1, 2, 3))
    rig.drain()
    assert rig.manager.get_match(chain(1, 2, 3), NAMESPACE).depth == 1
    rig.save(chain(1, 2, 3))
    rig.drain()
    assert rig.manager.get_match(chain(1, 2, 3), NAMESPACE).depth == 3


def test_what_left_host_memory_is_loaded_from_disk_and_kept_again() -> None:
    rig = Rig(host=4, disk=16)
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
    rig = Rig(host=4, disk=32)
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


def test_a_lookup_that_is_no_longer_true_leaves_nothing_pinned() -> None:
    """The first source is still there and is pinned; the second has left its tier."""
    rig = Rig(host=4, disk=16)
    old = chain(1, 2, 3, 4)
    rig.save(old)
    rig.drain()
    rig.save(chain(7, 8))
    rig.drain()
    hit = rig.manager.get_match(old, NAMESPACE)
    assert hit.blocks_by_tier() == {HOST: 2, "disk": 2}
    stale = replace(hit, keys=(*old[:3], b"gone" * 4))
    with pytest.raises(KVCoreError, match="not published"):
        rig.manager.launch_load(stale, 0, 4, rig.units(4))
    assert rig.manager.in_flight == 0
    rig.save(chain(21, 22, 23, 24))  # needs every slot, so none may be pinned
    rig.drain()
    assert rig.manager.get_match(chain(21, 22, 23, 24), NAMESPACE).blocks_by_tier() == {HOST: 4}


def test_a_fetch_stops_in_host_memory_and_a_full_one_is_no_error() -> None:
    rig = Rig(host=4, disk=16)
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
    rig = Rig()
    rig.manager.removals.set_quota(HOST, "ann", [NAMESPACE], 3)
    rig.save(chain(1, 2, 3, 4, 5))
    rig.drain()
    assert rig.manager.get_match(chain(1, 2, 3, 4, 5), NAMESPACE).depth == 3
    assert rig.metrics.snapshot()["kvcore_save_skipped_total"] == {"no_room": 2}


def test_a_rotten_block_is_quarantined_with_all_that_stands_on_it() -> None:
    rig = Rig(host=4, disk=16)
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
    rig = Rig(host=4, disk=16)
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


def test_write_back_keeps_what_host_memory_has_no_room_for() -> None:
    rig = Rig(host=8, disk=32, write=WritePolicy.WRITE_BACK)
    first = chain(1, 2, 3, 4, 5, 6, 7, 8)
    rig.save(first)
    rig.drain()
    assert rig.manager.index.num_used("disk") == 0
    rig.manager.maintain()
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
    rig = Rig(host=8, disk=32, write=WritePolicy.SELECTIVE, admit=2)
    keys = chain(1, 2, 3)
    rig.save(keys)
    rig.drain()
    assert rig.manager.index.num_used("disk") == 0
    rig.load(keys)
    rig.drain()
    assert rig.manager.index.num_used("disk") == 3


def test_a_second_backing_tier_is_written_behind_the_first() -> None:
    rig = Rig(host=8, disk=16, far=16)
    rig.save(chain(1, 2, 3))
    rig.drain()
    assert rig.manager.index.num_used("far") == 3


def test_staging_in_use_is_a_named_refusal_that_leaves_nothing_behind() -> None:
    rig = Rig(host=2, disk=16, staging=3)
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
        rig.manager.launch_load(hit, 0, 2, rig.units(2))
    rig.manager.index.unpin(pin)
    assert blocker.depth == 2
    assert rig.manager.in_flight == 0
    rig.manager.check_integrity()


def test_a_load_waits_only_for_what_will_come() -> None:
    """ "Later" must be followed by "ready" when the loads in flight end, or a request starves."""
    rig = Rig(host=2, disk=16, staging=2, batch=2)
    long, other = chain(1, 2, 3, 4, 5), chain(6, 7)
    for keys in (long[:2], other):
        rig.save(keys)
        rig.drain()
    hit = rig.manager.get_match(long, NAMESPACE)
    pin = rig.manager.index.pin(HOST, other[-1])
    assert rig.manager.can_load(hit, 0, 2) is Readiness.READY
    rig.manager.launch_load(hit, 0, 2, rig.units(2))
    assert rig.manager.can_load(hit, 0, 2) is Readiness.LATER
    rig.drain()
    assert rig.manager.can_load(hit, 0, 2) is Readiness.READY
    rig.manager.flights.staging.clear()
    assert rig.manager.can_load(hit, 0, 2) is Readiness.NEVER
    rig.manager.index.unpin(pin)


@pytest.mark.parametrize("why", [RowError.DEADLINE, RowError.CANCELLED])
def test_nothing_waits_for_a_load_that_was_given_up(why: RowError) -> None:
    """Its read hangs and keeps the staging slots; another request is computed, and does not hang
    with it."""
    rig = Rig(host=2, disk=16, staging=2, batch=2)
    long, other = chain(1, 2, 3, 4, 5), chain(6, 7)
    for keys in (long[:2], other):
        rig.save(keys)
        rig.drain()
    hit = rig.manager.get_match(long, NAMESPACE)
    pin = rig.manager.index.pin(HOST, other[-1])
    graph = rig.manager.launch_load(hit, 0, 2, rig.units(2))
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
    """A disk whose writes hang fills the flights with saves: loads wait while some end, not for
    ever."""
    rig = Rig(host=16, disk=16)
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


def test_cancel_returns_everything() -> None:
    rig = Rig(host=4, disk=16)
    keys = chain(1, 2, 3, 4)
    for saved in (keys, chain(7, 8, 9, 10)):
        rig.save(saved)
        rig.drain()
    graph = rig.load(keys)
    assert graph is not None
    rig.manager.cancel(graph.graph_id)
    assert rig.manager.wait(graph.graph_id, timeout=5)
    assert rig.manager.in_flight == 0
    rig.manager.check_integrity()
    assert rig.manager.get_match(keys, NAMESPACE).depth == 4


def test_clear_forgets_a_namespace() -> None:
    rig = Rig()
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
    """The medium answered, or was not asked at all: neither may shut it out for good."""
    rig = Rig(host=4, disk=16)
    keys = chain(1, 2, 3, 4)
    for saved in (keys, chain(7, 8, 9, 10)):
        rig.save(saved)
        rig.drain()
    breaker = rig.manager.breakers.reads["disk"]
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


def late_load(rig: Rig, keys: list[bytes]) -> list[OpReport]:
    """A load that is given up while its read runs; what the read reports when it ends after all."""
    hit = rig.manager.get_match(keys, NAMESPACE)
    graph = rig.manager.launch_load(hit, 0, hit.depth, rig.units(hit.depth))
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
    """They end well, after their deadline, and what is written between them ends well in time."""
    rig = Rig(host=4, disk=64)
    rig.save(chain(1, 2, 3, 4))
    rig.drain()
    for turn in range(3):
        rig.save(chain(*range(10 * turn + 10, 10 * turn + 14)))
        rig.drain()
        assert rig.manager.get_match(chain(1, 2, 3, 4), NAMESPACE).depth == 4
        rig.media.reports += late_load(rig, chain(1, 2, 3, 4))
        rig.manager.pump()
        rig.manager.index.evict(HOST, 4)  # what came late is in host memory
    assert rig.manager.get_match(chain(1, 2, 3, 4), NAMESPACE).depth == 0
    assert rig.manager.put_match(chain(1, 2, 3, 4)) == 0
    rig.now = 6  # a probe: in time at last
    assert rig.load(chain(1, 2, 3, 4)) is not None
    rig.drain()
    rig.manager.index.evict(HOST, 4)
    assert rig.manager.get_match(chain(1, 2, 3, 4), NAMESPACE).depth == 4
    rig.manager.check_integrity()


def test_a_full_disk_is_still_read() -> None:
    rig = Rig(host=4, disk=64)
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
    rig.manager.index.evict(HOST, 4)
    assert rig.manager.get_match(chain(1, 2, 3, 4), NAMESPACE).depth == 4
    assert rig.load(chain(1, 2, 3, 4)) is not None
    rig.drain()
    assert rig.manager.get_match(chain(1, 2, 3, 4), NAMESPACE).sources[0].tier == HOST


def test_a_block_that_a_store_dropped_is_no_failure_of_the_store() -> None:
    rig = Rig(host=4, disk=16)
    keys = chain(1, 2, 3, 4)
    for saved in (keys, chain(7, 8, 9, 10)):
        rig.save(saved)
        rig.drain()
    for _ in range(2):
        rig.manager.breakers.reads["disk"].failed()
    rig.media.fail_next = RowError.MISSING
    rig.load(keys)
    rig.drain()
    assert rig.manager.get_match(keys, NAMESPACE).depth < 4
    rig.manager.breakers.reads["disk"].failed()
    assert rig.manager.breakers.reads["disk"].state is BreakerState.CLOSED
    assert "kvcore_corrupt_blocks_total" not in rig.metrics.snapshot()
    rig.manager.check_integrity()


@pytest.mark.parametrize("again", [(0,), (1, 2, 0), (0, 0, 0, 2)])
@pytest.mark.parametrize("copied", [True, False])
def test_host_slots_of_what_was_cleared_are_not_reused_while_it_is_written(
    again: tuple[int, ...], copied: bool
) -> None:
    """Bytes of another block, written under a key that was cleared, would be found by that key
    after a restart: with a checksum, and wrong."""
    rig = Rig(host=6, disk=10, batch=3)
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
    """Slots are told as runs: a tier may have millions, and every worker hears of them."""
    rig = Rig(host=6, disk=1_000_000)
    rig.save(chain(1, 2, 3))
    rig.drain()
    rig.manager.clear()
    assert rig.media.forgotten == [("disk", [(0, 1_000_000)])]
    assert not rig.media.tiers["disk"]


def test_what_is_written_after_a_clear_does_not_come_back() -> None:
    rig = Rig(host=6, disk=10)
    rig.save(chain(1, 2, 3, 4))
    rig.manager.clear()
    rig.drain()
    assert not rig.media.tiers["disk"], "a restart would find these"
    rig.save(chain(1, 2))
    rig.drain()
    assert {key for key, _ in rig.media.tiers["disk"].values()} == set(chain(1, 2))


def test_a_load_reads_its_own_blocks_though_they_were_cleared() -> None:
    rig = Rig(host=4, disk=16)
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


class ManagerMachine(RuleBasedStateMachine):
    """Random traffic over chains that share prefixes; the media check every byte moved."""

    write = WritePolicy.WRITE_THROUGH

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig(host=6, disk=10, write=self.write, staging=3, batch=3, admit=2)

    names = st.lists(st.integers(0, 2), min_size=1, max_size=9)

    @rule(names=names)
    def save(self, names: list[int]) -> None:
        self.rig.save(chain(*names))

    @rule(names=names, start=st.integers(0, 3))
    def load(self, names: list[int], start: int) -> None:
        try:
            self.rig.load(chain(*names), start)
        except CapacityError:
            self.rig.manager.check_integrity()

    @rule(names=names)
    def fetch(self, names: list[int]) -> None:
        """Into host memory and no further."""
        manager, ended = self.rig.manager, []
        before = manager.in_flight
        began = self.rig.fetch(chain(*names), lambda: ended.append(1))
        assert manager.in_flight == before + began
        assert not ended

    @rule(names=names)
    def write_down(self, names: list[int]) -> None:
        manager = self.rig.manager
        before = manager.in_flight
        began = manager.saves.write("disk", chain(*names), NAMESPACE, on_end=lambda: None)
        assert manager.in_flight == before + began

    @rule(names=names, tier=st.sampled_from([HOST, "disk"]), below=st.booleans())
    def take_out(self, names: list[int], tier: str, below: bool) -> None:
        manager, keys = self.rig.manager, chain(*names)
        if below:
            manager.removals.drop(tier, keys[-1:])
            assert manager.index.held(tier, keys) < len(keys)
        else:
            manager.removals.discard(tier, keys)

    @rule(tier=st.sampled_from([HOST, "disk"]), blocks=st.none() | st.integers(0, 10))
    def set_quota(self, tier: str, blocks: int | None) -> None:
        self.rig.manager.removals.set_quota(tier, "ann", [NAMESPACE], blocks)

    @rule(pick=st.integers(0, 50), count=st.integers(1, 4))
    def run(self, pick: int, count: int) -> None:
        for _ in range(count):
            self.rig.media.step(pick)

    @rule()
    def pump(self) -> None:
        self.rig.manager.pump()

    @rule(error=st.sampled_from([RowError.IO, RowError.INTERNAL, RowError.CORRUPT]))
    def plant(self, error: RowError) -> None:
        if error is RowError.CORRUPT and not any(
            op.path.reads_tier for _, op in self.rig.media.todo
        ):
            return
        self.rig.media.fail_next = error if error is not RowError.CORRUPT else None
        if error is RowError.CORRUPT:
            slots = self.rig.media.tiers["disk"]
            if slots:
                slot = next(iter(slots))
                slots[slot] = (slots[slot][0], b"rot")

    @rule(seconds=st.sampled_from([1.0, 10.0, 400.0]))
    def later(self, seconds: float) -> None:
        self.rig.now += seconds

    @rule()
    def maintain(self) -> None:
        self.rig.manager.maintain()

    @rule(pick=st.integers(0, 10))
    def cancel(self, pick: int) -> None:
        ids = sorted({graph.graph_id for graph, _ in self.rig.media.todo})
        if ids:
            self.rig.manager.cancel(ids[pick % len(ids)])

    @rule()
    def clear(self) -> None:
        self.rig.manager.clear()

    @invariant()
    def sound(self) -> None:
        self.rig.manager.check_integrity()

    def teardown(self) -> None:
        self.rig.drain(1)
        assert self.rig.manager.in_flight == 0
        assert len(self.rig.manager.flights.staging) == 3, "a staging slot leaked"
        self.rig.manager.clear()
        self.rig.manager.check_integrity()
        assert self.rig.manager.index.num_used(HOST) == 0, "a pin or a reservation leaked"


class WriteBackMachine(ManagerMachine):
    write = WritePolicy.WRITE_BACK


class SelectiveMachine(ManagerMachine):
    write = WritePolicy.SELECTIVE


_budget = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestWriteThrough = ManagerMachine.TestCase
TestWriteBack = WriteBackMachine.TestCase
TestSelective = SelectiveMachine.TestCase
for case in (TestWriteThrough, TestWriteBack, TestSelective):
    case.settings = _budget


@given(st.integers(1, 30), st.integers(0, 30))
def test_hit_counts_blocks_by_tier(host: int, disk: int) -> None:
    rig = Rig(host=64, disk=128)
    keys = chain(*range(host + disk))
    rig.save(keys)
    rig.drain()
    hit = rig.manager.get_match(keys, NAMESPACE)
    assert sum(hit.blocks_by_tier(1, host).values()) == host - 1
