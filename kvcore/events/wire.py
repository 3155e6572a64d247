"""The bytes of block events: those of vLLM 0.32's KV events, so that its consumers read them.

    message     topic | sequence number, 8 bytes, big-endian | payload
    payload     msgpack [seconds, [event, ...]] or [seconds, [event, ...], data-parallel rank]
    event       msgpack map with its class under "type"; fields with default values are left out
    request     sequence number, 8 bytes: every kept message from it on, then one numbered -1
    extension   "snapshot", 8 bytes: everything held, as messages that begin with AllBlocksCleared
                and all carry the number they are as of; then -1, with the number of messages. To a
                publisher without the extension this is a number far ahead: it answers -1 at once.

Hashes are kvcore's prefix keys. An event has the token ids of all its blocks, or of none if they
are not known. ``medium`` is vLLM's word for the kind of memory, ``ownership`` is the tier's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import msgspec
import numpy as np

from kvcore.errors import FormatError
from kvcore.index.values import Event
from kvcore.model.keys import ROOT_PARENT

__all__ = [
    "END",
    "NUMBER_BYTES",
    "SNAPSHOT",
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "Message",
    "WireEvent",
    "decode",
    "encode",
    "medium_of",
    "number",
    "number_bytes",
    "wire_events",
]

SNAPSHOT = b"snapshot"
NUMBER_BYTES = 8
END = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)

HOST = "host"
MEDIUM_CPU, MEDIUM_STORAGE = "CPU", "STORAGE"


class Message(NamedTuple):
    """A batch on its way. Its number is one more than that of the message before it."""

    number: int
    payload: bytes


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """A run of a chain is held.

    Each block follows the one before it, the first follows the parent.
    """

    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    ownership: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Blocks are no longer held."""

    block_hashes: list[bytes | int]
    medium: str | None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Nothing is held."""


WireEvent = BlockStored | BlockRemoved | AllBlocksCleared


class _Batch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Batch)


def number_bytes(value: int) -> bytes:
    return value.to_bytes(NUMBER_BYTES, "big", signed=True)


def number(data: bytes) -> int:
    """Return the sequence number in ``data``. Raises FormatError if it is none."""
    if len(data) != NUMBER_BYTES:
        raise FormatError(f"a sequence number has {NUMBER_BYTES} bytes, given {len(data)}")
    return int.from_bytes(data, "big", signed=True)


def encode(events: Sequence[WireEvent], seconds: float, rank: int | None = None) -> bytes:
    """Return the payload of a message; ``seconds`` are since the epoch."""
    return _encoder.encode(_Batch(seconds, list(events), rank))


def decode(payload: bytes) -> list[WireEvent]:
    """Return the events of a payload, without fields that a later version added.

    Raises FormatError if the payload is not a batch of KV events.
    """
    try:
        events: list[WireEvent] = _decoder.decode(payload).events
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"not a batch of KV events: {error}") from error
    return events


def medium_of(tier: str) -> str:
    """Return vLLM's word for the kind of memory that a tier is."""
    return MEDIUM_CPU if tier == HOST else MEDIUM_STORAGE


def wire_events(
    events: Iterable[Event],
    block_tokens: int,
    tokens_of: Callable[[bytes], bytes | None] | None = None,
) -> list[WireEvent]:
    """Return ``events`` in order; adjacent runs of a chain, and adjacent removals, are merged.

    ``tokens_of`` returns a block's packed tokens if they are known; without it no event has tokens.
    """
    made: list[WireEvent] = []
    for event, tokens in _with_tokens(events, tokens_of):
        last = made[-1] if made else None
        if last is not None and _continues(last, event, tokens):
            last.block_hashes.extend(event.keys)  # type: ignore[union-attr]
            if tokens:
                last.token_ids.extend(tokens)  # type: ignore[union-attr]
        else:
            made.append(_wire_event(event, tokens, block_tokens))
    return made


def _with_tokens(
    events: Iterable[Event], tokens_of: Callable[[bytes], bytes | None] | None
) -> Iterator[tuple[Event, list[int]]]:
    """Yield runs of blocks whose tokens are known, with their tokens, and runs of the others."""
    for event in events:
        if tokens_of is None or not event.stored:
            yield event, []
            continue
        texts = [tokens_of(key) for key in event.keys]
        start = 0
        for known, run in groupby(texts, lambda text: text is not None):
            found = list(run)
            stop = start + len(found)
            parent = event.keys[start - 1] if start else event.parent
            part = event._replace(keys=event.keys[start:stop], parent=parent)
            yield part, _unpacked(found) if known else []
            start = stop


def _unpacked(texts: Iterable[bytes | None]) -> list[int]:
    tokens: list[int] = np.frombuffer(b"".join(filter(None, texts)), dtype="<u4").tolist()
    return tokens


def _continues(last: WireEvent, event: Event, tokens: list[int]) -> bool:
    if isinstance(last, BlockStored):
        same_run = event.stored and last.block_hashes[-1] == event.parent
        return same_run and last.ownership == event.tier and bool(last.token_ids) == bool(tokens)
    return isinstance(last, BlockRemoved) and not event.stored and last.ownership == event.tier


def _wire_event(event: Event, tokens: list[int], block_tokens: int) -> WireEvent:
    medium = medium_of(event.tier)
    hashes: list[bytes | int] = list(event.keys)
    if not event.stored:
        return BlockRemoved(hashes, medium, event.tier)
    parent = None if event.parent == ROOT_PARENT else event.parent
    return BlockStored(hashes, parent, tokens, block_tokens, None, medium, None, event.tier)
