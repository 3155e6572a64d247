"""Ranks of one engine as threads of this process, with the collectives they meet in."""

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
"""How long a collective waits for the other ranks before that is called a stall."""


class Ranks:
    """``size`` threads that act as ranks. Calls on them block; close it when done."""

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
        """``call()`` on one rank."""
        return self._start(number, call).result()

    def each(self, call: Callable[[int], _T]) -> list[_T]:
        """``call(rank)`` on all ranks at once; raises what the first failing rank raised."""
        running = [self._start(n, lambda n=n: call(n)) for n in range(self.size)]  # type: ignore[misc]
        errors = [error for future in running if (error := future.exception()) is not None]
        # A rank that fails breaks the collective for the others: tell of the cause, not of that.
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
            except BaseException as error:  # noqa: BLE001 - handed to who asked
                self._barrier.abort()
                future.set_exception(error)

    def gather(self, number: int, value: _T) -> list[_T]:
        """What every rank brought, in order of rank. Blocks until all ranks have called it."""
        self._slots[number] = value
        if self._barrier.wait() == 0:
            self.collectives += 1
        found = list(self._slots)
        self._barrier.wait()  # nobody writes again before everybody has read
        return found


def here() -> tuple[Ranks, int] | None:
    """The ranks this thread belongs to and its number among them; None for any other thread."""
    ranks: Ranks | None = getattr(_here, "ranks", None)
    return None if ranks is None else (ranks, _here.number)
