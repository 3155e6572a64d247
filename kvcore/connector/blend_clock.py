"""A clock for one blend on a device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvcore.memory.device import Device, Event

__all__ = ["BlendClock"]


class BlendClock:
    """Measures the device's time for the work queued on the current stream until `stop`.

    Waits are not counted. Never blocks: `seconds` has the time after the device has run the work.
    """

    def __init__(self, device: Device) -> None:
        self._stream = device.current_stream()
        self._begun = self._now()
        self._ended: Event | None = None
        self._waits: list[tuple[Event, Event]] = []

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Leave out the time that the stream, or the host, spends in this block."""
        before = self._now()
        yield
        self._waits.append((before, self._now()))

    def stop(self) -> None:
        """End the measurement here."""
        self._ended = self._now()

    def seconds(self) -> float | None:
        """Return the time in seconds; None while the device has not run the work."""
        if self._ended is None or not self._ended.passed():
            return None
        waited = sum(after.since(before) for before, after in self._waits)
        return self._ended.since(self._begun) - waited

    def _now(self) -> Event:
        return self._stream.record(timed=True)
