"""The data plane of one rank: it carries out transfer graphs on its device and tiers.

worker           `KVWorker`: one rank's arena, tiers and transfer engine
executors        carry out the ops of a graph: device copies, tier reads and writes
streams          order copies with the engine's compute
device_staging   reads from tiers straight into device memory
lifecycle        opens tiers and closes workers
refusing         stand-ins for a worker or a tier that cannot be used
"""

from __future__ import annotations

__all__ = [
    "DeadTier",
    "EnginePages",
    "KVWorker",
    "RefusingWorker",
    "WorkerLimits",
    "refuse",
]

from kvcore.worker.refusing import DeadTier, RefusingWorker, refuse
from kvcore.worker.worker import EnginePages, KVWorker, WorkerLimits
