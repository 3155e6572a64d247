"""The ranks' line to their leader, over a real pair of connections."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from multiprocessing import Pipe
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")

from kvcore_sglang import ranks  # noqa: E402  # the whole module needs torch
from kvcore_sglang.messages import Order  # noqa: E402

from kvcore.errors import TransferError  # noqa: E402
from kvcore.metrics import Metrics, MissReason  # noqa: E402
from kvcore.pool import SlotRun  # noqa: E402
from kvcore.transfer.graph import OpReport, RowError  # noqa: E402

WAIT_S = 60.0


class Worker:
    """Takes orders, and reports what it is told to."""

    def __init__(self) -> None:
        self.orders: list[Order] = []
        self.reports: list[OpReport] = []
        self.carried = threading.Event()

    def carry_out(self, order: Order) -> None:
        self.orders.append(order)
        self.carried.set()

    def wait_report(self, timeout: float) -> bool:
        return bool(self.reports) or (time.sleep(timeout) or False)

    def poll(self) -> list[OpReport]:
        found, self.reports = self.reports, []
        return found


class Line(NamedTuple):
    leader: ranks.SocketLines
    follower: ranks.Follower
    worker: Worker
    counted: Metrics


@pytest.fixture
def line() -> Iterator[Line]:
    mine, theirs = Pipe()
    worker: Any = Worker()
    counted = Metrics("rank-1")
    made = Line(ranks.SocketLines([mine]), ranks.Follower(theirs, worker, counted), worker, counted)
    yield made
    made.follower.close()
    made.leader.close()


def test_orders_of_a_point_wait_for_it_and_come_in_order(line: Line) -> None:
    for number in (1, 2, 3):
        line.leader.tell(Order(cancel=[number]))
    assert [line.follower.next_order().cancel for _ in range(3)] == [[1], [2], [3]]
    assert not line.worker.orders, "the schedule carries these out, not the line"


def test_an_order_for_now_is_carried_out_at_once(line: Line) -> None:
    """Also while no point of the schedule is reached, and it is none of its orders."""
    line.leader.tell(Order(now=True, forget=[("disk", [SlotRun(4, 6)])]))
    assert line.worker.carried.wait(WAIT_S)
    assert line.worker.orders == [Order(now=True, forget=[("disk", [SlotRun(4, 6)])])]
    line.leader.tell(Order(cancel=[9]))
    assert line.follower.next_order().cancel == [9]


def test_reports_and_counts_reach_the_leader(line: Line) -> None:
    report = OpReport(7, 1, {3: RowError.CANCELLED})
    line.counted.looked_up({}, 16, MissReason.NOT_CACHED)
    line.worker.reports = [report]
    limit, news = time.monotonic() + WAIT_S, []
    while not news and time.monotonic() < limit:
        news = line.leader.news()
    assert [found.reports for found in news] == [[report]]
    assert news[0].counted, "what the rank counted came with it"
    assert line.leader.news() == []


def test_a_silent_leader_is_named(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "ORDER_TIMEOUT_S", 1)
    with pytest.raises(TransferError, match="no word from the leading rank for 1 s"):
        line.follower.next_order()
