"""Block events in vLLM's own wire format, so that existing KV-aware routers understand them."""

from __future__ import annotations

from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    MEDIUM_STORAGE,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)

from kvcore.manager import HOST, Event
from kvcore.transfer.graph import NO_PARENT


def engine_event(event: Event, block_tokens: int) -> KVCacheEvent:
    """Return ``event`` as vLLM publishes it, with kvcore's prefix keys and without token ids."""
    medium = MEDIUM_CPU if event.tier == HOST else MEDIUM_STORAGE
    hashes: list[bytes | int] = list(event.keys)
    if not event.stored:
        return BlockRemoved(block_hashes=hashes, medium=medium, ownership=event.tier)
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=None if event.parent == NO_PARENT else event.parent,
        token_ids=[],
        block_size=block_tokens,
        lora_id=None,
        medium=medium,
        lora_name=None,
        ownership=event.tier,
    )
