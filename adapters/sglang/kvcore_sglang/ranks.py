"""The ranks' own line to the leader: local sockets, beside the engine's collectives.

The engine's ranks run the same schedule, each in its own process; the leader is in rank 0's. It
must be able to speak while the others wait for it in a collective, so it has a line of its own.

    leader   Lines     tell(order)   to all; news of theirs gathered by threads
    others   Follower  next_order()  the order of this point of the schedule; `now` ones at once

A thread in read() knows its connection by a number. Closing gives that number to the next file or
socket that is opened, and the thread would take bytes of that: a line is shut down first, which
ends its threads, and closed after them.
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

from kvcore.connector.messages import StepReport
from kvcore.errors import TransferError
from kvcore.telemetry.metrics import Metrics
from kvcore_sglang.describe import Rank
from kvcore_sglang.messages import ORDERS, REPORTS, Order
from kvcore_sglang.worker import WorkerConnector

_log = logging.getLogger("kvcore.sglang.ranks")

ORDER_TIMEOUT_S = 120
"""How long a rank waits for the leader at a point of the schedule before it says what is wrong.
Counted in seconds that the rank saw pass: while the machine is halted, its leader is too."""

REPORT_WAIT_S = 0.05

END_S = 30.0
"""How long a line that is closed waits for its threads. They wait for nothing but the line, and
the worker in an order that is under way."""


class Lines(Protocol):
    """The leader's side."""

    def tell(self, order: Order) -> None:
        """Send to every other rank. Does not wait for them, and raises for none that is gone: the
        others are told, and `news` says so."""
        ...

    def news(self) -> list[StepReport]:
        """What came since the last call. Does not block."""
        ...

    def close(self) -> None: ...


class NoLines:
    """Of a leader that is alone."""

    def tell(self, order: Order) -> None:
        pass

    def news(self) -> list[StepReport]:
        return []

    def close(self) -> None:
        pass


class _Gone(TransferError):
    """The other side has closed, or died."""


