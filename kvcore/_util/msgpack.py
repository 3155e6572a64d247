"""What an adapter's leader and its ranks tell each other, read from msgpack: one way for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

from kvcore.errors import FormatError

__all__ = ["decoder"]

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
