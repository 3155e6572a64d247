"""Orders of an operator, their answers, and the framing of every message to a server.

    frame 0   b"kvcore" and the protocol's version, 4 bytes little-endian
    frame 1   the message, in msgpack

A server and an engine with tiers of its own (`kvcore.control.endpoint`) take the same orders.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from kvcore._util.msgpack import MAX_MESSAGE
from kvcore.control.commands import Command
from kvcore.errors import FormatError

__all__ = [
    "HEADER",
    "PROTOCOL",
    "ControlReply",
    "ControlRequest",
    "NotACommand",
    "Ref",
    "Refused",
    "WrongProtocol",
    "decode_command",
    "decode_frames",
    "frames",
]

PROTOCOL = 2
_NAME = b"kvcore"
HEADER = _NAME + struct.pack("<I", PROTOCOL)

Ref = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_T = TypeVar("_T")


class ControlRequest(msgspec.Struct, frozen=True, array_like=True, tag="control"):
    """An operator's order, for the model whose fingerprint begins so: for the only one, if there
    is no more."""

    ref: Ref
    order: Command
    model: Annotated[bytes, Meta(max_length=64)] = b""


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """``kind`` is "busy" (ask again), "session" (over, or another's: say hello), "stale" (what was
    matched is no longer so), "capacity", "misfit" (this client never can), "malformed", or
    "control" (an order that cannot be carried out)."""

    ref: Ref
    kind: str
    message: str


class ControlReply(msgspec.Struct, frozen=True, array_like=True, tag="controlled"):
    """What came of an order, as plain data."""

    ref: Ref
    result: dict[str, Any]


class WrongProtocol(FormatError):
    """The other side speaks another version, or something else altogether."""


class NotACommand(FormatError):
    """A message that only a server takes. ``ref`` is the message's own."""

    def __init__(self, ref: int) -> None:
        super().__init__("an engine with tiers of its own takes orders of `kvcore ctl` only")
        self.ref = ref


_encode = msgspec.msgpack.Encoder().encode
_orders: msgspec.msgpack.Decoder[ControlRequest] = msgspec.msgpack.Decoder(ControlRequest)
_anything: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder()


def frames(message: msgspec.Struct) -> list[bytes]:
    """Return the frames of ``message``. Raises FormatError if it is longer than `MAX_MESSAGE`."""
    payload = _encode(message)
    if len(payload) > MAX_MESSAGE:
        raise FormatError(f"a message of {len(payload)} bytes; at most {MAX_MESSAGE} are allowed")
    return [HEADER, payload]


def decode_command(parts: Sequence[bytes]) -> ControlRequest:
    """Return the order in ``parts``.

    Raises WrongProtocol, NotAnOrder for a server's other requests, and FormatError for the rest.
    """
    try:
        return decode_frames(_orders, parts)
    except WrongProtocol:
        raise
    except FormatError:
        match decode_frames(_anything, parts):
            case [str() as tag, int() as ref, *_] if tag != "control" and 0 <= ref < 1 << 63:
                raise NotACommand(ref) from None
        raise


def decode_frames(decoder: msgspec.msgpack.Decoder[_T], parts: Sequence[bytes]) -> _T:
    """Decode the message in ``parts``. Raises WrongProtocol, or FormatError if it is malformed."""
    if len(parts) != 2:
        raise FormatError(f"a message of {len(parts)} frames; supported are 2")
    header, payload = parts
    if header != HEADER:
        raise WrongProtocol(_said(header))
    if len(payload) > MAX_MESSAGE:
        raise FormatError(f"a message of {len(payload)} bytes; at most {MAX_MESSAGE} are allowed")
    try:
        return decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"not a message of protocol {PROTOCOL}: {error}") from error


def _said(header: bytes) -> str:
    given = f"{len(header)} bytes that are no header"
    if len(header) == len(HEADER) and header.startswith(_NAME):
        given = f"protocol {struct.unpack('<I', header[len(_NAME) :])[0]}"
    return f"{given}; this side speaks protocol {PROTOCOL}: use one version of kvcore on both"
