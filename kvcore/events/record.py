"""An event as one run of bytes, in which form it waits to be published.

    stored, 1 byte | length of the tier's name, 1 byte | name | parent key | keys

Bytes spare the leader's thread work: the garbage collector ignores them, and keys that have left
the index are freed at once, by the thread that has them in its cache.
"""

from __future__ import annotations

from kvcore.index.values import Event
from kvcore.model.keys import KEY_BYTES

__all__ = ["blocks_of", "head_of", "unpack_event"]


def head_of(stored: bool, tier: str) -> bytes:
    """Return the first bytes of an event's record; its parent key and its keys follow."""
    name = tier.encode()
    return bytes((stored, len(name))) + name


def blocks_of(record: bytes) -> int:
    """Return how many keys a record has, without its parent key."""
    return (len(record) - 2 - record[1]) // KEY_BYTES - 1


def unpack_event(record: bytes) -> Event:
    """Return the event of a record. Raises ValueError if the record is malformed."""
    stored, start = record[0], 2 + record[1]
    if stored > 1 or len(record) < start + KEY_BYTES or (len(record) - start) % KEY_BYTES:
        raise ValueError(f"a record of {len(record)} bytes is not an event")
    parent, *keys = [record[at : at + KEY_BYTES] for at in range(start, len(record), KEY_BYTES)]
    return Event(bool(stored), record[2:start].decode(), tuple(keys), parent)
