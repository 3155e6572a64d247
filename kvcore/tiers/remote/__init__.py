"""Remote stores: tiers on other machines, addressed by key and shared by every host that uses them.

worker   StoreTier ── framing, retries ──▶ BlockStore ──▶ the store's own client
leader   StoreFinder ── which blocks? ─────▶ BlockStore
"""

from __future__ import annotations

from kvcore.tiers.finder import Promise, StoreQuery
from kvcore.tiers.remote.base import BlockStore, Item, fill
from kvcore.tiers.remote.lookup import StoreFinder
from kvcore.tiers.remote.object_keys import Shard
from kvcore.tiers.remote.options import StoreOptions
from kvcore.tiers.remote.shard_registry import ShardRegistry
from kvcore.tiers.remote.tier import StoreKind, StoreTier, open_tier, prepare

__all__ = [
    "BlockStore",
    "Item",
    "Promise",
    "Shard",
    "ShardRegistry",
    "StoreFinder",
    "StoreKind",
    "StoreOptions",
    "StoreQuery",
    "StoreTier",
    "fill",
    "open_tier",
    "prepare",
]