class _Line:
    """A connection to another rank, and the threads that use it.

    One thread at a time may send. ``broken`` is told, in the thread that met it and once a thread,
    why nothing comes in or goes out any more.
    """

    def __init__(
        self, connection: Connection[bytes, bytes], broken: Callable[[TransferError], None]
    ) -> None:
        self._connection = connection
        self._broken = broken
        self._threads: list[threading.Thread] = []
        self.closed = threading.Event()

    def listen(self, take: Callable[[bytes], None], name: str) -> None:
        """Have every message taken in by a thread of its own."""

        def listening() -> None:
            while True:
                take(self._connection.recv_bytes())

        self.run(listening, name)

    def run(self, work: Callable[[], None], name: str) -> None:
        """Have a thread do something until the line is closed."""

        def guarded() -> None:
            try:
                work()
            except (EOFError, ConnectionError):
                self._broken(_Gone("the other rank has closed its line: look at its log"))
            except Exception as error:  # noqa: BLE001 - thread boundary: told, never lost
                if not self.closed.is_set():
                    _log.exception("the line between two ranks has failed thread=%s", name)
                self._broken(TransferError(f"the line between two ranks has failed: {error!r}"))

        thread = threading.Thread(target=guarded, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def send(self, data: bytes) -> None:
        """Blocks while the other side takes nothing in. Raises OSError when it is gone."""
        self._connection.send_bytes(data)

    def close(self) -> None:
        """End the threads, then let go of the connection: it stays open for one that does not end.
        Blocks up to `END_S` seconds. Idempotent."""
        if self.closed.is_set():
            return
        self.closed.set()
        with (
            contextlib.suppress(OSError),  # the other side was faster
            socket.fromfd(self._connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as same,
        ):
            same.shutdown(socket.SHUT_RDWR)
        limit = time.monotonic() + END_S
        own = threading.current_thread()
        for thread in self._threads:
            if thread is not own:
                thread.join(max(0.0, limit - time.monotonic()))
        left = [thread.name for thread in self._threads if thread.is_alive()]
        if left:
            _log.error("a line between two ranks stays open: %s did not end", ", ".join(left))
        else:
            self._connection.close()


class SocketLines:
    """A line to every other rank; threads take in what they report."""

    def __init__(self, connections: list[Connection[bytes, bytes]]) -> None:
        self._news: deque[StepReport] = deque()
        self._failed: deque[TransferError] = deque()
        self._deaf: set[_Line] = set()  # whose rank takes nothing in any more
        self._lines = [_Line(connection, self._broken) for connection in connections]
        for line in self._lines:
            line.listen(lambda data: self._news.append(REPORTS.decode(data)), "kvcore-news")

    def tell(self, order: Order) -> None:
        data = ORDERS.encode(order)
        for number, line in enumerate(self._lines, start=1):
            if line in self._deaf:
                continue
            try:
                line.send(data)
            except OSError as error:
                self._deaf.add(line)
                why = (
                    f"rank {number} of kvcore's takes no orders any more ({error}): look at its log"
                )
                self._failed.append(TransferError(why))

    def news(self) -> list[StepReport]:
        """As `Lines.news`. Raises TransferError, once, when what a rank reports cannot be read any
        more, or it was given an order and is gone. One that has closed goes with the engine, and is
        no error here."""
        if self._failed:
            raise self._failed.popleft()
        return [self._news.popleft() for _ in range(len(self._news))]

    def close(self) -> None:
        for line in self._lines:
            line.close()

    def _broken(self, error: TransferError) -> None:
        if not isinstance(error, _Gone):
            self._failed.append(error)


class Follower:
    """A rank that is not the leader's: takes its orders, and reports what became of them."""

    def __init__(
        self, connection: Connection[bytes, bytes], worker: WorkerConnector, metrics: Metrics
    ) -> None:
        self._worker = worker
        self._metrics = metrics
        self._orders: queue.SimpleQueue[Order | TransferError] = queue.SimpleQueue()
        self._line = _Line(connection, self._orders.put)
        self._line.listen(self._take, "kvcore-orders")
        self._line.run(self._report, "kvcore-reports")

    def next_order(self) -> Order:
        """The leader's order for this point of the schedule. Blocks until it is there.

        Raises TransferError when none will come any more: after one that could not be read or
        carried out, or when the leader has closed.
        """
        for _ in range(ORDER_TIMEOUT_S):
            with contextlib.suppress(queue.Empty):
                found = self._orders.get(timeout=1.0)
                if isinstance(found, TransferError):
                    self._orders.put(found)  # of every point after this one too
                    raise found
                return found
        raise TransferError(
            f"no word from the leading rank for {ORDER_TIMEOUT_S} s: look at its log"
        )

    def close(self) -> None:
        self._line.close()

    def _take(self, data: bytes) -> None:
        order = ORDERS.decode(data)
        if order.now:
            self._worker.carry_out(order)
        else:
            self._orders.put(order)

    def _report(self) -> None:
        while not self._line.closed.is_set():
            self._worker.wait_report(REPORT_WAIT_S)
            reports = self._worker.poll()
            if reports:
                self._line.send(REPORTS.encode(StepReport(reports, self._metrics.delta())))
            else:
                self._line.closed.wait(REPORT_WAIT_S / 10)


def agree(rank: Rank, word: str) -> list[str]:
    """Every rank's ``word``, in order of rank. A collective: all ranks call it."""
    if rank.group is None:
        return [word]
    words: list[Any] = [None] * rank.ranks
    torch.distributed.all_gather_object(words, word, group=rank.group)
    return words


def open_lines(rank: Rank) -> SocketLines:
    """The leader's lines to the others, which call `join` meanwhile. Blocks for them."""
    key = secrets.token_bytes(16)
    with Listener(family="AF_UNIX", backlog=rank.ranks, authkey=key) as listener:
        _share(rank, {"address": listener.address, "key": key})
        return SocketLines([listener.accept() for _ in range(rank.ranks - 1)])


def join(rank: Rank) -> Callable[[WorkerConnector, Metrics], Follower]:
    """A line to the leader, which calls `open_lines` meanwhile."""
    found = _share(rank, None)
    connection = Client(found["address"], family="AF_UNIX", authkey=found["key"])
    return lambda worker, metrics: Follower(connection, worker, metrics)


def _share(rank: Rank, value: dict[str, Any] | None) -> dict[str, Any]:
    """Rank 0's value, on all ranks."""
    values: list[Any] = [None] * rank.ranks
    torch.distributed.all_gather_object(values, value, group=rank.group)
    found: dict[str, Any] = values[0]
    return found
