"""Tensor-parallel ranks of TensorRT-LLM: a step fails on all of them, or on none.

TensorRT-LLM handles the error of a forward on the rank that raises it. The other ranks would use
the tokens of a step that computed on KV which is wrong on one rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

from kvcore.errors import TransferError
from kvcore.transfer.graph import OpReport, RowError
from kvcore_trtllm.messages import StepPlan
from kvcore_trtllm.worker import Tally, WorkerConnector
from support.fusion_ranks import Matcher, together
from support.worker import ScriptedWorker, load_graph

RANKS, ILL = 2, 1
PARKED = 7


class Rank:
    """One rank with a worker whose copies end when the test says so."""

    def __init__(self, number: int, matcher: Matcher) -> None:
        self.ill = number == ILL
        self.scripted = ScriptedWorker()
        self.told: list[OpReport] = []
        self.worker = WorkerConnector(
            self.scripted.parts,
            Tally(RANKS, lambda own: matcher.meet(number, "reports", own)),
            layers=1,
            layerwise=True,
        )
        self.worker.listener = lambda news: self.told.extend(news.ended)

    def step(self, plan: StepPlan) -> bool:
        """Run a step; return True if the engine uses its tokens."""
        self.worker.begin(plan)
        if plan.sync_loads:
            self.worker.wait_for_layer(0)
        try:
            self.worker.end_forward()
        except TransferError:
            return False
        return True

    def park(self, graph_id: int) -> None:
        """Begin a load for a request that is parked, in a step of its own."""
        assert self.step(StepPlan(async_loads=[(PARKED, load_graph(graph_id))]))

    def break_down(self) -> None:
        """Let the next call that begins a plan fail on the ill rank. Cancelled ops end at once."""

        def fail(*_: Any) -> None:
            raise RuntimeError("an error of kvcore")

        if self.ill:
            self.worker._start = fail  # type: ignore[method-assign]
            self.scripted.on_cancel = self.cancelled

    def cancelled(self, graph_id: int) -> None:
        self.scripted._reports.append(OpReport(graph_id, 0, {0: RowError.CANCELLED}))


def used(run: Callable[[Rank], Any]) -> list[Any]:
    """Return what ``run`` returns on each rank."""
    found = together(RANKS, lambda number, matcher: run(Rank(number, matcher)))
    for one in found:
        if isinstance(one, BaseException):
            raise one
    return found


def test_a_step_fails_on_every_rank_if_a_load_has_failed_on_one() -> None:
    def run(rank: Rank) -> bool:
        graph = load_graph(1)
        rank.scripted.on_wait = lambda: rank.scripted.end(graph, ok=not rank.ill)
        return rank.step(StepPlan(sync_loads=[graph]))

    assert used(run) == [False, False]


def test_ranks_go_on_if_nothing_has_failed() -> None:
    def run(rank: Rank) -> list[bool]:
        rank.park(1)
        graph = load_graph(2)
        rank.scripted.on_wait = lambda: rank.scripted.end_once(graph)
        both = StepPlan(sync_loads=[graph], fence=[1], cancel=[1])
        return [rank.step(both), rank.step(StepPlan(late_saves=[(8, load_graph(3))]))]

    assert used(run) == [[True, True]] * RANKS


@pytest.mark.parametrize("given_away", [False, True])
def test_a_step_that_shares_pages_with_a_load_that_failed_before(given_away: bool) -> None:
    """The load has ended on one rank only, so the leader does not know that it has failed."""

    def run(rank: Rank) -> bool:
        rank.park(1)
        for _ in range(3 if rank.ill else 0):
            rank.scripted.end(load_graph(1), ok=False)
            rank.worker._collect()
        return rank.step(StepPlan(fence=[1], cancel=[1] if given_away else []))

    assert used(run) == [given_away, given_away]


def test_a_step_that_shares_pages_with_a_load_of_a_rank_that_has_stopped() -> None:
    def run(rank: Rank) -> list[bool]:
        rank.park(1)
        rank.break_down()
        return [rank.step(StepPlan(fence=[1])), rank.step(StepPlan())]

    assert used(run) == [[False, True]] * RANKS


def test_what_is_cleared_is_unreadable_on_a_rank_that_has_stopped() -> None:
    """It would be found again after a restart."""

    def run(rank: Rank) -> list[Any]:
        rank.break_down()
        rank.step(StepPlan())
        rank.step(StepPlan(invalidate=[("disk", [(0, 4)])]))
        return rank.scripted.invalidated

    assert used(run) == [[("disk", [(0, 4)])]] * RANKS


def test_a_load_that_an_error_has_cancelled_is_not_taken_for_an_aborted_one() -> None:
    """The request is parked and goes on when its load has ended: the leader has to fail it."""

    def run(rank: Rank) -> tuple[list[int], set[RowError]]:
        rank.park(1)
        rank.break_down()
        rank.step(StepPlan())
        if not rank.ill:
            rank.scripted.end(load_graph(1))
        _, loaded = rank.worker.finished([], [PARKED])
        return loaded, {error for op in rank.told for error in op.failed.values()}

    assert used(run) == [([PARKED], {RowError.REFUSED})] * RANKS


def test_a_request_does_not_wait_for_ever_for_a_load_that_could_not_be_repeated() -> None:
    def run(rank: Rank) -> tuple[list[int], set[RowError]]:
        rank.park(1)
        rank.scripted.end(load_graph(1), ok=not rank.ill)
        if rank.ill:

            def fail(*_: Any) -> None:
                raise RuntimeError("the device has failed")

            rank.worker._mark = fail  # type: ignore[method-assign]
        _, loaded = rank.worker.finished([], [PARKED])
        return loaded, {error for op in rank.told for error in op.failed.values()}

    assert used(run) == [([PARKED], {RowError.REFUSED})] * RANKS
