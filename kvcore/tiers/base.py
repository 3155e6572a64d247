"""The contract of a tier below the host arena: numbered slots for blocks.

The leader decides which slot holds which block; a tier, in each worker, moves the bytes. The key
travels with every read, so that a tier can tell that what it reads is what was asked for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvcore.errors import CapacityError, TierError
from kvcore.memory.buffers import Buffers

if TYPE_CHECKING:
    from kvcore.memory.device_region import DeviceRegion


class BlockWrite(NamedTuple):
    """Write ``buffers`` to ``slot`` as the block ``key``. The buffers are only read."""

    slot: int
    key: bytes
    parent: bytes
    namespace: bytes
    buffers: Buffers


class BlockRead(NamedTuple):
    """Read ``slot`` into ``buffers``; what is there must be the block ``key``. ``nodes`` have been
    promised to hold it (`kvcore.tiers.remote.base.Item`)."""

    slot: int
    key: bytes
    buffers: Buffers
    nodes: tuple[str, ...] = ()


class DeviceRead(NamedTuple):
    """Read ``slot`` into slot ``place`` of the region on the device; what is there must be the
    block ``key``."""

    slot: int
    key: bytes
    place: int


class NotDirect(TierError):
    """This block does not go straight to the device: read it into host memory."""


class BlockRecord(NamedTuple):
    """What a tier knows of a slot after a restart. A later ``stamp`` was written later."""

    slot: int
    key: bytes
    parent: bytes
    namespace: bytes
    stamp: int


class SlotError(TierError, CapacityError):
    """No such slot, or a block of another size than its slots are for."""


class Tier(ABC):
    """Thread-safe: several ops may be in flight, on different slots.

    A slot is not read while it is written, nor written twice at once: the leader sees to that. A
    batch names a slot once. What a failed write leaves in a slot must not be readable as the new
    block, nor as a mix of two. One bad request does not fail the others of its batch.

    A remote store (`kvcore.tiers.remote`) finds blocks by key and takes no note of slots: what was
    written under one is read from any, until the store drops it.

    `kvcore.testing.tier_contract` tests all of this, for a third party's tier as for ours.
    """

    slot_nbytes: int
    """Bytes of a slot: a block, rounded up where the medium wants it."""

    def attach(self, memory: memoryview) -> None:  # noqa: B027 - few media care
        """Buffers will lie in ``memory``, the host arena, which outlives the tier. Called once, or
        never, before the first operation."""

    def attach_device(self, region: DeviceRegion) -> str:
        """`read_device` will be asked for blocks in ``region``, which outlives the tier. Called
        once, or never, before it. Returns by what, or nothing where this tier reads none so."""
        return ""

    def read_device(self, requests: Sequence[DeviceRead]) -> list[TierError | None]:
        """`read` into the region, past host memory: None for each block whose bytes *there* were
        verified. NotDirect for those that are to be read the other way, whatever the reason.
        Blocks until all have ended, also those that failed: nothing writes to the region then."""
        return [NotDirect("this tier reads into host memory")] * len(requests)

    @abstractmethod
    def write(self, requests: Sequence[BlockWrite]) -> list[TierError | None]:
        """Write blocks; None for each that is stored. Blocks until all have ended."""

    @abstractmethod
    def read(self, requests: Sequence[BlockRead]) -> list[TierError | None]:
        """Read blocks; None for each that is whole and the one asked for. Blocks until all have
        ended. The buffers of a failed read hold anything. CorruptBlock: the slot holds no block,
        or another one, or one that is not whole; SlotError: there is no such slot, or the buffers
        are not of a block's size; TierUnavailable: the medium failed; BlockMissing, of a store
        alone: it holds no such block."""

    @abstractmethod
    def invalidate(self, slots: Iterable[int]) -> None:
        """Make slots unreadable, now and after a restart. Slots that hold nothing are let be.
        Raises TierUnavailable when that cannot be made so."""

    @abstractmethod
    def scan(self) -> list[BlockRecord]:
        """The blocks that can be read, in any order. Reads no payload."""

    def sync(self) -> None:  # noqa: B027 - a medium may have nothing to flush
        """Block until what was written survives a loss of power, where that can be promised."""

    def close(self) -> None:  # noqa: B027 - a medium may hold nothing
        """Flush and give everything back. Nothing may be in flight. Idempotent."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Read and verify every block; raises CorruptBlock naming the first that is not whole."""
