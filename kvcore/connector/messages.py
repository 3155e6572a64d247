"""The messages between the two halves of a connector. Each engine carries them in its own way.

    leader ──a subclass of WorkPlan──▶ every rank      the work of a step
    leader ◀──────StepReport────────── every rank      ops that ended, counts and times

The payload is msgpack. An engine that pickles its own messages pickles kvcore's as bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from kvcore._util.msgpack import decoder
from kvcore.connector.fusion_messages import BlendOrder, BlendReport, BlendTime
from kvcore.index.slots import SlotRun
from kvcore.telemetry.metrics import Data, merge
from kvcore.transfer.graph import OpReport

__all__ = ["Codec", "PlanMetadata", "StepReport", "WorkPlan", "merge_reports"]


class WorkPlan(msgspec.Struct, array_like=True):
    """The part of a rank's work in a step that all engines have in common.

    Attributes:
        open_tiers: options to open tiers with, by the tier's name. Sent once, before any graph
            that names those tiers.
        invalidate: slots of tiers to make unreadable before any graph of this plan starts.
        cancel: ids of graphs to cancel.
        blends: orders to carry out before the forward.
    """

    open_tiers: dict[str, dict[str, Any]] = {}
    invalidate: list[tuple[str, list[SlotRun]]] = []
    cancel: list[int] = []
    blends: list[BlendOrder] = []


class StepReport(msgspec.Struct, array_like=True):
    """The results of a rank since its last report.

    Attributes:
        reports: the ops that ended.
        counted: the increase of the rank's counters.
        blends: the results of blends.
        forwards: (number, seconds) of the forwards that a plan asked to time.
        profile: (rows, seconds) of the model's layers as a blend runs them, with no KV before the
            rows. Sent once.
        blend_times: the times of blends that the device has ended, perhaps after their results.
        weights: the number of the first plan that runs with the model's weights as they are now;
            0 if they were never changed in place.
        stopped: why the rank does no more work; empty while it does.
    """

    reports: list[OpReport] = []
    counted: Data = {}
    blends: list[BlendReport] = []
    forwards: list[tuple[int, float]] = []
    profile: list[tuple[int, float]] = []
    blend_times: list[BlendTime] = []
    weights: int = 0
    stopped: str = ""


def merge_reports(ranks: Sequence[StepReport]) -> StepReport:
    """Merge the reports of ranks into one.

    Lists the ops of all ranks, adds up the counts, and takes the times of the slowest rank. A blend
    that failed on one rank has failed.
    """
    if len(ranks) == 1:
        return ranks[0]
    merged = StepReport()
    blends: dict[str, BlendReport] = {}
    times: dict[str, BlendTime] = {}
    for rank in ranks:
        merged.reports += rank.reports
        merge(merged.counted, rank.counted)
        merged.weights = max(merged.weights, rank.weights)
        merged.stopped = merged.stopped or rank.stopped
        merged.forwards = _slowest(merged.forwards, rank.forwards)
        merged.profile = _slowest(merged.profile, rank.profile)
        for time in rank.blend_times:
            if (slowest := times.get(time.request_id)) is None or slowest.seconds < time.seconds:
                times[time.request_id] = time
        for report in rank.blends:
            if report.request_id not in blends or not report.ok:
                blends[report.request_id] = report
    merged.blends, merged.blend_times = list(blends.values()), list(times.values())
    return merged


def _slowest(
    mine: list[tuple[int, float]], theirs: list[tuple[int, float]]
) -> list[tuple[int, float]]:
    """Return the larger time of each number: ranks wait for the slowest one."""
    slowest: dict[int, float] = {}
    for number, seconds in (*mine, *theirs):
        slowest[number] = max(seconds, slowest.get(number, 0.0))
    return list(slowest.items())


_M = TypeVar("_M", bound=msgspec.Struct)
_P = TypeVar("_P", bound="PlanMetadata[Any]")


class Codec(Generic[_M]):
    """Encodes and decodes messages of one kind. A message with only defaults is empty.

    ``what`` names the kind in errors.
    """

    def __init__(self, kind: type[_M], what: str) -> None:
        self._kind = kind
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = decoder(kind, what)
        self._empty = self._encode(kind())

    def encode(self, message: _M) -> bytes:
        """Return the message as msgpack; empty if it has only defaults."""
        payload = self._encode(message)
        return b"" if payload == self._empty else payload

    def decode(self, payload: bytes) -> _M:
        """Return the message in ``payload``. Raises FormatError if it is not a valid message."""
        return self._decode(payload) if payload else self._kind()


class PlanMetadata(Generic[_M]):
    """A plan inside an engine's own metadata, which the engine pickles.

    A subclass sets ``codec`` for its kind of plan.
    """

    codec: ClassVar[Codec[Any]]

    def __init__(self, payload: bytes = b"") -> None:
        self.payload = payload

    @classmethod
    def of(cls: type[_P], plan: _M) -> _P:
        """Encode a plan."""
        return cls(cls.codec.encode(plan))

    def plan(self) -> _M:
        """Return the plan. Raises FormatError if the payload is not a valid plan."""
        found: _M = self.codec.decode(self.payload)
        return found
