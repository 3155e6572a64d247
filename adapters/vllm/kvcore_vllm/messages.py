"""The messages between the connector's two roles, on vLLM's own metadata channel.

scheduler ──StepPlan────▶ every worker    (with each step)
scheduler ◀──StepReport── every worker    (with each step's output)

vLLM pickles both in threads of its own, where an error of kvcore would end or hang it. So neither
raises there: what cannot be encoded or decoded becomes the word that a side has stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvcore.connector.messages import Codec, PlanMetadata, StepReport, WorkPlan, merge_reports
from kvcore.transfer.graph import TransferGraph

_REPORTS = Codec(StepReport, "a step report")


class StepPlan(WorkPlan, msgspec.Struct, array_like=True):
    """One step's work for a worker.

    ``fence`` are graphs that read pages which this step writes to: their reads must end first.
    ``sync_loads`` must have arrived when the forward uses them. ``async_loads`` run between steps;
    each comes with the request that waits for it. ``blend_loads`` bring the exact tokens before a
    blend; each comes with the blend's request. ``failed_loads`` are requests whose load or blend
    could not be planned, ``unfilled`` the pages of loads in the step that could not.
    ``early_saves`` read pages that this same step may give to another request. ``late_saves`` read
    what this step's forward computes. ``fetches`` read blocks into host memory. ``spills`` write
    blocks from there to lower tiers. ``empty_step`` is True if nothing is computed. ``timed`` is a
    number under which the forward's seconds are reported; 0 asks for none. ``number`` counts the
    plans from 1 on. ``weights`` is the last `StepReport.weights` that the leader knows of.
    """

    fence: list[int] = []
    sync_loads: list[TransferGraph] = []
    async_loads: list[tuple[str, TransferGraph]] = []
    blend_loads: list[tuple[str, TransferGraph]] = []
    failed_loads: list[str] = []
    early_saves: list[TransferGraph] = []
    late_saves: list[TransferGraph] = []
    fetches: list[TransferGraph] = []
    spills: list[TransferGraph] = []
    empty_step: bool = False
    timed: int = 0
    unfilled: list[int] = []
    number: int = 0
    weights: int = 0


class Promises(NamedTuple):
    """What vLLM counts on in a step: it is told of each as arrived or as failed.

    ``waiting`` are the requests that wait for a load or a blend between steps. ``pages`` are those
    that a load in the step fills.
    """

    waiting: tuple[str, ...] = ()
    pages: tuple[int, ...] = ()


NO_PROMISES = Promises()


class KVCoreMetadata(PlanMetadata[StepPlan], KVConnectorMetadata):
    """A StepPlan on its way to the workers, and beside it what can be read without the plan.

    ``promises`` are those of the step. ``meetings`` is the number of its blends, before each of
    which the ranks meet. ``stopped`` says why the scheduler's side has no plan any more.
    """

    codec = Codec(StepPlan, "a step plan")

    def __init__(
        self, payload: bytes = b"", promises: Promises = NO_PROMISES, stopped: str = ""
    ) -> None:
        super().__init__(payload)
        self.promises, self.stopped = promises, stopped
        self.meetings = 0

    @classmethod
    def of(cls, plan: StepPlan) -> KVCoreMetadata:
        """Encode a plan."""
        made = cls(cls.codec.encode(plan))
        made.meetings = len(plan.blends)
        return made


class KVCoreWorkerMetadata(KVConnectorWorkerMetadata):
    """The StepReports of ranks on their way to the scheduler. Pickled as msgpack."""

    def __init__(self, ranks: Sequence[StepReport]) -> None:
        self._ranks = ranks

    def __reduce__(self) -> tuple[Any, ...]:
        try:
            return _unpickled, tuple(_REPORTS.encode(report) for report in self._ranks)
        except Exception as error:  # noqa: BLE001 - told to the scheduler's side
            return _stopped, (f"a report could not be encoded: {error!r}",)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVCoreWorkerMetadata:
        """Return the reports of both."""
        if not isinstance(other, KVCoreWorkerMetadata):
            return _stopped(f"a report is of {type(other)}")
        return KVCoreWorkerMetadata([*self._ranks, *other._ranks])

    def merged(self) -> StepReport:
        """Return one report for all ranks."""
        return merge_reports(self._ranks)


def _unpickled(*payloads: bytes) -> KVCoreWorkerMetadata:
    """Decode the reports."""
    try:
        return KVCoreWorkerMetadata([_REPORTS.decode(payload) for payload in payloads])
    except Exception as error:  # noqa: BLE001 - told to the scheduler's side
        return _stopped(f"a report could not be decoded: {error}")


def _stopped(why: str) -> KVCoreWorkerMetadata:
    return KVCoreWorkerMetadata([StepReport(stopped=why)])
