"""A device that queues its work and does it when the test says so. Its memory is the CPU's."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from kvcore.memory.copy.base import DeviceOps, HeadRange, Units
from kvcore.memory.device import Device, Event, Stream
from kvcore.memory.layout import KVView

WAIT = 20.0


class ManualEvent(Event):
    def __init__(self, device: ManualDevice) -> None:
        self._device = device
        self.at = -1.0  # of the device's clock
        self.error: Exception | None = None

    def wait(self) -> None:
        self._device.host_waits.append(threading.current_thread().name)
        with self._device.moved:
            assert self._device.moved.wait_for(self.passed, WAIT), "nobody let the device work"
        if self.error is not None:
            raise self.error

    def passed(self) -> bool:
        return self.at >= 0

    def since(self, earlier: Event) -> float:
        assert isinstance(earlier, ManualEvent)
        return self.at - earlier.at


class ManualStream(Stream):
    """``work`` holds what to do, events to pass (recorded) and events to wait for (followed)."""

    def __init__(self, device: ManualDevice) -> None:
        self._device = device
        self.work: deque[tuple[str, Any]] = deque()
        self.error: Exception | None = None

    def record(self, *, timed: bool = False) -> ManualEvent:
        event = ManualEvent(self._device)
        self.push("record", event)
        return event

    def follow(self, event: Event) -> None:
        self.push("follow", event)

    def launch(self, work: Callable[[], None]) -> None:
        self.push("launch", work)

    def push(self, kind: str, what: Any) -> None:
        with self._device.moved:
            self.work.append((kind, what))
            self._device.moved.notify_all()

    def issuing(self) -> AbstractContextManager[object]:
        return self._device.use(self)


class ManualDevice(Device):
    """Streams go forward with `step` and `run` only. ``host_waits`` names threads that blocked."""

    def __init__(self, name: torch.device | None = None) -> None:
        self.name = name or torch.device("cpu")
        self.moved = threading.Condition(threading.RLock())
        self.streams: list[ManualStream] = []
        self.host_waits: list[str] = []
        self.entered: set[str] = set()
        self.clock = 0.0
        self._local = threading.local()
        self.compute = self.stream()

    @property
    def queues(self) -> bool:
        return True

    def enter(self) -> None:
        self.entered.add(threading.current_thread().name)

    def current(self) -> AbstractContextManager[object]:
        return nullcontext()

    def stream(self) -> ManualStream:
        made = ManualStream(self)
        with self.moved:
            self.streams.append(made)
        return made

    def current_stream(self) -> ManualStream:
        found: ManualStream = getattr(self._local, "stream", self.compute)
        return found

    def stream_of(self, engine_stream: Any) -> ManualStream:
        assert isinstance(engine_stream, ManualStream)
        return engine_stream

    @contextmanager
    def use(self, stream: ManualStream) -> Iterator[None]:
        before = self.current_stream()
        self._local.stream = stream
        try:
            yield
        finally:
            self._local.stream = before

    def register(self, address: int, nbytes: int) -> None:
        pass

    def unregister(self, address: int) -> None:
        pass

    def reaches(self, tensor: torch.Tensor) -> bool:
        return True

    def upload(self, array: Any) -> torch.Tensor:
        return torch.from_numpy(array)

    def synchronize(self) -> None:
        self.run()

    # -- progress ---------------------------------------------------------------------------

    def step(self, stream: ManualStream) -> bool:
        """Let a stream do its next piece of work; return False if it has none or must wait."""
        with self.moved:
            if not stream.work:
                return False
            kind, what = stream.work[0]
            if kind == "follow" and not what.passed():
                return False
            stream.work.popleft()
            self.clock += 1.0
            if kind == "launch":
                try:
                    what()
                except Exception as error:  # noqa: BLE001 - the stream's events raise it
                    stream.error = error
            if kind == "record":
                what.at, what.error = self.clock, stream.error
            self.moved.notify_all()
            return True

    def run(self, *only: ManualStream) -> None:
        """Let all streams, or only these, work until none can go on."""
        while any(self.step(stream) for stream in only or tuple(self.streams)):
            pass

    def until(self, reached: Callable[[], bool]) -> None:
        """Block until threads of the host have made something true, without letting work run."""
        with self.moved:
            assert self.moved.wait_for(reached, WAIT)

    @contextmanager
    def working(self, *but: ManualStream) -> Iterator[None]:
        """Let the device work by itself in this block, on all streams but these."""
        ended = threading.Event()

        def work() -> None:
            while not ended.is_set():
                self.run(*(s for s in tuple(self.streams) if s not in but))
                with self.moved:
                    self.moved.wait(0.005)

        thread = threading.Thread(target=work, name="device")
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


class QueuedOps(DeviceOps):
    """Device operations that put each copy of ``inner`` into the current stream's queue.

    ``refuse`` is the number of next copies that raise before they are queued; ``breaks`` makes the
    device fail when it comes to a copy.
    """

    name = "queued"
    priority = -1

    def __init__(self, inner: DeviceOps, device: ManualDevice) -> None:
        self.inner = inner
        self.device = device
        self.refuse = 0
        self.breaks = False

    def supports(self, src: KVView, dst: KVView) -> bool:
        return self.inner.supports(src, dst)

    def copy(
        self,
        src: KVView,
        src_units: Units,
        dst: KVView,
        dst_units: Units,
        layers: Sequence[int],
        unit_tokens: int,
        heads: HeadRange,
    ) -> None:
        if self.refuse:
            self.refuse -= 1
            raise RuntimeError("planted: out of memory")

        def copy() -> None:
            if self.breaks:
                raise RuntimeError("planted: an illegal address")
            self.inner.copy(src, src_units, dst, dst_units, layers, unit_tokens, heads)

        self.device.current_stream().launch(copy)
