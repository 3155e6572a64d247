"""Work on a caller's memory, in threads: it has ended when the caller goes on, come what may."""

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
    """``act`` on each of ``what`` in threads of ``pool``, while the block runs.

    Leaving it waits for all of them, also by an exception, of one of them or of the block's own:
    one that still ran would write to memory that has been given to somebody else. (`Executor.map`
    raises the first that failed, and leaves the others running.)
    """
    futures: list[Future[R]] = []
    try:
        for one in what:
            futures.append(pool.submit(act, one))  # noqa: PERF401 - known as soon as it runs
        yield futures
    except BaseException:
        for future in futures:
            future.cancel()
        raise
    finally:
        wait(futures)
