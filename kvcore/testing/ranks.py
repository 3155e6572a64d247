"""Ranks of one engine as threads of this process, with their collectives."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

__all__ = ["Ranks", "here"]

_T = TypeVar("_T")
_here = threading.local()

STALL_S = 600.0
"""Seconds that a collective waits for the other ranks before it fails as stalled."""


class Ranks:
    """A pool of ``size`` threads that act as ranks.

    Calls on them block. Close it when done.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.collectives = 0
        self._barrier = threading.Barrier(size, timeout=STALL_S)
        self._slots: list[Any] = [None] * size
        self._work: list[queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]] = [
            queue.SimpleQueue() for _ in range(size)
        ]
        self._threads = [
            threading.Thread(target=self._serve, args=(n,), name=f"rank-{n}", daemon=True)
            for n in range(size)
        ]
        for thread in self._threads:
            thread.start()

    def on(self, number: int, call: Callable[[], _T]) -> _T:
        """Run ``call()`` on one rank, and return its result."""
        return self._start(number, call).result()

    def each(self, call: Callable[[int], _T]) -> list[_T]:
        """Run ``call(rank)`` on all ranks at once. Raises the first failing rank's error."""
        running = [self._start(n, lambda n=n: call(n)) for n in range(self.size)]  # type: ignore[misc]
        errors = [error for future in running if (error := future.exception()) is not None]
        # A rank that fails breaks the others' barrier: raise the cause, not the broken barrier.
        causes = [e for e in errors if not isinstance(e, threading.BrokenBarrierError)]
        if errors:
            raise (causes or errors)[0]
        return [future.result() for future in running]

    def close(self) -> None:
        for work in self._work:
            work.put(None)
        for thread in self._threads:
            thread.join()

    def _start(self, number: int, call: Callable[[], _T]) -> Future[_T]:
        future: Future[_T] = Future()
        self._work[number].put((call, future))
        return future

    def _serve(self, number: int) -> None:
        _here.ranks, _here.number = self, number
        while (item := self._work[number].get()) is not None:
            call, future = item
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001 - passed to the caller through the future
                self._barrier.abort()
                future.set_exception(error)

    def gather(self, number: int, value: _T) -> list[_T]:
        """Return the values of all ranks in rank order. Blocks until every rank has called it."""
        self._slots[number] = value
        if self._barrier.wait() == 0:
            self.collectives += 1
        found = list(self._slots)
        self._barrier.wait()  # no rank writes again before every rank has read
        return found


def here() -> tuple[Ranks, int] | None:
    """Return the `Ranks` and the rank number of this thread, or None if it is no rank."""
    ranks: Ranks | None = getattr(_here, "ranks", None)
    return None if ranks is None else (ranks, _here.number)
