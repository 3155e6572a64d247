"""The worker side of vLLM's connector, in the orders in which vLLM calls it."""

from __future__ import annotations

import pytest
import torch

from kvcore.connector.forward_timer import ForwardTimer
from kvcore.connector.fusion_messages import BlendOrder, ChunkLoad
from kvcore.connector.fusion_worker import RefusingFusionWorker
from kvcore.transfer.graph import TransferGraph
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


def test_blends_are_made_once_in_a_step(worker: WorkerConnector) -> None:
    chunk = ChunkLoad(load_graph(3), 0, UNIT_TOKENS, 0, 0)
    order = BlendOrder("r", b"\0" * 4 * UNIT_TOKENS, 0, 0, UNIT_TOKENS, [5], 0.1, [chunk], 1)
    worker.begin(StepPlan(blends=[order]))
    worker.blend()
    worker.blend()
    assert worker.take_bad_pages() == {5}
    assert [report.ok for report in worker.take_blends()] == [False]
