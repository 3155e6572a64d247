"""The bounded queue between the leader, which must not wait, and the publisher.

    leader's thread    note ──▶ [record, record, ..] ──▶ take    publisher's thread, or the one that
                         │ full: the queue is emptied,           ships to its process
                         │ and refilled with everything
                         └─────▶ that is published now

So the publisher always catches up with what it takes. The leader pays for a look at the whole index
(about 20 ms for a million blocks) at most once in as many blocks as the queue holds.

`Feed.note` takes no lock: one thread appends to the queue and writes ``_noted``, another takes from
the queue and writes ``_taken``. Whatever touches both ends is done under the lock, on the leader's
thread, while the other thread does not take.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvcore.events.record import blocks_of, head_of, unpack_event
from kvcore.index.values import Event

__all__ = [
    "BlockTokens",
    "Content",
    "CountBlocks",
    "Feed",
    "Item",
    "Lost",
    "Queued",
    "count_nothing",
]

Content = dict[str, tuple[bytes, bytes]]
"""Packed keys and packed parent keys of every tier's blocks, as `Admin.published` gives."""

CountBlocks = Callable[[str, int], object]
"""Counts blocks by the outcome of their events, as `Metrics.told` does."""


_JOIN = b"".join


class Lost(NamedTuple):
    """Events of this many blocks were dropped; the tiers hold ``content`` after them."""

    blocks: int
    content: Content


class BlockTokens(NamedTuple):
    """The packed tokens of blocks whose events have been queued, or will be."""

    keys: tuple[bytes, ...]
    tokens: bytes


Item = Event | BlockTokens | Lost
Queued = bytes | BlockTokens | Lost
"""A queued item; events wait as records (`kvcore.events.record`)."""


def count_nothing(_outcome: str, _blocks: int) -> None:
    """Count nothing: the default `CountBlocks`."""


class Feed:
    """A queue of block events: one thread notes, another takes. Neither waits for the other."""

    def __init__(
        self,
        limit: int,
        content: Callable[[], Content],
        *,
        token_ids: bool = False,
        count: CountBlocks = count_nothing,
    ) -> None:
        """Make an empty queue for ``limit`` blocks.

        ``content`` returns what the index publishes now; it is called on the thread that notes.
        With ``token_ids`` the queue passes on tokens from `publish_tokens`. ``count`` counts what
        is dropped.
        """
        self.content = content
        self.wants_tokens = token_ids
        """Whether `publish_tokens` has any effect."""
        self._count = count
        self._limit = self._room = limit
        self._heads: dict[tuple[bool, str], bytes] = {}
        self._items: deque[Queued] = deque()
        self._noted = self._taken = 0  # blocks, ever; see the module for who writes which
        self._lock = threading.Lock()
        self._renewing = self._closed = False

    # -- leader's thread ------------------------------------------------------------------------

    def note(self, event: Event) -> None:
        """Queue an event. Does no I/O and never waits."""
        stored, tier, keys, parent = event
        noted = self._noted + len(keys)
        if noted - self._taken > self._room or (stored, tier) not in self._heads:
            self._add_event(event)
            return
        self._noted = noted
        self._items.append(_JOIN((self._heads[stored, tier], parent, *keys)))

    def publish_tokens(self, keys: Sequence[bytes], tokens: bytes) -> None:
        """Queue the packed tokens of blocks that will be stored. Never waits."""
        if self.wants_tokens and keys:
            self._add(BlockTokens(tuple(keys), tokens), len(keys))

    def tick(self) -> None:
        """Do what `renew` asked for, if nothing was noted since. Call it now and then."""
        if self._renewing:
            self._begin_anew()

    # -- the thread that takes ------------------------------------------------------------------

    def take(self, most: int | None = None) -> list[Queued]:
        """Return what is queued, in order: everything, or ``most`` blocks and a few more."""
        taken: list[Queued] = []
        count = 0
        with self._lock:
            while self._items and (most is None or count < most):
                taken.append(self._items.popleft())
                count += _blocks(taken[-1])
            self._taken += count
        return taken

    def items(self, most: int | None = None) -> list[Item]:
        """Return what `take` returns, with events in the form in which they were noted."""
        queued = self.take(most)
        return [unpack_event(item) if isinstance(item, bytes) else item for item in queued]

    def renew(self) -> None:
        """Have the leader queue everything that is published, with its next `note` or `tick`.

        For a consumer that lost all it took. What is queued then is dropped.
        """
        with self._lock:
            self._renewing = True
            self._room = -1

    @property
    def renewed(self) -> bool:
        """Return True if the leader has carried out `renew`; the first item is then a `Lost`."""
        return not self._renewing

    def close(self) -> None:
        """Drop what is queued, and what is noted from now on."""
        with self._lock:
            dropped = self._noted - self._taken
            self._taken += dropped
            self._closed = True
            self._room = -1
            self._items.clear()
        if dropped:
            self._count("dropped", dropped)

    # -- inside ---------------------------------------------------------------------------------

    def _add_event(self, event: Event) -> None:
        stored, tier, keys, parent = event
        head = self._heads[stored, tier] = head_of(stored, tier)
        self._add(_JOIN((head, parent, *keys)), len(keys))

    def _add(self, item: bytes | BlockTokens, count: int) -> None:
        if self._noted + count - self._taken <= self._room:
            self._noted += count
            self._items.append(item)
        elif self._closed:
            late, self._taken = self._noted - self._taken, self._noted  # noted while it was closed
            self._count("dropped", count + late)
        else:
            self._begin_anew(item)  # it is in the content, or is sent twice: both are harmless

    def _begin_anew(self, *items: bytes | BlockTokens) -> None:
        content = self.content()
        with self._lock:
            if self._closed:
                return
            dropped = self._noted - self._taken
            self._noted += sum(map(_blocks, items))
            if not self._items and not self._renewing:  # somebody took it all meanwhile
                self._items.extend(items)
                return
            earlier = sum(item.blocks for item in self._items if isinstance(item, Lost))
            self._items.clear()
            self._items.extend([Lost(earlier + dropped, content), *items])
            self._taken += dropped
            self._room = self._limit
            self._renewing = False
        if dropped:
            self._count("dropped", dropped)


def _blocks(item: Queued) -> int:
    if isinstance(item, bytes):
        return blocks_of(item)
    return len(item.keys) if isinstance(item, BlockTokens) else 0
