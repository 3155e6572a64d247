"""The disk tier: for each shard a preallocated file of blocks, and a file of their records."""

from __future__ import annotations

from kvcore.tiers.disk.mount import STORE_SHIFT, DiskAccess, MountedStore
from kvcore.tiers.disk.store import PreparedStore, prepare_store
from kvcore.tiers.disk.tier import DiskTier
from kvcore.tiers.geometry import Geometry

__all__ = [
    "STORE_SHIFT",
    "DiskAccess",
    "DiskTier",
    "Geometry",
    "MountedStore",
    "PreparedStore",
    "prepare_store",
]
