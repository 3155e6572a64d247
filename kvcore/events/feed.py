"""The bounded queue between the leader, which must not wait, and who publishes.

    leader's thread    note ──▶ [event, event, ...] ──▶ take    publisher's thread, or the one that
                         │ full: the queue is emptied,          ships to its process
                         │ and in place of what was in it
                         └─────▶ [everything that is published now]

So the publisher always catches up by what it takes, and the leader pays for a look at the whole
index (about 20 ms for a million blocks) once in as many blocks as the queue holds.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvcore._tables import Event

__all__ = ["Content", "Feed", "Item", "Lost", "Spelled", "Told", "untold"]

Content = dict[str, tuple[bytes, bytes]]
"""Packed keys and packed parent keys of every tier's blocks, as `BlockIndex.published` gives."""

Told = Callable[[str, int], object]
"""Counts blocks by what became of their events, as `Metrics.told` does."""


class Lost(NamedTuple):
    """Events of this many blocks were dropped; the tiers hold ``content`` after them."""

    blocks: int
    content: Content


class Spelled(NamedTuple):
    """The packed tokens of blocks that are told, or will be."""

    keys: tuple[bytes, ...]
    tokens: bytes


Item = Event | Spelled | Lost


def untold(_outcome: str, _blocks: int) -> None:
    """A `Told` that counts nothing."""


class Feed:
    """One thread notes, another takes. Nothing blocks but a lock held for a few instructions."""

    def __init__(
        self,
        limit: int,
        content: Callable[[], Content],
        *,
        token_ids: bool = False,
        told: Told = untold,
    ) -> None:
        """``limit`` is in blocks; ``content`` gives what the index publishes now, and is called on
        the thread that notes. With ``token_ids`` what `spell` says is passed on. ``told`` counts
        what is dropped."""
        self.content = content
        self.tells_tokens = token_ids
        """Whether `spell` is of any use."""
        self._told = told
        self._limit = self._room = limit
        self._lock = threading.Lock()
        self._items: deque[Item] = deque()
        self._blocks = 0
        self._renewing = self._closed = False

    # -- leader's thread ------------------------------------------------------------------------

    def note(self, event: Event | Spelled) -> None:
        """Queue an event. Does no I/O and waits for nobody."""
        count = len(event.keys)
        with self._lock:
            if self._blocks + count <= self._room:
                self._blocks += count
                self._items.append(event)
                return
        self._overflow(event, count)

    def spell(self, keys: Sequence[bytes], tokens: bytes) -> None:
        """The packed tokens of blocks that will be told as stored. As `note` does, it waits for
        nobody."""
        if self.tells_tokens and keys:
            self.note(Spelled(tuple(keys), tokens))

    def tick(self) -> None:
        """Do what `renew` asked for, if nothing was noted since. To be called now and then."""
        if self._renewing:
            self._begin_anew([])

    # -- the thread that takes ------------------------------------------------------------------

    def take(self, most: int | None = None) -> list[Item]:
        """What is queued, in order: all of it, or until it is ``most`` blocks or a few more."""
        with self._lock:
            if most is None or self._blocks <= most:
                items, self._items = self._items, deque()
                self._blocks = 0
                return list(items)
            taken: list[Item] = []
            count = 0
            while count < most:
                taken.append(self._items.popleft())
                count += _blocks(taken[-1])
            self._blocks -= count
            return taken

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
            dropped, self._blocks = self._blocks, 0
            self._closed = True
            self._room = -1
            self._items.clear()
        if dropped:
            self._told("dropped", dropped)

    # -- inside ---------------------------------------------------------------------------------

    def _overflow(self, event: Event | Spelled, count: int) -> None:
        if self._closed:
            self._told("dropped", count)
        else:
            self._begin_anew([event])  # it is part of the content, or told twice: both are harmless

    def _begin_anew(self, events: Sequence[Event | Spelled]) -> None:
        content = self.content()
        with self._lock:
            if self._closed:
                return
            dropped = self._blocks
            if not self._items and not self._renewing:  # somebody took it all meanwhile
                self._items.extend(events)
                self._blocks = sum(map(_blocks, events))
                return
            earlier = sum(item.blocks for item in self._items if isinstance(item, Lost))
            self._items = deque([Lost(earlier + dropped, content), *events])
            self._blocks = 0
            self._room = self._limit
            self._renewing = False
        if dropped:
            self._told("dropped", dropped)


def _blocks(item: Item) -> int:
    return 0 if isinstance(item, Lost) else len(item.keys)
