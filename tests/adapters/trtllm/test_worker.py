"""The worker side of TensorRT-LLM's connector, without the engine."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from kvcore.connector.worker import ATTEMPTS
from kvcore.errors import TransferError
from kvcore_trtllm.messages import StepPlan
from kvcore_trtllm.worker import Tally, WorkerConnector
from support.worker import ScriptedWorker, load_graph, save_graph

LAYERS = 3


@pytest.fixture
def scripted() -> ScriptedWorker:
    return ScriptedWorker()


@pytest.fixture
def worker(scripted: ScriptedWorker) -> WorkerConnector:
    return WorkerConnector(
        scripted.parts, Tally(1, lambda own: [own]), layers=LAYERS, layerwise=True
    )


def test_a_load_that_may_be_repeated_does_not_fail_the_step(
    worker: WorkerConnector, scripted: ScriptedWorker
) -> None:
    """One load's later layer fails while the step waits for the other load's next attempt."""
    first, second = load_graph(1, layers=LAYERS), load_graph(2, layers=LAYERS)
    worker.begin(StepPlan(sync_loads=[first, second]))
    scripted.end(first, [0])
    scripted.end(second, [0], ok=False)
    scripted.end(second, [1, 2])

    def between() -> None:
        scripted.end(first, [1], ok=False)
        scripted.end(second)

    nothing = [lambda: None] * 3  # layer 0 of each load, and the second's next attempt
    ends = [between, lambda: scripted.end(first, [2]), lambda: scripted.end(first)]
    waits = iter([*nothing, *ends])
    scripted.on_wait = lambda: next(waits, lambda: None)()
    for layer in range(LAYERS):
        worker.wait_for_layer(layer)
    worker.end_forward()
    assert scripted.submitted == [1, 2, 2, 1]


def test_a_load_that_has_failed_for_good_fails_the_step(
    worker: WorkerConnector, scripted: ScriptedWorker
) -> None:
    graph = load_graph(1)
    worker.begin(StepPlan(sync_loads=[graph]))
    scripted.on_wait = lambda: scripted.end(graph, ok=False)
    worker.wait_for_layer(0)  # in the forward, which is a collective
    with pytest.raises(TransferError, match=f"in {ATTEMPTS} attempts"):
        worker.end_forward()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_the_pages_of_a_save_in_parts_are_held_until_the_last_one_has_ended(
    worker: WorkerConnector, scripted: ScriptedWorker, order: tuple[int, ...]
) -> None:
    """TensorRT-LLM gives a request's pages to others as soon as it is told that it is saved."""
    graph = save_graph(1, parts=3)
    worker.begin(StepPlan(late_saves=[(7, graph)]))
    worker.end_forward()
    for part in order:
        assert worker.finished([7], []) == ([], [])
        scripted.end(graph, [part])
    assert worker.finished([], []) == ([7], [])
