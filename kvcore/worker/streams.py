"""Orders copies with the engine's compute: each thread that copies has a stream of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kvcore.memory.device import Device, Event, Stream

__all__ = ["CopyStreams"]

_MARKS_KEPT = 65536


class CopyStreams:
    """The streams of a worker's copies on ``device``. They wait for the engine as of `mark`."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._streams: dict[int, Stream] = {}
        self._marks: dict[int, Event] = {}

    def mark(self, graph_id: int) -> None:
        """Make the graph's copies wait for what this thread's stream has been given so far."""
        if not self._device.queues:
            return
        self._marks[graph_id] = self._device.current_stream().record()
        while len(self._marks) > _MARKS_KEPT:  # ids ascend: the oldest graph ended long ago
            self._marks.pop(next(iter(self._marks)))

    @contextmanager
    def copying(self, graph_id: int) -> Iterator[None]:
        """Issue copies in this block. At its end they have ended."""
        thread = threading.get_ident()
        stream = self._streams.get(thread)
        if stream is None:
            self._device.enter()
            stream = self._streams[thread] = self._device.stream()
        if (mark := self._marks.get(graph_id)) is not None:
            stream.follow(mark)
        with stream.issuing():
            yield
        stream.record().wait()
