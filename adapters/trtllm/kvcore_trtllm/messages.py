"""The messages between the leader and the workers.

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

    ``early_saves`` read pages that this same step may give to another request. ``cancel`` and then
    ``fence`` name graphs that use such pages: they must have ended before the step writes.
    ``sync_loads`` must have arrived when the forward uses them. ``async_loads`` belong to parked
    requests. ``late_saves`` read what this step's forward computes. Saves and async loads come with
    the id of their request. ``lost_loads`` are parked requests whose load could not be planned;
    they are reported as loaded all the same. If ``broken`` is not empty, it says why the step must
    fail.
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
