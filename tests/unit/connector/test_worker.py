"""The worker side that adapters share: attempts of loads, and the order of their reports."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from kvcore.connector.worker import ATTEMPTS, Load, StepWorker
from kvcore.transfer.graph import OpReport, RowError, TransferGraph
from support.worker import ScriptedWorker, load_graph


class Worker(StepWorker[int]):
    attempts = ATTEMPTS

    def __init__(self, scripted: ScriptedWorker) -> None:
        super().__init__(scripted.parts)
        self.ended: list[tuple[int, bool]] = []

    def load(self, graph: TransferGraph) -> Load[int]:
        load = self._expect(graph)
        self._submit(graph)
        return load

    def cancel(self, graph_id: int) -> None:
        self._cancel([graph_id])

    def settle(self, load: Load[int]) -> None:
        self._settle(load)

    def reports(self) -> list[OpReport]:
        self._collect()
        return self._take_reports()

    def _ended(self, load: Load[int]) -> None:
        self.ended.append((load.graph_id, load.failed))


@pytest.fixture
def scripted() -> ScriptedWorker:
    return ScriptedWorker()


@pytest.fixture
def worker(scripted: ScriptedWorker) -> Worker:
    return Worker(scripted)


def test_a_load_that_may_be_repeated_holds_its_reports_back(
    worker: Worker, scripted: ScriptedWorker
) -> None:
    graph = load_graph(1, layers=2)
    worker.load(graph)
    scripted.end(graph, [0])
    assert worker.reports() == []
    scripted.end(graph, [1], ok=False)
    assert worker.reports() == []
    assert scripted.submitted == [1, 1]
    scripted.end(graph)
    assert worker.reports() == [OpReport(1, 0), OpReport(1, 1)]
    assert worker.ended == [(1, False)]


def test_a_load_ends_after_its_last_attempt(worker: Worker, scripted: ScriptedWorker) -> None:
    graph = load_graph(1)
    load = worker.load(graph)
    for _ in range(ATTEMPTS):
        assert worker.reports() == []
        scripted.end(graph, ok=False)
    worker.settle(load)
    assert scripted.submitted == [1] * ATTEMPTS
    assert worker.ended == [(1, True)]
    assert worker.reports() == [OpReport(1, 0, {0: RowError.IO})]


def test_a_refused_load_waits_for_room_before_each_attempt(
    worker: Worker, scripted: ScriptedWorker
) -> None:
    waits: list[None] = []
    scripted.on_wait = lambda: waits.append(None)
    scripted.refusals = ATTEMPTS - 1
    graph = load_graph(1)
    worker.load(graph)
    assert scripted.submitted == [1] * ATTEMPTS
    assert len(waits) == ATTEMPTS - 1
    scripted.end(graph)
    assert worker.reports() == [OpReport(1, 0)]


def test_a_cancelled_load_is_not_repeated_even_if_its_report_overtakes_the_cancel(
    worker: Worker, scripted: ScriptedWorker
) -> None:
    graph = load_graph(1)
    worker.load(graph)

    def cancel(graph_id: int) -> None:
        scripted.end(graph, ok=False)
        worker._collect()  # as the thread that reports does meanwhile

    scripted.on_cancel = cancel
    worker.cancel(1)
    assert scripted.submitted == [1], "its pages are another's by now"
    assert worker.ended == [(1, True)]


def test_a_load_that_reads_a_tier_is_not_repeated(worker: Worker, scripted: ScriptedWorker) -> None:
    """Its copies can end while a read hangs, which still writes to host memory."""
    graph = load_graph(1, from_disk=True)
    worker.load(graph)
    scripted.end(graph, [1], ok=False)
    assert worker.reports() == [OpReport(1, 1, {0: RowError.IO})]
    assert scripted.submitted == [1]
    assert worker.ended == [(1, True)]
    scripted.end(graph, [0], ok=False)
    assert worker.reports() == [OpReport(1, 0, {0: RowError.IO})]


def test_a_load_that_cannot_be_repeated_ends_and_costs_no_other_its_report(
    worker: Worker, scripted: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread may have taken the report, and one may wait for the load in `_settle`."""
    load, other = worker.load(load_graph(1, layers=2)), load_graph(2)
    worker.load(other)
    scripted.end(load.graph, [0], ok=False)
    scripted.end(load.graph, [1])
    scripted.end(other)
    monkeypatch.setattr(worker, "_mark", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        worker.reports()
    worker.settle(load)
    refused = {0: RowError.REFUSED}
    assert worker.reports() == [OpReport(1, 0, refused), OpReport(1, 1, refused), OpReport(2, 0)]
    assert worker.ended == [(1, True), (2, False)]


def test_a_refused_load_that_cannot_be_repeated_is_reported_once(
    worker: Worker, scripted: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each attempt is made inside of the one before."""
    scripted.refusals = ATTEMPTS
    marks = iter([None, None])
    monkeypatch.setattr(worker, "_mark", lambda: next(marks))
    with pytest.raises(StopIteration):
        worker.load(load_graph(1))
    assert worker.reports() == [OpReport(1, 0, {0: RowError.REFUSED})]
    assert worker.ended == [(1, True)]


@pytest.mark.parametrize("by_leader", [False, True])
def test_what_an_error_cancels_is_not_reported_as_cancelled_by_the_leader(
    worker: Worker, scripted: ScriptedWorker, by_leader: bool
) -> None:
    graph = load_graph(1, layers=2)
    worker.load(graph)
    scripted.end(graph, [0])
    if by_leader:
        worker.cancel(1)
    assert worker.abandon(worker.open_loads(), 1.0)
    scripted._reports.append(OpReport(1, 1, {0: RowError.CANCELLED}))
    told = RowError.CANCELLED if by_leader else RowError.REFUSED
    assert worker.reports() == [OpReport(1, 0), OpReport(1, 1, {0: told})]
