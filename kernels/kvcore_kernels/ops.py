"""kvcore's device operations in Triton."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from kvcore.memory.copy.base import DeviceOps, HeadRange, Units
from kvcore.memory.layout import KVView
from kvcore_kernels.copy.launch import copy_units
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
        """Return True if all memory is one GPU's or pinned, and some of it is the GPU's."""
        tensors = [*src.tensors, *dst.tensors]
        devices = {t.device for t in tensors if t.device.type == "cuda"}
        return len(devices) == 1 and all(_reachable(t) for t in tensors)

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


def _reachable(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cuda" or (tensor.device.type == "cpu" and tensor.is_pinned())
