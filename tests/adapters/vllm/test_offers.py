"""What vLLM takes up of what its lookup was offered: right pages, or no pages at all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from vllm.v1.core.sched.output import SchedulerOutput

from kvcore.fusion.options import FusionOptions
from kvcore.transfer.graph import SKIP, TransferGraph
from kvcore_vllm.fusion_scheduler import VllmFusionRequest
from kvcore_vllm.tracked import Offer
from support.vllm_leader import BLOCK, PAGES, LeaderRig
from support.worker import load_graph


@pytest.fixture
def rig() -> LeaderRig:
    return LeaderRig()


def ask(rig: LeaderRig, computed: int = 0) -> Any:
    rig.ask("r")  # begins the request
    return rig.side.get_num_new_matched_tokens(rig.requests["r"], computed)


def take(rig: LeaderRig, external: int) -> TransferGraph | None:
    """Take up ``external`` tokens; return the load, or None if it was refused."""
    rig.side.update_state_after_alloc(rig.requests["r"], PAGES, external)
    loads, failed = rig.side._plan.async_loads, rig.side._plan.failed_loads
    assert len(loads) + len(failed) == 1
    return loads[0][1] if loads else None


@pytest.mark.parametrize("computed", [0, 48])
@pytest.mark.parametrize("less", [0, 1, 15, 16, 100])
def test_fewer_tokens_come_from_the_start_of_the_offer(
    rig: LeaderRig, computed: int, less: int
) -> None:
    offered, between_steps = ask(rig, computed)
    assert (offered, between_steps) == (400 - computed, True)
    graph = take(rig, offered - less)
    assert graph is not None
    [table] = graph.units
    units = table.array().ravel()
    first, last = computed // BLOCK, -(-(400 - less) // BLOCK)
    filled = units[units != SKIP] * table.unit_tokens // BLOCK
    assert (np.unique(filled) - 1).tolist() == list(range(first, last))
    assert list(graph.keys) == rig.chain.keys[first:last]


@pytest.mark.parametrize("ahead", [0, 1, 3, 16])
def test_as_many_tokens_as_a_draft_looks_ahead_are_computed_again(ahead: int) -> None:
    """The draft's KV of them depends on tokens that are no part of the hit."""
    rig = LeaderRig(lookahead=ahead)
    offered, _ = ask(rig)
    assert offered == 400 - ahead
    graph = take(rig, offered)
    assert graph is not None
    assert list(graph.keys) == rig.chain.keys[: -(-offered // BLOCK)]


def test_more_tokens_than_were_offered_are_computed(rig: LeaderRig) -> None:
    offered, _ = ask(rig)
    assert take(rig, offered + 1) is None
    assert ask(rig) == (0, False), "it is not offered again"


def test_an_offer_is_taken_up_once() -> None:
    rig = LeaderRig(in_step=False)
    offered, _ = ask(rig)
    assert take(rig, offered) is not None
    rig.side._plan.async_loads.clear()
    assert take(rig, offered) is None


def test_an_offer_that_comes_true_too_late_is_computed(rig: LeaderRig) -> None:
    """vLLM may put the load off until other steps have ended."""
    offered, _ = ask(rig)
    rig.manager.clear()
    assert take(rig, offered) is None


def test_a_short_load_from_host_memory_is_part_of_the_step_only_if_vllm_recovers_from_it() -> None:
    for recovers in (False, True):
        rig = LeaderRig(in_step=recovers)
        offered, _ = ask(rig)
        graph = take(rig, offered)
        assert graph is not None
        rig.end(graph)
        rig.side._load_ended("r")
        rig.side._plan.async_loads.clear()
        assert rig.ask("other") == (offered, not recovers)


def test_pages_of_a_load_in_the_step_that_cannot_be_planned_are_told_as_unfilled() -> None:
    """The forward reads pages that nothing fills, so vLLM computes them again after it."""
    rig = LeaderRig()
    offered, _ = ask(rig)
    graph = take(rig, offered)
    assert graph is not None
    rig.end(graph)
    assert rig.ask("other") == (offered, False)
    rig.side.update_state_after_alloc(rig.requests["other"], PAGES, offered + 1)
    assert rig.side._plan.unfilled == list(range(1, 27))
    assert rig.side._plan.sync_loads == []
    assert rig.ask("other") == (0, False), "it is not offered again"


@pytest.mark.parametrize("refused", [False, True])
def test_a_request_aborted_before_its_pages_are_filled_saves_nothing(
    rig: LeaderRig, refused: bool
) -> None:
    offered, _ = ask(rig)
    assert (take(rig, offered + refused) is None) == refused
    rig.manager.clear()  # a tier that holds the blocks would be reason enough to save nothing
    request = rig.requests["r"]
    request.num_computed_tokens = offered
    request.get_finished_reason = lambda: "abort"
    rig.side.request_finished(request, PAGES.get_block_ids())
    assert rig.side._plan.early_saves == []


@pytest.mark.parametrize("less", [0, 1])
def test_a_blend_is_taken_up_whole_or_computed(rig: LeaderRig, less: int) -> None:
    ask(rig)
    blend, orders = SimpleNamespace(reused=400), rig.side._plan.blends
    order: Any = SimpleNamespace(pages=PAGES.get_block_ids()[0], exact=48, stop=400)
    rig.side._fusion = cast(
        "Any", SimpleNamespace(layer_steps=(), order_marked=lambda request, fusing, pages: order)
    )
    tracked = rig.side._requests["r"]
    tracked.offer = Offer(0, 400, 0, blend=cast("Any", blend))
    tracked.fusing = VllmFusionRequest("r", FusionOptions(), due=True)
    rig.side._users.add(load_graph(9), [4])  # a save, of whoever had the page before
    rig.side.update_state_after_alloc(rig.requests["r"], PAGES, 400 - less)
    fence = rig.side._fences(rig.side._plan, SchedulerOutput.make_empty())
    assert orders == ([] if less else [order])
    assert fence == ([] if less else [9]), "a blend writes pages of no request in the step"
    assert rig.side._plan.failed_loads == (["r"] if less else [])
