"""kvcore's device operations in Triton."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from kvcore.memory.copy.base import Copy, DeviceOps
from kvcore.memory.copy.link import LinkOps, Way
from kvcore.memory.device import device_of
from kvcore.memory.layout import KVView
from kvcore_kernels.copy.launch import copy_units, prepare
from kvcore_kernels.planes import kernel_device
from kvcore_kernels.sums.launch import sums

__all__ = ["KernelOps", "TritonOps"]

LINK_PROGRAMS = 12
"""Programs that copy over the link. Each has 16 KiB in flight, a read over the link takes about
2 us, so 12 ask for 90 GB/s: more than PCIe 5 gives, from a tenth of the GPU's cores. Untuned: no
GPU was at hand. vLLM 0.32 caps its kernel at 12 on an H100."""


class KernelOps(DeviceOps):
    """Copies between memory that kernels reach, in one launch each.

    Without ``programs`` a launch may fill the GPU, as suits copies in its memory. With it, it has
    at most so many programs. A call returns when the copy is enqueued on the current stream. Units
    are sent to the device from pinned memory, so nothing waits for the stream.
    """

    name: ClassVar[str] = "kernel"
    priority: ClassVar[int] = 20

    def __init__(self, programs: int | None = None) -> None:
        self._programs = programs

    def supports(self, src: KVView, dst: KVView) -> bool:
        """Return True if kernels of the GPU that holds some of the memory reach all of it."""
        device = device_of(kernel_device((src, dst)))
        return device.queues and all(map(device.reaches, (*src.tensors, *dst.tensors)))

    def prepare(self, pages: KVView, blocks: KVView, unit_tokens: int) -> None:
        for ends in ((pages, blocks), (blocks, pages)):
            prepare(*ends, unit_tokens, self._programs)

    def copy(self, copy: Copy) -> None:
        copy_units(copy, self._programs)


class TritonOps(LinkOps):
    """Copies in a GPU's memory by kernels, and over the link as `LinkOps` chooses."""

    name: ClassVar[str] = "triton"
    priority: ClassVar[int] = 20

    def __init__(self, way: Way | None = None) -> None:
        super().__init__(KernelOps(), KernelOps(LINK_PROGRAMS), way)

    def sums(self, data: torch.Tensor, offsets: Sequence[int], nbytes: int) -> list[int]:
        """Compute checksums in one launch. Offsets must be multiples of 16."""
        return sums(data, offsets, nbytes)
