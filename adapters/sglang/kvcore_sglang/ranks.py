"""Links between the leader and the other ranks: local sockets, besides the engine's collectives.

The engine's ranks run the same schedule, each in its own process. The leader is in rank 0's
process. It must reach the other ranks while they wait for it in a collective, so it has links of
its own.

    leader   RankLinks  send(order)   sends to all ranks; threads receive the ranks' reports
    others   Follower   next_order()  returns the order of this point; `now` orders run at once

A thread in read() knows its connection by a file descriptor. Once that is closed, the next file or
socket gets the same number, and the thread would read from there. A link is therefore shut down
first, which ends its threads, and closed after they have ended.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, Protocol

import torch.distributed

from kvcore._util.threads import GuardedThread
from kvcore.connector.messages import StepReport
from kvcore.errors import RankLostError, TransferError
from kvcore.telemetry.metrics import Metrics
from kvcore_sglang.describe import Rank
from kvcore_sglang.messages import ORDERS, REPORTS, Order
from kvcore_sglang.worker import WorkerConnector

_log = logging.getLogger("kvcore.sglang.ranks")

ORDER_TIMEOUT_S = 120
"""Seconds that a rank waits for the leader's next order before it raises an error. Counted second
by second: if the machine is halted, so is the leader, and that time does not count."""

REPORT_WAIT_S = 0.05
"""Longest wait for one report, in seconds."""

END_S = 30.0
"""Seconds that closing a link waits for its threads. They wait for the link, or for the worker
while it carries out an order."""


class RankLinks(Protocol):
    """The leader's links to the other ranks."""

    def send(self, order: Order) -> None:
        """Send an order to every other rank. Does not wait until they carry it out.

        Does not raise if a rank is gone: the others still get the order, and `take_reports` raises.
        """
        ...

    def take_reports(self) -> list[StepReport]:
        """Return the reports that arrived since the last call. Does not block."""
        ...

    def close(self) -> None:
        """Close the links. Blocks up to `END_S` seconds for each."""
        ...


class NoLinks:
    """The links of a leader whose rank is alone: there are none."""

    def send(self, order: Order) -> None:
        pass

    def take_reports(self) -> list[StepReport]:
        return []

    def close(self) -> None:
        pass


class _Gone(TransferError):
    """The other side has closed the link, or has died."""


