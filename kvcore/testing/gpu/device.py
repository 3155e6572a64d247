"""The recording device: `kvcore.memory.device` over a `Machine`, for tensors on the CPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

from kvcore.memory.device import Device, Event, Stream, serve_devices
from kvcore.testing.gpu.machine import Machine, Point, _Queue
from kvcore.testing.gpu.memory import span

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

__all__ = ["RecordedEvent", "RecordedStream", "RecordingDevice", "installed"]


class RecordedEvent(Event):
    """A point in a stream of the machine."""

    def __init__(self, machine: Machine, point: Point) -> None:
        self.machine = machine
        self.point = point

    def wait(self) -> None:
        self.machine.wait(self.point)

    def passed(self) -> bool:
        return self.machine.passed(self.point)

    def since(self, earlier: Event) -> float:
        assert isinstance(earlier, RecordedEvent)
        assert self.point.work.done and earlier.point.work.done
        return self.point.work.at - earlier.point.work.at


class RecordedStream(Stream):
    """A stream of the machine."""

    def __init__(self, machine: Machine, queue: _Queue) -> None:
        self.machine = machine
        self.queue = queue

    def record(self, *, timed: bool = False) -> RecordedEvent:
        return RecordedEvent(self.machine, self.machine.record(self.queue))

    def follow(self, event: Event) -> None:
        assert isinstance(event, RecordedEvent)
        self.machine.follow(self.queue, event.point)

    def issuing(self) -> AbstractContextManager[object]:
        return self.machine.issuing(self.queue)


class RecordingDevice(Device):
    """The device of a `Machine`. Its tensors are on the CPU, and it runs nothing at once."""

    def __init__(self, machine: Machine, name: torch.device) -> None:
        self.machine = machine
        self.name = name

    @property
    def queues(self) -> bool:
        return True

    def enter(self) -> None:
        self.machine.host().device = self.machine.index

    @contextmanager
    def current(self) -> Iterator[None]:
        host = self.machine.host()
        before, host.device = host.device, self.machine.index
        try:
            yield
        finally:
            host.device = before

    def stream(self) -> RecordedStream:
        return RecordedStream(self.machine, self.machine.new_stream())

    def current_stream(self) -> RecordedStream:
        return RecordedStream(self.machine, self.machine.current_stream())

    def register(self, address: int, nbytes: int) -> None:
        with self.current():
            try:
                self.machine.register(address, nbytes)
            except Exception:
                self.machine.take_error()
                raise

    def unregister(self, address: int) -> None:
        with self.current():
            self.machine.unregister(address)
            self.machine.take_error()

    def reaches(self, tensor: torch.Tensor) -> bool:
        nbytes = tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.itemsize
        return self.machine.reaches(span(tensor.data_ptr(), nbytes))

    def upload(self, array: npt.NDArray[Any]) -> torch.Tensor:
        import torch

        self.machine.upload(array.nbytes)
        return torch.from_numpy(array.copy())

    def synchronize(self) -> None:
        self.machine.synchronize()


@contextmanager
def installed(machine: Machine) -> Iterator[Machine]:
    """Let ``machine`` stand in for the CPU's device, and order threads by their start and join.

    Only workers that are built in this block use it.
    """
    from kvcore.testing.gpu.hosts import watched_engine

    start, ended = threading.Thread.start, threading.Thread.join

    def started(thread: threading.Thread) -> None:
        thread._gpu_born = machine.now()  # type: ignore[attr-defined]
        start(thread)

    def joined(thread: threading.Thread, timeout: float | None = None) -> None:
        ended(thread, timeout)
        host = getattr(thread, "_gpu_host", None)
        if host is not None and not thread.is_alive():
            machine.learn(host.clock)

    undo = serve_devices("cpu", partial(RecordingDevice, machine))
    try:
        with (
            mock.patch.object(threading.Thread, "start", started),
            mock.patch.object(threading.Thread, "join", joined),
            mock.patch("kvcore.worker.worker.TransferEngine", watched_engine(machine)),
        ):
            machine.host().device = machine.index
            yield machine
    finally:
        undo()
