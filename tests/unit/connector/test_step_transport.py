"""Graphs leave once, by the lane that was chosen at their launch; reports of all ranks are one."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.connector.step_transport import Outbox
from kvcore.index import BlockIndex, TierSpec
from kvcore.index.slots import slot_runs
from kvcore.manager import HOST, Backing, KVManager, Readiness, TransferOptions
from kvcore.manager.base import Lane
from kvcore.transfer.graph import OpReport, RowError, Span, TransferGraph, UnitTable
from kvcore.transfer.quorum import Quorum
from support.transfers import load_blocks, save_blocks

# --- lanes ------------------------------------------------------------------------------------

LANES = ("sync", "async", "early", "late")


def units(start: int, stop: int) -> list[UnitTable]:
    return [UnitTable.of(np.arange(start, stop)[:, None], 16)]


class Leader:
    """A leader that launches what comes to its mind, each graph into a lane, and sends it all once
    a step. The second tier is written to by graphs of their own, which no lane gets."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.outbox = Outbox()
        tiers = [Backing("disk"), Backing("far")]
        self.manager = KVManager(
            BlockIndex([TierSpec(HOST, 12), TierSpec("disk", 64), TierSpec("far", 64)]),
            self.outbox,
            backing=tiers,
            options=TransferOptions(range(100, 104)),
        )
        self.lanes: dict[str, list[TransferGraph]] = {name: [] for name in LANES}
        self.wanted: dict[int, str] = {}
        self.sent: Counter[int] = Counter()

    def launch(self) -> None:
        chain, name = self.rng.choice([1, 2, 3]), self.rng.choice(LANES)
        keys = [bytes([chain, n]) * 8 for n in range(self.rng.randrange(1, 9))]
        load = self.rng.random() < 0.5
        graph = (self._load if load else self._save)(keys, self.lanes[name].append)
        if graph is not None:
            self.wanted[graph.graph_id] = name

    def _save(self, keys: list[bytes], lane: Lane) -> TransferGraph | None:
        return save_blocks(self.manager, keys, b"", len(keys), units, lane=lane)

    def _load(self, keys: list[bytes], lane: Lane) -> TransferGraph | None:
        hit = self.manager.get_match(keys, b"")
        if self.manager.can_load(hit, 0, hit.depth) is not Readiness.READY or not hit.depth:
            return None
        to = units(0, hit.depth)
        if hit.in_host == hit.depth and self.rng.random() < 0.5:
            self.manager.drop(self.manager.plan_load(hit, Span(0, hit.depth)))
        return load_blocks(self.manager, hit, 0, hit.depth, to, lane=lane)

    def step(self) -> None:
        """Everything leaves, and ends."""
        for name, graphs in self.lanes.items():
            assert all(self.wanted[graph.graph_id] == name for graph in graphs)
        queued = [graph for graphs in self.lanes.values() for graph in graphs]
        for graphs in self.lanes.values():
            graphs.clear()
        own = self.outbox.take().graphs
        assert not self.wanted.keys() & {graph.graph_id for graph in own}
        for graph in (*queued, *own):
            self.sent[graph.graph_id] += 1
            for op in graph.ops:
                self.manager.complete(OpReport(graph.graph_id, op.op_id))


@pytest.mark.parametrize("seed", range(10))
def test_every_graph_leaves_once_by_the_lane_of_its_launch(seed: int) -> None:
    leader = Leader(seed)
    for _ in range(80):
        leader.launch()
        if leader.rng.random() < 0.4:
            leader.step()
    while leader.manager.in_flight:
        leader.step()
    assert leader.wanted.keys() < leader.sent.keys(), "the second tier was written to as well"
    assert set(leader.sent.values()) == {1}, "a graph was sent twice"
    leader.manager.check_integrity()


# --- reports ----------------------------------------------------------------------------------

rows = st.dictionaries(st.integers(0, 3), st.sampled_from(RowError), max_size=2)
ops = st.tuples(st.integers(0, 2), st.integers(0, 2))


@given(st.data(), st.integers(1, 4))
def test_an_op_is_reported_once_when_all_ranks_ended_it(data: st.DataObject, ranks: int) -> None:
    per_op = data.draw(st.dictionaries(ops, st.lists(rows, min_size=ranks, max_size=ranks)))
    told = data.draw(
        st.permutations([OpReport(*op, f) for op, each in per_op.items() for f in each])
    )
    quorum, left = Quorum(ranks), Counter(dict.fromkeys(per_op, ranks))
    for report in told:
        op = (report.graph_id, report.op_id)
        left[op] -= 1
        whole = quorum.add(report)
        assert (whole is not None) == (left[op] == 0)
        if whole is not None:
            assert (whole.graph_id, whole.op_id) == op
            assert set(whole.failed) == {row for failed in per_op[op] for row in failed}
    assert len(quorum) == 0


def test_an_outbox_passes_reports_on_once() -> None:
    outbox = Outbox(ranks=2)
    outbox.deliver(OpReport(1, 0))
    assert not outbox.wait_report(60.0)  # nothing to block on
    assert outbox.poll() == []
    outbox.deliver(OpReport(1, 0))
    assert outbox.wait_report(0.0)
    assert outbox.poll() == [OpReport(1, 0)]
    assert outbox.poll() == []


def test_a_pump_brings_reports() -> None:
    waited = []

    def pump(timeout: float) -> None:
        waited.append(timeout)
        outbox.deliver(OpReport(1, 0))

    outbox = Outbox(pump=pump)
    assert outbox.wait_report(0.5)
    assert waited == [0.5]


def test_what_is_to_be_forgotten_is_copied() -> None:
    outbox, slots = Outbox(), slot_runs([1, 2])
    outbox.invalidate("disk", slots)
    outbox.cancel(7)
    slots.clear()
    assert (outbox.invalidated, outbox.cancelled) == ([("disk", [(1, 3)])], [7])


def test_what_was_taken_waits_no_more() -> None:
    outbox = Outbox()
    graph: Any = object()
    outbox.submit(graph)
    outbox.cancel(7)
    outbox.invalidate("disk", slot_runs([1]))
    assert outbox.take() == ([graph], [7], [("disk", [(1, 2)])])
    assert outbox.take() == ([], [], [])
