"""The block index: it knows which tier holds a block, and which block is evicted next.

The index belongs to the leader's thread. It does no I/O.
"""

from __future__ import annotations

__all__ = [
    "BlockIndex",
    "Event",
    "Evicted",
    "Eviction",
    "Pin",
    "Reservation",
    "TierSpec",
]

from kvcore.index.block_index import BlockIndex
from kvcore.index.values import Event, Evicted, Eviction, Pin, Reservation, TierSpec
