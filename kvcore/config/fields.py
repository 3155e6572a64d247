"""Building blocks of the settings schema: sizes, paths, names, and the base model."""

from __future__ import annotations

import os
import re
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

from kvcore.errors import ConfigError
from kvcore.masking import mask_login

__all__ = [
    "DEFAULT",
    "FolderPath",
    "Name",
    "Options",
    "SchemaModel",
    "Seconds",
    "Size",
    "Source",
    "expand_user",
    "forgotten_unit",
    "format_size",
    "is_socket",
    "parse_size",
]

_UNITS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SIZE = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?)\s*(?P<unit>[a-z]*)")
_SIZE_HELP = 'a size such as "8GiB", "512MiB", "10GB", or a whole number of bytes'
_SHORT = 1 << 10
"""Bytes that nobody means: the unit was forgotten."""


def parse_size(value: str | int) -> int:
    """Return the bytes of a size: a whole number, or text with a unit (KiB = 1024 B, KB = 1000 B).

    A fraction of a byte is rounded down. Raises ConfigError for anything else.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return _not_negative(value, value)
    if not isinstance(value, str):
        raise ConfigError(f"given {value!r}; supported is {_SIZE_HELP}")
    found = _SIZE.fullmatch(value.strip().lower())
    unit = found["unit"] or "b" if found else ""
    if found is None or unit not in _UNITS:
        hint = ""
        letter = unit.removesuffix("i").upper()
        if found and letter and f"{letter.lower()}ib" in _UNITS:
            number = found["number"]
            hint = f"; write {number}{letter}iB (of 1024)"
            hint += "" if unit.endswith("i") else f" or {letter}B (of 1000)"
        raise ConfigError(f"given {value!r}; supported is {_SIZE_HELP}{hint}")
    return int(Fraction(found["number"]) * _UNITS[unit])


def forgotten_unit(nbytes: int) -> str:
    """Return a hint for a size that is too small, if its unit was forgotten; else nothing."""
    if isinstance(nbytes, bool) or not 0 < nbytes < _SHORT:
        return ""
    return f'; a number without a unit is bytes: write "{nbytes}GiB" if you mean that'


def _not_negative(nbytes: int, given: object) -> int:
    if nbytes < 0:
        raise ConfigError(f"given {given!r}; supported is {_SIZE_HELP}, not negative")
    return nbytes


def format_size(nbytes: int, *, exact: bool = True) -> str:
    """Format ``nbytes`` in the largest binary unit that fits.

    With ``exact``, ``parse_size`` returns ``nbytes`` again (1000 is "1000B"). Otherwise two
    decimals are kept, for reading (1000 is "0.98KiB").
    """
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        scale = _UNITS[unit.lower()]
        if exact and nbytes and nbytes % scale == 0:
            return f"{nbytes // scale}{unit}"
        if not exact and nbytes * 2 > scale:
            return f"{nbytes / scale:.2f}".rstrip("0").rstrip(".") + unit
    return f"{nbytes}B"


def _path(value: object) -> object:
    """Expand ``~`` and return a Path, because strict mode would refuse text."""
    if not isinstance(value, str):
        return value
    if not value or "\0" in value:
        raise ConfigError(f"given {value!r}; supported is the path of a folder")
    if (scheme := re.match(r"([a-zA-Z][a-zA-Z0-9+.-]*)://", value)) is not None:
        path = value[scheme.end() :]
        is_local = scheme[1].lower() == "file" and path.startswith("/")
        raise ConfigError(
            f"given {mask_login(value)!r}; supported is a path, and no URL: write "
            f"{path if is_local else '/mnt/kv'!r} if you mean that folder"
        )
    if re.match(r"\$|%[A-Za-z_]+%", value):
        raise ConfigError(
            f"given {value!r}; variables are not expanded in it: write the whole path, or ~ for "
            "the home of the user"
        )
    return expand_user(value)


def expand_user(path: str | os.PathLike[str]) -> Path:
    """Return ``path`` with ``~`` expanded; ConfigError if there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"given {str(path)!r}: {error}; write the whole path") from error


def is_socket(value: str) -> bool:
    """Return True if ``value`` is the ZeroMQ address of a local socket that has a path.

    Abstract sockets ("ipc://@NAME") have no path, and so neither owner nor mode: any user may
    connect to one, or listen at it first.
    """
    return re.fullmatch(r"ipc://[^@*\0][^\0]*", value) is not None


Size = Annotated[int, BeforeValidator(parse_size)]
"""A field in bytes that accepts "8GiB"."""

FolderPath = Annotated[Path, BeforeValidator(_path), PlainSerializer(str)]
Name = Annotated[str, Field(min_length=1)]
Options = dict[str, Any]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Source(NamedTuple):
    """Where a value came from.

    ``kind`` is one of default, file, environment, overrides, in rising precedence. ``detail`` is
    the file's path, the variable's name, or the name that the caller of ``load_config`` gave its
    dict.
    """

    kind: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.detail}".rstrip()


DEFAULT = Source("default")


class SchemaModel(BaseModel):
    """A table of settings: strict, frozen, without unknown keys."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, validate_default=True)
