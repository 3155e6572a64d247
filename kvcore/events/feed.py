"""The bounded queue between the leader, which must not wait, and who publishes.

    leader's thread    note ──▶ [record, record, ..] ──▶ take    publisher's thread, or the one that
                         │ full: the queue is emptied,           ships to its process
                         │ and in place of what was in it
                         └─────▶ [everything that is published now]

So the publisher always catches up by what it takes, and the leader pays for a look at the whole
index (about 20 ms for a million blocks) once in as many blocks as the queue holds.

A note takes no lock: one thread adds to the queue and to ``_noted``, another takes from the one
and adds to ``_taken``. What touches both ends is done under the lock, on the leader's thread, while
the other does not take.
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
"""Counts blocks by what became of their events, as `Metrics.told` does."""


_JOIN = b"".join


class Lost(NamedTuple):
    """Events of this many blocks were dropped; the tiers hold ``content`` after them."""

    blocks: int
    content: Content


class BlockTokens(NamedTuple):
    """The packed tokens of blocks that are told, or will be."""

    keys: tuple[bytes, ...]
    tokens: bytes


Item = Event | BlockTokens | Lost
Queued = bytes | BlockTokens | Lost
"""An event waits as a record (`kvcore.events.record`)."""


def count_nothing(_outcome: str, _blocks: int) -> None:
    """A `CountBlocks` that counts nothing."""


class Feed:
    """One thread notes, another takes. Neither waits for the other."""

    def __init__(
        self,
        limit: int,
        content: Callable[[], Content],
        *,
        token_ids: bool = False,
        count: CountBlocks = count_nothing,
    ) -> None:
        """``limit`` is in blocks; ``content`` gives what the index publishes now, and is called on
        the thread that notes. With ``token_ids`` what `publish_tokens` says is passed on. ``count`` counts
        what is dropped."""
        self.content = content
        self.wants_tokens = token_ids
        """Whether `publish_tokens` is of any use."""
        self._count = count
        self._limit = self._room = limit
        self._heads: dict[tuple[bool, str], bytes] = {}
        self._items: deque[Queued] = deque()
        self._noted = self._taken = 0  # blocks, ever; see the module for who writes which
        self._lock = threading.Lock()
        self._renewing = self._closed = False

    # -- leader's thread ------------------------------------------------------------------------

    def note(self, event: Event) -> None:
        """Queue an event. Does no I/O and waits for nobody."""
        stored, tier, keys, parent = event
        noted = self._noted + len(keys)
        if noted - self._taken > self._room or (stored, tier) not in self._heads:
            self._add_event(event)
            return
        self._noted = noted
        self._items.append(_JOIN((self._heads[stored, tier], parent, *keys)))

    def publish_tokens(self, keys: Sequence[bytes], tokens: bytes) -> None:
        """The packed tokens of blocks that will be told as stored. As `note` does, it waits for
        nobody."""
        if self.wants_tokens and keys:
            self._add(BlockTokens(tuple(keys), tokens), len(keys))

    def tick(self) -> None:
        """Do what `renew` asked for, if nothing was noted since. To be called now and then."""
        if self._renewing:
            self._begin_anew()

    # -- the thread that takes ------------------------------------------------------------------

    def take(self, most: int | None = None) -> list[Queued]:
        """What is queued, in order: all of it, or until it is ``most`` blocks or a few more."""
        taken: list[Queued] = []
        count = 0
        with self._lock:
            while self._items and (most is None or count < most):
                taken.append(self._items.popleft())
                count += _blocks(taken[-1])
            self._taken += count
        return taken

    def items(self, most: int | None = None) -> list[Item]:
        """What `take` gives, with events as they were noted."""
        queued = self.take(most)
        return [unpack_event(item) if isinstance(item, bytes) else item for item in queued]

    def renew(self) -> None:
        """Whoever took knows nothing any more: have the leader queue everything that is published,
        with the next `note` or `tick`. What is queued then is dropped."""
        with self._lock:
            self._renewing = True
            self._room = -1

    @property
    def renewed(self) -> bool:
        """Whether the leader has done it: the first item to take is a `Lost`."""
        return not self._renewing

    def close(self) -> None:
        """Nobody takes any more: what is queued, or is noted from now on, is dropped."""
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
            self._begin_anew(item)  # it is part of the content, or told twice: both are harmless

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
