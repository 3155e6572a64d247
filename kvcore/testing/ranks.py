"""Ranks of one engine as threads of this process, with their collectives."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

__all__ = ["Ranks", "here"]

_T = TypeVar("_T")
_here = threading.local()

STALL_S = 600.0
"""Seconds that a collective waits for the other ranks before it fails as stalled."""


class _Round:
    """A collective that not all ranks have called yet."""

    def __init__(self, size: int) -> None:
        self.values: list[Any] = [None] * size
        self.missing = size


class Ranks:
    """A pool of ``size`` threads that act as ranks.

    Calls on them block. Close it when done.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.collectives = 0
        self._met = threading.Condition()
        self._round = _Round(size)
        self._broken = False  # a rank has failed: the others would wait for it
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
        future = self._start(number, call)
        self._end([future])
        return future.result()

    def each(self, call: Callable[[int], _T]) -> list[_T]:
        """Run ``call(rank)`` on all ranks at once. Raises the first failing rank's error."""
        running = [self._start(n, lambda n=n: call(n)) for n in range(self.size)]  # type: ignore[misc]
        self._end(running)
        errors = [error for future in running if (error := future.exception()) is not None]
        # A rank that fails breaks the others' collectives: raise the cause, not what came of it.
        causes = [e for e in errors if not _only_met_nobody(e)]
        if errors:
            raise (causes or errors)[0]
        return [future.result() for future in running]

    def _end(self, running: list[Future[Any]]) -> None:
        """Wait for calls to end. Collectives that an error has broken can be called again."""
        wait(running)
        with self._met:
            self._round, self._broken = _Round(self.size), False

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
                with self._met:
                    self._broken = True
                    self._met.notify_all()
                future.set_exception(error)

    def gather(self, number: int, value: _T) -> list[_T]:
        """Return the values of all ranks in rank order. Blocks until every rank has called it.

        Raises BrokenBarrierError if a rank fails instead.
        """
        with self._met:
            made = self._round
            made.values[number], made.missing = value, made.missing - 1
            if not made.missing:
                self.collectives += 1
                self._round = _Round(self.size)
                self._met.notify_all()
            self._met.wait_for(lambda: not made.missing or self._broken, STALL_S)
            if made.missing:
                raise threading.BrokenBarrierError("another rank has failed, or is stalled")
        return list(made.values)


def _only_met_nobody(error: BaseException) -> bool:
    """Return True if an error comes of a collective that another rank has broken."""
    causes: list[BaseException | None] = [error, error.__cause__]
    return any(isinstance(cause, threading.BrokenBarrierError) for cause in causes)


def here() -> tuple[Ranks, int] | None:
    """Return the `Ranks` and the rank number of this thread, or None if it is no rank."""
    ranks: Ranks | None = getattr(_here, "ranks", None)
    return None if ranks is None else (ranks, _here.number)
