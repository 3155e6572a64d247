"""The leader against simulated media: whatever happens, a load brings the bytes of its own keys.

Ops run in any order their deps allow, some fail, some blocks rot on disk, requests save and load
chains that share prefixes, and plans are launched or dropped at any later time.
"""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvcore.errors import CapacityError, TransferError
from kvcore.manager import HOST, Readiness, WritePolicy
from kvcore.manager.base import Planned
from kvcore.transfer.graph import Priority, RowError, Span, UnitTable
from support.budget import examples
from support.manager import NAMESPACE, ManagerRig, chain


class ManagerMachine(RuleBasedStateMachine):
    """Random traffic over chains that share prefixes; the media check every byte moved."""

    write = WritePolicy.WRITE_THROUGH
    host = 6
    device = 0
    """Places in the staging on the device; if there are any, disk loads go past host memory."""

    def __init__(self) -> None:
        super().__init__()
        self.planned: list[Planned] = []
        self.rig = ManagerRig(
            host=self.host,
            disk=10,
            write=self.write,
            staging=3,
            batch=3,
            admit=2,
            device=self.device,
        )

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
        """Prefetch into host memory only."""
        manager, ended = self.rig.manager, []
        before = manager.in_flight
        began = self.rig.fetch(chain(*names), lambda: ended.append(1))
        assert manager.in_flight == before + (began is not None)
        assert not ended

    @rule(names=names, what=st.sampled_from(["save", "load", "fetch"]))
    def plan(self, names: list[int], what: str) -> None:
        """Plan now, and launch or drop in some later step."""
        manager, keys, before = self.rig.manager, chain(*names), self.rig.manager.in_flight
        hit = manager.get_match(keys, NAMESPACE)
        planned = None
        if what == "save":
            planned = manager.plan_save(keys, NAMESPACE, len(keys))
        elif what == "fetch":
            planned = manager.plan_fetch(hit)
        elif hit.depth and manager.can_load(hit, 0, hit.depth) is Readiness.READY:
            with contextlib.suppress(CapacityError):
                planned = manager.plan_load(hit, Span(0, hit.depth))
        if planned is not None:
            self.planned.append(planned)
        if what != "save":  # planning a save may write what is there already
            assert manager.in_flight == before

    @precondition(lambda self: self.planned)
    @rule(pick=st.integers(0, 10), wrong=st.booleans())
    def launch(self, pick: int, wrong: bool) -> None:
        planned = self.planned.pop(pick % len(self.planned))
        rig, graph = self.rig, planned.graph
        units: list[UnitTable] = []
        if graph.priority is Priority.SAVE:
            units = rig.computed(planned.keys, *planned.blocks)
        elif graph.touches_device:
            units = rig.units(planned.blocks.size)
        if wrong and units:
            with pytest.raises(TransferError):
                rig.manager.launch(planned, rig.units(planned.blocks.size + 1))
        else:
            rig.manager.launch(planned, units)

    @precondition(lambda self: self.planned)
    @rule(pick=st.integers(0, 10))
    def drop(self, pick: int) -> None:
        self.rig.manager.drop(self.planned.pop(pick % len(self.planned)))

    @rule(names=names)
    def write_down(self, names: list[int]) -> None:
        manager = self.rig.manager
        before = manager.in_flight
        began = manager.offloader.write("disk", chain(*names), NAMESPACE, on_end=lambda: None)
        assert manager.in_flight == before + (began is not None)

    @rule(names=names, tier=st.sampled_from([HOST, "disk"]), below=st.booleans())
    def take_out(self, names: list[int], tier: str, below: bool) -> None:
        manager, keys = self.rig.manager, chain(*names)
        if below:
            manager.invalidation.delete(tier, keys[-1:])
            assert manager.index.held(tier, keys) < len(keys)
        else:
            manager.invalidation.evict(tier, keys)

    @rule(tier=st.sampled_from([HOST, "disk"]), blocks=st.none() | st.integers(0, 10))
    def set_quota(self, tier: str, blocks: int | None) -> None:
        self.rig.manager.invalidation.set_quota(tier, "ann", [NAMESPACE], blocks)

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
        for planned in self.planned:
            self.rig.manager.drop(planned)
        self.rig.drain(1)
        assert self.rig.manager.in_flight == 0
        assert len(self.rig.manager.flights.staging) == 3, "a staging slot leaked"
        places = sorted(self.rig.manager.flights.device)
        assert places == list(range(self.device)), "a place on the device leaked"
        self.rig.manager.clear()
        self.rig.manager.check_integrity()
        assert self.rig.manager.index.num_used(HOST) == 0, "a pin or a reservation leaked"


class WriteBackMachine(ManagerMachine):
    write = WritePolicy.WRITE_BACK
    host = 8  # an eighth of it is kept free, so it demotes when it is full


class SelectiveMachine(ManagerMachine):
    write = WritePolicy.SELECTIVE


class ToDeviceMachine(ManagerMachine):
    device = 5


class NarrowMachine(WriteBackMachine):
    device = 1


TestWriteThrough = ManagerMachine.TestCase
TestWriteBack = WriteBackMachine.TestCase
TestSelective = SelectiveMachine.TestCase
TestToDevice = ToDeviceMachine.TestCase
TestNarrow = NarrowMachine.TestCase
for case in (TestWriteThrough, TestWriteBack, TestSelective, TestToDevice, TestNarrow):
    case.settings = settings(
        max_examples=examples(40, 2 if case is TestWriteThrough else 4),
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
del case  # else pytest finds the last one twice
