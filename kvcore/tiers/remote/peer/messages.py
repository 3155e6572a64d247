"""What nodes say to each other: msgpack, one message a frame, its version in a frame before.

    frame 0   b"kvpeer" and the protocol's version, 4 bytes little-endian
    frame 1   one of `Request` or of `Reply`

KV does not travel here: a reader is told where a value lies, reads it over NIXL, and says when it
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
"""Values in one message; who asks for more sends several."""

MAX_MESSAGE = 1 << 20
"""Bytes of a message; ZeroMQ drops the connection of who sends more."""

MAX_FOLDERS = 8
"""Folders told of what a node holds: one a model and part of its heads, so as a rule one."""

Name = Annotated[str, Meta(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9/._-]+$")]
Names = Annotated[list[Name], Meta(max_length=MAX_NAMES)]
Folders = Annotated[list[Name], Meta(max_length=MAX_FOLDERS)]
Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Text = Annotated[str, Meta(max_length=1000)]
Place = tuple[Number, Number]
"""Where a value begins in its owner's memory, and its bytes."""


class Find(msgspec.Struct, frozen=True, array_like=True, tag="find"):
    """Which of these are there?"""

    names: Names


class Lease(msgspec.Struct, frozen=True, array_like=True, tag="lease"):
    """Where do these lie? They are to stay there until `Done`, or for a while."""

    names: Names


class Done(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    """A lease has been used."""

    lease: Number


class Remove(msgspec.Struct, frozen=True, array_like=True, tag="remove"):
    """Forget these."""

    names: Names


class Meet(msgspec.Struct, frozen=True, array_like=True, tag="meet"):
    """What does NIXL need to read from the node's memory?"""


Request = Find | Lease | Done | Remove | Meet


class Found(msgspec.Struct, frozen=True, array_like=True, tag="found"):
    """The answer to `Find`: one byte for each name, 1 where it is there. ``folders`` are those of
    all that is held."""

    held: Annotated[bytes, Meta(max_length=MAX_NAMES)]
    folders: Folders = []


class Leased(msgspec.Struct, frozen=True, array_like=True, tag="leased"):
    """The answer to `Lease`: a place for each name, None where it is not there. They stay for
    ``seconds`` from when it was sent. ``agent`` is the owner's name in NIXL. ``folders`` as in
    `Found`."""

    lease: Number
    seconds: Annotated[float, Meta(gt=0)]
    agent: Text
    places: Annotated[list[Place | None], Meta(max_length=MAX_NAMES)]
    folders: Folders = []


class Ended(msgspec.Struct, frozen=True, array_like=True, tag="ended"):
    """The answer to `Done`: whether the lease was held until now. Where it was not, what was read
    may be another value's bytes."""

    held: bool


class Removed(msgspec.Struct, frozen=True, array_like=True, tag="removed"):
    """The answer to `Remove`. ``folders`` as in `Found`."""

    folders: Folders = []


class Met(msgspec.Struct, frozen=True, array_like=True, tag="met"):
    """The answer to `Meet`: NIXL's own description of the node, not looked into here."""

    agent: Text
    metadata: Annotated[bytes, Meta(max_length=MAX_MESSAGE // 2)]


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """Nothing was done, and why."""

    why: Text


Reply = Found | Leased | Ended | Removed | Met | Refused

_encode = msgspec.msgpack.Encoder().encode
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
_T = TypeVar("_T")


def frames(message: Request | Reply) -> list[bytes]:
    """The message as it is sent."""
    return [HEADER, _encode(message)]


def decode_request(parts: Sequence[bytes]) -> Request:
    """Raises FormatError for what is no request of this version."""
    return _decode(_requests, parts)


def decode_reply(parts: Sequence[bytes]) -> Reply:
    """Raises FormatError for what is no reply of this version."""
    return _decode(_replies, parts)


def folder_of(name: str) -> str:
    """A name without its last part: which model, block shape, heads and layers."""
    return name.rpartition("/")[0]


def _decode(decoder: msgspec.msgpack.Decoder[_T], parts: Sequence[bytes]) -> _T:
    if len(parts) != 2:
        raise FormatError(f"a message of {len(parts)} frames; supported are 2")
    header, payload = parts
    if header != HEADER:
        raise FormatError(f"{_said(header)}; this node speaks {PROTOCOL}: use one kvcore on all")
    try:
        return decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"not a message of protocol {PROTOCOL}: {error}") from error


def _said(header: bytes) -> str:
    if len(header) == len(HEADER) and header.startswith(_NAME):
        return f"protocol {struct.unpack('<I', header[len(_NAME) :])[0]}"
    return f"{len(header)} bytes that are no header"
