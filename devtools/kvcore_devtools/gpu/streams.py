"""Streams, the work that is queued on them, and the points that events record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvcore_devtools.gpu.clocks import Actor, Clock

__all__ = ["Point", "StreamQueue", "Work"]


@dataclass(eq=False)
class Work:
    """A piece of queued work: a launch, or the point of an event if ``run`` does nothing.

    ``error`` is what it, or work that it is ordered after, has raised.
    """

    what: str
    run: Callable[[], None] | None
    needs: list[Work]
    stream: StreamQueue
    done: bool = False
    at: float = 0.0
    error: Exception | None = None


class StreamQueue(Actor):
    """A stream."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.last: Work | None = None
        self.awaited: list[Work] = []


@dataclass(eq=False)
class Point:
    """A recorded event."""

    work: Work
    clock: Clock
    stream: str
    asked: int = 0
