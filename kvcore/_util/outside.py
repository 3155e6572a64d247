"""Reads what others wrote, within bounds: requests of clients, files of models, files on disk.

    open_regular   a file that may be anybody's: never waits for a pipe, never reads a device
    read_bounded   the content of an open file, if it is not larger than a limit
    decode_json    JSON text as a value of a type
    converted      a decoded value as a value of a type

Whatever is wrong with the input is a FormatError: nesting without end, numbers out of range, text
that is no Unicode, sizes that no memory has. Its message is short and can be written everywhere.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any, TypeVar, overload

import msgspec

from kvcore.errors import FormatError

__all__ = ["converted", "decode_json", "open_regular", "printable", "read_bounded", "read_regular"]

T = TypeVar("T")

MAX_SHOWN = 200
"""Characters of an error's text that are repeated."""


def open_regular(path: str | os.PathLike[str]) -> int:
    """Open a regular file for reading, through symbolic links; return its descriptor.

    Never blocks on what the path leads to. Raises OSError: also for a pipe, a socket or a device.
    """
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))
    os.set_blocking(file, True)
    return file


def read_bounded(file: int, limit: int, name: object) -> bytes:
    """Return the content of an open regular file from its start. Blocks on disk reads.

    Raises FormatError, which names the file, if it has more than ``limit`` bytes. Its size is
    looked at first, so a sparse file costs nothing.
    """
    size = os.fstat(file).st_size
    parts, left = [], limit + 1
    while size <= limit and left and (part := os.pread(file, left, limit + 1 - left)):
        parts.append(part)
        left -= len(part)
    if size > limit or not left:  # it may have grown meanwhile
        raise FormatError(f"{name} has {max(size, limit + 1)} bytes; supported are {limit}")
    return b"".join(parts)


def read_regular(path: str | os.PathLike[str], limit: int) -> bytes:
    """Return the content of a regular file of at most ``limit`` bytes.

    Raises OSError if it cannot be read or is not a regular file, and FormatError if it is larger.
    """
    file = open_regular(path)
    try:
        return read_bounded(file, limit, Path(path).name)
    finally:
        os.close(file)


@overload
def decode_json(text: str | bytes, kind: type[T]) -> T: ...
@overload
def decode_json(text: str | bytes, kind: Any = Any) -> Any: ...
def decode_json(text: str | bytes, kind: Any = Any) -> Any:
    """Return JSON text as a value of ``kind``, a type that msgspec knows. Raises FormatError."""
    try:
        data = text.encode() if isinstance(text, str) else text
        return msgspec.json.decode(data, type=kind)
    except Exception as error:  # noqa: BLE001 - of any input, whatever the decoder makes of it
        raise FormatError(f"not the JSON that is expected: {printable(error)}") from None


@overload
def converted(value: object, kind: type[T]) -> T: ...
@overload
def converted(value: object, kind: Any) -> Any: ...
def converted(value: object, kind: Any) -> Any:
    """Return a decoded value as one of ``kind``, a type that msgspec knows. Raises FormatError.

    All its text is valid Unicode, so that it can be sent on.
    """
    try:
        found = msgspec.convert(value, kind)
        msgspec.json.encode(found)
        return found
    except Exception as error:  # noqa: BLE001 - of any input, whatever the decoder makes of it
        raise FormatError(printable(error)) from None


def printable(error: BaseException) -> str:
    """Return the text of an error that an input caused: short, on one line, and valid Unicode.

    The text of an error about nesting, memory or encoding tells about the decoder, not the input.
    """
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, UnicodeError):
        return "it is not valid Unicode"
    if isinstance(error, (MemoryError, OverflowError)):
        return "a number in it is too large"
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:MAX_SHOWN].encode("utf-8", "backslashreplace").decode()
