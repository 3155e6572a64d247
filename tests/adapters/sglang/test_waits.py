"""SGLang's two threads and two streams over a device that queues its work."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvcore_sglang.gate import LayerGate
from kvcore_sglang.messages import Order
from kvcore_sglang.worker import WorkerConnector
from support.manual_device import ManualStream
from support.manual_worker import SHAPE, WAIT, ManualRig


@pytest.fixture
def rig() -> Iterator[ManualRig]:
    made = ManualRig()
    yield made
    made.close()


@pytest.fixture
def forward(rig: ManualRig) -> ManualStream:
    """The stream that forwards run on; the scheduler's thread has the device's first stream."""
    return rig.device.stream()


def test_a_save_reads_what_the_forward_stream_was_given(
    rig: ManualRig, forward: ManualStream
) -> None:
    worker = WorkerConnector(rig.parts, forward)
    forward.launch(lambda: rig.write(1, 5.0))
    graph = rig.save(1, page=1, slot=3)
    worker.carry_out(Order(graphs=[graph]))
    rig.until_issued(graph)
    rig.device.run(rig.device.compute, *rig.others(forward))
    assert rig.kept(3) == {1.0}, "it was read before the forward"
    rig.end()
    assert rig.kept(3) == {5.0}


def test_a_forward_waits_for_its_loads_on_its_own_stream(
    rig: ManualRig, forward: ManualStream
) -> None:
    """Also if it asks for the last layer only, as the replay of a full graph does."""
    worker = WorkerConnector(rig.parts, forward)
    gate = LayerGate(worker, layers=SHAPE.layers, layerwise=True)
    gate.set_consumer(gate.start([rig.load(1, page=2, slot=0)]))
    seen: list[set[float]] = []
    with forward.issuing():
        gate.wait_until(gate.num_layers - 1)
        forward.launch(lambda: seen.append(rig.read(2)))
    assert not rig.host_waited
    rig.end()
    rig.device.run()
    assert seen == [{1.0}]
    assert gate.finish(1)


def test_a_second_attempt_is_as_late_as_the_first(rig: ManualRig, forward: ManualStream) -> None:
    """The thread that polls submits it; its current stream knows nothing of forwards."""
    worker = WorkerConnector(rig.parts, forward)
    elsewhere = rig.device.stream()
    forward.launch(lambda: rig.write(2, 7.0))  # the page's owner before
    rig.ops.refuse = SHAPE.layers
    graph = rig.load(1, page=2, slot=0)
    worker.start_loads([graph])

    def poll() -> None:
        limit = time.monotonic() + WAIT
        with elsewhere.issuing():
            while len(rig.worker.engine.issued(1)) < SHAPE.layers:
                worker.poll()
                assert time.monotonic() < limit

    with rig.device.working(forward), ThreadPoolExecutor(1) as pool:
        pool.submit(poll).result()
    rig.device.run(rig.device.compute, *rig.others(forward))
    assert rig.read(2) == {0.0}, "the load came before what the forward still writes"
    with rig.device.working():
        assert worker.finish([1])
    assert rig.read(2) == {1.0}
