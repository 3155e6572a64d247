"""Work in threads on a caller's memory, which always ends before the caller continues."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, wait
from contextlib import contextmanager
from typing import TypeVar

__all__ = ["started"]

T = TypeVar("T")
R = TypeVar("R")


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
