"""The data plane of one rank: it carries out transfer graphs on its device and tiers."""

from __future__ import annotations

__all__ = [
    "DeadTier",
    "KVWorker",
    "RefusingWorker",
    "refuse",
]

from kvcore.worker.refusing import DeadTier, RefusingWorker, refuse
from kvcore.worker.worker import KVWorker
