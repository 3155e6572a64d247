"""Traces of requests in the format that Mooncake publishes: JSON lines.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, ...]}

``timestamp`` is in milliseconds from the start and never decreases. Lengths are in tokens.
``hash_ids`` has a number for each block of the prompt, of which the last may be partial. Equal
numbers from the front mean equal text. The answer has no numbers, so it is never reused.
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
"""Most characters of a line."""


class TraceRequest(NamedTuple):
    """A request at ``at`` seconds. ``keys`` are those of the prompt's whole blocks."""

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
    """Read the requests of a trace lazily, at most ``limit``.

    Raises FormatError, with the line, for invalid content, and ConfigError if the file is missing.
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
                    decoded = decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                    raise FormatError(f"{where}: not a valid request: {error}") from error
                _check(decoded, before, block_tokens, where)
                before, count = decoded.timestamp, count + 1
                whole = decoded.hash_ids[: decoded.input_length // block_tokens]
                yield TraceRequest(
                    decoded.timestamp / 1e3,
                    decoded.input_length,
                    decoded.output_length,
                    _keys(whole),
                )
    except OSError as error:
        raise ConfigError(f"cannot read the trace: {error}; give a file of JSON lines") from error


def _check(read: _Line, before: float, block_tokens: int, where: str) -> None:
    if read.input_length < 1 or read.output_length < 0:
        raise FormatError(
            f"{where}: input_length {read.input_length}, output_length {read.output_length}; the "
            "first must be above 0, the second not negative"
        )
    if not before <= read.timestamp < 1e15:
        raise FormatError(
            f"{where}: timestamp {read.timestamp} after {before}; sort the trace by timestamp, in "
            "milliseconds"
        )
    blocks = -(-read.input_length // block_tokens)
    if not read.input_length // block_tokens <= len(read.hash_ids) <= blocks:
        raise FormatError(
            f"{where}: {len(read.hash_ids)} hash_ids for {read.input_length} tokens; with blocks "
            f"of {block_tokens} there must be {blocks}; give the block size of the trace"
        )


def _keys(ids: list[int]) -> list[bytes]:
    """Derive a key for each block from it and all blocks before, as a valid chain."""
    keys, key = [], b""
    for number in ids:
        key = hashlib.blake2b(b"%b%d" % (key, number), digest_size=KEY_BYTES).digest()
        keys.append(key)
    return keys
