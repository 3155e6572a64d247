"""The ranks' own line to the leader: local sockets, beside the engine's collectives.

The engine's ranks run the same schedule, each in its own process; the leader is in rank 0's. It
must be able to speak while the others wait for it in a collective, so it has a line of its own.

    leader   Lines     tell(order)   to all; news of theirs gathered by threads
    others   Follower  next_order()  the order of this point of the schedule; `now` ones at once
"""

from __future__ import annotations

import contextlib
import logging
import queue
import secrets
import threading
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, Protocol

import torch.distributed
from kvcore_sglang.describe import Rank
from kvcore_sglang.messages import News, Order, decode_news, decode_order, encode
from kvcore_sglang.worker import RankWorker

from kvcore.errors import TransferError
from kvcore.metrics import Metrics

_log = logging.getLogger("kvcore.sglang.ranks")

ORDER_TIMEOUT_S = 120
"""How long a rank waits for the leader at a point of the schedule before it says what is wrong.
Counted in seconds that the rank saw pass: while the machine is halted, its leader is too."""

REPORT_WAIT_S = 0.05


class Lines(Protocol):
    """The leader's side."""

    def tell(self, order: Order) -> None:
        """Send to every other rank. Does not wait for them."""
        ...

    def news(self) -> list[News]:
        """What came since the last call. Does not block."""
        ...

    def close(self) -> None: ...


class NoLines:
    """Of a leader that is alone."""

    def tell(self, order: Order) -> None:
        pass

    def news(self) -> list[News]:
        return []

    def close(self) -> None:
        pass


class SocketLines:
    """A connection to every other rank, and a thread on each that takes in what they report."""

    def __init__(self, connections: list[Connection[bytes, bytes]]) -> None:
        self._connections = connections
        self._news: deque[News] = deque()
        for connection in connections:
            name = "kvcore-news"
            threading.Thread(
                target=self._listen, args=(connection,), name=name, daemon=True
            ).start()

    def tell(self, order: Order) -> None:
        data = encode(order)
        for connection in self._connections:
            connection.send_bytes(data)

    def news(self) -> list[News]:
        return [self._news.popleft() for _ in range(len(self._news))]

    def close(self) -> None:
        for connection in self._connections:
            connection.close()

    def _listen(self, connection: Connection[bytes, bytes]) -> None:
        try:
            while True:
                self._news.append(decode_news(connection.recv_bytes()))
        except (EOFError, OSError):
            return


class Follower:
    """A rank that is not the leader's: takes its orders, and reports what became of them."""

    def __init__(
        self, connection: Connection[bytes, bytes], worker: RankWorker, metrics: Metrics
    ) -> None:
        self._connection = connection
        self._worker = worker
        self._metrics = metrics
        self._orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._closed = threading.Event()
        for target, name in ((self._listen, "kvcore-orders"), (self._report, "kvcore-reports")):
            threading.Thread(target=target, name=name, daemon=True).start()

    def next_order(self) -> Order:
        """The leader's order for this point of the schedule. Blocks until it is there."""
        for _ in range(ORDER_TIMEOUT_S):
            with contextlib.suppress(queue.Empty):
                return self._orders.get(timeout=1.0)
        raise TransferError(
            f"no word from the leading rank for {ORDER_TIMEOUT_S} s: look at its log"
        )

    def close(self) -> None:
        self._closed.set()
        self._connection.close()

    def _listen(self) -> None:
        try:
            while True:
                order = decode_order(self._connection.recv_bytes())
                if order.now:
                    self._worker.carry_out(order)
                else:
                    self._orders.put(order)
        except (EOFError, OSError):
            return

    def _report(self) -> None:
        while not self._closed.is_set():
            self._worker.wait_report(REPORT_WAIT_S)
            reports = self._worker.poll()
            if not reports:
                self._closed.wait(REPORT_WAIT_S / 10)
                continue
            try:
                self._connection.send_bytes(encode(News(reports, self._metrics.delta())))
            except OSError:
                return


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


def join(rank: Rank) -> Callable[[RankWorker, Metrics], Follower]:
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
