"""The worker side of vLLM's connector, in the orders in which vLLM calls it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from kvcore.connector.forward_timer import ForwardTimer
from kvcore.connector.fusion_messages import BlendOrder, BlendReport, ChunkLoad
from kvcore.connector.fusion_worker import RefusingFusionWorker
from kvcore.transfer.graph import OpReport, TransferGraph
from kvcore_vllm.messages import StepPlan
from kvcore_vllm.worker import TAINTED_STEPS, WorkerConnector
from support.worker import UNIT_TOKENS, ScriptedWorker, load_graph


@pytest.fixture
def scripted() -> ScriptedWorker:
    return ScriptedWorker()


@pytest.fixture
def worker(scripted: ScriptedWorker) -> WorkerConnector:
    return WorkerConnector(
        scripted.parts,
        RefusingFusionWorker(UNIT_TOKENS),
        layer_of={"layer": 0},
        page_tokens=(UNIT_TOKENS,),
        clock=ForwardTimer(torch.device("cpu")),
    )


def save_of(graph_id: int) -> TransferGraph:
    return load_graph(graph_id)


@pytest.mark.parametrize("deferred", [False, True])
def test_pages_of_a_failed_sync_load_are_named_in_its_own_step_and_once(
    worker: WorkerConnector, scripted: ScriptedWorker, deferred: bool
) -> None:
    """Speculative decoding ends the forward after vLLM has asked which pages are bad."""
    graph = load_graph(7)
    worker.begin(StepPlan(sync_loads=[graph], late_saves=[save_of(8)]))
    scripted.end(graph, ok=False)
    worker.wait_for_layer("layer")
    if not deferred:
        worker.end_forward()
    assert worker.finished_loads() == (set(), set())
    assert worker.take_bad_pages() == {7}
    if deferred:
        worker.end_forward()
    assert worker.take_bad_pages() == set()
    for step in range(1, TAINTED_STEPS):
        worker.begin(StepPlan(late_saves=[save_of(8 + step)]))
        worker.end_forward()
    assert scripted.submitted == [7], "saves of what was computed on the failed load"
    worker.begin(StepPlan(late_saves=[save_of(20)]))
    worker.end_forward()
    assert scripted.submitted == [7, 20]


def blend_of(request_id: str, chunk: TransferGraph) -> BlendOrder:
    loads = [ChunkLoad(chunk, 0, UNIT_TOKENS, 0, 0)]
    tokens = b"\0" * 4 * UNIT_TOKENS
    return BlendOrder(request_id, tokens, 0, 0, UNIT_TOKENS, [5], 0.1, loads, 1)


def test_blends_are_made_once_in_a_step(worker: WorkerConnector) -> None:
    """One that fails is told like an async load that failed: the request was not scheduled yet."""
    worker.begin(StepPlan(blends=[blend_of("r", load_graph(3))]))
    worker.blend()
    worker.blend()
    assert worker.finished_loads() == ({"r"}, {"r"})
    assert worker.take_bad_pages() == set()
    report = worker.take_report()
    assert report is not None
    assert [(blend.request_id, blend.ok) for blend in report.blends] == [("r", False)]
    assert worker.finished_loads() == (set(), set())


class _Blending:
    """A fusion worker whose blends succeed."""

    def __init__(self) -> None:
        self.orders: list[BlendOrder] = []

    def begin(self, orders: list[BlendOrder]) -> list[OpReport]:
        self.orders += orders
        return []

    def run(self, landed: Callable[[int], None]) -> list[int]:
        landed(0)
        return []

    def take_reports(self) -> list[BlendReport]:
        orders, self.orders = self.orders, []
        return [BlendReport(order.request_id, ok=True) for order in orders]

    def take_profile(self) -> list[tuple[int, float]]:
        return []


@pytest.mark.parametrize("arrives", [True, False])
def test_a_blend_behind_tokens_that_did_not_arrive_has_failed(
    scripted: ScriptedWorker, arrives: bool
) -> None:
    worker = WorkerConnector(
        scripted.parts,
        cast(Any, _Blending()),
        layer_of={"layer": 0},
        page_tokens=(UNIT_TOKENS,),
        clock=ForwardTimer(torch.device("cpu")),
    )
    prefix, chunks = load_graph(1), [load_graph(2), load_graph(3)]
    orders = [blend_of("a", chunks[0]), blend_of("b", chunks[1])]
    worker.begin(StepPlan(blends=orders, blend_loads=[("a", prefix)], late_saves=[save_of(9)]))
    scripted.end(prefix, ok=arrives)
    for chunk in chunks:
        scripted.end(chunk)
    worker.blend()
    worker.end_forward()
    assert worker.finished_loads() == ({"a", "b"}, set() if arrives else {"a"})
    assert scripted.submitted == [1, 9], "the step itself computed nothing from it"
    assert worker.take_bad_pages() == set()
