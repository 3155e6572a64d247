"""A clock for one blend on a device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvcore.memory.device import Device, Event

__all__ = ["BlendClock"]


class BlendClock:
    """Times what the current stream does from now until `stop`, without its waits.

    The host waits for nothing: the time is known once the device has come to the end.
    """

    def __init__(self, device: Device) -> None:
        self._stream = device.current_stream()
        self._begun = self._now()
        self._ended: Event | None = None
        self._waits: list[tuple[Event, Event]] = []

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Leave out what the stream, or the host, waits for in this block."""
        before = self._now()
        yield
        self._waits.append((before, self._now()))

    def stop(self) -> None:
        """End the time here."""
        self._ended = self._now()

    def seconds(self) -> float | None:
        """Return the time in seconds; None if the device has not come to its end."""
        if self._ended is None or not self._ended.passed():
            return None
        waited = sum(after.since(before) for before, after in self._waits)
        return self._ended.since(self._begun) - waited

    def _now(self) -> Event:
        return self._stream.record(timed=True)
