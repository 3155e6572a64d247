"""The ranks' line to their leader, over a real pair of connections."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")

from kvcore.errors import TransferError  # noqa: E402
from kvcore.index.slots import SlotRun  # noqa: E402
from kvcore.telemetry.metrics import Metrics, MissReason  # noqa: E402
from kvcore.testing.waiting import until  # noqa: E402
from kvcore.transfer.graph import OpReport, RowError  # noqa: E402
from kvcore_sglang import ranks  # noqa: E402  # the whole module needs torch
from kvcore_sglang.messages import Order  # noqa: E402

WAIT_S = 60.0


class Worker:
    """Takes orders, and reports what it is told to. Those for ``held`` wait until that is set."""

    def __init__(self) -> None:
        self.orders: list[Order] = []
        self.reports: list[OpReport] = []
        self.carried = threading.Event()
        self.held: threading.Event | None = None
        self.guard = SimpleNamespace(stopped="")
        self.entered: set[str] = set()

    def enter_device(self) -> None:
        self.entered.add(threading.current_thread().name)

    def carry_out(self, order: Order) -> None:
        self.orders.append(order)
        self.carried.set()
        if self.held is not None:
            self.held.wait(WAIT_S)

    def wait_report(self, timeout: float) -> bool:
        return bool(self.reports) or (time.sleep(timeout) or False)

    def poll(self) -> list[OpReport]:
        found, self.reports = self.reports, []
        return found


class Line(NamedTuple):
    leader: ranks.SocketLinks
    follower: ranks.Follower
    worker: Worker
    counted: Metrics


def make_line() -> Line:
    mine, theirs = Pipe()
    worker: Any = Worker()
    counted = Metrics("rank-1")
    return Line(ranks.SocketLinks([mine]), ranks.Follower(theirs, worker, counted), worker, counted)


@pytest.fixture
def line() -> Iterator[Line]:
    made = make_line()
    yield made
    made.follower.close()
    made.leader.close()


def next_order(line: Line) -> Order:
    """What the rank hears at a point of the schedule. Fails as soon as it can hear no more: its
    thread has ended, and left it nothing."""
    listener, limit = line.follower._link._threads[0], time.monotonic() + WAIT_S
    while True:
        hopeless = not listener.is_alive()
        if not line.follower._orders.empty():
            return line.follower.next_order()
        assert not hopeless, "the line has ended, and nobody was told"
        assert time.monotonic() < limit, "no order came"
        time.sleep(0.005)


def threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith("kvcore-")}


def test_orders_of_a_point_wait_for_it_and_come_in_order(line: Line) -> None:
    for number in (1, 2, 3):
        line.leader.send(Order(cancel=[number]))
    assert [next_order(line).cancel for _ in range(3)] == [[1], [2], [3]]
    assert not line.worker.orders, "the schedule carries these out, not the line"


def test_an_order_for_now_is_carried_out_at_once(line: Line) -> None:
    """Also while no point of the schedule is reached, and it is none of its orders."""
    line.leader.send(Order(now=True, invalidate=[("disk", [SlotRun(4, 6)])]))
    assert line.worker.carried.wait(WAIT_S)
    assert line.worker.orders == [Order(now=True, invalidate=[("disk", [SlotRun(4, 6)])])]
    line.leader.send(Order(cancel=[9]))
    assert next_order(line).cancel == [9]


def test_reports_and_counts_reach_the_leader(line: Line) -> None:
    report = OpReport(7, 1, {3: RowError.CANCELLED})
    line.counted.looked_up({}, 16, MissReason.NOT_CACHED)
    line.worker.reports = [report]
    limit, news = time.monotonic() + WAIT_S, []
    while not news and time.monotonic() < limit:
        news = line.leader.take_reports()
    assert [found.reports for found in news] == [[report]]
    assert news[0].counted, "what the rank counted came with it"
    assert line.leader.take_reports() == []


def test_a_silent_leader_is_named(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "ORDER_TIMEOUT_S", 1)
    with pytest.raises(TransferError, match="no order from the leading rank for 1 s"):
        line.follower.next_order()


def test_what_is_opened_next_loses_no_byte_to_a_line_that_was_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A closed connection's number is given out again at once, and its thread was in read()."""
    monkeypatch.setattr(ranks, "REPORT_WAIT_S", 0.002)  # a close waits for the thread of reports
    before = threads()
    for _ in range(50):
        made = make_line()
        made.leader.send(Order(cancel=[1]))
        made.follower.next_order()  # its thread goes back to read(), as the leader's is there
        made.follower.close()
        made.leader.close()
        readers, writers = zip(*(os.pipe() for _ in range(4)), strict=True)
        try:
            for number, file in enumerate(writers):
                os.write(file, b"%08d" % number)
            for file in readers:
                os.set_blocking(file, False)
            assert [os.read(file, 8) for file in readers] == [b"%08d" % n for n in range(4)]
        finally:
            for file in (*readers, *writers):
                os.close(file)
    assert threads() <= before, "a thread of a closed line has ended"


