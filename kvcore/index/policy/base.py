"""The interface of eviction policies.

The index keeps each tier prefix-closed, so only *leaves* (blocks without a child in that tier) may
be evicted, and of those only published ones without a pin. The index passes these to the policy,
which chooses among them. Pinned and inner blocks are not passed, so they cost the policy nothing.

    published ──stored──▶ known ──add──▶ evictable ──victim──▶ leaving ──forget──▶ gone
                            ▲               │
                            └────remove─────┘  (got a child, or a pin)

Only the deepest block of a used prefix is touched. Its ancestors inherit the use when their last
child leaves: `forget` passes a block's history on to its parent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush, heapreplace
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from kvcore.errors import ConfigError

__all__ = ["EvictionPolicy", "LeafHeap", "Recency", "fit"]

NODE_BITS = 28
MAX_NODES = 1 << NODE_BITS
_NODE_MASK = MAX_NODES - 1


def fit(node: int, *columns: array[int] | bytearray) -> None:
    """Extend columns indexed by node id with zeros until they have an entry for ``node``."""
    for column in columns:
        if node >= len(column):
            itemsize = 1 if isinstance(column, bytearray) else column.itemsize
            missing = bytes((node + 1024 - len(column)) * itemsize)
            if isinstance(column, bytearray):
                column.extend(missing)
            else:
                column.frombytes(missing)


class Recency:
    """Logical time of last use by node id, shared by all policies of an index."""

    __slots__ = ("now", "stamps")

    def __init__(self) -> None:
        self.now = 0
        self.stamps = array("q")

    def stamp(self, node: int) -> int:
        """Return the time of last use; 0 means never."""
        return self.stamps[node]

    def touch(self, node: int) -> None:
        """Make this node the most recently used."""
        self.now += 1
        self.stamps[node] = self.now

    def inherit(self, parent: int, child: int) -> None:
        """Give a parent its child's time of last use, if that is later."""
        if self.stamps[parent] < self.stamps[child]:
            self.stamps[parent] = self.stamps[child]

    def restore(self, nodes: npt.NDArray[np.int64]) -> None:
        """Mark nodes as used now, one after the other; later ones are more recent."""
        stamps = np.frombuffer(self.stamps, dtype=np.int64)
        stamps[nodes] = self.now + 1 + np.arange(len(nodes))
        self.now += len(nodes)

    def grow(self, count: int) -> None:
        """Append ``count`` nodes that were never used."""
        self.stamps.frombytes(bytes(count * self.stamps.itemsize))


class LeafHeap:
    """A set of nodes ordered by score; O(log n) to add and pop, O(1) to discard.

    The caller keeps the scores. Entries are lazy: the entry of a discarded node stays until it
    surfaces or `_compact` runs, and a node whose score *rose* is reinserted when its old entry
    surfaces. A caller that *lowers* a score calls `lowered`. There are at most 2 * len + 64 entries
    at a push.
    """

    __slots__ = ("_entries", "_flags", "_live", "_score")

    _LIVE, _QUEUED = 1, 2

    def __init__(self, score: Callable[[int], int]) -> None:
        self._score = score
        self._entries: list[int] = []
        self._flags = bytearray()
        self._live = 0

    def __len__(self) -> int:
        return self._live

    def __contains__(self, node: int) -> bool:
        return node < len(self._flags) and bool(self._flags[node] & self._LIVE)

    def add(self, node: int) -> None:
        """Add a node that is not in the set."""
        if node >= len(self._flags):
            self._flags.extend(bytes(node + 1024 - len(self._flags)))
        flags = self._flags[node]
        assert not flags & self._LIVE, f"node {node} is in already"
        self._flags[node] = self._LIVE | self._QUEUED
        self._live += 1
        if not flags & self._QUEUED:
            self._push(node)

    def discard(self, node: int) -> None:
        """Remove a node; does nothing if it is not in the set."""
        if node in self:
            self._flags[node] &= ~self._LIVE
            self._live -= 1

    def lowered(self, node: int) -> None:
        """Announce that a node's score fell, or that its id now means another block."""
        if node < len(self._flags) and self._flags[node]:
            if self._flags[node] & self._LIVE:
                self._push(node)
            else:
                self._flags[node] = 0

    def pop(self) -> int | None:
        """Remove and return the node of least score; None if the set is empty."""
        entries, flags = self._entries, self._flags
        while self._live:
            entry = entries[0]
            node = entry & _NODE_MASK
            if not flags[node] & self._LIVE:
                flags[node] = 0
                heappop(entries)
                continue
            current = self._score(node) << NODE_BITS | node
            if current > entry:
                heapreplace(entries, current)
                continue
            heappop(entries)
            flags[node] = 0
            self._live -= 1
            return node
        return None

    def nodes(self) -> Iterable[int]:
        """Return the nodes in the set, in no order. O(largest node id)."""
        return (node for node, flags in enumerate(self._flags) if flags & self._LIVE)

    def _push(self, node: int) -> None:
        heappush(self._entries, self._score(node) << NODE_BITS | node)
        if len(self._entries) > 2 * self._live + 64:
            self._compact()

    def _compact(self) -> None:
        flags, live = self._flags, []
        for node in {entry & _NODE_MASK for entry in self._entries}:
            if flags[node] & self._LIVE:
                live.append(self._score(node) << NODE_BITS | node)
            else:
                flags[node] = 0
        heapify(live)
        self._entries = live


class EvictionPolicy(ABC):
    """Orders the evictable blocks of one tier. Leader thread only; no I/O; O(log n) per call.

    Blocks are identified by node id, a small integer that is reused after `forget`. ``capacity`` is
    the tier's size in blocks; ghosts and targets are sized by it.
    """

    name: ClassVar[str]

    watches_blocks: ClassVar[bool] = False
    """True if `stored` is called for every block, False if only for the last of a stored run."""

    def __init__(self, capacity: int, recency: Recency) -> None:
        self.capacity = capacity
        self.recency = recency

    def stored(self, node: int, key: bytes) -> None:  # noqa: B027 - most policies need nothing here
        """Handle a published block. Its recency is already set."""

    def touch(self, node: int) -> None:  # noqa: B027 - recency alone is enough for LRU
        """Handle another use of a block, evictable or not. Its recency is already set."""

    def set_priority(self, node: int, priority: int, ttl: float | None = None) -> None:
        """Give a stored block a priority for ``ttl`` seconds (None: until it leaves)."""
        raise ConfigError(
            f"eviction policy {self.name!r} knows no priorities: "
            "set the policy of the tier to 'priority'"
        )

    def order(self, node: int) -> int:
        """Return the order of an evictable block among those of *one tenant* at its quota.

        The block of least order is evicted first. By default this is its recency. Changes nothing.
        """
        return self.recency.stamps[node]

    @abstractmethod
    def add(self, node: int) -> None:
        """Handle a block that became evictable."""

    @abstractmethod
    def remove(self, node: int) -> None:
        """Handle a block that is no longer evictable: it has a child or a pin, or is dropped."""

    @abstractmethod
    def victim(self) -> int | None:
        """Remove and return the block to evict next; None if none is evictable."""

    @abstractmethod
    def forget(self, node: int, key: bytes, parent: int, *, evicted: bool) -> None:
        """Handle a block that left the tier; it is not evictable, and its id may be reused.

        ``parent`` (-1: none) inherits its history, before the parent itself may become evictable.
        ``evicted`` is False if the block was dropped instead of chosen.
        """

    @abstractmethod
    def evictable(self) -> Iterable[int]:
        """Return the evictable blocks in no order. For checks: may be O(index)."""
