"""An event as one run of bytes, which is what waits to be told.

    stored, 1 byte | length of the tier's name, 1 byte | name | parent key | keys

Bytes because of what they spare the leader's thread: they are no work for the garbage collector,
and keys that have left the index are freed at once, by the thread that has them in its cache.
"""

from __future__ import annotations

from kvcore.index.values import Event
from kvcore.model.keys import KEY_BYTES

__all__ = ["blocks_of", "head_of", "unpack_event"]


def head_of(stored: bool, tier: str) -> bytes:
    """What the record of an event begins with; its parent key and its keys follow."""
    name = tier.encode()
    return bytes((stored, len(name))) + name


def blocks_of(record: bytes) -> int:
    """How many keys it has, its parent apart."""
    return (len(record) - 2 - record[1]) // KEY_BYTES - 1


def unpack_event(record: bytes) -> Event:
    """The event that it is. Raises ValueError where it is none."""
    stored, start = record[0], 2 + record[1]
    if stored > 1 or len(record) < start + KEY_BYTES or (len(record) - start) % KEY_BYTES:
        raise ValueError(f"a record of {len(record)} bytes is no event")
    parent, *keys = [record[at : at + KEY_BYTES] for at in range(start, len(record), KEY_BYTES)]
    return Event(bool(stored), record[2:start].decode(), tuple(keys), parent)
