"""Messages between nodes: a frame with the protocol's version, then one msgpack message.

    frame 0   b"kvpeer" and the protocol's version, 4 bytes little-endian
    frame 1   one of `Request` or of `Reply`

Messages carry no KV. A reader learns where a value lies, reads it over NIXL, and reports when it
has done so.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from kvcore.errors import FormatError

PROTOCOL = 1
_NAME = b"kvpeer"
HEADER = _NAME + struct.pack("<I", PROTOCOL)

MAX_NAMES = 1024
"""Most names in one message; a longer request is sent as several messages."""

MAX_REQUEST = 256 << 10
"""Largest request in bytes, all its frames together: `MAX_NAMES` of the longest names fit."""

MAX_MESSAGE = 1 << 20
"""Largest frame of an answer in bytes; ZeroMQ drops the connection of a node that sends more."""

MAX_FOLDERS = 8
"""Most folders that a node reports: one per model and part of its heads, so usually one."""

Name = Annotated[str, Meta(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9/._-]+$")]
Names = Annotated[list[Name], Meta(max_length=MAX_NAMES)]
Folders = Annotated[list[Name], Meta(max_length=MAX_FOLDERS)]
Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Text = Annotated[str, Meta(max_length=1000)]
Place = tuple[Number, Number]
"""The address of a value in its owner's memory, and its size in bytes."""


class Find(msgspec.Struct, frozen=True, array_like=True, tag="find"):
    """Ask which of these values the node holds."""

    names: Names


class Lease(msgspec.Struct, frozen=True, array_like=True, tag="lease"):
    """Ask where these values lie, and lease them: they stay there until `Done` or expiry."""

    names: Names


class Done(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    """End a lease that has been used."""

    lease: Number


class Remove(msgspec.Struct, frozen=True, array_like=True, tag="remove"):
    """Delete these values."""

    names: Names


class Meet(msgspec.Struct, frozen=True, array_like=True, tag="meet"):
    """Ask for the NIXL metadata that a reader of the node's memory needs."""


Request = Find | Lease | Done | Remove | Meet


class Found(msgspec.Struct, frozen=True, array_like=True, tag="found"):
    """The answer to `Find`: one byte per name, 1 if the node holds the value.

    ``folders`` are the folders of all values that the node holds.
    """

    held: Annotated[bytes, Meta(max_length=MAX_NAMES)]
    folders: Folders = []


class Leased(msgspec.Struct, frozen=True, array_like=True, tag="leased"):
    """The answer to `Lease`: a place per name, None if the node does not hold the value.

    The values stay in place for ``seconds`` after the answer was sent. ``agent`` is the name of the
    owner's NIXL agent. ``folders`` are as in `Found`.
    """

    lease: Number
    seconds: Annotated[float, Meta(gt=0)]
    agent: Text
    places: Annotated[list[Place | None], Meta(max_length=MAX_NAMES)]
    folders: Folders = []


class Ended(msgspec.Struct, frozen=True, array_like=True, tag="ended"):
    """The answer to `Done`: ``held`` is True if the lease was valid until now.

    If it was not, the bytes that were read may belong to another value.
    """

    held: bool


class Removed(msgspec.Struct, frozen=True, array_like=True, tag="removed"):
    """The answer to `Remove`. ``folders`` are as in `Found`."""

    folders: Folders = []


class Met(msgspec.Struct, frozen=True, array_like=True, tag="met"):
    """The answer to `Meet`: the node's NIXL agent and its metadata, which stay opaque here."""

    agent: Text
    metadata: Annotated[bytes, Meta(max_length=MAX_MESSAGE // 2)]


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """The answer to a request that was not executed, with the reason."""

    why: Text


Reply = Found | Leased | Ended | Removed | Met | Refused

_encode = msgspec.msgpack.Encoder().encode
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
_T = TypeVar("_T")


def frames(message: Request | Reply) -> list[bytes]:
    """Encode a message into the frames to send."""
    return [HEADER, _encode(message)]


def decode_request(parts: Sequence[bytes]) -> Request:
    """Decode a request. Raises FormatError if it is not a request of this version."""
    return _decode(_requests, parts)


def decode_reply(parts: Sequence[bytes]) -> Reply:
    """Decode a reply. Raises FormatError if it is not a reply of this version."""
    return _decode(_replies, parts)


def folder_of(name: str) -> str:
    """Return a name without its last part, which leaves model, shape, heads and layers."""
    return name.rpartition("/")[0]


def _decode(decoder: msgspec.msgpack.Decoder[_T], parts: Sequence[bytes]) -> _T:
    if len(parts) != 2:
        raise FormatError(f"given a message of {len(parts)} frames; supported are 2")
    header, payload = parts
    if header != HEADER:
        raise FormatError(
            f"given {_describe(header)}; this node supports {PROTOCOL}: use one version of kvcore "
            "on all nodes"
        )
    try:
        return decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"not a message of protocol {PROTOCOL}: {error}") from error


def _describe(header: bytes) -> str:
    if len(header) == len(HEADER) and header.startswith(_NAME):
        return f"protocol {struct.unpack('<I', header[len(_NAME) :])[0]}"
    return f"{len(header)} bytes that are not a header"
