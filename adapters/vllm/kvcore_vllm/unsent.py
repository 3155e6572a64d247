"""What becomes of planned work that no worker will get, because kvcore failed or must start over.

vLLM counts on the loads and blends of a plan. One that is taken out of it is told as failed:

    a load or blend between steps ─▶ ``failed_loads``   vLLM takes the request back
    a load in the step            ─▶ ``unfilled``       vLLM computes the pages again
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet

from kvcore.transfer.graph import TransferGraph, UnitTable
from kvcore_vllm.messages import StepPlan

__all__ = ["failing_plan", "take_saves", "withdraw"]


def take_saves(plan: StepPlan) -> list[TransferGraph]:
    """Take all saves out of a plan, and return them."""
    saves = [*plan.early_saves, *plan.late_saves]
    plan.early_saves, plan.late_saves = [], []
    return saves


def withdraw(plan: StepPlan, request_id: str) -> list[TransferGraph]:
    """Take a request's loads and blends between steps out of a plan; return their graphs."""
    gone = [graph for name, graph in (*plan.async_loads, *plan.blend_loads) if name == request_id]
    plan.async_loads = [load for load in plan.async_loads if load[0] != request_id]
    plan.blend_loads = [load for load in plan.blend_loads if load[0] != request_id]
    for order in plan.blends:
        if order.request_id == request_id:
            gone += [chunk.graph for chunk in order.chunks]
    plan.blends = [order for order in plan.blends if order.request_id != request_id]
    return gone


def failing_plan(
    made: StepPlan, in_use: AbstractSet[int], pages_of: Callable[[Sequence[UnitTable]], list[int]]
) -> tuple[StepPlan, list[TransferGraph]]:
    """Return a plan that fails what ``made`` promised, and the graphs that it does not send.

    ``in_use`` are all graphs that use the engine's pages: the plan's fence waits for those that
    were sent earlier. What a clear makes unreadable stays in the plan.
    """
    unfilled = [page for graph in made.sync_loads for page in pages_of(graph.units)]
    lost = [name for name, _ in (*made.async_loads, *made.blend_loads)]
    lost += [order.request_id for order in made.blends]
    unsent = [*take_saves(made), *made.sync_loads, *made.fetches, *made.spills]
    for name in lost:
        unsent += withdraw(made, name)
    plan = StepPlan(
        open_tiers=made.open_tiers,
        invalidate=made.invalidate,
        cancel=made.cancel,
        fence=sorted(in_use - {graph.graph_id for graph in unsent}),
        failed_loads=[*made.failed_loads, *dict.fromkeys(lost)],
        unfilled=[*made.unfilled, *unfilled],
        empty_step=made.empty_step,
        number=made.number,
        weights=made.weights,
    )
    return plan, unsent
