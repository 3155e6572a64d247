"""Policies: which blocks are evicted, admitted and, of resume points, saved."""

from __future__ import annotations

from kvcore.index.policy.admission import AdmissionFilter, Always, OnNthUse
from kvcore.index.policy.arc import ARC
from kvcore.index.policy.base import EvictionPolicy, LeafHeap, Recency
from kvcore.index.policy.lfu import LFU
from kvcore.index.policy.lru import LRU
from kvcore.index.policy.points import EveryPoint, PointPolicy, PointRequest, SpacedPoints
from kvcore.index.policy.priority import Priority
from kvcore.index.policy.s3fifo import S3FIFO

__all__ = [
    "ARC",
    "BUILTIN_POINTS",
    "BUILTIN_POLICIES",
    "LFU",
    "LRU",
    "S3FIFO",
    "AdmissionFilter",
    "Always",
    "EveryPoint",
    "EvictionPolicy",
    "LeafHeap",
    "OnNthUse",
    "PointPolicy",
    "PointRequest",
    "Priority",
    "Recency",
    "SpacedPoints",
]

BUILTIN_POLICIES: dict[str, type[EvictionPolicy]] = {
    policy.name: policy for policy in (LRU, LFU, ARC, S3FIFO, Priority)
}
"""Eviction policies by the name used in the config."""

BUILTIN_POINTS: dict[str, type[PointPolicy]] = {
    policy.name: policy for policy in (SpacedPoints, EveryPoint)
}
"""Policies of resume points by the name used in the config."""
