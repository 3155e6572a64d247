"""TensorRT-LLM's leader: pages that are fenced, loads that are parked, what is kept."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from kvcore.config import load_config
from kvcore.connector.leader import LeaderParts
from kvcore.connector.step_transport import Outbox
from kvcore.explain.recorder import RequestRecorder
from kvcore.index import BlockIndex, TierSpec
from kvcore.index.policy import LRU
from kvcore.manager import HOST, KVManager
from kvcore.model.spec import LayerGroup
from kvcore.telemetry.metrics import Metrics
from kvcore.transfer.graph import OpReport, RowError, TransferGraph
from kvcore.worker.lifecycle import RankParts, refuse_tier
from kvcore_trtllm.describe import whole
from kvcore_trtllm.leader import Leader
from kvcore_trtllm.messages import News, StepPlan
from kvcore_trtllm.worker import Tally, WorkerConnector
from support.trtllm_parts import facts, request
from support.worker import load_graph


def make_leader(sync_load_max: str = "512MiB") -> Leader:
    settings = {
        "block": {"tokens": 16},
        "trtllm": {"min_load_tokens": 1},
        "transfer": {"sync_load_max": sync_load_max},
    }
    config = load_config(overrides=settings, env={})
    outbox = Outbox()
    index = BlockIndex([TierSpec(HOST, 64, LRU, {})])
    manager = KVManager(index, outbox)
    model = whole(facts(page_tokens=16), (LayerGroup(0, 16, (0, 1, 2)),), 16)
    metrics, recorder = Metrics("leader"), RequestRecorder()
    recorder.count_in(metrics)
    parts = LeaderParts[Any](manager=manager, transport=outbox, metrics=metrics, recorder=recorder)
    return Leader(config, model, parts, outbox, {})


def asked(number: int, tokens: list[int]) -> SimpleNamespace:
    return request(request_id=number, get_tokens=lambda beam: list(tokens))


def data(number: int, tokens: list[int], pages: list[int], at: int, count: int) -> SimpleNamespace:
    return SimpleNamespace(
        request_id=number,
        new_tokens=tokens,
        new_block_ids=pages,
        computed_position=at,
        num_scheduled_tokens=count,
    )


def output(new: list[Any] | None = None, cached: list[Any] | None = None) -> SimpleNamespace:
    return SimpleNamespace(new_requests=new or [], cached_requests=cached or [])


def begin(leader: Leader, number: int, tokens: list[int], pages: list[int]) -> StepPlan:
    """The first step of a request that the engine has nothing of."""
    one = asked(number, tokens)
    matched, _ = leader.match(one, 0)
    leader.allocated(one, [pages])
    plan = leader.build_plan(output([data(number, tokens, pages, 0, len(tokens) - matched)]))
    leader.promises.hand(plan)
    return plan


def end(leader: Leader, plan: StepPlan) -> None:
    """All ranks did what the plan says."""
    graphs = [g for _, g in (*plan.early_saves, *plan.late_saves, *plan.async_loads)]
    graphs += plan.sync_loads
    leader.hear(News([OpReport(g.graph_id, op.op_id) for g in graphs for op in g.ops], []))


PROMPT = list(range(100, 148))


def test_a_page_that_a_save_reads_is_fenced_when_it_is_given_away() -> None:
    leader = make_leader()
    plan = begin(leader, 1, PROMPT, [0, 1, 2])
    [(number, save)] = plan.late_saves
    assert (number, plan.fence) == (1, [])
    other = begin(leader, 2, list(range(48)), [5, 2, 7])
    assert other.fence == [save.graph_id]
    assert other.cancel == []
    end(leader, plan)
    end(leader, other)
    assert begin(leader, 3, list(range(200, 248)), [0, 1, 2]).fence == []


def test_a_new_page_of_a_running_request_is_fenced_too() -> None:
    leader = make_leader()
    save = begin(leader, 1, PROMPT, [0, 1, 2]).late_saves[0][1]
    begin(leader, 2, list(range(16)), [5])
    plan = leader.build_plan(output(cached=[data(2, [16], [1], 16, 1)]))
    assert plan.fence == [save.graph_id]


def test_requests_that_kvcore_does_not_know_give_pages_away_as_well() -> None:
    leader = make_leader()
    save = begin(leader, 1, PROMPT, [0, 1, 2]).late_saves[0][1]
    dummy = request(request_id=9, is_dummy_request=True)
    assert leader.match(dummy, 0) == (0, False)
    leader.allocated(dummy, [[1]])
    assert leader.build_plan(output([data(9, [0], [1], 0, 1)])).fence == [save.graph_id]


def parked(leader: Leader) -> TransferGraph:
    """A load on its way into pages 10, 11, 12 for request 5."""
    end(leader, begin(leader, 1, PROMPT, [0, 1, 2]))
    one = asked(5, PROMPT)
    assert leader.match(one, 0) == (47, True)
    leader.allocated(one, [[10, 11, 12]])
    plan = leader.build_plan(output())
    [(number, load)] = plan.async_loads
    assert (number, plan.fence, plan.cancel) == (5, [], [])
    return load


def test_a_load_of_an_aborted_request_is_stopped_when_its_page_is_given_away() -> None:
    leader = make_leader(sync_load_max="0B")
    load = parked(leader)
    plan = begin(leader, 6, list(range(48)), [20, 11, 21])
    assert (plan.cancel, plan.fence) == ([load.graph_id], [load.graph_id])


def test_a_load_into_a_page_that_is_reused_is_waited_for() -> None:
    leader = make_leader(sync_load_max="0B")
    load = parked(leader)
    one = asked(6, PROMPT[:40])
    leader.match(one, 32)  # the engine has its first two pages
    leader.allocated(one, [[10, 11, 30]])
    plan = leader.build_plan(output([data(6, PROMPT[:40], [10, 11, 30], 32, 8)]))
    assert (plan.cancel, plan.fence) == ([], [load.graph_id])


class _Slow:
    """A worker whose loads end when a step waits for them; the first ``failing`` attempts fail."""

    def __init__(self, failing: int) -> None:
        self.failing = failing
        self.attempts = 0
        self._running: list[TransferGraph] = []
        self._reports: list[OpReport] = []

    def mark(self) -> None:
        return None

    def wave(self) -> int:
        return 0

    def submit(
        self, graph: TransferGraph, wave: int | None = None, after: None = None
    ) -> list[OpReport]:
        self.attempts += 1
        self._running.append(graph)
        return []

    def wait_device(self, graph_id: int) -> None:
        self.follow(graph_id)

    def follow(self, *graph_ids: int) -> None:
        if not graph_ids:
            return
        for graph in self._running:
            failed = {0: RowError.IO} if self.attempts <= self.failing else {}
            self._reports += [OpReport(graph.graph_id, op.op_id, failed) for op in graph.ops]
        self._running.clear()

    def poll(self) -> list[OpReport]:
        found, self._reports = self._reports, []
        return found

    def cancel(self, graph_id: int) -> None:
        pass

    def wait_report(self, timeout: float) -> bool:
        return True

    @property
    def writes(self) -> bool:
        return bool(self._running)


@pytest.mark.parametrize(("failing", "cancel", "broken"), [
    (1, False, False), (3, False, True), (1, True, False),
])  # fmt: skip
def test_a_fence_waits_until_a_load_is_not_tried_again(
    failing: int, cancel: bool, broken: bool
) -> None:
    """Between two attempts nothing is under way, and the next writes to the page again."""
    worker: Any = _Slow(failing)
    side = WorkerConnector(
        RankParts(worker, Metrics(), refuse_tier),
        Tally(1, lambda mine: [mine]),
        layers=1,
        layerwise=True,
    )
    side.begin(StepPlan(async_loads=[(5, load_graph(1))]))
    plan = StepPlan(fence=[1], cancel=[1] if cancel else [])
    side.begin(plan)
    assert not worker.writes
    assert worker.attempts == (1 if cancel else min(failing + 1, 3))
    assert bool(plan.broken) == broken


def test_promised_blocks_stay_until_they_are_loaded() -> None:
    """Between the promise and the plan other requests may want the room."""
    leader = make_leader()
    end(leader, begin(leader, 1, PROMPT, [0, 1, 2]))
    one = asked(2, PROMPT)
    assert leader.match(one, 0) == (47, False)
    leader.manager.index.evictions.evict(HOST, 64)
    leader.allocated(one, [[4, 5, 6]])
    plan = leader.build_plan(output([data(2, PROMPT, [4, 5, 6], 0, 1)]))
    assert len(plan.sync_loads) == 1
    end(leader, plan)
    leader.check_integrity()
    assert len(leader.manager.index.evictions.evict(HOST, 64)) == 3  # nothing is pinned any more


@pytest.mark.parametrize("pages", [[4, 5], [4, -1, 6]])
def test_promised_tokens_need_a_page(caplog: pytest.LogCaptureFixture, pages: list[int]) -> None:
    leader = make_leader()
    end(leader, begin(leader, 1, PROMPT, [0, 1, 2]))
    one = asked(2, PROMPT)
    leader.match(one, 0)
    leader.allocated(one, [pages])
    plan = leader.build_plan(output([data(2, PROMPT, pages, 0, 1)]))
    assert "0..47 were promised" in caplog.text
    assert (plan.sync_loads, plan.broken) == ([], "KV promised to requests [2] did not arrive")


def test_nothing_is_kept_that_was_not_computed() -> None:
    """Chunks count up to where they end, and a bound that lags is caught up with at the end."""
    leader = make_leader()
    one = asked(1, PROMPT)
    leader.match(one, 0)
    leader.allocated(one, [[0, 1, 2]])
    plan = leader.build_plan(output([data(1, PROMPT, [0, 1, 2], 0, 20)]))
    assert [g.num_rows for _, g in plan.late_saves] == [1]
    plan = leader.build_plan(output(cached=[data(1, [], [], 20, 27)]))
    assert [g.num_rows for _, g in plan.late_saves] == [1]  # 47 tokens: block 2 lacks one
    assert leader.finished(asked(1, [*PROMPT, 1]), [[0, 1, 2]])
    assert leader.build_plan(output()).early_saves == []  # the prompt was not finished


def test_after_a_clear_keys_are_others_and_running_requests_keep_nothing() -> None:
    """Weights may have been changed in place: what was computed before must not be found by what
    comes after, not even by this engine."""
    leader = make_leader()
    plan = begin(leader, 1, PROMPT[:20], [0, 1, 2])
    end(leader, plan)
    before = leader.namespaces.of()
    leader.clear()
    assert leader.namespaces.of().digest != before.digest
    later = leader.build_plan(output(cached=[data(1, PROMPT[20:], [], 20, 28)]))
    assert later.late_saves == []
    assert [len(graph.keys) for _, graph in begin(leader, 2, PROMPT, [5, 6, 7]).late_saves] == [3]


def test_a_failed_load_counts_once_with_its_tokens() -> None:
    """A load of several ops fails in each; it is one miss of what it was to bring."""
    leader = make_leader()
    end(leader, begin(leader, 1, PROMPT, [0, 1, 2]))
    [load] = begin(leader, 2, PROMPT, [10, 11, 12]).sync_loads
    assert len(load.ops) > 1
    failed = dict.fromkeys(range(3), RowError.IO)
    before = leader.metrics.snapshot()["kvcore_lookup_tokens_total"]["miss|"]
    leader.take_news([OpReport(load.graph_id, op.op_id, dict(failed)) for op in load.ops], [])
    counts = leader.metrics.snapshot()
    assert counts["kvcore_misses_total"]["load_failed"] == 1
    assert counts["kvcore_lookup_tokens_total"]["miss|"] == before + 47


def test_the_last_block_is_kept_when_a_request_ends() -> None:
    leader = make_leader()
    begin(leader, 1, PROMPT[:47], [0, 1, 2])
    # With overlap the 48th token was computed and is told of only now, with the one after it.
    assert leader.finished(asked(1, [*PROMPT, 1]), [[0, 1, 2]])
    assert [g.num_rows for _, g in leader.build_plan(output()).early_saves] == [1]


def test_pages_that_the_engine_lacks_are_not_saved() -> None:
    leader = make_leader()
    plan = begin(leader, 1, PROMPT, [0, 1])
    assert plan.late_saves == []


# -- errors -------------------------------------------------------------------------------------


def fail(*_: Any, **__: Any) -> Any:
    raise RuntimeError("an error of kvcore")


def loading(parked: bool) -> tuple[Leader, list[SimpleNamespace]]:
    """A leader that has promised KV to request 2 and none to 3, and what a step then has."""
    leader = make_leader("0B" if parked else "512MiB")
    end(leader, begin(leader, 1, PROMPT, [0, 1, 2]))
    leader.finished(asked(1, PROMPT), [[0, 1, 2]])
    longer = [*PROMPT, *range(300, 332)]
    one, other = asked(2, longer), asked(3, list(range(500, 548)))
    for wanted, pages in ((one, [4, 5, 6, 7, 8]), (other, [9, 10, 11])):
        leader.match(wanted, 0)
        leader.allocated(wanted, [pages])
    new = [
        data(2, longer, [4, 5, 6, 7, 8], 48, 32),
        data(3, other.get_tokens(0), [9, 10, 11], 0, 48),
    ]
    return leader, new[parked:]


@pytest.mark.parametrize("parked", [False, True])
@pytest.mark.parametrize("inside", ["_fence", "_save_computed", "_end_step"])
def test_an_error_beside_a_promise_costs_saves_only(
    monkeypatch: pytest.MonkeyPatch, inside: str, parked: bool
) -> None:
    leader, new = loading(parked)
    monkeypatch.setattr(leader, inside, fail)
    try:
        plan = leader.build_plan(output(new))
    except RuntimeError:
        plan = leader.last_plan(output(new))
    loads = [*plan.sync_loads, *(graph for _, graph in plan.async_loads)]
    assert len(loads) == 1
    assert plan.broken == ""
    assert not [*plan.early_saves, *(() if inside == "_end_step" else plan.late_saves)]
    leader.promises.hand(plan)
    end(leader, plan)
    assert leader.manager.in_flight == 0
    assert not leader.promises.owes(2)
    leader.check_integrity()


@pytest.mark.parametrize("inside", ["_use", "_load"])
def test_a_load_whose_pages_an_error_has_left_unknown_is_not_sent(
    monkeypatch: pytest.MonkeyPatch, inside: str
) -> None:
    leader, new = loading(parked=False)
    monkeypatch.setattr(leader, inside, fail)
    plan = leader.build_plan(output(new))
    assert plan.broken == "KV promised to requests [2] did not arrive"
    assert not [*plan.sync_loads, *plan.early_saves, *plan.late_saves]
    assert leader.manager.in_flight == 0


def test_a_parked_load_that_could_not_be_planned_is_told_and_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leader = make_leader("0B")
    end(leader, begin(leader, 1, PROMPT, [0, 1, 2]))
    leader.finished(asked(1, PROMPT), [[0, 1, 2]])
    leader.match(asked(2, PROMPT), 0)
    monkeypatch.setattr(leader, "_use", fail)
    with pytest.raises(RuntimeError):
        leader.allocated(asked(2, PROMPT), [[4, 5, 6]])
    leader.lose(2)
    plan = leader.build_plan(output())
    assert (plan.async_loads, plan.lost_loads, plan.broken) == ([], [2], "")
    leader.promises.hand(plan)
    assert leader.manager.in_flight == 0
    again = [data(2, PROMPT, [4, 5, 6], 47, 1)]
    assert leader.build_plan(output(again)).broken == "KV promised to requests [2] did not arrive"


def test_the_step_after_an_error_waits_for_all_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error may be in the books of pages, by which copies are found that a step waits for."""
    leader = make_leader()
    [(_, save)] = begin(leader, 1, PROMPT, [0, 1, 2]).late_saves
    leader.stop("an error", RuntimeError())
    assert leader.build_plan(output()).fence == [save.graph_id]
    assert leader.build_plan(output()).fence == []


