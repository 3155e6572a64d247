"""A step of vLLM over a device that queues its work: the host waits for no copy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvcore.connector.forward_timer import ForwardTimer
from kvcore.connector.fusion_worker import RefusingFusionWorker
from kvcore.transfer.graph import RowError
from kvcore.transfer.path_queue import SAVES_ISSUED
from kvcore_vllm.messages import StepPlan
from kvcore_vllm.worker import WorkerConnector
from support.manual_worker import SHAPE, ManualRig, manual_rig


@pytest.fixture
def rig() -> Iterator[ManualRig]:
    with manual_rig() as made:
        yield made


@pytest.fixture
def worker(rig: ManualRig) -> WorkerConnector:
    return WorkerConnector(
        rig.parts,
        RefusingFusionWorker(SHAPE.block_tokens),
        layer_of={f"layers.{i}": i for i in range(SHAPE.layers)},
        page_tokens=(SHAPE.block_tokens,),
        clock=ForwardTimer[int](rig.device),
    )


def step(worker: WorkerConnector, plan: StepPlan, rig: ManualRig, *, layerwise: bool) -> Any:
    """The calls of a step in the order of vLLM's runners."""
    worker.begin(plan)
    if not layerwise:
        worker.wait_for_loads()
    worker.blend()
    for layer in range(SHAPE.layers):
        if layerwise:
            worker.wait_for_layer(f"layers.{layer}")
    worker.end_forward()
    return worker.finished_loads(), worker.take_bad_pages()


@pytest.mark.parametrize("layerwise", [True, False])
def test_steps_are_launched_ahead_of_their_loads_and_saves(
    worker: WorkerConnector, rig: ManualRig, layerwise: bool
) -> None:
    """Page 1 is computed and saved, given away to a load, and saved again; page 2 is loaded."""
    rig.arena.tensor().view(8, -1)[0] = 4.0
    rig.compute(lambda: rig.write(1, 3.0))
    plain = {"layerwise": layerwise}
    step(worker, StepPlan(late_saves=[rig.save(1, page=1, slot=5)]), rig, **plain)
    plan = StepPlan(fence=[1], sync_loads=[rig.load(2, 1, 0), rig.load(3, 2, 0)], early_saves=[])
    assert step(worker, plan, rig, **plain) == ((set(), set()), set())
    seen: list[set[float]] = []
    rig.compute(lambda: seen.append(rig.read(1) | rig.read(2)))
    step(worker, StepPlan(late_saves=[rig.save(4, page=1, slot=6)]), rig, **plain)
    rig.compute(lambda: rig.write(7, 1.0))
    assert not rig.host_waited
    assert not seen
    rig.end()
    assert (seen, rig.kept(5), rig.kept(6)) == ([{4.0}], {3.0}, {4.0})


def test_a_fence_reaches_a_save_that_waits_in_the_queue(
    worker: WorkerConnector, rig: ManualRig
) -> None:
    saves = [rig.save(i, page=i, slot=i) for i in range(1, SAVES_ISSUED + 4)]
    for page in range(1, SAVES_ISSUED + 4):
        rig.compute(lambda page=page: rig.write(page, float(page)))
    worker.begin(StepPlan(late_saves=saves))
    worker.end_forward()
    last = saves[-1].graph_id
    worker.begin(StepPlan(fence=[last]))
    rig.compute(lambda: rig.write(last, 99.0))
    assert not rig.host_waited
    rig.run(rig.stream)  # the engine's stream first, as far as it may go before the copies
    rig.end()
    assert [rig.kept(i) for i in range(1, SAVES_ISSUED + 4)] == [
        {float(i)} for i in range(1, SAVES_ISSUED + 4)
    ]


@pytest.mark.parametrize("layerwise", [True, False])
def test_a_load_that_cannot_be_issued_is_told_in_its_step(
    worker: WorkerConnector, rig: ManualRig, layerwise: bool
) -> None:
    rig.ops.refuse = 1
    plan = StepPlan(sync_loads=[rig.load(1, page=4, slot=0)], late_saves=[rig.save(2, 4, 3)])
    with rig.machine.working():
        _, bad = step(worker, plan, rig, layerwise=layerwise)
    assert bad == {4}
    rig.end()
    report = worker.take_report()
    assert report is not None
    assert {r.graph_id: r.failed for r in report.reports}[2] == {0: RowError.UPSTREAM}, "tainted"


def test_sleep_waits_for_every_copy(worker: WorkerConnector, rig: ManualRig) -> None:
    """Those on a stream that the device has not come to, and those that were not issued."""
    saves = [rig.save(i, page=i, slot=i) for i in range(1, SAVES_ISSUED + 3)]
    worker.begin(StepPlan(early_saves=saves, async_loads=[("r", rig.load(9, 0, 0))]))
    assert not worker.quiesce(0.05)
    with rig.machine.working():
        assert worker.quiesce(20.0)
    assert rig.worker.engine.in_flight == 0
    assert worker.finished_loads() == ({"r"}, set())
