"""The messages between the leader and the workers.

leader ──StepPlan────▶ every worker     in the connector's metadata, broadcast with each step
leader ◀──StepReport── every worker     gathered inside get_finished, while any op is open
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from kvcore.connector.messages import Codec, PlanMetadata, StepReport, WorkPlan
from kvcore.telemetry.metrics import Data
from kvcore.transfer.graph import OpReport, TransferGraph

__all__ = ["REPORTS", "KVCoreMetadata", "News", "StepPlan"]

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


class News(NamedTuple):
    """What all ranks have reported: ops that ended on all of them, and counts of each.

    ``stopped`` says why a rank does no more work, and is empty while all do.
    """

    ended: list[OpReport]
    counted: list[Data]
    stopped: str = ""


class KVCoreMetadata(PlanMetadata[StepPlan]):
    """A StepPlan on its way to the workers, and beside it what can be read without the plan.

    ``counts`` is True if the step must fail where the plan is not carried out. ``stopped`` says why
    the leader makes no plans any more. Then ``broken`` is that of a plan.
    """

    codec = Codec(StepPlan, "a step plan")

    def __init__(self, payload: bytes = b"", stopped: str = "", broken: str = "") -> None:
        super().__init__(payload)
        self.stopped, self.broken = stopped, broken
        self.counts = bool(broken)

    @classmethod
    def of(cls, plan: StepPlan) -> KVCoreMetadata:
        """Encode a plan."""
        made = cls(cls.codec.encode(plan))
        made.counts = bool(plan.sync_loads or plan.blends or plan.fence or plan.broken)
        return made
