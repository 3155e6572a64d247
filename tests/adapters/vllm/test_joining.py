"""Two requests of vLLM that want the same blocks from a slow tier: they are read once."""

from __future__ import annotations

import pytest

from kvcore.config import load_config
from kvcore.connector.fusion_scheduler import FusionTraits
from kvcore.fusion.options import FusionOptions
from kvcore.fusion.segments import Reusable, Segments
from kvcore.telemetry.metrics import Metrics
from kvcore.transfer.graph import OpReport, RowError, TransferGraph
from kvcore_vllm import leader
from kvcore_vllm.fusion_scheduler import VllmFusionRequest, VllmFusionScheduler
from support.vllm_leader import BLOCK, PAGES, SHAPE, LeaderRig, request


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> LeaderRig:
    made = LeaderRig()
    monkeypatch.setattr(leader.time, "monotonic", lambda: made.now)  # type: ignore[attr-defined]
    return made


def reads(graph: TransferGraph) -> int:
    return sum(op.rows.size for op in graph.ops if op.path.reads_tier)


def test_what_another_is_reading_is_waited_for_and_comes_from_host_memory(rig: LeaderRig) -> None:
    assert rig.ask("a") == (400, True)
    first = rig.load("a")
    assert reads(first) == 25
    for _ in range(3):
        assert rig.ask("b") == (None, False)
    rig.end(first)
    external, _ = rig.ask("b")
    assert external == 400
    assert rig.side._requests["b"].hit.blocks_by_tier() == {"host": 25}  # type: ignore[union-attr]


def test_who_joined_a_read_that_is_aborted_reads_by_itself(rig: LeaderRig) -> None:
    rig.ask("a")
    first = rig.load("a")
    assert rig.ask("b") == (None, False)
    rig.manager.cancel(first.graph_id)
    rig.end(first, RowError.CANCELLED)
    assert rig.ask("b") == (400, True)
    second = rig.load("b")
    assert reads(second) == 25
    rig.end(second)


@pytest.mark.parametrize("why", [RowError.CORRUPT, RowError.IO])
def test_who_joined_a_read_that_fails_computes_as_well(rig: LeaderRig, why: RowError) -> None:
    """What is rotten is held no more, and a disk that fails is left alone."""
    rig.ask("a")
    first = rig.load("a")
    assert rig.ask("b") == (None, False)
    rig.end(first, why)
    assert rig.ask("b") == (0, False)


def test_a_request_that_waits_is_not_served_once_kvcore_is_off(rig: LeaderRig) -> None:
    rig.ask("a")
    rig.load("a")
    assert rig.ask("b") == (None, False), "it waits for the load of the other"
    rig.side.disable("a worker refused its work")
    assert rig.ask("b") == (0, False)


def test_a_failed_load_counts_once_with_the_tokens_it_was_to_bring(rig: LeaderRig) -> None:
    """Not with those that the engine held itself."""
    rig.requests["a"] = request("a")
    external, _ = rig.side.get_num_new_matched_tokens(rig.requests["a"], 48)
    assert external == 352
    rig.side.update_state_after_alloc(rig.requests["a"], PAGES, external)
    rig.side._load_failed("a")
    counts = rig.side.metrics.snapshot()
    assert counts["kvcore_misses_total"] == {"load_failed": 1}
    assert counts["kvcore_lookup_tokens_total"]["miss|"] == 1 + 352


def test_a_load_that_is_given_up_counts_as_late(rig: LeaderRig) -> None:
    """The alert KvcoreLoadsLate reads this reason."""
    rig.ask("a")
    load = rig.load("a")
    for op in load.ops:
        late = dict.fromkeys(range(*op.rows), RowError.DEADLINE)
        rig.side._complete(OpReport(load.graph_id, op.op_id, late))
    rig.side._load_failed("a")
    assert rig.side.metrics.snapshot()["kvcore_misses_total"] == {"deadline": 1}


