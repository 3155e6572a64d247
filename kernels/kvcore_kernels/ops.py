"""kvcore's device operations in Triton."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from kvcore.memory.copy.base import DeviceOps, HeadRange, Units
from kvcore.memory.device import device_of
from kvcore.memory.layout import KVView
from kvcore_kernels.copy.launch import copy_units
from kvcore_kernels.planes import kernel_device
from kvcore_kernels.sums.launch import sums

__all__ = ["TritonOps"]


class TritonOps(DeviceOps):
    """Copies between device memory and device or pinned memory, in one launch each.

    A call returns when the copy is enqueued on the current stream. Units and plane tables are sent
    to the device from pinned memory, so nothing waits for the stream.
    """

    name: ClassVar[str] = "triton"
    priority: ClassVar[int] = 20

    def supports(self, src: KVView, dst: KVView) -> bool:
        """Return True if kernels of the GPU that holds some of the memory reach all of it."""
        device = device_of(kernel_device((src, dst)))
        return device.queues and all(map(device.reaches, (*src.tensors, *dst.tensors)))

    def sums(self, data: torch.Tensor, offsets: Sequence[int], nbytes: int) -> list[int]:
        """Compute checksums in one launch. Offsets must be multiples of 16."""
        return sums(data, offsets, nbytes)

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
        copy_units(src, src_units, dst, dst_units, layers, unit_tokens, heads)
