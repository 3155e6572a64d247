"""The contract of a tier below the host arena: numbered slots for blocks.

The leader decides which slot holds which block; a tier, in each worker, moves the bytes. The key
travels with every read, so that a tier can tell that what it reads is what was asked for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvcore.errors import TierError

Buffers = Sequence[memoryview]
"""The bytes of one block in order, in one piece or several (a layerwise arena)."""


class BlockWrite(NamedTuple):
    """Write ``buffers`` to ``slot`` as the block ``key``. The buffers are only read."""

    slot: int
    key: bytes
    parent: bytes
    namespace: bytes
    buffers: Buffers


class BlockRead(NamedTuple):
    """Read ``slot`` into ``buffers``; what is there must be the block ``key``."""

    slot: int
    key: bytes
    buffers: Buffers


class BlockRecord(NamedTuple):
    """What a tier knows of a slot after a restart. A later ``stamp`` was written later."""

    slot: int
    key: bytes
    parent: bytes
    namespace: bytes
    stamp: int


class Tier(ABC):
    """Thread-safe: several ops may be in flight, on different slots.

    A slot is written before it is read, and is not read while it is written: the leader sees to
    that. What a failed write leaves in a slot must not be readable as any block.
    """

    slot_nbytes: int
    """Bytes of a slot: a block, rounded up where the medium wants it."""

    @abstractmethod
    def write(self, requests: Sequence[BlockWrite]) -> list[TierError | None]:
        """Write blocks; None for each that is stored. Blocks until all have ended."""

    @abstractmethod
    def read(self, requests: Sequence[BlockRead]) -> list[TierError | None]:
        """Read blocks; None for each that is whole and the one asked for. Blocks until all have
        ended. The buffers of a failed read hold anything."""

    @abstractmethod
    def invalidate(self, slots: Iterable[int]) -> None:
        """Make slots unreadable."""

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


def nbytes_of(buffers: Buffers) -> int:
    return sum(part.nbytes for part in buffers)
