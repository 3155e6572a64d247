"""Device memory as torch's caching allocator gives it out: by stream, and again at once.

Memory is given back when the host drops its tensor, whatever is still queued. It is then given out
again to whoever allocates on the stream that it was allocated on. So work of another stream that
may not have ended needs an order, or `Stream.hold`.
"""

from __future__ import annotations

import weakref
from collections import deque
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvcore_devtools.gpu.clocks import Actor, call_site
from kvcore_devtools.gpu.memory import Memory, Region
from kvcore_devtools.gpu.streams import Point, StreamQueue

__all__ = ["Allocator"]

_ROUND = 4096
"""Bytes to which blocks are rounded up, so that tensors of other sizes take their place, too."""
_SLAB = 1 << 20
_GARBAGE = 255
"""The byte in memory that nobody has written: a NaN in every floating-point format."""


class _Machine(Protocol):
    """What the allocator asks of `kvcore_devtools.gpu.machine.Machine`."""

    lock: AbstractContextManager[Any]
    memory: Memory

    def current_stream(self) -> StreamQueue: ...

    def host(self) -> Actor: ...

    def know_device(self, address: int, nbytes: int, name: str) -> Region: ...

    def record(self, stream: StreamQueue) -> Point: ...


@dataclass(eq=False)
class _Block:
    """A piece of device memory of one stream, in use or not."""

    region: Region
    stream: StreamQueue
    held: set[StreamQueue] = field(default_factory=set)
    uses: list[Point] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return self.region.stop - self.region.start


class Allocator:
    """The device memory of a machine. Its blocks are reused, and never given back to the system."""

    def __init__(self, machine: _Machine) -> None:
        self._machine = machine
        self._slabs: list[npt.NDArray[np.uint8]] = []
        self._room = 0
        self._blocks: dict[int, _Block] = {}
        self._idle: dict[int, list[_Block]] = {}
        self._dropped: deque[_Block] = deque()  # filled by finalizers, on any thread

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return ``nbytes`` of memory for the calling thread's stream, with unspecified content."""
        machine = self._machine
        with machine.lock:
            stream = machine.current_stream()
            block = self._again(stream, nbytes) or self._new(stream, nbytes)
            block.region.name = name = f"device memory that was allocated at {call_site()}"
            block.region.place = lambda offset: f"{name}, byte {offset}"
            owner = self._bytes(block.region.start, max(nbytes, 1))
            weakref.finalize(owner, self._dropped.append, block).atexit = False
            return torch.from_numpy(owner)[:nbytes]

    def hold(self, tensor: torch.Tensor, stream: StreamQueue) -> None:
        """Do not give the memory out again before the stream's work so far has ended."""
        with self._machine.lock:
            region = self._machine.memory.at(tensor.data_ptr())
            block = None if region is None else self._blocks.get(region.start)
            if block is not None:
                block.held.add(stream)

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the same bytes as a tensor that does not keep the memory in use.

        Queued work is given these: a launch knows addresses only. Memory from elsewhere is
        returned as it is.
        """
        if not tensor.numel():
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        reach = sum(step * (n - 1) for step, n in zip(tensor.stride(), tensor.shape, strict=True))
        nbytes = (reach + 1) * tensor.itemsize
        with self._machine.lock:
            region = self._machine.memory.at(tensor.data_ptr())
            if region is None or region.start not in self._blocks:
                return tensor
            flat = torch.from_numpy(self._bytes(tensor.data_ptr(), nbytes))
        found: torch.Tensor = flat.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
        return found

    def _again(self, stream: StreamQueue, nbytes: int) -> _Block | None:
        """Take the smallest idle block of a stream that is large enough, at the lowest address."""
        while self._dropped:
            block = self._dropped.popleft()
            block.uses = [self._machine.record(one) for one in block.held - {block.stream}]
            block.held = set()
            self._idle.setdefault(block.stream.number, []).append(block)
        idle = self._idle.get(stream.number, [])
        fit = [
            block
            for block in idle
            if block.nbytes >= nbytes and all(use.work.done for use in block.uses)
        ]
        if not fit:
            return None
        block = min(fit, key=lambda one: (one.nbytes, one.region.start))
        idle.remove(block)
        for use in block.uses:
            self._machine.host().learn(use.clock)  # the allocator has asked, on the host
        return block

    def _new(self, stream: StreamQueue, nbytes: int) -> _Block:
        size = max(-(-nbytes // _ROUND), 1) * _ROUND
        if size > self._room:
            slab = np.full(max(_SLAB, size) + _ROUND, _GARBAGE, dtype=np.uint8)
            skip = -slab.ctypes.data % _ROUND
            self._slabs.append(slab[skip:])
            self._room = len(slab) - skip
        slab = self._slabs[-1]
        start = _address(slab) + len(slab) - self._room
        self._room -= size
        region = self._machine.know_device(start, size, "device memory")
        block = self._blocks[start] = _Block(region, stream)
        return block

    def _bytes(self, address: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return memory of a slab as an array of its own."""
        slab = next(one for one in self._slabs if 0 <= address - _address(one) < len(one))
        start = address - _address(slab)
        return slab[start : start + nbytes]


def _address(array: npt.NDArray[Any]) -> int:
    return int(array.ctypes.data)
