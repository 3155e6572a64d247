"""The contract of a store: named values, on any machine, shared by everyone who uses the store.

A store knows nothing about blocks. `kvcore.tiers.remote.tier` frames the values and verifies them.
The leader tracks which blocks a store is believed to hold.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from kvcore.errors import CorruptBlock, Mismatch, TierError
from kvcore.memory.buffers import Buffers, nbytes_of


class Item(NamedTuple):
    """A value: the concatenated bytes of ``parts``.

    A put reads the parts, and a get fills them. They belong to the caller again as soon as the call
    returns. ``nodes`` are the nodes where a get should look first, as `BlockStore.node` returned
    them to their engines.
    """

    name: str
    parts: Buffers
    nodes: tuple[str, ...] = ()


class BlockStore(ABC):
    """A store of named values. Thread-safe.

    Names are ASCII letters, digits and ``/ . _ -``, at most 200 characters long.

    A name identifies its content. A put to a name that already has a value may replace the whole
    value or keep the old one. A reader sees the old value, the new value or none, never a mixture.
    A store may drop any value at any time. Opening a store does not need a running server: calls
    fail while the server is down, and work again when it is back.

    Every call returns within the store's own timeout. After it has returned, it must not touch the
    caller's memory: the bytes of a late answer would overwrite another block. A failed item does
    not fail the other items of its call.

    `kvcore.testing.store_contract` tests all of this, for third-party stores too.
    """

    def attach(self, memory: memoryview) -> None:  # noqa: B027 - most clients copy
        """Announce the memory that will hold most parts, for stores that transfer without copies.

        ``memory`` outlives the store. Called before any other method, or never.
        """

    @abstractmethod
    def put(self, items: Sequence[Item]) -> list[TierError | None]:
        """Store values. Returns None for each value that is in the store afterwards.

        TierUnavailable in the result means that the store is down or full. Blocks until every item
        has ended.
        """

    @abstractmethod
    def get(self, items: Sequence[Item]) -> list[TierError | None]:
        """Fill the parts of each item. Returns None for each value that has exactly their size.

        Errors in the result: BlockMissing if there is no such value, CorruptBlock if it is longer
        or shorter than the parts, TierUnavailable if the store did not answer. The parts of a
        failed item have undefined content. Blocks until every item has ended.
        """

    @abstractmethod
    def exists(self, names: Sequence[str]) -> list[bool]:
        """Return True for each value that the store holds now, without transferring any value.

        Blocks. Raises TierUnavailable.
        """

    @property
    def has_nodes(self) -> bool:
        """True if values lie in the memory of the ranks of several nodes.

        In such a store a leader holds no values, and a node that does not answer says nothing about
        the others. The store itself stops asking nodes that do not answer.
        """
        return False

    @property
    def folders(self) -> Collection[str]:
        """Folders of the names that the nodes hold, as reported in their answers so far. No I/O.

        Empty for a store without nodes.
        """
        return ()

    def exists_at(self, node: str, names: Sequence[str]) -> list[bool]:
        """Do what `exists` does for values that another engine promised to have at ``node``.

        ``node`` is what `node` returned to that engine. A store without nodes ignores it.
        """
        return self.exists(names)

    def node(self, ranks: int) -> str:
        """Return the node where others find what this engine's ranks put; "" without nodes."""
        return ""

    @abstractmethod
    def delete(self, names: Sequence[str]) -> None:
        """Delete values, and ignore names that have none. Blocks. Raises TierUnavailable."""

    def close(self) -> None:  # noqa: B027 - a client may hold nothing
        """Close all connections. No call may be in flight. Idempotent."""


def fill(item: Item, value: memoryview) -> bool:
    """Copy ``value`` into the parts of ``item``.

    Returns False, and copies nothing, if their sizes differ.
    """
    if sum(part.nbytes for part in item.parts) != value.nbytes:
        return False
    start = 0
    for part in item.parts:
        copy_bytes(value[start : start + part.nbytes], part)
        start += part.nbytes
    return True


def wrong_size(item: Item, nbytes: int) -> CorruptBlock:
    """Return the error for a value of ``nbytes`` that does not fit the parts of ``item``."""
    text = f"the value {item.name} has {nbytes} bytes, not {nbytes_of(item.parts)}"
    return CorruptBlock(text, Mismatch.TRUNCATED)


def copy_bytes(source: memoryview, target: memoryview) -> None:
    """Copy between two pieces of memory of the same size.

    Large copies release the GIL, so that other threads run meanwhile.
    """
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
