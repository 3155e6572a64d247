"""What the leader sends the workers, and what they send it.

leader ──StepPlan────▶ every worker     in the connector's metadata, broadcast with each step
leader ◀──StepReport── every worker     gathered inside get_finished, while any op is open
"""

from __future__ import annotations

import msgspec

from kvcore.connector.messages import Codec, PlanMetadata, StepReport, WorkPlan
from kvcore.transfer.graph import TransferGraph

__all__ = ["REPORTS", "KVCoreMetadata", "StepPlan"]

REPORTS = Codec(StepReport, "a step report")


class StepPlan(WorkPlan, msgspec.Struct, array_like=True):
    """One step's work for a worker.

    ``early_saves`` read pages that may be given away in this very step. ``cancel`` and then
    ``fence`` name graphs that use pages which this step gives to others: they must have let go of
    them before it writes. ``sync_loads`` must have landed when the forward uses them,
    ``async_loads`` belong to parked requests, ``late_saves`` read what this step's forward
    computes. Saves and parked loads come with their request. ``lost_loads`` are parked requests
    whose load could not be planned; they are reported all the same. ``broken``, if it is not empty,
    says why nothing that this step computes may reach anyone.
    """

    early_saves: list[tuple[int, TransferGraph]] = []
    fence: list[int] = []
    sync_loads: list[TransferGraph] = []
    async_loads: list[tuple[int, TransferGraph]] = []
    lost_loads: list[int] = []
    late_saves: list[tuple[int, TransferGraph]] = []
    spills: list[TransferGraph] = []
    broken: str = ""


class KVCoreMetadata(PlanMetadata[StepPlan]):
    """A StepPlan on its way to the workers."""

    codec = Codec(StepPlan, "a step plan")