def test_a_load_that_fails_after_its_request_has_gone_is_not_remembered() -> None:
    leader = make_leader("0B")
    end(leader, begin(leader, 1, PROMPT, [0, 1, 2]))
    leader.finished(asked(1, PROMPT), [[0, 1, 2]])
    plan = begin(leader, 2, PROMPT, [4, 5, 6])
    [(_, load)] = plan.async_loads
    leader.forget(2)
    leader.take_news([OpReport(load.graph_id, op.op_id, {0: RowError.IO}) for op in load.ops], [])
    assert not leader.promises.owes(2)


def test_an_error_while_a_promise_is_made_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    leader = make_leader()
    end(leader, begin(leader, 1, PROMPT, [0, 1, 2]))
    leader.finished(asked(1, PROMPT), [[0, 1, 2]])
    monkeypatch.setattr(leader, "_by_first_tier", lambda *_: 1 / 0)
    one = asked(2, PROMPT)
    with pytest.raises(ZeroDivisionError):
        leader.match(one, 0)
    leader.allocated(one, [[4, 5, 6]])
    plan = leader.build_plan(output([data(2, PROMPT, [4, 5, 6], 0, 48)]))
    assert plan.sync_loads == [], "the engine computes these pages"
    leader.check_integrity()
    assert leader.manager.index.evictions.evict(HOST, 8), "its blocks are no longer pinned"
