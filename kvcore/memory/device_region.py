"""Slots on the device for blocks that come from disk and bypass host memory.

    disk ──NIXL──▶ region ──sums──▶ verified there ──copy_blocks──▶ the engine's pages

On a GPU the region is device memory, which GPUDirect Storage writes to. For an engine on the CPU it
is host memory; everything else is the same.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvcore.errors import UnsupportedError
from kvcore.memory.arena import slot_bytes
from kvcore.memory.copy.base import DeviceOps
from kvcore.memory.device import device_of
from kvcore.memory.hugepages import PAGE, Pages
from kvcore.memory.layout import Arrangement, KVView, arena_layout
from kvcore.memory.nixl import Memory
from kvcore.model.shape import BlockShape

if TYPE_CHECKING:
    import torch

__all__ = ["DeviceRegion"]

_log = logging.getLogger("kvcore.memory.device_region")


class DeviceRegion:
    """``num_slots`` slots of ``slot_nbytes`` bytes for blocks of ``shape``, located at ``memory``.

    Different slots may be used from different threads. Raises UnsupportedError if the device has
    not enough memory.
    """

    def __init__(
        self, shape: BlockShape, num_slots: int, ops: DeviceOps, device: torch.device | None = None
    ) -> None:
        import torch

        self.shape = shape
        self.num_slots = num_slots
        self.slot_nbytes = slot_bytes(shape)
        self._ops = ops
        self._device = device_of(device)
        nbytes = num_slots * self.slot_nbytes
        self._pages: Pages | None = None
        if device is None or device.type == "cpu":
            self._pages = Pages(nbytes)
            self.memory = Memory.of(self._pages)
            self.tensor = torch.frombuffer(self._pages.view, dtype=torch.uint8)
            return
        try:
            whole = self._device.allocate(nbytes + PAGE)
        except torch.OutOfMemoryError as error:
            raise UnsupportedError(
                f"cannot allocate {nbytes} bytes on {device} for disk.device_staging ({error}): "
                "lower it, or give the engine less memory"
            ) from error
        skip = -whole.data_ptr() % PAGE
        self.tensor = whole[skip : skip + nbytes]
        self.memory = Memory(self.tensor.data_ptr(), nbytes, "VRAM", whole.device.index)
        ops.sums(self.tensor, [0], shape.nbytes)  # compiled now, not at the first read

    def view(self) -> KVView:
        """Return the slots as canonical blocks, for copies."""
        import torch

        layout = arena_layout(self.shape, self.num_slots, Arrangement.BLOCKWISE, self.slot_nbytes)
        return KVView(layout, [self.tensor.view(getattr(torch, self.shape.dtype))])

    def put(self, place: int, block: memoryview) -> None:
        """Copy a block from host memory into the slot ``place``, on the current stream.

        Blocks until the host memory may be used again.
        """
        source = np.frombuffer(block, dtype=np.uint8)
        ends = self.tensor.data_ptr() + place * self.slot_nbytes, source.ctypes.data, source.nbytes
        to, start, nbytes = (np.array([end], dtype=np.int64) for end in ends)
        self._device.copy_batch(to, start, nbytes, registered=False)

    def sums(self, places: Sequence[int]) -> list[int]:
        """Return the sums of the blocks in these slots, computed on the device.

        See `kvcore.memory.checksums`.
        """
        offsets = [place * self.slot_nbytes for place in places]
        return self._ops.sums(self.tensor, offsets, self.shape.nbytes)

    def close(self) -> None:
        """Free the memory. Views of it keep it alive until they are gone."""
        del self.tensor
        if self._pages is not None:
            self._pages.close()
