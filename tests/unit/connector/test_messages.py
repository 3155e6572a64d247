"""The messages that both halves of every connector share."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from kvcore.connector.fusion_messages import BlendReport, BlendTime
from kvcore.connector.messages import (
    Codec,
    PlanMetadata,
    StepReport,
    WorkPlan,
    merge_reports,
)
from kvcore.errors import FormatError
from kvcore.telemetry.metrics import Metrics
from kvcore.transfer.graph import OpReport, RowError


class Metadata(PlanMetadata[WorkPlan]):
    codec = Codec(WorkPlan, "a plan")


def test_a_plan_without_work_is_no_bytes() -> None:
    assert Metadata.of(WorkPlan()).payload == b""
    assert Metadata().plan() == WorkPlan()
    plan = WorkPlan(cancel=[1], invalidate=[("disk", [(2, 5)])])
    assert Metadata.of(plan).plan() == plan
    with pytest.raises(FormatError, match="not a plan of"):
        Metadata(b"\xc1").plan()


def moved(nbytes: int) -> Metrics:
    metrics = Metrics("rank")
    metrics.transferred("h2d", nbytes, 0.5)
    return metrics


def test_ranks_reports_become_one() -> None:
    done, failed = OpReport(1, 0), OpReport(1, 0, {2: RowError.IO})
    first = StepReport(
        [done], moved(100).delta(), [BlendReport("a"), BlendReport("b", share=0.5)], [(7, 0.2)],
        blend_times=[BlendTime("a", 10, 2, 0, 3.0), BlendTime("b", 10, 2, 0, 1.0)],
    )  # fmt: skip
    second = StepReport(
        [failed], moved(20).delta(), [BlendReport("a", ok=False)], [(7, 0.3), (8, 0.1)],
        [(16, 1.0)], [BlendTime("b", 10, 3, 0, 2.0)],
    )  # fmt: skip
    one = merge_reports([first, second])
    assert one.reports == [done, failed]
    assert one.counted["kvcore_transfer_bytes_total"] == {"h2d": 120}
    assert {blend.request_id: blend.ok for blend in one.blends} == {"a": False, "b": True}
    assert one.forwards == [(7, 0.3), (8, 0.1)]
    assert one.profile == [(16, 1.0)]
    assert {time.request_id: time.seconds for time in one.blend_times} == {"a": 3.0, "b": 2.0}
    assert first.reports == [done]  # nothing of a rank's own is changed
    assert first.counted["kvcore_transfer_bytes_total"] == {"h2d": 100}


def test_the_report_of_a_lone_rank_stays_as_it_is() -> None:
    alone = StepReport([OpReport(1, 0)], forwards=[(1, 0.1)])
    assert merge_reports([alone]) is alone
