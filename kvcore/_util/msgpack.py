"""Decoding of msgpack messages: a value, or FormatError."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

from kvcore.errors import FormatError

__all__ = ["MAX_MESSAGE", "decoder"]

MAX_MESSAGE = 16 << 20
"""Bytes of a message between processes; ZeroMQ drops the connection of who sends more."""

_T = TypeVar("_T")


def decoder(kind: type[_T], what: str) -> Callable[[bytes], _T]:
    """A function that decodes messages of ``kind``, a `msgspec.Struct`.

    It raises FormatError, which names ``what``, for all that is none: cut, of another version, or
    nested deeper than the interpreter goes.
    """
    decode = msgspec.msgpack.Decoder(kind).decode

    def read(data: bytes) -> _T:
        try:
            return decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise FormatError(f"not {what} of this version of kvcore: {error}") from error

    return read
