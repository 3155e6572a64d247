"""The host arena: one block of memory, in slots, that device copies and disk I/O go through."""

from __future__ import annotations

import logging
import mmap
import resource
from typing import TYPE_CHECKING, Any

from kvcore.errors import CapacityError, TierUnavailable
from kvcore.layout import Arrangement, BlockShape, KVLayout, arena_layout

if TYPE_CHECKING:
    import torch

_log = logging.getLogger("kvcore.tiers.host")

PAGE = 4096
HUGE_PAGE = 2 << 20
_PINNED_SUCCESS = 0


def slot_bytes(shape: BlockShape) -> int:
    """Bytes of an arena slot: the block rounded up to whole pages, as direct I/O wants it."""
    return -(-shape.nbytes // PAGE) * PAGE


class HostArena:
    """``num_slots`` slots for blocks of ``shape``, allocated when first touched.

    The memory is anonymous, starts on a 2 MiB boundary, and asks for huge pages: direct disk I/O
    into 4 KiB pages runs at a third of the rate (the device takes few segments a request). With
    ``pin`` it is registered with CUDA; a limit on locked memory that forbids it is logged.
    """

    def __init__(
        self,
        shape: BlockShape,
        num_slots: int,
        *,
        arrangement: Arrangement | str = Arrangement.BLOCKWISE,
        huge_pages: bool = True,
        pin: bool = False,
    ) -> None:
        if num_slots < 1:
            raise CapacityError(
                f"host memory for {num_slots} blocks of {slot_bytes(shape)} bytes: "
                "raise host.capacity to hold at least one"
            )
        self.shape = shape
        self.num_slots = num_slots
        self.arrangement = Arrangement(arrangement)
        blockwise = self.arrangement is Arrangement.BLOCKWISE
        self.slot_nbytes = slot_bytes(shape) if blockwise else shape.nbytes
        self.nbytes = num_slots * self.slot_nbytes
        try:
            self._map = mmap.mmap(-1, self.nbytes + HUGE_PAGE)
        except (OSError, OverflowError, ValueError) as error:
            raise TierUnavailable(
                f"cannot reserve {self.nbytes} bytes of host memory ({error}): lower host.capacity"
            ) from error
        self.huge_pages = huge_pages and self._advise_huge()
        self._view, self._start = self._aligned()
        self.pinned = pin and self._pin()

    def layout(self) -> KVLayout:
        """Strides of the arena, for copies."""
        distance = self.slot_nbytes if self.arrangement is Arrangement.BLOCKWISE else None
        return arena_layout(self.shape, self.num_slots, self.arrangement, distance)

    def tensor(self) -> torch.Tensor:
        """The whole arena as a flat tensor of the blocks' dtype, sharing the memory."""
        import torch

        return torch.frombuffer(self._view, dtype=torch.uint8).view(
            getattr(torch, self.shape.dtype)
        )

    def slot_buffers(self, slot: int) -> list[memoryview]:
        """The bytes of a slot in canonical order: one piece, or one a layer when layerwise."""
        if not 0 <= slot < self.num_slots:
            raise CapacityError(f"slot {slot} of an arena of {self.num_slots}")
        if self.arrangement is Arrangement.BLOCKWISE:
            start = slot * self.slot_nbytes
            return [self._view[start : start + self.slot_nbytes]]
        layer = self.shape.layer_nbytes
        starts = [(i * self.num_slots + slot) * layer for i in range(self.shape.layers)]
        return [self._view[start : start + layer] for start in starts]

    def close(self) -> None:
        """Give the memory back. Views and tensors of it keep it alive until they are gone."""
        if self.pinned:
            import torch

            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            runtime.cudaHostUnregister(self._start)
            self.pinned = False
        try:
            self._view.release()
            self._map.close()
        except BufferError:
            _log.debug("arena memory is still in use; it is freed with its last view")

    def _advise_huge(self) -> bool:
        try:
            self._map.madvise(mmap.MADV_HUGEPAGE)
        except (OSError, AttributeError) as error:
            _log.warning(
                "huge pages are not to be had (%s): disk reads into host memory are slower; "
                "set /sys/kernel/mm/transparent_hugepage/enabled to madvise or always",
                error,
            )
            return False
        return True

    def _aligned(self) -> tuple[memoryview, int]:
        import ctypes

        whole = memoryview(self._map)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        skip = -address % HUGE_PAGE
        return whole[skip : skip + self.nbytes], address + skip

    def _pin(self) -> bool:
        import torch

        if not torch.cuda.is_available():
            return False
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        code = int(runtime.cudaHostRegister(self._start, self.nbytes, 0))
        if code != _PINNED_SUCCESS:
            soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
            _log.warning(
                "host memory is not pinned (CUDA error %d, locked-memory limit %s bytes): copies "
                "to the GPU are slower; raise the limit (ulimit -l) or lower host.capacity",
                code,
                "unlimited" if soft == resource.RLIM_INFINITY else soft,
            )
        return code == _PINNED_SUCCESS
