"""A publisher in a process of its own, so that its work does not take the engine's interpreter.

    leader's thread ── note ──▶ Feed                   process (`kvcore.events.publisher_process`)
                                 │ take                 ┌──────────────────────────┐
                     ┌ shipping thread ┐  keys, packed  │ Publisher: mirror,       │──▶ outlets
                     │ joins, writes   │ ── socket ───▶ │ history, tokens, numbers,│
                     │ counts, logs    │ ◀── reports ── │ heartbeats               │◀── requests
                     └─────────────────┘                └──────────────────────────┘

The shipping thread holds the interpreter's lock for a `bytes.join` and a few words for each event,
0.1 ms at a time, and writes without it.

Memory is bounded: the thread takes some blocks at a time and waits for the process to read them.
While the process is slow or stopped, `Feed` fills up and drops; afterwards everything held is
shipped.

Either end can go away:

    the process   Its socket closes, or it reads nothing any more. It is killed, reaped, logged and
                  restarted after a while with everything that is published then (the leader's next
                  call provides that). Numbers start elsewhere, so consumers catch up by a snapshot.
                  At most `RESTARTS` times in a row. After that nothing more is published, and what
                  is noted counts as dropped.
    the leader    The socket closes or, if a fork of the leader holds it too, the parent changes.
                  The process sends what it has and ends.

The process is a fresh interpreter. It receives its plan over the socket, because addresses in it
may hold passwords. It has no other descriptor of the engine and imports neither the engine nor
torch. It ignores the signals that end an engine, and ends with the engine.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from kvcore._util.module_command import module_command
from kvcore._util.threads import GuardedThread, nobody_waits
from kvcore.events.feed import CountBlocks, Feed, Lost, Queued
from kvcore.events.frames import Buffer, Opening, Report, framed, pack
from kvcore.events.plan import PublisherPlan

__all__ = ["PublisherProcess"]

_log = logging.getLogger("kvcore.events")

_BATCH_BLOCKS = 4096
_RECEIVE_BYTES = 1 << 16
_PARTS = 64
_LOOK_S = 0.1
_EXIT_S = 1.0
_reports = msgspec.msgpack.Decoder(Report)


class PublisherProcess:
    """Ships what a feed holds to a process that publishes it."""

    RESTARTS = 8
    BACKOFF_S = 0.5
    """Seconds before the first restart; doubled for each that follows, up to a minute."""
    STEADY_S = 60.0
    """After a process that lived this long, restarts are counted from the beginning."""
    STALL_S = 60.0
    """A process that reads nothing for this long, while there is something to read, is killed."""
    READY_S = 30.0
    CLOSE_S = 10.0

    def __init__(self, plan: PublisherPlan, feed: Feed, count: CountBlocks) -> None:
        """``count`` receives the counts that the process reports."""
        self._plan = plan
        self._feed = feed
        self._count = count
        self._child: _Child | None = None
        self._stop = threading.Event()
        self._limit = float("inf")  # the time until which a process is waited for
        self._thread = GuardedThread("kvcore-events", self._run, nobody_waits)

    @property
    def pid(self) -> int | None:
        """Return the id of the process that publishes now, or published last."""
        return None if self._child is None else self._child.process.pid

    def start(self) -> bool:
        """Start to publish; return False, with nothing running, if no bus can be opened.

        Call it on the thread that notes. Waits until the process is ready, which takes a moment.
        Raises OSError if no process or thread can be started, or if the process ends at once.
        """
        self._child = self._open([Lost(0, self._feed.content())])
        if self._child.outlets == 0:
            self._child.end(time.monotonic() + self.CLOSE_S)
            return False
        if not self._thread.start():
            self._child.end(0)
            raise OSError(errno.EAGAIN, str(self._thread.error))
        return True

    def close(self) -> None:
        """Send what is queued and wait some seconds for the process to end; then kill it."""
        self._limit = time.monotonic() + self.CLOSE_S
        self._stop.set()
        self._thread.join(2 * self.CLOSE_S)

    # -- shipping thread ------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._publish()
        except _Late:
            pass
        except Exception:  # noqa: BLE001  the end of a thread
            _log.exception("block events are told no more: what ships them to their process failed")
        finally:
            self._feed.close()
            if self._child is not None:
                self._child.end(self._limit if self._stop.is_set() else 0)

    def _publish(self) -> None:
        """Publish with one process after another, until told to stop or they fail too often."""
        failures = 0
        while True:
            began = time.monotonic()
            try:
                return self._ship()
            except OSError as error:
                why = error
            steady = time.monotonic() - began > self.STEADY_S
            failures = 1 if steady else failures + 1
            if failures > self.RESTARTS:
                _log.error("block events are told no more, their process ends too often: %s", why)
                return None
            _log.warning("the process that tells block events is started anew: %s", why)
            if self._child is not None:
                self._child.end(0)
                self._child = None
            self._feed.renew()
            self._stop.wait(min(60.0, self.BACKOFF_S * 2 ** (failures - 1)))

    def _ship(self) -> None:
        """Ship what comes until `close`, then the rest.

        Raises OSError if the process is gone, or if none can be started.
        """
        if self._child is None:
            while not self._feed.renewed:
                if self._stop.wait(self._plan.pacing.interval_s):
                    return
            self._child = self._open(self._feed.take(1))
        while not self._stop.wait(self._plan.pacing.interval_s):
            self._ship_queued(self._child)
        self._ship_queued(self._child)

    def _ship_queued(self, child: _Child) -> None:
        child.look()
        while items := self._feed.take(_BATCH_BLOCKS):
            child.send(pack(items), self._late, self.STALL_S)

    def _open(self, items: Sequence[Queued]) -> _Child:
        """Start a process and wait until it is ready, or nearly.

        The first item says what is published.
        """
        child = _Child(self._count)
        limit = time.monotonic() + self.READY_S
        try:
            opening = Opening(self._plan, os.getpid(), _log.getEffectiveLevel())
            child.send([*framed(opening), *pack(items)], self._late, self.STALL_S)
            while child.outlets is None and time.monotonic() < limit and not self._stop.is_set():
                child.wait()
        except ConnectionError:
            if child.outlets is None:
                child.end(0)
                raise
        except BaseException:
            child.end(0)
            raise
        return child

    def _late(self) -> bool:
        return time.monotonic() > self._limit


class _Late(Exception):
    """The time to send more is over."""


class _Child:
    """The process, and this end of its socket. For one thread."""

    def __init__(self, count: CountBlocks) -> None:
        """Start the process. Raises OSError if that fails."""
        self.outlets: int | None = None
        """The buses that it has opened; None until it is ready."""
        self._count = count
        self._counted: dict[str, int] = {}
        self._buffer = Buffer()
        self._socket, theirs = socket.socketpair()
        try:
            self._socket.setblocking(False)
            self.process = subprocess.Popen(
                module_command("kvcore.events.publisher_process"),
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env=_environment(),
            )
        except BaseException:
            self._socket.close()
            raise
        finally:
            theirs.close()

    def send(self, parts: Sequence[bytes], late: Callable[[], bool], stall_s: float) -> None:
        """Send ``parts``; blocks until the process has read them.

        Raises _Late if ``late`` returns True before that, and ConnectionError if the process is
        gone or has read nothing for ``stall_s`` seconds.
        """
        left = [memoryview(part) for part in parts]
        limit = time.monotonic() + stall_s
        while left:
            try:
                sent = self._socket.sendmsg(left[:_PARTS])
            except BlockingIOError:
                if late():
                    raise _Late from None
                if time.monotonic() > limit:
                    what = f"process {self.process.pid} has read nothing for {stall_s:.0f} s"
                    raise ConnectionError(what) from None
                self.wait(select.POLLIN | select.POLLOUT)
                continue
            except OSError as error:
                raise self._gone() from error
            limit = time.monotonic() + stall_s
            while left and sent >= len(left[0]):
                sent -= len(left.pop(0))
            if sent:
                left[0] = left[0][sent:]

    def wait(self, mask: int = select.POLLIN) -> None:
        """Wait a moment for the events in ``mask``, then `look`."""
        poll = select.poll()
        poll.register(self._socket, mask)
        poll.poll(_LOOK_S * 1000)
        self.look()

    def look(self) -> None:
        """Take in the reports of the process. Raises ConnectionError if it is gone."""
        there = self._receive()
        for frame in self._buffer.frames():
            self._hear(_reports.decode(frame.head))
        if not there or self.process.poll() is not None:
            raise self._gone()

    def end(self, limit: float) -> None:
        """Let the process send what it has until the time ``limit``, then kill and reap it.

        Call it once.
        """
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            while time.monotonic() < limit:
                self.wait()
        try:
            self.process.wait(max(0.0, min(limit - time.monotonic(), _EXIT_S)))
        except subprocess.TimeoutExpired:
            self.process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel
                self.process.wait(_EXIT_S)
        self._socket.close()

    def _receive(self) -> bool:
        """Receive what is there; return False at the end of the stream."""
        try:
            while data := self._socket.recv(_RECEIVE_BYTES):
                self._buffer.add(data)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def _hear(self, report: Report) -> None:
        self.outlets = report.outlets
        for outcome, blocks in report.told.items():
            self._count(outcome, blocks - self._counted.get(outcome, 0))
        self._counted = report.told
        for level, name, text in report.lines:
            logging.getLogger(name).log(level, "%s", text)

    def _gone(self) -> ConnectionError:
        try:
            status = self.process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            return ConnectionError(f"process {self.process.pid} has closed its socket")
        how = f"by signal {-status}" if status < 0 else f"with status {status}"
        return ConnectionError(f"process {self.process.pid} ended {how}")


def _environment() -> dict[str, str]:
    """Return the environment of the process.

    It finds modules where this process finds them, and not in the current folder. numpy needs no
    thread for each core.
    """
    from kvcore.config import engine_environment  # which the process itself has no use for

    path = os.pathsep.join(os.path.abspath(folder) for folder in sys.path if folder)
    return engine_environment(
        {"PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    )
