"""Block events for vLLM's own publisher, in whose batches they travel beside vLLM's events."""

from __future__ import annotations

from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    MEDIUM_STORAGE,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)
from vllm.v1.core.kv_cache_utils import BlockHash, ExternalBlockHash, maybe_convert_block_hash

from kvcore.manager import HOST, Event
from kvcore.transfer.graph import NO_PARENT


def engine_event(event: Event, block_tokens: int) -> KVCacheEvent:
    """Return ``event`` as vLLM publishes it, with kvcore's prefix keys and without token ids.

    Keys are numbers where vLLM's hashes are (by default). A router that reads only numbers would
    drop the whole batch, vLLM's own events too.
    """
    medium = MEDIUM_CPU if event.tier == HOST else MEDIUM_STORAGE
    hashes = [_hash(key) for key in event.keys]
    if not event.stored:
        return BlockRemoved(block_hashes=hashes, medium=medium, ownership=event.tier)
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=None if event.parent == NO_PARENT else _hash(event.parent),
        token_ids=[],
        block_size=block_tokens,
        lora_id=None,
        medium=medium,
        lora_name=None,
        ownership=event.tier,
    )


def _hash(key: bytes) -> ExternalBlockHash:
    return maybe_convert_block_hash(BlockHash(key))
