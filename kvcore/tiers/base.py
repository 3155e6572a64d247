"""The contract of a tier below the host arena: numbered slots for blocks.

The leader decides which slot holds which block. A tier, in each worker, moves the bytes. Every read
carries the block's key, so that the tier can check that it reads the block that was asked for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvcore.errors import CapacityError, TierError
from kvcore.memory.buffers import Buffers

if TYPE_CHECKING:
    from kvcore.memory.device_region import DeviceRegion


class BlockWrite(NamedTuple):
    """A request to write ``buffers``, which are only read, to ``slot`` as the block ``key``."""

    slot: int
    key: bytes
    parent: bytes
    namespace: bytes
    buffers: Buffers


class BlockRead(NamedTuple):
    """A request to read ``slot``, which must hold the block ``key``, into ``buffers``.

    ``nodes`` announced that they hold the block (`kvcore.tiers.remote.base.Item`). ``parent`` and
    ``namespace`` are those that the stored block must name; empty if they are not known.
    """

    slot: int
    key: bytes
    buffers: Buffers
    nodes: tuple[str, ...] = ()
    parent: bytes = b""
    namespace: bytes = b""


class DeviceRead(NamedTuple):
    """A request to read ``slot``, which must hold the block ``key``, into device memory.

    ``place`` is the slot of the region on the device. ``parent`` and ``namespace`` are as in
    `BlockRead`.
    """

    slot: int
    key: bytes
    place: int
    parent: bytes = b""
    namespace: bytes = b""


class NotDirect(TierError):
    """The block cannot be read straight into device memory. Read it into host memory."""


class BlockRecord(NamedTuple):
    """What a tier knows of a slot after a restart. A greater ``stamp`` was written later."""

    slot: int
    key: bytes
    parent: bytes
    namespace: bytes
    stamp: int


class StoredBlock(Protocol):
    """What a record or header says about the block that it describes."""

    @property
    def key(self) -> bytes: ...
    @property
    def parent(self) -> bytes: ...
    @property
    def namespace(self) -> bytes: ...


def is_asked_for(stored: StoredBlock, asked: BlockRead | DeviceRead) -> bool:
    """Return True if a record or header names the block that a request asks for."""
    return (
        stored.key == asked.key
        and asked.parent in (b"", stored.parent)
        and asked.namespace in (b"", stored.namespace)
    )


class SlotError(TierError, CapacityError):
    """The tier has no such slot, or its slots are for blocks of another size."""


class Tier(ABC):
    """Storage below the host arena. Thread-safe: several ops may be in flight, on different slots.

    The leader makes sure that no slot is read while it is written, or written twice at once. A
    batch names a slot only once. After a failed write, a slot must not be readable as the new
    block, or as a mix of two blocks. One bad request does not fail the others of its batch.

    A remote store (`kvcore.tiers.remote`) finds blocks by key and ignores slots: a block that was
    written under one slot can be read under any, until the store evicts it.

    `kvcore.testing.tier_contract` tests all of this, for third-party tiers too.
    """

    slot_nbytes: int
    """Bytes of a slot: a block, rounded up if the medium requires it."""

    def attach(self, memory: memoryview) -> None:  # noqa: B027 - few media care
        """Prepare for buffers in ``memory``, the host arena, which outlives the tier.

        Called at most once, before the first operation.
        """

    def attach_device(self, region: DeviceRegion) -> str:
        """Prepare for `read_device` into ``region``, which outlives the tier.

        Called at most once, before the first `read_device`. Returns the name of the means that will
        be used, or an empty string if this tier cannot read into device memory.
        """
        return ""

    def read_device(self, requests: Sequence[DeviceRead]) -> list[TierError | None]:
        """Read blocks into the region, past host memory.

        Returns None for each block whose bytes *in the region* were verified, and NotDirect for
        each that must be read into host memory instead, whatever the reason. Blocks until all have
        ended, including those that failed: after that nothing writes to the region.
        """
        return [NotDirect("this tier reads into host memory")] * len(requests)

    @abstractmethod
    def write(self, requests: Sequence[BlockWrite]) -> list[TierError | None]:
        """Write blocks. Return None for each that is stored. Blocks until all have ended."""

    @abstractmethod
    def read(self, requests: Sequence[BlockRead]) -> list[TierError | None]:
        """Read blocks. Return None for each that is whole and the one that was asked for.

        Blocks until all have ended. The content of the buffers of a failed read is undefined. The
        errors are:

        - CorruptBlock: the slot holds no block, another one, or one that is not whole. Its
          ``mismatch`` says which.
        - SlotError: there is no such slot, or the buffers do not have a block's size.
        - TierUnavailable: the medium failed.
        - BlockMissing (remote stores only): the store holds no such block.
        """

    @abstractmethod
    def invalidate(self, slots: Iterable[int]) -> None:
        """Make slots unreadable, now and after a restart. Empty slots are ignored.

        Raises TierUnavailable if the medium fails.
        """

    @abstractmethod
    def scan(self) -> list[BlockRecord]:
        """Return the blocks that can be read, in any order. Reads no payload."""

    def sync(self) -> None:  # noqa: B027 - a medium may have nothing to flush
        """Block until all writes survive a loss of power, if the medium can promise that."""

    def close(self) -> None:  # noqa: B027 - a medium may hold nothing
        """Flush, and release all resources. Nothing may be in flight. Idempotent."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Read and verify every block. Raise CorruptBlock, naming the first that is not whole."""
