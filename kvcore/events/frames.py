"""The bytes between a leader and the process that publishes for it, over a socket.

    frame      head's length, 4 bytes | body's length, 8 bytes | head, msgpack | body
    leader     a frame with what is published, then batches; heads say how the body is divided
    process    Report, now and then, without a body

Events are sent as they waited (`kvcore.events.record`), one after another: a batch is one
`bytes.join`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import msgspec

from kvcore.events.feed import BlockTokens, Content, Item, Lost, Queued
from kvcore.events.plan import PublisherPlan
from kvcore.events.record import unpack_event
from kvcore.model.keys import KEY_BYTES

__all__ = ["Buffer", "Frame", "Opening", "Report", "framed", "pack", "unpack"]

_LENGTHS = struct.Struct("<IQ")


class Opening(msgspec.Struct, frozen=True):
    """The first frame.

    ``parent`` is the leader's process id, ``level`` the lowest level of log lines that it wants.
    """

    plan: PublisherPlan
    parent: int
    level: int


class Report(msgspec.Struct, frozen=True):
    """What the process reports to its leader.

    ``outlets`` is how many buses could be opened. ``told`` counts blocks so far by the outcome of
    their events. ``lines`` are levels, loggers and texts that were logged.
    """

    outlets: int
    told: dict[str, int]
    lines: list[tuple[int, str, str]]


class _EventsHead(msgspec.Struct, frozen=True, tag="records", array_like=True):
    """Events: the body holds records of these lengths."""

    nbytes: list[int]


class _TokensHead(msgspec.Struct, frozen=True, tag="text", array_like=True):
    """Keys and tokens of blocks."""

    blocks: int
    nbytes: int


class _ContentHead(msgspec.Struct, frozen=True, tag="held", array_like=True):
    """Everything that is published: for each tier its keys, and as many parent keys."""

    lost: int
    tiers: list[tuple[str, int]]


_heads = msgspec.msgpack.Decoder(list[_EventsHead | _TokensHead | _ContentHead])


class Frame(NamedTuple):
    head: bytes
    body: bytes


class Buffer:
    """Received bytes, and the frames in them."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def add(self, data: bytes) -> None:
        self._bytes += data

    def frames(self) -> list[Frame]:
        """Remove the complete frames from the buffer and return them."""
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
    """Return the bytes to send, in order. The body is not copied."""
    packed = msgspec.msgpack.encode(head)
    return [_LENGTHS.pack(len(packed), sum(map(len, body))) + packed, *body]


def pack(items: Iterable[Queued]) -> list[bytes]:
    """Return the bytes to send for ``items``. Looks at no key of an event."""
    heads: list[_EventsHead | _TokensHead | _ContentHead] = []
    body: list[bytes] = []
    run: list[bytes] = []
    lengths: list[int] | None = None  # of the events that came last
    for item in items:
        if isinstance(item, bytes):
            if lengths is None:
                lengths = []
                heads.append(_EventsHead(lengths))
            lengths.append(len(item))
            run.append(item)
            continue
        lengths = None
        if isinstance(item, BlockTokens):
            heads.append(_TokensHead(len(item.keys), len(item.tokens)))
            run += *item.keys, item.tokens
        else:
            tiers = [(tier, len(held)) for tier, (held, _) in item.content.items()]
            heads.append(_ContentHead(item.blocks, tiers))
            body += b"".join(run), *chain.from_iterable(item.content.values())
            run = []
    return framed(heads, [*body, b"".join(run)])


def unpack(frame: Frame) -> list[Item]:
    """Return the items in a frame.

    Raises msgspec.DecodeError or ValueError if the frame is not a batch.
    """
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
        if isinstance(head, _EventsHead):
            items += [unpack_event(cut(nbytes)) for nbytes in head.nbytes]
        elif isinstance(head, _TokensHead):
            items.append(BlockTokens(keys(head.blocks), cut(head.nbytes)))
        else:
            content: Content = {tier: (cut(nbytes), cut(nbytes)) for tier, nbytes in head.tiers}
            items.append(Lost(head.lost, content))
    return items
