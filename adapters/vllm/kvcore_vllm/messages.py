"""What the two roles of the connector say to each other, on vLLM's own metadata channel.

    scheduler ──StepPlan──▶ every worker         (with each step)
    scheduler ◀──StepNews── every worker, merged (with each step's output)

The payload is msgpack inside vLLM's metadata classes, so nothing of kvcore's is pickled.
"""

from __future__ import annotations

from typing import Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvcore._util.msgpack import decoder
from kvcore.connector.fusion_messages import BlendOrder, BlendReport
from kvcore.index.slots import SlotRun
from kvcore.telemetry.metrics import merge
from kvcore.transfer.graph import OpReport, TransferGraph


class StepPlan(msgspec.Struct, array_like=True):
    """One step's work for a worker.

    ``fence`` are graphs whose reads of the engine's pages must end before this step writes to
    those pages. ``sync_loads`` must have landed when the forward uses them, ``async_loads`` maps a
    graph to the request that waits for it, ``early_saves`` read pages that may be given away in
    this very step, ``late_saves`` read what this step's forward computes. ``open_tiers`` comes
    once, before any graph that names those tiers: what their `prepare` told. ``forget`` are slots
    of tiers to make unreadable before any graph of this step. ``fetches`` bring blocks to host
    memory, ``blends`` are carried out before the forward. ``timed`` asks for the seconds of the
    forward, under this number; 0 does not.
    """

    fence: list[int] = []
    sync_loads: list[TransferGraph] = []
    async_loads: list[tuple[str, TransferGraph]] = []
    failed_loads: list[str] = []
    early_saves: list[TransferGraph] = []
    late_saves: list[TransferGraph] = []
    spills: list[TransferGraph] = []
    cancel: list[int] = []
    empty_step: bool = False
    open_tiers: dict[str, dict[str, Any]] = {}
    forget: list[tuple[str, list[SlotRun]]] = []
    fetches: list[TransferGraph] = []
    blends: list[BlendOrder] = []
    timed: int = 0

    @property
    def idle(self) -> bool:
        return not (
            self.fence
            or self.sync_loads
            or self.async_loads
            or self.failed_loads
            or self.early_saves
            or self.late_saves
            or self.spills
            or self.cancel
            or self.open_tiers
            or self.forget
            or self.fetches
            or self.blends
            or self.timed
        )


class RankReport(msgspec.Struct, array_like=True):
    """An op's report and how many ranks it speaks for."""

    report: OpReport
    ranks: int = 1


class StepNews(msgspec.Struct, array_like=True):
    """What ended on the workers since their last news, and what they counted.

    ``forwards`` are (`StepPlan.timed`, seconds). ``profile`` comes once: (rows, seconds) of the
    model's layers as a blend runs them, behind nothing.
    """

    reports: list[RankReport] = []
    counted: dict[str, dict[str, Any]] = {}
    blends: list[BlendReport] = []
    forwards: list[tuple[int, float]] = []
    profile: list[tuple[int, float]] = []

    def merge(self, other: StepNews) -> StepNews:
        """News of two ranks as one: reports of the same op add up, counters too."""
        merged = {(r.report.graph_id, r.report.op_id): r for r in self.reports}
        for theirs in other.reports:
            place = (theirs.report.graph_id, theirs.report.op_id)
            mine = merged.get(place)
            merged[place] = theirs if mine is None else _add(mine, theirs)
        counted = merge(merge({}, self.counted), other.counted)
        blends = {report.request_id: report for report in self.blends}
        for report in other.blends:
            if report.request_id not in blends or not report.ok:
                blends[report.request_id] = report
        return StepNews(
            list(merged.values()),
            counted,
            list(blends.values()),
            _slowest(self.forwards, other.forwards),
            _slowest(self.profile, other.profile),
        )


def _slowest(
    mine: list[tuple[int, float]], theirs: list[tuple[int, float]]
) -> list[tuple[int, float]]:
    """Ranks wait for each other, so what the slowest says is what it took."""
    if len(mine) == len(theirs) and [n for n, _ in mine] == [n for n, _ in theirs]:
        return [(n, max(a, b)) for (n, a), (_, b) in zip(mine, theirs, strict=True)]
    slowest: dict[int, float] = {}
    for number, seconds in (*mine, *theirs):
        slowest[number] = max(seconds, slowest.get(number, 0.0))
    return list(slowest.items())


def _add(a: RankReport, b: RankReport) -> RankReport:
    failed = {**b.report.failed, **a.report.failed}
    report = OpReport(a.report.graph_id, a.report.op_id, failed)
    return RankReport(report, a.ranks + b.ranks)


_encode = msgspec.msgpack.Encoder().encode
_decode_plan = decoder(StepPlan, "a step plan")
_decode_news = decoder(StepNews, "step news")


class KVCoreMetadata(KVConnectorMetadata):
    """A StepPlan on its way to the workers."""

    def __init__(self, payload: bytes) -> None:
        self.payload = payload

    @classmethod
    def of(cls, plan: StepPlan) -> KVCoreMetadata:
        return cls(b"" if plan.idle and not plan.empty_step else _encode(plan))

    def plan(self) -> StepPlan:
        """Raises FormatError when the payload is not a step plan."""
        if not self.payload:
            return StepPlan()
        return _decode_plan(self.payload)


class KVCoreWorkerMetadata(KVConnectorWorkerMetadata):
    """StepNews on its way to the scheduler."""

    def __init__(self, payload: bytes) -> None:
        self.payload = payload

    @classmethod
    def of(cls, news: StepNews) -> KVCoreWorkerMetadata:
        return cls(_encode(news))

    def news(self) -> StepNews:
        """Raises FormatError when the payload is not step news."""
        return _decode_news(self.payload)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVCoreWorkerMetadata:
        assert isinstance(other, KVCoreWorkerMetadata)
        return KVCoreWorkerMetadata.of(self.news().merge(other.news()))
