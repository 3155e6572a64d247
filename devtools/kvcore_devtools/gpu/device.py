"""The recording device: `kvcore.memory.device` over a `Machine`, for tensors on the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcore.memory.device import Device, Event, Stream
from kvcore_devtools.gpu.machine import Machine
from kvcore_devtools.gpu.memory import span, tensor_spans, together
from kvcore_devtools.gpu.streams import Point, StreamQueue

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

    from kvcore.memory.cuda_batch import Addresses

__all__ = ["RecordedEvent", "RecordedStream", "RecordingDevice", "on_device", "plain"]


class RecordedEvent(Event):
    """A point in a stream of the machine. ``seen`` is True once the host has seen it pass."""

    def __init__(self, machine: Machine, point: Point, *, timed: bool) -> None:
        self.machine = machine
        self.point = point
        self.timed = timed
        self.seen = False

    def wait(self) -> None:
        self.machine.wait(self.point)

    def passed(self) -> bool:
        self.seen = self.machine.passed(self.point) or self.seen
        return self.seen

    def since(self, earlier: Event) -> float:
        assert isinstance(earlier, RecordedEvent)
        assert self.timed, "CUDA keeps the time of an event only if it was asked to"
        assert earlier.timed
        assert self.point.work.done
        assert earlier.point.work.done
        return self.point.work.at - earlier.point.work.at


class RecordedStream(Stream):
    """A stream of the machine."""

    def __init__(self, machine: Machine, queue: StreamQueue) -> None:
        self.machine = machine
        self.queue = queue

    def record(self, *, timed: bool = False) -> RecordedEvent:
        event = RecordedEvent(self.machine, self.machine.record(self.queue), timed=timed)
        self.machine.note("record", event.point, self.queue)
        return event

    def follow(self, event: Event) -> None:
        assert isinstance(event, RecordedEvent)
        self.machine.note("follow", event.point, self.queue)
        self.machine.follow(self.queue, event.point)

    def issuing(self) -> AbstractContextManager[object]:
        return self.machine.issuing(self.queue)

    def hold(self, tensor: torch.Tensor) -> None:
        self.machine.note("hold", tensor.data_ptr(), self.queue)
        self.machine.allocator.hold(tensor, self.queue)


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
        self.machine.note("enter", None)

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

    def stream_of(self, engine_stream: Any) -> RecordedStream:
        assert isinstance(engine_stream, RecordedStream), engine_stream
        return engine_stream

    def numa_node(self) -> int | None:
        return self.machine.node

    def register(self, address: int, nbytes: int) -> None:
        with self.current():
            try:
                self.machine.register(address, nbytes)
            except Exception:
                self.machine.take_error()
                raise
        self.machine.note("register", address)

    def unregister(self, address: int) -> None:
        self.machine.note("unregister", address)
        with self.current():
            self.machine.unregister(address)
            self.machine.take_error()

    def reaches(self, tensor: torch.Tensor) -> bool:
        # As CUDA's runtime: it looks at the first address only.
        return self.machine.reaches(span(tensor.data_ptr(), 1))

    def upload(self, array: npt.NDArray[Any]) -> torch.Tensor:
        import torch

        self.machine.note("upload", array.nbytes)
        allocator = self.machine.allocator
        source = torch.from_numpy(array.copy())
        memory = allocator.allocate(array.nbytes).view(source.dtype).view(source.shape)
        target = allocator.alias(memory)

        def run() -> None:
            with torch.inference_mode():
                target.copy_(source)

        self.machine.upload(array.nbytes, run, tensor_spans(memory))
        return memory

    def allocate(self, nbytes: int) -> torch.Tensor:
        import torch

        room = self.machine.room
        if room is not None and sum(self.machine.allocated) + nbytes > room:
            raise torch.OutOfMemoryError(f"no room for {nbytes} bytes on the recording device")
        self.machine.allocated.append(nbytes)
        memory = self.machine.allocator.allocate(nbytes)
        return memory if self.name.type == "cpu" else on_device(memory)

    def copy_batch(
        self, dst: Addresses, src: Addresses, sizes: Addresses, *, registered: bool = True
    ) -> None:
        dst, src, sizes = dst.copy(), src.copy(), sizes.copy()
        self.machine.note("batch", sizes)
        if registered:
            for start in (dst, src):
                pieces = np.stack([start, start + sizes], axis=1)
                address = self.machine.spans_two_registrations(pieces)
                if address is not None:
                    self.machine.fault(
                        "memory", f"a copy from {address:#x} on spans two registrations"
                    )

        def run() -> None:
            for one in zip(dst.tolist(), src.tolist(), sizes.tolist(), strict=True):
                ctypes.memmove(*one)

        with self.current():
            work = self.machine.launch(
                f"a batch of {len(sizes)} copies",
                run,
                reads=together(map(span, src.tolist(), sizes.tolist())),
                writes=together(map(span, dst.tolist(), sizes.tolist())),
                pageable=not registered,
            )
            if not registered:
                self.machine.wait(self.machine.record(self.machine.current_stream()))
                assert work.done

    def synchronize(self) -> None:
        self.machine.synchronize()


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as a tensor that says that it is on GPU 0."""
    found: torch.Tensor = tensor.as_subclass(_claiming())
    return found


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Undo `on_device`."""
    import torch

    found: torch.Tensor = tensor.as_subclass(torch.Tensor)
    return found


@cache
def _claiming() -> type[torch.Tensor]:
    import torch

    gpu = torch.device("cuda", 0)
    return type("OnDevice", (torch.Tensor,), {"device": property(lambda tensor: gpu)})
