"""The worker side of vLLM's connector, in the orders in which vLLM calls it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

import kvcore_vllm.connector
from kvcore.connector.forward_timer import ForwardTimer
from kvcore.connector.fusion_messages import BlendOrder, BlendReport, BlendTime
from kvcore.connector.fusion_worker import RefusingFusionWorker
from kvcore.errors import TransferError
from kvcore.memory.device import device_of
from kvcore.transfer.graph import OpReport, TransferGraph
from kvcore_vllm.connector import KVCoreConnector
from kvcore_vllm.messages import KVCoreMetadata, StepPlan
from kvcore_vllm.worker import WorkerConnector
from kvcore_vllm.worker_guard import WorkerGuard
from support.worker import UNIT_TOKENS, ScriptedWorker, blend_of, load_graph


@pytest.fixture
def scripted() -> ScriptedWorker:
    return ScriptedWorker()


def make(scripted: ScriptedWorker, blends: Any = None) -> WorkerConnector:
    return WorkerConnector(
        scripted.parts,
        blends or RefusingFusionWorker(UNIT_TOKENS),
        layer_of={"layer": 0},
        page_tokens=(UNIT_TOKENS,),
        clock=ForwardTimer(device_of(None)),
    )


@pytest.fixture
def worker(scripted: ScriptedWorker) -> WorkerConnector:
    return make(scripted)


def save_of(graph_id: int) -> TransferGraph:
    return load_graph(graph_id)


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("deferred", [False, True])
def test_pages_of_a_failed_sync_load_are_named_in_its_own_step_and_once(
    worker: WorkerConnector, scripted: ScriptedWorker, deferred: bool, layerwise: bool
) -> None:
    """Speculative decoding ends the forward after vLLM has asked which pages are bad."""
    graph = load_graph(7)
    worker.begin(StepPlan(sync_loads=[graph], late_saves=[save_of(8)]))
    scripted.on_wait = lambda: scripted.end_once(graph, ok=False)
    if layerwise:
        worker.wait_for_layer("layer")
    if not deferred:
        worker.end_forward()
    assert worker.finished_loads() == (set(), set())
    assert worker.take_bad_pages() == {7}
    if deferred:
        worker.end_forward()
    assert worker.take_bad_pages() == set()
    assert scripted.submitted == [7], "a save of what was computed on the failed load"


def test_only_the_step_of_a_failed_load_saves_nothing(
    worker: WorkerConnector, scripted: ScriptedWorker
) -> None:
    """vLLM plans no step on top of one that has loads."""
    graph = load_graph(7)
    worker.begin(StepPlan(sync_loads=[graph], late_saves=[save_of(8)]))
    scripted.end(graph, ok=False)
    worker.end_forward()
    worker.begin(StepPlan(late_saves=[save_of(20)]))
    worker.end_forward()
    assert scripted.submitted == [7, 20]


def test_a_forward_is_timed_until_model_runner_v2_says_that_it_is_launched(
    worker: WorkerConnector,
) -> None:
    connector = KVCoreConnector.__new__(KVCoreConnector)
    connector._worker, connector._cold = WorkerGuard(worker), None
    connector.handle_preemptions(KVCoreMetadata.of(StepPlan(timed=5)))
    connector.finish_forward()
    time.sleep(0.2)  # V2 samples here
    connector.wait_for_save()
    report = worker.take_report()
    assert report is not None
    [(_, seconds)] = report.forwards
    assert seconds < 0.1


def test_sleep_waits_for_copies_of_pages(
    worker: WorkerConnector, scripted: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    connector = KVCoreConnector.__new__(KVCoreConnector)
    connector._worker = WorkerGuard(worker)
    left = iter([2, 1, 0])
    scripted.count_on_device = lambda: next(left)
    connector.unregister_kv_caches()
    assert list(left) == []
    monkeypatch.setattr(kvcore_vllm.connector, "SLEEP_S", 0.01)
    scripted.count_on_device = lambda: 1
    with pytest.raises(TransferError, match="must not sleep"):
        connector.unregister_kv_caches()


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

    def begin(self, orders: list[BlendOrder], mark: Any) -> list[OpReport]:
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

    def take_times(self) -> list[BlendTime]:
        return []


@pytest.mark.parametrize("runner", [1, 2])
def test_saves_of_a_forward_that_was_launched_are_started_before_a_blend(
    scripted: ScriptedWorker, runner: int
) -> None:
    """They would wait for all of the blend. V1 makes a blend before it says so."""
    order: list[str] = []
    scripted.mark = lambda *others: order.append("mark") or object()  # type: ignore
    blends = _Blending()
    run = blends.run
    blends.run = lambda landed: order.append("blend") or run(landed)  # type: ignore[method-assign, func-returns-value]
    worker = make(scripted, blends)
    worker.begin(StepPlan(blends=[blend_of("r", load_graph(3))], late_saves=[save_of(8)]))
    order.clear()
    if runner == 2:
        worker.forward_launched()
    worker.blend()
    worker.end_forward()
    assert order == (["mark", "blend"] if runner == 2 else ["blend", "mark"])
    assert scripted.submitted.count(8) == 1
    worker.begin(StepPlan(blends=[blend_of("s", load_graph(4))], late_saves=[save_of(9)]))
    worker.blend()  # before this forward: V2 does so if the step has sync loads
    assert 9 not in scripted.submitted, "the forward has not computed it"
    worker.end_forward()
    assert scripted.submitted.count(9) == 1


@pytest.mark.parametrize("arrives", [True, False])
def test_a_blend_behind_tokens_that_did_not_arrive_has_failed(
    scripted: ScriptedWorker, arrives: bool
) -> None:
    worker = make(scripted, _Blending())
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
