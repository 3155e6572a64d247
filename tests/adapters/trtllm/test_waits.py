"""TensorRT-LLM's streams over a device that queues its work."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvcore_trtllm.messages import StepPlan
from kvcore_trtllm.worker import Tally, WorkerConnector
from support.manual_device import ManualStream
from support.manual_worker import SHAPE, ManualRig


@pytest.fixture
def rig() -> Iterator[ManualRig]:
    made = ManualRig()
    yield made
    made.close()


@pytest.fixture
def execution(rig: ManualRig) -> ManualStream:
    return rig.device.stream()


def connector(rig: ManualRig, *, layerwise: bool) -> WorkerConnector:
    tally = Tally(1, lambda mine: [mine])
    return WorkerConnector(rig.parts, tally, layers=SHAPE.layers, layerwise=layerwise)


@pytest.mark.parametrize("layerwise", [True, False])
def test_a_step_is_launched_ahead_of_fences_loads_and_saves(
    rig: ManualRig, execution: ManualStream, layerwise: bool
) -> None:
    """The forward runs on a stream of its own, and the engine's hooks name it."""
    side = connector(rig, layerwise=layerwise)
    execution.launch(lambda: rig.write(1, 3.0))
    with side.on(execution):
        side.begin(StepPlan(late_saves=[(7, rig.save(1, page=1, slot=5))]))
        for layer in range(SHAPE.layers):
            side.wait_for_layer(layer)
    save = rig.save(1, page=1, slot=5)
    side.end_forward()  # the engine's own callback, on whatever stream
    rig.until_issued(save)
    rig.device.run(rig.device.compute, *rig.others(execution))
    assert rig.kept(5) == {1.0}, "it was read before the forward"
    plan = StepPlan(fence=[1], sync_loads=[rig.load(2, page=1, slot=0, by_layer=layerwise)])
    seen: list[set[float]] = []
    with side.on(execution):
        side.begin(plan)
        for layer in range(SHAPE.layers):
            side.wait_for_layer(layer)
        execution.launch(lambda: seen.append(rig.read(1)))
        side.end_forward()
    assert not rig.host_waited
    assert not seen
    rig.end()
    rig.device.run()
    assert seen == [{1.0}]
    assert rig.kept(5) == {3.0}
