"""The data plane of one rank: it carries out transfer graphs on its device and tiers."""

from __future__ import annotations

__all__ = [
    "DeadTier",
    "DeviceGroup",
    "KVWorker",
    "RefusingWorker",
    "refuse",
]

from kvcore.worker.worker import DeadTier, DeviceGroup, KVWorker, RefusingWorker, refuse
