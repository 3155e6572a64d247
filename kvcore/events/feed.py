"""The bounded queue between the leader, which must not wait, and the thread that publishes.

    leader's thread    note ──▶ [event, event, ...] ──▶ take    publisher's thread
                         │ full: the queue is emptied, and in place of what was in it
                         └─────▶ [everything that is published now]

So the publisher always catches up by what it takes, and the leader pays for a look at the whole
index (about 20 ms for a million blocks) once in as many blocks as the queue holds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

from kvcore.index import Event

__all__ = ["Content", "Feed", "Lost", "Spelled"]

Content = dict[str, tuple[bytes, bytes]]
"""Packed keys and packed parent keys of every tier's blocks, as `BlockIndex.published` gives."""


class Lost(NamedTuple):
    """Events of this many blocks were dropped; the tiers hold ``content`` after them."""

    blocks: int
    content: Content


class Spelled(NamedTuple):
    """The packed tokens of blocks that are told, or will be."""

    keys: tuple[bytes, ...]
    tokens: bytes


class Feed:
    """One thread notes, another takes. Nothing blocks but a lock held for a few instructions."""

    def __init__(self, limit: int, content: Callable[[], Content]) -> None:
        """``limit`` is in blocks; ``content`` is called on the thread that notes."""
        self._limit = limit
        self._content = content
        self._lock = threading.Lock()
        self._items: list[Event | Spelled | Lost] = []
        self._blocks = 0

    def note(self, event: Event | Spelled) -> int:
        """Queue an event; returns how many blocks' events had to be dropped for want of room."""
        count = len(event.keys)
        with self._lock:
            if self._blocks + count <= self._limit:
                self._blocks += count
                self._items.append(event)
                return 0
        content = self._content()  # the event is part of it, or told twice: both are harmless
        with self._lock:
            dropped = self._blocks
            earlier = sum(item.blocks for item in self._items if isinstance(item, Lost))
            self._items = [Lost(earlier + dropped, content), event]
            self._blocks = 0
        return dropped

    def take(self) -> list[Event | Spelled | Lost]:
        """All that is queued, in order."""
        with self._lock:
            items, self._items = self._items, []
            self._blocks = 0
        return items
