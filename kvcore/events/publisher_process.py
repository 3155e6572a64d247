"""The process behind `kvcore.events.process`: a publisher of what a leader ships to it.

    python -m kvcore.events.publisher_process      with a socket as its standard input; kvcore
                                                   starts it, never a user

It ends when the leader closes its end of the socket, or is no longer its parent, after it has sent
what it has. It ignores the signals that end an engine.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import sys
import time
from collections import Counter, deque
from functools import partial

import msgspec

from kvcore.events.feed import Item, Lost
from kvcore.events.frames import Buffer, Frame, Opening, Report, framed, unpack

__all__ = ["LeaderConnection", "main"]

_log = logging.getLogger("kvcore.events")

_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_RECEIVE_BYTES = 1 << 18
_AT_ONCE_BYTES = 4 << 20
_KEPT_LINES = 100
_REPORT_S = 0.2
_LOOK_S = 0.1
_LAST_WORDS_S = 1.0


def main() -> int:
    """Publish until the leader is gone; return the exit status."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    try:
        leader = LeaderConnection(socket.socket(fileno=0))
    except OSError:
        sys.stderr.write(f"{__spec__.name} is started by kvcore, with a socket as its input\n")
        return 2
    head = leader.next_frame()
    if head is None:
        return 0
    opening = msgspec.msgpack.decode(head.head, type=Opening)
    leader.pid = opening.parent
    logging.basicConfig(
        level=opening.level, format="%(message)s", handlers=[_Lines(leader.lines)], force=True
    )
    try:
        _publish(leader, opening)
    except Exception:  # noqa: BLE001  the end of a process: the leader logs it
        _log.exception("the process that tells block events failed")
        return 1
    finally:
        leader.close()
    return 0


def _publish(leader: LeaderConnection, opening: Opening) -> None:
    body = leader.next_frame()
    if body is None:
        return
    held, *rest = unpack(body)
    assert isinstance(held, Lost)
    leader.items += rest
    plan = opening.plan
    outlets = plan.outlets()
    leader.ready(len(outlets))
    if outlets:
        publisher = plan.publisher(held.content, leader.take, outlets, leader.count)
        publisher.run(partial(leader.wait, plan.pacing.interval_s))


class LeaderConnection:
    """The publisher's end of the socket: items come in, reports go out. For one thread."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.pid = os.getppid()
        self.items: list[Item] = []
        self.lines: deque[tuple[int, str, str]] = deque(maxlen=_KEPT_LINES)
        self._socket = connection
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._buffer = Buffer()
        self._frames: deque[Frame] = deque()
        self._ended = False
        self._outlets = 0
        self._blocks: Counter[str] = Counter()
        self._changed = False
        self._reported = time.monotonic()
        self._unsent = b""

    # -- what comes -----------------------------------------------------------------------------

    def wait(self, seconds: float) -> bool:
        """Wait ``seconds`` for news; return True if the leader is gone and everything was read."""
        if self._poll.poll(seconds * 1000):
            self._receive()
        elif os.getppid() != self.pid:
            self._ended = True
        if (self._changed or self.lines) and time.monotonic() - self._reported >= _REPORT_S:
            self._report()
        return self._ended

    def next_frame(self) -> Frame | None:
        """Wait for the next frame; return None if the leader is gone."""
        while not self._frames:
            if self._ended:
                return None
            self.wait(_LOOK_S)
        return self._frames.popleft()

    def take(self) -> list[Item]:
        """Return the items that have come."""
        items, self.items = self.items, []
        while self._frames:
            items += unpack(self._frames.popleft())
        return items

    def _receive(self) -> None:
        """Receive a bounded amount. The leader waits for room, and drops what does not fit."""
        for _ in range(_AT_ONCE_BYTES // _RECEIVE_BYTES):
            try:
                data = self._socket.recv(_RECEIVE_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self._ended = True
                break
            self._buffer.add(data)
        self._frames += self._buffer.frames()

    # -- what goes ------------------------------------------------------------------------------

    def ready(self, outlets: int) -> None:
        """Report how many buses could be opened."""
        self._outlets = outlets
        self._report()

    def count(self, outcome: str, blocks: int) -> None:
        """Add to the counts of the next report."""
        self._blocks[outcome] += blocks
        self._changed = True

    def close(self) -> None:
        """Send the last report, for as long as the leader may read it."""
        self._socket.settimeout(_LAST_WORDS_S)
        try:
            self._socket.sendall(self._unsent)
            self._unsent = b""
            self._socket.sendall(self._next_report())
        except OSError:
            pass
        self._socket.close()

    def _report(self) -> None:
        """Send a report without waiting; the rest of it is sent next time, before anything new."""
        self._unsent = self._unsent or self._next_report()
        self._reported = time.monotonic()
        try:
            self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except OSError:
            self._changed = True

    def _next_report(self) -> bytes:
        lines = [self.lines.popleft() for _ in range(len(self.lines))]
        self._changed = False
        return b"".join(framed(Report(self._outlets, dict(self._blocks), lines)))


class _Lines(logging.Handler):
    """Keeps the last log lines for the leader."""

    def __init__(self, lines: deque[tuple[int, str, str]]) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append((record.levelno, record.name, self.format(record)))


if __name__ == "__main__":
    sys.exit(main())
