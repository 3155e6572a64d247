"""Orders copies with the engine's compute, on the device: the host waits for neither.

    engine's stream ─── step ──▶ mark ┄┄┐           ┌┄▶ forward
                                        ▼           ┆
    copy thread's stream ─────────── copies of a graph ──▶ done

Each thread that copies has a stream of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kvcore.memory.device import Device, Event, Stream

__all__ = ["CopyStreams", "IssuedCopies"]


class IssuedCopies:
    """Copies that were issued to a stream: the `Issued` of the transfer engine.

    ``done`` is the event after the last of them.
    """

    def __init__(self, device: Device, begun: Event) -> None:
        self._device = device
        self._begun = self.done = begun

    def wait(self) -> None:
        """Block a thread of kvcore until the copies have ended.

        Raises what the device raises if it has failed.
        """
        self._device.enter()  # else it is the first GPU, and a capture elsewhere forbids to wait
        self.done.wait()

    def seconds(self) -> float:
        """Return how long the device took for them, without what the stream waited for before."""
        with self._device.current():
            return self.done.since(self._begun)


class CopyStreams:
    """The streams of a worker's copies on ``device``. Thread-safe."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._streams: dict[int, Stream] = {}
        self._after: dict[int, Event] = {}
        self._lock = threading.Lock()  # of what copies wait for
        self._joined: Stream | None = None

    def mark(self, *others: Stream) -> Event:
        """Return an event after all that the current stream and ``others`` were given so far."""
        stream = self.device.current_stream()
        if others:
            events = [stream.record(), *(other.record() for other in others)]
            if self._joined is None:
                self._joined = self.device.stream()
            stream = self._joined
            for event in events:
                stream.follow(event)
        return stream.record()

    def start_after(self, graph_id: int, event: Event) -> None:
        """Make copies of a graph wait for ``event``.

        Events that have passed are forgotten, so that few are kept.
        """
        if not self.device.queues:
            return
        with self._lock, self.device.current():  # to ask an event needs it, on any thread
            self._after[graph_id] = event
            while self._after and self._after[oldest := next(iter(self._after))].passed():
                del self._after[oldest]

    @contextmanager
    def copying(self, *graph_ids: int) -> Iterator[IssuedCopies]:
        """Issue copies of graphs in this block, on this thread's stream.

        They may not have ended after it. If the block raises, what it has issued has ended.
        """
        stream = self._stream()
        with self._lock:
            found = [self._after.get(graph_id) for graph_id in graph_ids]
        for after in {id(event): event for event in found}.values():
            if after is not None:
                stream.follow(after)
        copies = IssuedCopies(self.device, stream.record(timed=True))
        try:
            with stream.issuing():
                yield copies
        except BaseException:
            stream.record().wait()
            raise
        copies.done = stream.record(timed=True)

    def _stream(self) -> Stream:
        thread = threading.get_ident()
        stream = self._streams.get(thread)
        if stream is None:
            self.device.enter()
            stream = self._streams[thread] = self.device.stream()
        return stream
