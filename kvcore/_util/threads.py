"""Threads of kvcore: each has one boundary, and none of them dies silently.

Product code makes threads with `GuardedThread` only; a test holds the line. `started` runs work in
the threads of a pool on a caller's memory.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, wait
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import Generic, TypeVar

from kvcore._util.log_limit import LogLimit

__all__ = ["Died", "GuardedThread", "InOrder", "nobody_waits", "started"]

_log = logging.getLogger("kvcore.threads")

_unstarted = LogLimit()

T = TypeVar("T")
R = TypeVar("R")

Died = Callable[[BaseException], object]
"""Fails what waits for a thread, which ended by this error or could not be started."""


def nobody_waits(error: BaseException) -> None:
    """Do nothing: the `Died` of a thread for whose work nobody waits."""


class GuardedThread:
    """A daemon thread that calls ``run`` once.

    If ``run`` raises, or if the system has no room for one more thread, that is logged with the
    thread's name and ``died`` is called. A thread that cannot be started is thus a thread that has
    died at once, and its owner needs no second way to fail. ``died`` runs on the thread itself, or
    on the caller's in `start`. It must not call `join`.
    """

    def __init__(self, name: str, run: Callable[[], object], died: Died) -> None:
        self.name = name
        self.error: BaseException | None = None
        """Why it has died; None if it has not."""
        self._run = run
        self._died = died
        self._thread = threading.Thread(target=self._guarded, name=name, daemon=True)
        self._started = False

    def is_alive(self) -> bool:
        """Return True while it runs."""
        return self._thread.is_alive()

    @property
    def ident(self) -> int | None:
        """The interpreter's number for it; None before it was started."""
        return self._thread.ident

    @property
    def is_current(self) -> bool:
        """True on this thread."""
        return self._thread is threading.current_thread()

    def start(self) -> bool:
        """Start it; return False, after ``died`` was called, if that is not possible. Call once."""
        assert not self._started
        self._started = True
        try:
            self._thread.start()
        except RuntimeError as error:
            self.error = error
            if _unstarted.admit(self.name) is not None:
                _log.error("the thread %s cannot be started: %s", self.name, error)
            self._died(error)
            return False
        return True

    def join(self, timeout: float) -> bool:
        """Wait until it has ended, at most ``timeout`` seconds; return True if it does not run.

        A thread that still runs is left behind, with a warning. It does not wait for itself.
        """
        if self._thread.ident is None or self.is_current:
            return not self.is_alive()
        self._thread.join(max(0.0, timeout))
        if self.is_alive():
            _log.warning(
                "the thread %s did not end in %.3g s and is left behind", self.name, timeout
            )
        return not self.is_alive()

    def _guarded(self) -> None:
        try:
            self._run()
        except BaseException as error:  # noqa: BLE001 - the boundary of every thread
            self.error = error
            _tell(self.name, self._died, error)


class InOrder(Generic[T]):
    """Calls ``act`` with everything that is put, in order, on a thread of its own.

    The thread is started for the first of it, and calls ``begin`` first. If it cannot be started,
    `put` calls ``act`` itself: the same, only slower. If ``act`` raises there, ``died`` is called,
    and what follows is taken nevertheless.
    """

    def __init__(
        self, name: str, act: Callable[[T], object], died: Died, begin: Callable[[], object]
    ) -> None:
        self._act = act
        self._died = died
        self._begin = begin
        self._queue: SimpleQueue[tuple[T] | None] = SimpleQueue()
        self._thread = GuardedThread(name, self._run, nobody_waits)
        self._works: bool | None = None
        """Whether the thread could be started; None before the first `put`."""

    def put(self, what: T) -> None:
        """Have ``act`` called with ``what``. Blocks for that, and raises, only without a thread."""
        if self._works is None:
            self._works = self._thread.start()
        if self._works:
            self._queue.put((what,))
        else:
            self._act(what)

    def close(self) -> None:
        """End the thread after what was put so far. Does not wait. Nothing may follow."""
        self._queue.put(None)

    def join(self, timeout: float) -> bool:
        """Wait as `GuardedThread.join` does."""
        return self._thread.join(timeout)

    def _run(self) -> None:
        with suppress(Exception):  # where a thread runs changes no outcome
            self._begin()
        while (one := self._queue.get()) is not None:
            try:
                self._act(*one)
            except BaseException as error:  # noqa: BLE001, PERF203 - the rest is waited for too
                _tell(self._thread.name, self._died, error)


def _tell(name: str, died: Died, error: BaseException) -> None:
    """Log that a thread has failed, and call ``died``. Does not raise."""
    try:
        _log.error("the thread %s has stopped after an error", name, exc_info=error)
    finally:
        try:
            died(error)
        except Exception:  # noqa: BLE001 - nobody else would tell
            _log.exception("the end of the thread %s could not be told", name)


@contextmanager
def started(pool: Executor, act: Callable[[T], R], what: Iterable[T]) -> Iterator[list[Future[R]]]:
    """Run ``act`` on each of ``what`` in threads of ``pool`` while the block runs.

    Leaving the block waits for all of them, even if one of them or the block itself raised: a
    thread that still ran could write to memory that has been given to somebody else. `Executor.map`
    does not ensure this: it raises the first failure and leaves the others running.
    """
    futures: list[Future[R]] = []
    try:
        for one in what:
            futures.append(pool.submit(act, one))  # noqa: PERF401 - listed as it starts
        yield futures
    except BaseException:
        for future in futures:
            future.cancel()
        raise
    finally:
        wait(futures)
