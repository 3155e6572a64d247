"""Lookups in a store that other hosts write to, as the leader sees them.

`kvcore.tiers.remote.lookup.StoreFinder` is the implementation.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

__all__ = ["MAX_OPEN", "PROMISE_POLL_S", "Ends", "Finder", "Promise", "StoreQuery"]

MAX_OPEN = 256
"""Most queries of a finder that are open at a time."""
PROMISE_POLL_S = 0.02
"""Seconds between two lookups of blocks that another engine has promised to store."""
_FIRST_WINDOW = 16
_MAX_WINDOW = 512


class Promise(NamedTuple):
    """Another engine's promise that it is storing the first ``blocks`` blocks of a prompt.

    If the model keeps resume points, it is storing the point behind them, too.

    It is worth waiting for up to ``wait_s`` seconds. Blocks not found by then are computed.
    ``node`` is where that engine keeps them (`BlockStore.node`), or "" if it did not name a node.
    """

    blocks: int
    wait_s: float
    node: str = ""

    def beyond(self, start: int) -> Promise | None:
        """Return the promise for the blocks from ``start`` on; None if it covers none of them."""
        return self._replace(blocks=self.blocks - start) if self.blocks > start else None


Ends = Callable[[int], Sequence[bytes]]
"""Returns the last rows of the resume points within so many keys of a prompt, longest first."""


class StoreQuery:
    """A query for how many of ``keys``, counted from the first, the store holds.

    ``found`` is the number known so far. ``ended`` says that it will not grow any more. ``failed``
    says that it ended because the store did not answer; ``error`` is the reason. Keys covered by a
    ``promise`` are looked up repeatedly until its ``wait_s`` is over. ``node_only`` marks a query
    to a single node, whose outcome says nothing about the store as a whole.

    A model with resume points is of use up to one of them only. ``ends`` then returns the last rows
    of the points within a number of keys, the longest first, and ``end`` is the first of these that
    the store holds; None if it holds none. A promise covers all ``keys`` then, which end in the
    rows of the promised point: that is the ``end`` once all of them are found.
    """

    __slots__ = (
        "_ends", "_left", "asked_at", "due_at", "end", "ended", "error", "failed", "found", "keys",
        "node", "node_only", "promised", "until", "window",
    )  # fmt: skip

    def __init__(
        self, keys: Sequence[bytes], promise: Promise | None = None, ends: Ends | None = None
    ) -> None:
        self.keys = tuple(keys)
        self._ends = ends
        self._left: Sequence[bytes] | None = None  # the ends to look for, once `found` is known
        self.end: bytes | None = None
        self.found = 0
        self.ended = False
        self.failed = False
        self.error = ""
        self.asked_at = time.monotonic()
        self.due_at = self.asked_at
        self.promised = 0 if promise is None else min(promise.blocks, len(self.keys))
        self.node = "" if promise is None else promise.node
        self.node_only = False
        self.until = self.asked_at + (0.0 if promise is None else promise.wait_s)
        self.window = _FIRST_WINDOW

    def due(self) -> tuple[bytes, ...]:
        """Return the keys of the next batch."""
        if self._left is not None:
            return tuple(self._left[: self.window])
        return self.keys[self.found : self.found + self.window]

    def take(self, held: Sequence[bool]) -> None:
        """Record which keys of the batch that was due the store holds."""
        if self._left is None:
            self._take_blocks([*held, False].index(False))
            if self.ended and self._ends is not None and 0 < self.promised <= self.found:
                self.end = self.keys[-1]
            elif self.ended and self._ends is not None:
                self._left, self.window = self._ends(self.found), _FIRST_WINDOW
                self.ended = not self._left
            return
        if True in held:
            self.end = self._left[held.index(True)]
        self._left = self._left[len(held) :]
        self.ended = self.end is not None or not self._left
        self.window = min(2 * self.window, _MAX_WINDOW)

    def _take_blocks(self, held: int) -> None:
        """Record that the store holds the first ``held`` keys of the batch that was due."""
        short, now = held < self.window, time.monotonic()
        self.found += held
        if short and self.found < self.promised and now < self.until:
            self.due_at = now + PROMISE_POLL_S
            return
        self.ended = short or self.found == len(self.keys)
        self.window = min(2 * self.window, _MAX_WINDOW)


class Finder(ABC):
    """Looks up and deletes blocks in a store that other hosts write to, in the background.

    Any thread may call. Only `wait` and `close` block.
    """

    lookup_s: float
    """Seconds for which the leader waits for an answer."""
    absent_s: float
    """Seconds for which the leader believes that a block is absent."""

    @abstractmethod
    def is_node_only(self, promise: Promise | None) -> bool:
        """Return True if a query with this promise would be `StoreQuery.node_only`. No I/O."""

    @abstractmethod
    def ask(
        self, keys: Sequence[bytes], promise: Promise | None = None, ends: Ends | None = None
    ) -> StoreQuery | None:
        """Start a `StoreQuery`. Returns None if it cannot be answered now.

        ``promise`` covers the first of these keys.
        """

    @abstractmethod
    def cancel(self, query: StoreQuery) -> None:
        """Cancel a query. What it has found so far stays valid."""

    @abstractmethod
    def held(self, keys: Sequence[bytes]) -> set[bytes]:
        """Return those of ``keys`` that the store holds completely. Blocks for a round trip.

        Raises TierError if the store does not answer. Not for the leader: it asks.
        """

    @abstractmethod
    def delete(self, keys: Sequence[bytes]) -> None:
        """Start deleting blocks from the store, for all its users.

        Until the blocks are deleted, lookups do not find them.
        """

    @abstractmethod
    def wait(self, timeout: float) -> bool:
        """Block until a query ends, at most ``timeout`` seconds.

        Returns False if no query is open or none ended in time.
        """

    @abstractmethod
    def close(self, timeout: float = 5.0) -> None:
        """Attempt the requested deletes, then stop. Blocks for at most ``timeout`` seconds."""