class _Link:
    """A connection to another rank, and the threads that use it.

    One thread at a time may send. When a thread fails it calls ``broken`` once, with the reason why
    nothing can be sent or received any more. Each thread calls ``begin`` first.
    """

    def __init__(
        self,
        connection: Connection[bytes, bytes],
        broken: Callable[[TransferError], None],
        begin: Callable[[], object] = lambda: None,
    ) -> None:
        self._connection = connection
        self._broken = broken
        self._begin = begin
        self._threads: list[GuardedThread] = []
        self.closed = threading.Event()

    def listen(self, take: Callable[[bytes], None], name: str) -> None:
        """Start a thread that calls ``take`` with every message."""

        def listening() -> None:
            while True:
                take(self._connection.recv_bytes())

        self.run(listening, name)

    def run(self, work: Callable[[], None], name: str) -> None:
        """Start a thread that runs ``work`` until the link is closed."""

        def guarded() -> None:
            try:
                self._begin()
                work()
            except (EOFError, ConnectionError):
                self._broken(_Gone("the other rank has closed its link: look at its log"))
            except Exception as error:  # noqa: BLE001 - thread boundary: passed on, never lost
                if not self.closed.is_set():
                    _log.exception("the link between two ranks has failed thread=%s", name)
                self._broken(TransferError(f"the link between two ranks has failed: {error!r}"))

        def died(error: BaseException) -> None:
            self._broken(TransferError(f"a thread of the link could not work: {error!r}"))

        thread = GuardedThread(name, guarded, died)
        self._threads.append(thread)
        thread.start()

    def send(self, data: bytes) -> None:
        """Send a message. Raises OSError if the other side is gone. Blocks until it receives."""
        self._connection.send_bytes(data)

    def close(self) -> None:
        """End the threads, then close the connection. Blocks up to `END_S` seconds. Idempotent.

        The connection stays open if a thread does not end.
        """
        if self.closed.is_set():
            return
        self.closed.set()
        with (
            contextlib.suppress(OSError),  # the other side has closed already
            socket.fromfd(self._connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as same,
        ):
            same.shutdown(socket.SHUT_RDWR)
        limit = time.monotonic() + END_S
        for thread in self._threads:
            thread.join(limit - time.monotonic())
        left = [thread.name for thread in self._threads if thread.is_alive()]
        if left:
            _log.error("a link between two ranks stays open: %s did not end", ", ".join(left))
        else:
            self._connection.close()


class SocketLinks:
    """A link to every other rank. Threads receive the ranks' reports."""

    def __init__(self, connections: list[Connection[bytes, bytes]]) -> None:
        self._reports: deque[StepReport] = deque()
        self._failed: deque[TransferError] = deque()
        self._deaf: set[_Link] = set()  # links whose rank receives nothing any more
        self._links = [_Link(connection, self._broken) for connection in connections]
        for link in self._links:
            link.listen(
                lambda data: self._reports.append(REPORTS.decode(data)), "kvcore-rank-reports"
            )

    def send(self, order: Order) -> None:
        """Send an order to every rank that still receives. Blocks while a rank's socket is full."""
        data = ORDERS.encode(order)
        for number, link in enumerate(self._links, start=1):
            if link in self._deaf:
                continue
            try:
                link.send(data)
            except OSError as error:
                self._deaf.add(link)
                why = (
                    f"rank {number} takes no orders from kvcore any more ({error}): look at its log"
                )
                self._failed.append(TransferError(why))

    def take_reports(self) -> list[StepReport]:
        """Return the reports that arrived since the last call. Does not block.

        Raises TransferError, once, if a rank's reports cannot be read any more, or if an order
        could not be sent to it. A rank that has closed its link is no error: the engine is ending.
        """
        if self._failed:
            raise self._failed.popleft()
        return [self._reports.popleft() for _ in range(len(self._reports))]

    def close(self) -> None:
        """Close the links, one after the other. Blocks up to `END_S` seconds for each."""
        for link in self._links:
            link.close()

    def _broken(self, error: TransferError) -> None:
        if not isinstance(error, _Gone):
            self._failed.append(error)


class Follower:
    """The link of a rank other than the leader's. It receives orders and sends reports."""

    def __init__(
        self, connection: Connection[bytes, bytes], worker: WorkerConnector, metrics: Metrics
    ) -> None:
        self._worker = worker
        self._metrics = metrics
        self._orders: queue.SimpleQueue[Order | TransferError] = queue.SimpleQueue()
        self._link = _Link(connection, self._orders.put, worker.enter_device)
        self._link.listen(self._take, "kvcore-orders")
        self._link.run(self._report, "kvcore-reports")

    def next_order(self) -> Order:
        """Return the leader's order for this point of the schedule. Blocks until it arrives.

        Raises RankLostError if no order will arrive any more: one could not be read or carried out,
        the leader has closed the link, or it was silent for `ORDER_TIMEOUT_S`. Nobody knows then
        which requests the leader loads for.
        """
        for _ in range(ORDER_TIMEOUT_S):
            with contextlib.suppress(queue.Empty):
                found = self._orders.get(timeout=1.0)
                if isinstance(found, TransferError):
                    self._orders.put(found)  # for every later point too
                    raise RankLostError(str(found)) from found
                return found
        raise RankLostError(
            f"no order from the leading rank for {ORDER_TIMEOUT_S} s: look at its log"
        )

    def close(self) -> None:
        """Close the link. Blocks up to `END_S` seconds."""
        self._link.close()

    def _take(self, data: bytes) -> None:
        order = ORDERS.decode(data)
        if order.now:
            self._worker.carry_out(order)
        else:
            self._orders.put(order)

    def _report(self) -> None:
        told = ""
        while not self._link.closed.is_set():
            self._worker.wait_report(REPORT_WAIT_S)
            reports, stopped = self._worker.poll(), self._worker.guard.stopped
            if reports or stopped != told:
                report = StepReport(reports, self._metrics.delta(), stopped=stopped)
                self._link.send(REPORTS.encode(report))
                told = stopped
            else:
                self._link.closed.wait(REPORT_WAIT_S / 10)


def first_problem(rank: Rank, problem: str) -> str:
    """Return the ``problem`` of the first rank that has one; empty if none has.

    A collective: all ranks call it.
    """
    problems: list[Any] = [problem]
    if rank.group is not None:
        problems = [None] * rank.ranks
        torch.distributed.all_gather_object(problems, problem, group=rank.group)
    return next((found for found in problems if found), "")


def open_links(rank: Rank) -> SocketLinks:
    """Open the leader's links to the other ranks. Blocks until each of them has called `join`."""
    key = secrets.token_bytes(16)
    with Listener(family="AF_UNIX", backlog=rank.ranks, authkey=key) as listener:
        _share(rank, {"address": listener.address, "key": key})
        return SocketLinks([listener.accept() for _ in range(rank.ranks - 1)])


def join(rank: Rank) -> Callable[[WorkerConnector, Metrics], Follower]:
    """Connect to the leader, which calls `open_links`; return what makes the `Follower`. Blocks."""
    found = _share(rank, None)
    connection = Client(found["address"], family="AF_UNIX", authkey=found["key"])
    return lambda worker, metrics: Follower(connection, worker, metrics)


def _share(rank: Rank, value: dict[str, Any] | None) -> dict[str, Any]:
    """Return rank 0's value on all ranks. A collective."""
    values: list[Any] = [None] * rank.ranks
    torch.distributed.all_gather_object(values, value, group=rank.group)
    found: dict[str, Any] = values[0]
    return found
