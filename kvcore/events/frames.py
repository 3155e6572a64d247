"""What passes between a leader and the process that publishes for it, over a socket.

    frame      head's length, 4 bytes | body's length, 8 bytes | head, msgpack | body
    leader     Plan of what is published, then batches without end: heads say how the body is cut
    process    Report, now and then, without a body

Keys go as they are in memory, one after another: a batch of 2,000 blocks is one `bytes.join`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import msgspec

from kvcore._tables import Event
from kvcore.block import KEY_BYTES
from kvcore.events.feed import Content, Item, Lost, Spelled
from kvcore.events.plan import Plan

__all__ = ["Buffer", "Frame", "Opening", "Report", "framed", "pack", "unpack"]

_LENGTHS = struct.Struct("<IQ")


class Opening(msgspec.Struct, frozen=True):
    """The first frame. ``parent`` is the leader's process, ``level`` that of the least log lines
    that are wanted."""

    plan: Plan
    parent: int
    level: int


class Report(msgspec.Struct, frozen=True):
    """``outlets``: how many buses could be had. ``told``: blocks so far, by what became of their
    events. ``lines``: levels, loggers and texts that were logged."""

    outlets: int
    told: dict[str, int]
    lines: list[tuple[int, str, str]]


class _Run(msgspec.Struct, frozen=True, tag="run", array_like=True):
    """An event: so many keys in the body."""

    stored: bool
    tier: str
    parent: bytes
    blocks: int


class _Text(msgspec.Struct, frozen=True, tag="text", array_like=True):
    """Keys and tokens of blocks."""

    blocks: int
    nbytes: int


class _Held(msgspec.Struct, frozen=True, tag="held", array_like=True):
    """Everything that is published: of each tier the keys, and as many parent keys."""

    lost: int
    tiers: list[tuple[str, int]]


_heads = msgspec.msgpack.Decoder(list[_Run | _Text | _Held])


class Frame(NamedTuple):
    head: bytes
    body: bytes


class Buffer:
    """Bytes as they come, and the frames in them."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def add(self, data: bytes) -> None:
        self._bytes += data

    def frames(self) -> list[Frame]:
        """Those that are whole, once."""
        found = []
        while len(self._bytes) >= _LENGTHS.size:
            head, body = _LENGTHS.unpack_from(self._bytes)
            end = _LENGTHS.size + head + body
            if len(self._bytes) < end:
                break
            with memoryview(self._bytes) as view:
                start = _LENGTHS.size
                found.append(
                    Frame(bytes(view[start : start + head]), bytes(view[start + head : end]))
                )
            del self._bytes[:end]
        return found


def framed(head: Any, body: Sequence[bytes] = ()) -> list[bytes]:
    """Bytes to send, in order; the body is not copied."""
    packed = msgspec.msgpack.encode(head)
    return [_LENGTHS.pack(len(packed), sum(map(len, body))) + packed, *body]


def pack(items: Iterable[Item]) -> list[bytes]:
    """Bytes to send for ``items``. Touches each key once: see the module."""
    heads: list[_Run | _Text | _Held] = []
    body: list[bytes] = []
    keys: list[Sequence[bytes]] = []
    for item in items:
        if isinstance(item, Event):
            heads.append(_Run(item.stored, item.tier, item.parent, len(item.keys)))
            keys.append(item.keys)
        elif isinstance(item, Spelled):
            heads.append(_Text(len(item.keys), len(item.tokens)))
            keys += item.keys, (item.tokens,)
        else:
            tiers = [(tier, len(held)) for tier, (held, _) in item.content.items()]
            heads.append(_Held(item.blocks, tiers))
            body += b"".join(chain.from_iterable(keys)), *chain.from_iterable(item.content.values())
            keys = []
    return framed(heads, [*body, b"".join(chain.from_iterable(keys))])


def unpack(frame: Frame) -> list[Item]:
    """The items that were packed. Raises msgspec.DecodeError for what is no batch."""
    items: list[Item] = []
    body, at = frame.body, 0

    def cut(nbytes: int) -> bytes:
        nonlocal at
        at += nbytes
        return body[at - nbytes : at]

    def keys(count: int) -> tuple[bytes, ...]:
        run = cut(count * KEY_BYTES)
        return tuple([run[i : i + KEY_BYTES] for i in range(0, len(run), KEY_BYTES)])

    for head in _heads.decode(frame.head):
        if isinstance(head, _Run):
            items.append(Event(head.stored, head.tier, keys(head.blocks), head.parent))
        elif isinstance(head, _Text):
            items.append(Spelled(keys(head.blocks), cut(head.nbytes)))
        else:
            content: Content = {tier: (cut(nbytes), cut(nbytes)) for tier, nbytes in head.tiers}
            items.append(Lost(head.lost, content))
    return items
