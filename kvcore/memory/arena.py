"""The host arena: one allocation, cut into slots, for device copies and disk I/O."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from kvcore._util.cpus import node_cores, running_on
from kvcore._util.threads import GuardedThread, nobody_waits
from kvcore.errors import CapacityError, UnsupportedError
from kvcore.memory.device import Device
from kvcore.memory.hugepages import PAGE, Pages
from kvcore.memory.layout import Arrangement, KVLayout, arena_layout
from kvcore.memory.pinned import PinnedRange
from kvcore.model.shape import BlockShape

if TYPE_CHECKING:
    import torch

_log = logging.getLogger("kvcore.memory.arena")

PINNED = "host memory is pinned, %d bytes in %d pieces after %.1f s"
PREFAULTED = "host memory is there, all %d bytes after %.1f s"

CALM_S = 1.0
"""Seconds after the last use of memory before pre-faulting continues, unless only a quarter of the
pre-faulted memory is left: page faults beside a forward pass cost its request more time than they
save the next request."""


END_S = 30.0
"""Seconds that `HostArena.close` waits for pre-faulting."""


def slot_bytes(shape: BlockShape) -> int:
    """Return the bytes of an arena slot: the block rounded up to pages, for direct I/O."""
    return -(-shape.nbytes // PAGE) * PAGE


def arena_bytes(shape: BlockShape, num_slots: int, arrangement: Arrangement | str) -> int:
    """Return the bytes of an arena of ``num_slots`` slots."""
    blockwise = Arrangement(arrangement) is Arrangement.BLOCKWISE
    return num_slots * (slot_bytes(shape) if blockwise else shape.nbytes)


class HostArena:
    """``num_slots`` slots for blocks of ``shape``, allocated at first touch or pre-faulted.

    With ``huge_pages`` it requests huge pages (see `Pages`). The attribute ``huge_pages`` tells
    whether they are available. With ``pin`` it is pinned for that device (`pin`) before anything
    can be copied. With ``prefault`` a thread asks the kernel for that many bytes beyond the slots
    used so far (`reach`), either while none is being used or once only a quarter of those bytes is
    left. ``pages`` is memory of exactly the arena's size to use instead of its own. Raises
    TierUnavailable if the system does not provide the memory.
    """

    def __init__(
        self,
        shape: BlockShape,
        num_slots: int,
        *,
        arrangement: Arrangement | str = Arrangement.BLOCKWISE,
        huge_pages: bool = True,
        pin: Device | None = None,
        prefault: int = 0,
        pages: Pages | None = None,
    ) -> None:
        if num_slots < 1:
            raise CapacityError(
                f"given host memory for {num_slots} blocks of {slot_bytes(shape)} bytes: "
                "raise host.capacity to hold at least one"
            )
        self.shape = shape
        self.num_slots = num_slots
        self.arrangement = Arrangement(arrangement)
        self.nbytes = arena_bytes(shape, num_slots, arrangement)
        self.slot_nbytes = self.nbytes // num_slots
        self._pages = pages or Pages(self.nbytes, huge=huge_pages)
        self.huge_pages = self._pages.huge
        self._view = self._pages.view
        self._pinned: PinnedRange | None = None
        if pin is not None:
            self.pin(pin)
        self._ahead = -(-prefault // self.slot_nbytes)
        self._reached = 0  # slots before this one were used; later ones may be, too
        self._faulted = self.num_slots if self.pinned else 0
        self._closing, self._wake = threading.Event(), threading.Event()
        self._faulting: GuardedThread | None = None  # not at low priority: it holds mmap's lock
        if self._ahead and self._faulted < self.num_slots:
            self._faulting = GuardedThread("kvcore-prefault", self._prefault, nobody_waits)
            self._faulting.start()

    def layout(self) -> KVLayout:
        """Return the strides of the arena, for copies."""
        distance = self.slot_nbytes if self.arrangement is Arrangement.BLOCKWISE else None
        return arena_layout(self.shape, self.num_slots, self.arrangement, distance)

    def reach(self, slots: Sequence[int]) -> None:
        """Announce that these slots are about to be used. Does not block.

        The kernel is asked for the memory that follows them, because slots are allocated from the
        front. Slots far beyond the pre-faulted part are ignored.
        """
        if self._faulting is None or self._faulted >= self.num_slots:
            return
        near = self._faulted + self._ahead
        last = max(slots, default=-1)
        if last >= near:
            last = max((slot for slot in slots if slot < near), default=-1)
        if last >= self._reached:
            self._reached = last + 1
            self._wake.set()

    def tensor(self) -> torch.Tensor:
        """Return the whole arena as a flat tensor of the blocks' dtype that shares its memory."""
        import torch

        return torch.frombuffer(self._view, dtype=torch.uint8).view(
            getattr(torch, self.shape.dtype)
        )

    def slot_buffers(self, slot: int) -> list[memoryview]:
        """Return the bytes of a slot in canonical order: one piece, or one per layer."""
        if not 0 <= slot < self.num_slots:
            raise CapacityError(f"slot {slot} is out of range: the arena has {self.num_slots}")
        if self.arrangement is Arrangement.BLOCKWISE:
            start = slot * self.slot_nbytes
            return [self._view[start : start + self.slot_nbytes]]
        layer = self.shape.layer_nbytes
        starts = [(i * self.num_slots + slot) * layer for i in range(self.shape.layers)]
        return [self._view[start : start + layer] for start in starts]

    @property
    def memory(self) -> memoryview:
        """All slots as one piece."""
        return self._view

    @property
    def pinned(self) -> bool:
        """True if all of the memory is locked in place and the device reaches it."""
        return self._pinned is not None

    def pin(self, device: Device, wanted: Callable[[], bool] = lambda: True) -> bool:
        """Lock the memory in place and let the device reach it; return `pinned`. Blocks.

        It takes 2 to 6 GB a second, and first faults in what was not used before, on the device's
        NUMA node. Does nothing for a device that copies at once. If the device refuses, a warning
        is logged; if ``wanted`` returns False, it ends early. Nothing is pinned then.

        Nobody may copy meanwhile. Frameworks ask one address whether memory is pinned, and a copy
        of memory that is pinned in part fails.
        """
        if not device.queues or self.pinned:
            return self.pinned
        began, unit = time.monotonic(), self._unit
        try:
            with running_on(node_cores(device.numa_node())):
                self._pages.take(wanted)  # faster than the driver, and launches do not wait for it
                self._pinned = PinnedRange(
                    device, self._pages.address, self.nbytes, unit, wanted=wanted
                )
        except UnsupportedError as error:
            if wanted():
                self._warn_unpinned(error)
            return False
        seconds = time.monotonic() - began
        _log.info(PINNED, self.nbytes, self._pinned.chunks, seconds)
        return True

    def close(self) -> None:
        """Free the memory. Views and tensors of it keep it alive until they are gone.

        It is not freed if the kernel does not end a page fault within `END_S` seconds.
        """
        self._closing.set()
        self._wake.set()
        if self._faulting is not None and not self._faulting.join(END_S):
            return
        if self._pinned is not None:
            self._pinned.close()
            self._pinned = None
        self._pages.close()

    def _prefault(self) -> None:
        began = time.monotonic()
        while not self._closing.is_set():
            stop = min(self._reached + self._ahead, self.num_slots)
            for piece in self._pieces(self._faulted, stop):
                if not self._pages.prefault(*piece, lambda: not self._closing.is_set()):
                    return
            self._faulted = max(self._faulted, stop)
            if self._faulted >= self.num_slots:
                _log.info(PREFAULTED, self.nbytes, time.monotonic() - began)
                return
            self._await_calm()

    def _await_calm(self) -> None:
        """Block until memory is wanted, and none is being used or little is left ahead."""
        self._wake.wait()
        while not self._closing.is_set():
            self._wake.clear()
            scant = 4 * (self._faulted - self._reached) < self._ahead
            if scant or not self._wake.wait(CALM_S):
                return

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the byte ranges of slots [start, stop)."""
        if start >= stop:
            return
        if self.arrangement is Arrangement.BLOCKWISE:
            yield start * self.slot_nbytes, stop * self.slot_nbytes
            return
        layer = self.shape.layer_nbytes
        for first in range(0, self.shape.layers * self.num_slots, self.num_slots):
            yield (first + start) * layer, (first + stop) * layer

    @property
    def _unit(self) -> int:
        """Bytes that a copy moves at once at most: a slot, or one layer of it."""
        blockwise = self.arrangement is Arrangement.BLOCKWISE
        return self.slot_nbytes if blockwise else self.shape.layer_nbytes

    def _warn_unpinned(self, error: UnsupportedError) -> None:
        _log.warning(
            "host memory of %d bytes is not pinned (%s): copies to the GPU are slower; raise the "
            "memory limit of the container or lower host.capacity",
            self.nbytes,
            error,
        )
