"""A machine whose queued work runs when the test says so."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvcore.testing.waiting import PATIENCE_S
from kvcore_devtools.gpu.machine import Machine
from kvcore_devtools.gpu.memory import Spans
from kvcore_devtools.gpu.streams import Point, StreamQueue, Work

__all__ = ["ManualMachine"]


class ManualMachine(Machine):
    """A machine that goes forward by `step` and `run`, and by itself inside of `working`.

    Outside of it, a host thread that waits for an event blocks until others have let the work
    before it run. A query runs nothing.
    """

    def __init__(self, *, index: int = 0) -> None:
        super().__init__(index=index, eager=0.0)
        self._moved = threading.Condition(self.lock)
        self._working = 0

    def step(self, stream: StreamQueue) -> bool:
        """Run a stream's next piece of work; return False if it has none or must wait.

        The record of an event is a piece of work.
        """
        with self.lock:
            work = next((one for one in self._queued if one.stream is stream), None)
            if work is None or not all(need.done for need in work.needs):
                return False
            self._run(work)
            return True

    def run(self, *only: StreamQueue) -> None:
        """Let all streams, or only these, work until none can go on."""
        while any(self.step(stream) for stream in only or tuple(self.streams)):
            pass

    @contextmanager
    def working(self) -> Iterator[None]:
        """Let the device work by itself in this block, also for threads that wait already."""
        with self._moved:
            self._working += 1
            self._moved.notify_all()
        try:
            yield
        finally:
            with self._moved:
                self._working -= 1

    def force(self, work: Work) -> None:
        with self._moved:
            reached = self._moved.wait_for(lambda: work.done or self._working, PATIENCE_S)
            assert reached, "nobody let the device work"
            super().force(work)

    def upload(self, nbytes: int, run: Callable[[], None], writes: Spans) -> None:
        with self.lock, self.working():  # it may be forced, and does not let go of the lock
            super().upload(nbytes, run, writes)

    def passed(self, point: Point) -> bool:
        if not self._working:
            point.asked = 0  # patience begins when the device works
        return super().passed(point)

    def _run(self, work: Work) -> None:
        super()._run(work)
        self._moved.notify_all()
