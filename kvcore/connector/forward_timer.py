"""A timer for an engine's forwards on a device."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

from kvcore.memory.device import Device, Event

__all__ = ["ForwardTimer"]

_T = TypeVar("_T")


class ForwardTimer(Generic[_T]):
    """Times forwards without waiting for them. Used by one owner, on the thread that runs them.

    On a CPU a forward has ended when the engine says so. On a GPU it has only been launched by
    then. Two events are therefore recorded around it, on the current stream, and read when both
    have passed.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._running: tuple[_T, Event] | None = None
        self._ended: deque[tuple[_T, Event, Event]] = deque()

    def start(self, what: _T) -> None:
        """Start timing a forward, labelled ``what``. A forward that was not stopped is dropped."""
        self._running = (what, self._now())

    def stop(self) -> None:
        """Stop timing the current forward, if any: it has ended, or it has been launched."""
        if self._running is not None:
            self._ended.append((*self._running, self._now()))
            self._running = None

    def take(self) -> list[tuple[_T, float]]:
        """Return (label, seconds) of forwards that ended since the last call. Does not block."""
        done = []
        while self._ended and self._ended[0][2].passed():
            what, start, stop = self._ended.popleft()
            done.append((what, stop.since(start)))
        return done

    def _now(self) -> Event:
        return self._device.current_stream().record(timed=True)
