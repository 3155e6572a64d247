"""A GPU's memory and its link, played by this CPU: for tests of copies between host and device.

Memory "on the device" is host memory whose tensors say that they are elsewhere. Copies by address
work on it, torch's own do not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvcore.memory.device import CpuDevice, Device, Event, Stream, serve_devices
from kvcore.memory.layout import KVView
from kvcore.testing.gpu.device import on_device

__all__ = ["GPU", "FakeGpu", "on_gpu", "served"]

GPU = torch.device("cuda", 0)


def on_gpu(view: KVView) -> KVView:
    """Return the same memory as a view on the GPU."""
    return KVView(view.layout, [on_device(tensor) for tensor in view.tensors])


class _Passed(Event):
    def wait(self) -> None:
        pass

    def passed(self) -> bool:
        return False

    def since(self, earlier: Event) -> float:
        return 0.0


class _Stream(Stream):
    def __init__(self, gpu: FakeGpu, name: str) -> None:
        self.gpu, self.name = gpu, name

    def record(self, *, timed: bool = False) -> Event:
        event = _Passed()
        self.gpu.log.append(("record", self.name, event))
        return event

    def follow(self, event: Event) -> None:
        self.gpu.log.append(("follow", self.name, event))

    @contextmanager
    def issuing(self) -> Iterator[None]:
        before, self.gpu.now = self.gpu.now, self
        yield
        self.gpu.now = before

    def hold(self, tensor: torch.Tensor) -> None:
        self.gpu.log.append(("hold", self.name, tensor))


class FakeGpu(Device):
    """A device whose work has ended when it is issued; ``log`` tells what was issued in order.

    ``host_reached`` is what `reaches` answers for host memory. ``most`` bytes can be allocated.
    """

    name = GPU

    def __init__(self, *, host_reached: bool = True, most: int = 1 << 40) -> None:
        self.host_reached, self.most = host_reached, most
        self.log: list[tuple[str, str, Any]] = []
        self.now = _Stream(self, "default")
        self.allocated: list[torch.Tensor] = []
        self._cpu = CpuDevice(torch.device("cpu"))

    def new_stream(self, name: str) -> _Stream:
        return _Stream(self, name)

    @property
    def queues(self) -> bool:
        return True

    def enter(self) -> None:
        pass

    def current(self) -> AbstractContextManager[object]:
        return nullcontext()

    def stream(self) -> Stream:
        return _Stream(self, "new")

    def current_stream(self) -> Stream:
        return self.now

    def register(self, address: int, nbytes: int) -> None:
        pass

    def unregister(self, address: int) -> None:
        pass

    def reaches(self, tensor: torch.Tensor) -> bool:
        return tensor.device == GPU or self.host_reached

    def upload(self, array: npt.NDArray[Any]) -> torch.Tensor:
        self.log.append(("upload", self.now.name, array.nbytes))
        return torch.from_numpy(np.array(array))

    def allocate(self, nbytes: int) -> torch.Tensor:
        if nbytes > self.most:
            raise torch.OutOfMemoryError("the fake GPU is full")
        memory = torch.full((nbytes + 256,), 0xA5, dtype=torch.uint8)
        skip = -memory.data_ptr() % 256
        self.allocated.append(on_device(memory[skip : skip + nbytes]))
        return self.allocated[-1]

    def copy_batch(
        self,
        dst: npt.NDArray[np.int64],
        src: npt.NDArray[np.int64],
        sizes: npt.NDArray[np.int64],
        *,
        registered: bool = True,
    ) -> None:
        assert registered is self.host_reached
        self.log.append(("batch", self.now.name, sizes.copy()))
        self._cpu.copy_batch(dst, src, sizes)

    def synchronize(self) -> None:
        pass


@contextmanager
def served(gpu: FakeGpu) -> Iterator[FakeGpu]:
    """Let `device_of` return ``gpu`` for CUDA devices."""
    undo = serve_devices("cuda", lambda name: gpu)
    try:
        yield gpu
    finally:
        undo()
