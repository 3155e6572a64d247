"""Decoding of msgpack messages into values, or FormatError."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

from kvcore.errors import FormatError

__all__ = ["MAX_MESSAGE", "decoder"]

MAX_MESSAGE = 16 << 20
"""Largest message between processes, in bytes; ZeroMQ disconnects a sender that exceeds it."""

_T = TypeVar("_T")


def decoder(kind: type[_T], what: str) -> Callable[[bytes], _T]:
    """Return a function that decodes messages of ``kind``, a `msgspec.Struct`.

    The function raises FormatError, which names ``what``, for messages that are truncated, of
    another version, or nested too deeply for the interpreter.
    """
    decode = msgspec.msgpack.Decoder(kind).decode

    def read(data: bytes) -> _T:
        try:
            return decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise FormatError(f"not {what} of this version of kvcore: {error}") from error

    return read
