"""The contract of a store: values under names, on whatever machine, shared by all that use it.

A store knows nothing of blocks. What a value must look like, and that it is what was asked for, is
the business of `kvcore.tiers.remote.tier`; who is believed to hold what, of the leader's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from kvcore.errors import TierError
from kvcore.memory.buffers import Buffers


class Item(NamedTuple):
    """A value: the bytes of ``parts``, one after the other. Parts are read by a put, filled by a
    get, and belong to the caller again as soon as the call returns. ``nodes`` are where a get may
    look first, as `BlockStore.node` told their engines."""

    name: str
    parts: Buffers
    nodes: tuple[str, ...] = ()


class BlockStore(ABC):
    """Thread-safe. Names are ASCII: letters, digits, ``/ . _ -``, 200 characters at most.

    A name stands for its content: a put of a name that has a value may replace it, whole, or let it
    be. Who reads while it is written gets the old one, the new one or none. A store may drop any
    value at any time. Opening one needs no server to be up:
    calls fail until it is, and work when it is back.

    Every call gives up by itself after the store's own timeout, and touches no memory of the caller
    once it has returned: the bytes of a late answer would land in another block. One bad item does
    not fail the others.

    `kvcore.testing.store_contract` tests all of this, for a third party's store as for ours.
    """

    def attach(self, memory: memoryview) -> None:  # noqa: B027 - most clients copy
        """Most parts will lie in ``memory``, which outlives the store: for those that read and
        write without copying. Called before anything else, or never."""

    @abstractmethod
    def put(self, items: Sequence[Item]) -> list[TierError | None]:
        """Store values; None for each that is there. TierUnavailable: the store is down, or full.
        Blocks until all have ended."""

    @abstractmethod
    def get(self, items: Sequence[Item]) -> list[TierError | None]:
        """Fill each item's parts; None where the value is exactly as long as they are.

        BlockMissing: there is no such value; CorruptBlock: it is longer or shorter;
        TierUnavailable: the store did not answer. The parts of a failed item hold anything. Blocks
        until all have ended."""

    @abstractmethod
    def exists(self, names: Sequence[str]) -> list[bool]:
        """Which values there are now. Moves no payload. Blocks; raises TierUnavailable."""

    @property
    def has_nodes(self) -> bool:
        """Whether values lie at nodes, in the memory of each one's ranks: a leader keeps none, and
        a node that is away says nothing of the others. Such a store leaves alone by itself what
        does not answer."""
        return False

    @property
    def folders(self) -> Collection[str]:
        """Of a store of nodes: in which folders the names lie that its nodes hold, as far as they
        have said so with their answers. No I/O."""
        return ()

    def exists_at(self, node: str, names: Sequence[str]) -> list[bool]:
        """As `exists`, of values that another engine has promised, at what `node` told it. A store
        with one place for all knows no better than to look there."""
        return self.exists(names)

    def node(self, ranks: int) -> str:
        """Where others find what this engine's ``ranks`` put; "" where all look in one place."""
        return ""

    @abstractmethod
    def delete(self, names: Sequence[str]) -> None:
        """Remove values; those that are not there are let be. Blocks; raises TierUnavailable."""

    def close(self) -> None:  # noqa: B027 - a client may hold nothing
        """Give connections back. Nothing may be in flight. Idempotent."""


def fill(item: Item, value: memoryview) -> bool:
    """Copy ``value`` into the parts of ``item``; False, and nothing is copied, if it does not
    fit them exactly."""
    if sum(part.nbytes for part in item.parts) != value.nbytes:
        return False
    start = 0
    for part in item.parts:
        copy_bytes(value[start : start + part.nbytes], part)
        start += part.nbytes
    return True


def copy_bytes(source: memoryview, target: memoryview) -> None:
    """Copy memory of one size; other threads of the process run meanwhile if there is much of
    it."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