def test_a_thread_that_does_not_end_keeps_its_connection(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ranks, "END_S", 0.0)
    made = make_line()
    held = made.worker.held = threading.Event()
    made.leader.send(Order(now=True, cancel=[3]))
    assert made.worker.carried.wait(WAIT_S)
    connection = made.follower._link._connection
    made.follower.close()
    assert not connection.closed
    assert "stays open: kvcore-orders" in caplog.text
    held.set()
    monkeypatch.setattr(ranks, "END_S", WAIT_S)
    made.leader.close()


@pytest.mark.parametrize("data", [b"\xc1", b"\x93\xa1x\x80\x90"], ids=["no message", "mistyped"])
def test_an_order_that_cannot_be_read_is_an_error_of_the_next_point(
    line: Line, data: bytes
) -> None:
    line.leader.send(Order(cancel=[1]))
    line.leader._links[0].send(data)
    assert next_order(line).cancel == [1], "what came before it holds"
    for _ in range(2):
        with pytest.raises(TransferError, match="link between two ranks has failed"):
            next_order(line)


def test_an_order_that_cannot_be_carried_out_is_an_error_of_the_next_point(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(order: Order) -> None:
        raise TypeError("no such tier")

    monkeypatch.setattr(line.worker, "carry_out", fail)
    line.leader.send(Order(now=True, cancel=[3]))
    with pytest.raises(TransferError, match="no such tier"):
        next_order(line)


def test_a_leader_that_has_closed_is_named_at_once(line: Line) -> None:
    line.leader.send(Order(cancel=[1]))
    line.leader.close()
    assert next_order(line).cancel == [1]
    with pytest.raises(TransferError, match="the other rank has closed its link"):
        next_order(line)


def test_news_that_cannot_be_read_are_told_once(line: Line) -> None:
    line.follower._link.send(b"\xc1")
    listener = line.leader._links[0]._threads[0]
    listener.join(WAIT_S)
    assert not listener.is_alive()
    with pytest.raises(TransferError, match="link between two ranks has failed"):
        line.leader.take_reports()
    assert line.leader.take_reports() == []


def test_a_rank_that_has_closed_is_no_error_of_the_leader(line: Line) -> None:
    line.follower.close()
    listener = line.leader._links[0]._threads[0]
    listener.join(WAIT_S)
    assert not listener.is_alive()
    assert line.leader.take_reports() == []


def test_threads_that_may_use_the_device_enter_it_first(line: Line) -> None:
    """Else one that asks an event would end a capture in SGLang's thread."""
    for thread in line.follower._link._threads:
        until(lambda thread=thread: thread.name in line.worker.entered)
    assert line.worker.entered == {"kvcore-orders", "kvcore-reports"}


def test_a_rank_that_died_is_told_of_once_and_the_others_are_told_their_orders() -> None:
    """Nothing is raised into the schedule, where the other ranks wait for this order."""
    first, dying = Pipe()
    second, living = Pipe()
    worker: Any = Worker()
    leader = ranks.SocketLinks([first, second])
    follower = ranks.Follower(living, worker, Metrics("rank-2"))
    dying.close()
    for number in range(3):
        leader.send(Order(cancel=[number]))
        assert follower.next_order().cancel == [number]
    with pytest.raises(TransferError, match="rank 1 takes no orders from kvcore any more"):
        leader.take_reports()
    assert leader.take_reports() == []
    follower.close()
    leader.close()
