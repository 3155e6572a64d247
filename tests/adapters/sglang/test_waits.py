"""SGLang's two threads and two streams over a device that queues its work."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvcore.connector.worker import ATTEMPTS
from kvcore.transfer.graph import TransferGraph
from kvcore_devtools.gpu.device import RecordedStream
from kvcore_sglang.gate import LayerGate
from kvcore_sglang.messages import Order
from kvcore_sglang.worker import WorkerConnector
from support.manual_worker import SHAPE, ManualRig, manual_rig


@pytest.fixture
def rig() -> Iterator[ManualRig]:
    with manual_rig() as made:
        yield made


@pytest.fixture
def forward(rig: ManualRig) -> RecordedStream:
    """The stream that forwards run on; the scheduler's thread has the device's first stream."""
    return rig.device.stream()


def test_a_save_reads_what_the_forward_stream_was_given(
    rig: ManualRig, forward: RecordedStream
) -> None:
    worker = WorkerConnector(rig.parts, forward)
    rig.compute(lambda: rig.write(1, 5.0), forward)
    graph = rig.save(1, page=1, slot=3)
    worker.carry_out(Order(graphs=[graph]))
    rig.until_issued(graph)
    rig.run(rig.stream, *rig.others(forward))
    assert rig.kept(3) == {1.0}, "it was read before the forward"
    rig.end()
    assert rig.kept(3) == {5.0}


def test_a_forward_waits_for_its_loads_on_its_own_stream(
    rig: ManualRig, forward: RecordedStream
) -> None:
    """Also if it asks for the last layer only, as the replay of a full graph does."""
    worker = WorkerConnector(rig.parts, forward)
    gate = LayerGate(worker, layers=SHAPE.layers, layerwise=True)
    gate.set_consumer(gate.start([rig.load(1, page=2, slot=0)]))
    seen: list[set[float]] = []
    with forward.issuing():
        gate.wait_until(gate.num_layers - 1)
        rig.compute(lambda: seen.append(rig.read(2)), forward)
    assert not rig.host_waited
    with rig.machine.working():
        assert gate.finish(1)
    rig.run()
    assert seen == [{1.0}]


def test_every_attempt_waits_for_the_same(
    rig: ManualRig, forward: RecordedStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that polls may submit the next one; its current stream knows of no forward."""
    worker = WorkerConnector(rig.parts, forward)
    elsewhere, submit = rig.device.stream(), rig.worker.submit
    waited_for: list[Any] = []

    def note(graph: TransferGraph, wave: int | None = None, after: Any = None) -> Any:
        waited_for.append(after)
        return submit(graph, wave, after)

    monkeypatch.setattr(rig.worker, "submit", note)
    rig.ops.refuse = ATTEMPTS - 1
    with rig.machine.working(), ThreadPoolExecutor(1) as pool:
        worker.start_loads([rig.load(1, page=2, slot=0, by_layer=False)])

        def finish() -> bool:
            with elsewhere.issuing():
                return worker.finish([1])

        assert pool.submit(finish).result()
    assert len(waited_for) == ATTEMPTS
    assert waited_for[0] is not None
    assert all(one is waited_for[0] for one in waited_for)
    assert rig.read(2) == {1.0}


def test_a_batch_without_loads_is_right_on_a_rank_that_has_stopped(
    rig: ManualRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be the batch of a request whose load was made at once, before."""
    worker = WorkerConnector(rig.parts)
    gate = LayerGate(worker, layers=SHAPE.layers, layerwise=True)
    monkeypatch.setattr(worker, "start_loads", lambda graphs: 1 / 0)
    gate.set_consumer(gate.start([rig.load(1, page=2, slot=0)]))
    assert gate.stopped
    assert not gate.finish(1)
    gate.set_consumer(-1)
    assert gate.finish(-1)
