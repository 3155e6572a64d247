"""Traces of requests in the format that Mooncake publishes: JSON lines.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, ...]}

Milliseconds from the start, not falling; tokens; and a number for each block of the prompt, the
last of which may be a part of one. Equal numbers from the front are equal text. Nothing of the
answer is named, so nothing of it is reused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvcore.errors import ConfigError, FormatError
from kvcore.model.keys import KEY_BYTES

__all__ = ["TraceRequest", "read_trace"]

MAX_LINE = 1 << 24
"""Characters; longer ones are no request."""


class TraceRequest(NamedTuple):
    """``at`` seconds from the start; ``keys`` of the prompt's whole blocks."""

    at: float
    tokens: int
    answer: int
    keys: list[bytes]


class _Line(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


def read_trace(
    path: Path, block_tokens: int = 512, limit: int | None = None
) -> Iterator[TraceRequest]:
    """The requests of a trace, at most ``limit``, read as they are asked for.

    Raises FormatError that names the line of anything else, ConfigError where there is no file.
    """
    decode = msgspec.json.Decoder(_Line).decode
    before, count = 0.0, 0
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(iter(lambda: lines.readline(MAX_LINE), b""), 1):
                if not line.strip():
                    continue
                if limit is not None and count >= limit:
                    return
                where = f"{path.name}, line {number}"
                try:
                    told = decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                    raise FormatError(f"{where}: not a request of a trace: {error}") from error
                _check(told, before, block_tokens, where)
                before, count = told.timestamp, count + 1
                whole = told.hash_ids[: told.input_length // block_tokens]
                yield TraceRequest(
                    told.timestamp / 1e3, told.input_length, told.output_length, _keys(whole)
                )
    except OSError as error:
        raise ConfigError(
            f"the trace cannot be read: {error}; give a file of JSON lines"
        ) from error


def _check(told: _Line, before: float, block_tokens: int, where: str) -> None:
    if told.input_length < 1 or told.output_length < 0:
        raise FormatError(
            f"{where}: {told.input_length} tokens asked and {told.output_length} answered; a "
            "request has at least one, and none below zero"
        )
    if not before <= told.timestamp < 1e15:
        raise FormatError(
            f"{where}: timestamp {told.timestamp} after {before}; requests come in order of time, "
            "in milliseconds: sort the trace"
        )
    blocks = -(-told.input_length // block_tokens)
    if not told.input_length // block_tokens <= len(told.hash_ids) <= blocks:
        raise FormatError(
            f"{where}: {len(told.hash_ids)} hash_ids for {told.input_length} tokens; with blocks "
            f"of {block_tokens} there are {blocks}: give the block size the trace was made with"
        )


def _keys(ids: list[int]) -> list[bytes]:
    """A key for each block and all before it, so that any numbers make sound chains."""
    keys, key = [], b""
    for number in ids:
        key = hashlib.blake2b(b"%b%d" % (key, number), digest_size=KEY_BYTES).digest()
        keys.append(key)
    return keys