def test_a_request_waits_for_one_deadline_and_not_for_two(rig: LeaderRig) -> None:
    """Its tier is not left alone after one operation that was late."""
    rig.ask("a")
    load = rig.load("a")
    for i, op in enumerate(load.ops):
        why = RowError.CANCELLED if i else RowError.DEADLINE
        rig.side._complete(OpReport(load.graph_id, op.op_id, dict.fromkeys(range(*op.rows), why)))
    rig.side._load_failed("a")
    assert rig.ask("a") == (0, False)
    assert rig.ask("b") == (400, True)


def test_after_a_load_that_failed_what_is_left_is_tried_once_more(rig: LeaderRig) -> None:
    for _ in range(2):
        assert rig.ask("a") == (400, True)
        load = rig.load("a")
        for op in load.ops:
            failed = dict.fromkeys(range(*op.rows), RowError.CANCELLED)
            rig.side._complete(OpReport(load.graph_id, op.op_id, failed))
        rig.side._load_failed("a")
    assert rig.ask("a") == (0, False)


def test_a_read_that_hangs_is_joined_no_longer_than_a_load_may_take(rig: LeaderRig) -> None:
    rig.ask("a")
    first = rig.load("a")
    assert rig.ask("b") == (None, False)
    rig.now += rig.config.transfer.load_deadline_s + 1
    for _ in range(2):
        assert rig.ask("b") == (0, False), "its own read would hang as well"
    rig.end(first)
    assert rig.ask("b")[0] == 400, "it has come after all, before anything was computed"


