"""Commands of an operator, their results, and the framing of every message to a server.

    frame 0   b"kvcore" and the protocol's version, 4 bytes little-endian
    frame 1   the message, in msgpack

A server and an engine with its own tiers (`kvcore.admin.endpoint`) take the same commands.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from kvcore._util.msgpack import MAX_MESSAGE
from kvcore.admin.commands import Command
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

PROTOCOL = 4
_NAME = b"kvcore"
HEADER = _NAME + struct.pack("<I", PROTOCOL)

Ref = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_T = TypeVar("_T")


class ControlRequest(msgspec.Struct, frozen=True, array_like=True, tag="control"):
    """An operator's command for one model.

    ``model`` is the beginning of its fingerprint; it may be empty if there is only one model.
    """

    ref: Ref
    order: Command
    model: Annotated[bytes, Meta(max_length=64)] = b""


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """A request was refused, because of ``kind``.

    busy       ask again later
    away       the server of another machine of this engine is not there: ask again later
    session    the session is over or belongs to another client: say hello
    stale      what was matched is no longer there
    capacity   there is no room
    misfit     this client can never be served with these settings
    malformed  the message could not be understood
    control    the command cannot be carried out
    internal   a bug; the server's log has the traceback

    A client itself refuses a welcome as "distrusted" if other users may have made what it names.
    """

    ref: Ref
    kind: str
    message: str


class ControlReply(msgspec.Struct, frozen=True, array_like=True, tag="controlled"):
    """The result of a command, as plain data."""

    ref: Ref
    result: dict[str, Any]


class WrongProtocol(FormatError):
    """The other side speaks another protocol version, or something else altogether."""


class NotACommand(FormatError):
    """A message that only a server takes; ``ref`` is the message's own."""

    def __init__(self, ref: int) -> None:
        super().__init__("an engine with its own tiers takes only the commands of `kvcore ctl`")
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
    """Return the command in ``parts``.

    Raises WrongProtocol, NotACommand for a server's other requests, and FormatError for anything
    else.
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
    given = f"{len(header)} bytes that are not a header"
    if len(header) == len(HEADER) and header.startswith(_NAME):
        given = f"protocol {struct.unpack('<I', header[len(_NAME) :])[0]}"
    return f"{given}; this side speaks protocol {PROTOCOL}: use one version of kvcore on both"
