"""An error of kvcore in an order's work: SGLang goes on, and the leader is told what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from kvcore.connector import rank_guard
from kvcore.errors import TransferError
from kvcore.transfer.graph import RowError
from kvcore_sglang.gate import LayerGate
from kvcore_sglang.messages import Order
from kvcore_sglang.worker import WorkerConnector
from support.worker import ScriptedWorker, load_graph

SAVES = [1, 2, 3]


def boom(*_: Any, **__: Any) -> Any:
    raise RuntimeError("a mistake of ours")


def refused(worker: WorkerConnector) -> list[int]:
    return [r.graph_id for r in worker.poll() if RowError.REFUSED in r.failed.values()]


@pytest.mark.parametrize("inside", ["tend_tiers", "_cancel", "_submit"])
def test_an_order_that_fails_is_refused_and_so_is_all_that_follows(
    monkeypatch: pytest.MonkeyPatch, inside: str
) -> None:
    scripted = ScriptedWorker()
    worker = WorkerConnector(scripted.parts)
    gate = LayerGate(worker, layers=1, layerwise=True)
    with monkeypatch.context() as patch:
        patch.setattr(worker, inside, boom)
        worker.carry_out(Order(graphs=[load_graph(i) for i in SAVES]))
    assert refused(worker) == SAVES, "the leader waits for none of them, and stops"
    assert gate.stopped == "an error in an order"

    worker.carry_out(Order(graphs=[load_graph(4)], invalidate=[("disk", [(0, 4)])]))
    assert refused(worker) == [4]
    assert scripted.invalidated == [("disk", [(0, 4)])], "it would be found after a restart"
    index = gate.start([load_graph(5)])
    gate.set_consumer(index)
    assert not gate.finish(index)
    assert refused(worker) == [5]
    assert scripted.submitted == []


def test_graphs_that_were_begun_before_the_error_report_for_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scripted = ScriptedWorker()
    worker = WorkerConnector(scripted.parts)
    submit = scripted.submit

    def second_fails(graph: Any, *args: Any, **named: Any) -> Any:
        return boom() if graph.graph_id == 2 else submit(graph, *args, **named)

    monkeypatch.setattr(scripted, "submit", second_fails)
    worker.carry_out(Order(graphs=[load_graph(i) for i in SAVES]))
    assert scripted.submitted == [1]
    assert refused(worker) == [2, 3]


def test_the_engine_ends_if_a_copy_may_still_touch_its_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_guard, "LAND_S", 0.1)
    scripted = ScriptedWorker()
    worker = WorkerConnector(scripted.parts)
    scripted.count_on_device = lambda: 1
    monkeypatch.setattr(worker, "_submit", boom)
    with pytest.raises(TransferError, match="did not end"):
        worker.carry_out(Order(graphs=[load_graph(1)]))