def test_who_has_waited_too_long_has_time_for_a_load_from_host_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between steps, as with asynchronous scheduling."""
    rig = LeaderRig(in_step=False)
    monkeypatch.setattr(leader.time, "monotonic", lambda: rig.now)  # type: ignore[attr-defined]
    rig.ask("a")
    first = rig.load("a")
    assert rig.ask("b") == (None, False)
    rig.now += rig.config.transfer.load_deadline_s + 1
    assert rig.ask("b") == (0, False)
    rig.end(first)
    assert rig.ask("b") == (400, True)
    assert rig.load("b").deadline_s == pytest.approx(3.0)


@pytest.mark.parametrize("waited", [0.0, 12.0, 29.0])
def test_waiting_for_another_and_for_its_own_load_takes_one_deadline(
    rig: LeaderRig, waited: float
) -> None:
    """Also if it could not be scheduled at once: only waiting for loads counts."""
    rig.ask("a")
    first = rig.load("a")
    assert rig.ask("b") == (None, False)
    rig.now += waited
    assert rig.ask("b") == (None, False)
    rig.manager.cancel(first.graph_id)
    rig.end(first, RowError.CANCELLED)
    if waited > 27:
        assert rig.ask("b") == (0, False), "what is left is too short to begin"
        return
    assert rig.ask("b") == (400, True)
    rig.now += 100.0
    assert rig.ask("b") == (400, True)
    second = rig.load("b")
    assert second.deadline_s == 30.0 - waited
    rig.end(second)


def test_a_load_that_is_tried_again_has_the_rest_of_the_deadline(rig: LeaderRig) -> None:
    """After one that has come, the next load of a request, which was preempted, has all of it."""
    rig.ask("a")
    first = rig.load("a")
    rig.now += 10.0
    for op in first.ops:
        failed = dict.fromkeys(range(*op.rows), RowError.CANCELLED)
        rig.side._complete(OpReport(first.graph_id, op.op_id, failed))
    rig.side._load_failed("a")
    assert rig.ask("a") == (400, True)
    second = rig.load("a")
    assert second.deadline_s == 20.0
    rig.now += 10.0
    rig.end(second)
    rig.side._load_ended("a")
    host = rig.index.lifecycle
    assert rig.manager.clear()
    host.commit(host.reserve("disk", rig.chain.keys, 0, 25, rig.space))
    assert rig.ask("a") == (400, True)
    assert rig.load("a").deadline_s == 30.0


def test_who_has_waited_goes_on_from_what_is_in_host_memory(rig: LeaderRig) -> None:
    made = rig.index.lifecycle.reserve("host", rig.chain.keys, 0, 10, rig.space)
    rig.index.lifecycle.commit(made)
    rig.ask("a")
    first = rig.load("a")
    assert rig.ask("b") == (None, False)
    rig.now += 31.0
    assert rig.ask("b")[0] == 160
    rig.end(first)


def test_what_passes_through_is_nobodys_to_join() -> None:
    """Host memory has no room to keep it."""
    rig = LeaderRig(host=1)
    rig.index.pin("host", _fill(rig))
    assert rig.ask("a") == (400, True)
    first = rig.load("a")
    assert rig.ask("b") == (None, False), "the staging slots are lent"
    rig.end(first)
    assert rig.ask("b") == (400, True)


def _fill(rig: LeaderRig) -> bytes:
    key = b"k" * 16
    rig.index.lifecycle.commit(rig.index.lifecycle.reserve("host", [key], 0, 1, rig.space))
    return key


# -- chunks of a blend ---------------------------------------------------------------------------


class Blends:
    """Fetches of one chunk, the first 64 tokens of the prompt on disk."""

    def __init__(self, rig: LeaderRig) -> None:
        self.rig = rig
        settings = load_config(None, {"fusion": {"enabled": True, "min_tokens": 16}})
        self.fusion = VllmFusionScheduler(
            settings,
            SHAPE.nbytes,
            rig.manager,
            Segments(BLOCK),
            (),
            Metrics(),
            FusionTraits(BLOCK),
        )
        chunk = Reusable(100, 64, 0, rig.chain.keys[3])
        plan = self.fusion.chunks.plan([chunk], 0, 400, 0.1)
        assert plan is not None
        self.plan = plan

    def fetch(self, fusing: VllmFusionRequest) -> list[TransferGraph]:
        hit = self.rig.manager.get_match([], self.rig.space)
        graphs: list[TransferGraph] = []
        self.fusion.fetch(fusing, self.plan, hit, 0, 30.0, graphs.append)
        return graphs

    def in_host(self) -> bool:
        return self.fusion.chunks.in_host(self.plan) is not None


@pytest.fixture
def blends(rig: LeaderRig) -> Blends:
    return Blends(rig)


def test_a_chunk_that_another_is_fetching_is_joined(rig: LeaderRig, blends: Blends) -> None:
    first, second = (VllmFusionRequest(name, FusionOptions()) for name in "ab")
    [graph] = blends.fetch(first)
    assert blends.fetch(second) == [], "it is not read twice"
    assert blends.fusion.waits(second)
    rig.end(graph)
    assert not blends.fusion.waits(first)
    assert not blends.fusion.waits(second)
    assert second.fetched
    assert blends.in_host()


def test_a_chunk_whose_fetch_was_aborted_is_fetched_by_who_joined(
    rig: LeaderRig, blends: Blends
) -> None:
    first, second = (VllmFusionRequest(name, FusionOptions()) for name in "ab")
    [graph] = blends.fetch(first)
    assert blends.fetch(second) == []
    rig.end(graph, RowError.CANCELLED)
    assert not blends.fusion.waits(second)
    [own] = blends.fetch(second)
    assert blends.fusion.waits(second)
    rig.end(own)
    assert not blends.fusion.waits(second)
    assert blends.in_host()


def test_a_fetch_that_hangs_is_joined_no_longer_than_ones_own(
    rig: LeaderRig, blends: Blends
) -> None:
    first, second = (VllmFusionRequest(name, FusionOptions()) for name in "ab")
    [graph] = blends.fetch(first)
    assert blends.fetch(second) == []
    rig.now += 31.0
    assert not blends.fusion.waits(second)
    assert blends.fetch(second) == [], "it is computed"
    rig.end(graph)
