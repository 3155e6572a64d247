"""A timer for an engine's forwards on a device."""

from __future__ import annotations

import time
from collections import deque
from typing import Any, Generic, TypeVar

import torch

__all__ = ["ForwardTimer"]

_T = TypeVar("_T")


class ForwardTimer(Generic[_T]):
    """Times forwards without waiting for them. Used by one owner, on the thread that runs them.

    On a CPU a forward has ended when the engine says so. On a GPU it has only been launched by
    then. Two events are therefore recorded around it, on the current stream, and read when both
    have passed.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._device = device
        self._running: tuple[_T, Any] | None = None
        self._ended: deque[tuple[_T, Any, Any]] = deque()

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
        while self._ended and self._is_over(self._ended[0][2]):
            what, start, stop = self._ended.popleft()
            done.append((what, self._seconds(start, stop)))
        return done

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _is_over(self, mark: Any) -> bool:
        return bool(mark.query()) if self._cuda else True

    def _seconds(self, start: Any, stop: Any) -> float:
        return float(start.elapsed_time(stop)) / 1e3 if self._cuda else float(stop - start)
