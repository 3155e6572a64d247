"""Block events as vLLM sends them by default, for routers that read nothing else.

    kvcore's format                            vLLM's
    a block's key, 16 bytes                    the key's last 8 bytes, as a number
    events of each tier, with its name         events of each medium, no name
    blocks without known tokens, too           only blocks with tokens
    the rank, if there are several             always a rank
    an answer ends with how many there were    ... with an empty payload (`zmq_bus`)
    `snapshot` asks for everything             so does a number that is no longer kept

Dynamo's router drops a whole batch that has bytes for hashes or no rank, takes no notice of events
with an owner, and waits for ever for an answer's empty payload. vLLM's router takes an owner for a
pool that is far away, and hears only messages without a topic.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set

from kvcore.events.wire import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    WireEvent,
    medium_of,
)
from kvcore.index.values import Event

__all__ = ["as_vllm", "hash_of", "of_media"]

_HASH_BYTES = 8


def hash_of(key: bytes | int) -> int:
    """Return the number by which vLLM's format names a block, as vLLM shortens its own hashes."""
    return key if isinstance(key, int) else int.from_bytes(key[-_HASH_BYTES:], "big")


def of_media(events: Iterable[Event], held: Mapping[str, Set[bytes]]) -> Iterator[Event]:
    """Yield ``events`` without removals of blocks that another tier of the same medium holds.

    ``held`` is what each tier holds before the first event.
    """
    changed: dict[tuple[str, bytes], bool] = {}  # by the events so far
    for event in events:
        for key in event.keys:
            changed[event.tier, key] = event.stored
        if event.stored:
            yield event
            continue
        medium = medium_of(event.tier)
        others = [
            tier
            for tier in dict.fromkeys([*held, *(tier for tier, _ in changed)])
            if tier != event.tier and medium_of(tier) == medium
        ]
        gone = tuple(
            key
            for key in event.keys
            if not any(changed.get((tier, key), key in held.get(tier, ())) for tier in others)
        )
        if gone:
            yield event._replace(keys=gone)


def as_vllm(events: Iterable[WireEvent]) -> list[WireEvent]:
    """Return ``events`` with numbers for keys and without owners.

    Stored blocks whose tokens are not known are left out: a router could not tell what they hold.
    """
    made: list[WireEvent] = []
    for event in events:
        if isinstance(event, AllBlocksCleared):
            made.append(event)
        elif isinstance(event, BlockRemoved):
            made.append(BlockRemoved([*map(hash_of, event.block_hashes)], event.medium))
        elif event.token_ids:
            made.append(_stored(event))
    return made


def _stored(event: BlockStored) -> BlockStored:
    parent = event.parent_block_hash
    return BlockStored(
        [*map(hash_of, event.block_hashes)],
        None if parent is None else hash_of(parent),
        event.token_ids,
        event.block_size,
        None,
        event.medium,
        None,
    )
