"""TensorRT-LLM's streams over a device that queues its work."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvcore.testing.waiting import until
from kvcore.transfer.path_queue import SAVES_ISSUED
from kvcore_devtools.gpu.device import RecordedStream
from kvcore_trtllm.messages import StepPlan
from kvcore_trtllm.worker import Tally, WorkerConnector
from support.manual_worker import SHAPE, ManualRig, manual_rig


@pytest.fixture
def rig() -> Iterator[ManualRig]:
    with manual_rig() as made:
        yield made


@pytest.fixture
def execution(rig: ManualRig) -> RecordedStream:
    return rig.device.stream()


def connector(rig: ManualRig, *, layerwise: bool) -> WorkerConnector:
    tally = Tally(1, lambda mine: [mine])
    return WorkerConnector(rig.parts, tally, layers=SHAPE.layers, layerwise=layerwise)


@pytest.mark.parametrize("layerwise", [True, False])
def test_a_step_is_launched_ahead_of_fences_loads_and_saves(
    rig: ManualRig, execution: RecordedStream, layerwise: bool
) -> None:
    """The forward runs on a stream of its own, and the engine's hooks name it."""
    side = connector(rig, layerwise=layerwise)
    rig.compute(lambda: rig.write(1, 3.0), execution)
    with side.on(execution):
        side.begin(StepPlan(late_saves=[(7, rig.save(1, page=1, slot=5))]))
        for layer in range(SHAPE.layers):
            side.wait_for_layer(layer)
    save = rig.save(1, page=1, slot=5)
    side.end_forward()  # the engine's own callback, on whatever stream
    rig.until_issued(save)
    rig.run(rig.stream, *rig.others(execution))
    assert rig.kept(5) == {1.0}, "it was read before the forward"
    plan = StepPlan(fence=[1], sync_loads=[rig.load(2, page=1, slot=0, by_layer=layerwise)])
    seen: list[set[float]] = []
    with side.on(execution):
        side.begin(plan)
        for layer in range(SHAPE.layers):
            side.wait_for_layer(layer)
        rig.compute(lambda: seen.append(rig.read(1)), execution)
        side.end_forward()
    assert not rig.host_waited
    assert not seen
    rig.end()
    assert seen == [{1.0}]
    assert rig.kept(5) == {3.0}


def test_the_saves_of_a_fence_are_copied_at_once(rig: ManualRig) -> None:
    """A step that gives away the pages of several saves costs the device one operation."""
    side = connector(rig, layerwise=False)
    before = [rig.save(i, page=i, slot=i) for i in range(SAVES_ISSUED)]
    rig.submit(*before)  # as many as may be issued: what comes now waits
    for graph in before:
        until(lambda graph=graph: rig.issued(graph))
    saves = [rig.save(10 + i, page=4 + i, slot=4 + i) for i in range(3)]
    side.begin(StepPlan(late_saves=[(7, graph) for graph in saves]))
    side.end_forward()
    assert not any(map(rig.issued, saves))
    side.begin(StepPlan(fence=[graph.graph_id for graph in saves]))
    assert all(map(rig.issued, saves))
    engine = rig.worker.engine
    operations = {id(copies) for graph in saves for copies in engine.issued(graph.graph_id)}
    assert len(operations) == 1
    side.end_forward()
    assert not rig.host_waited
    assert len(rig.end()) == SAVES_ISSUED + len(saves)
