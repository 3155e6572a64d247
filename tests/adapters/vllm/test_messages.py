"""What vLLM carries between the halves, as it pickles it."""

from __future__ import annotations

import pickle

import pytest

from kvcore.connector.messages import StepReport
from kvcore.transfer.graph import OpReport
from kvcore_vllm.messages import KVCoreMetadata, KVCoreWorkerMetadata, StepPlan, _unpickled


def test_reports_of_ranks_are_pickled_as_msgpack_and_merged_once() -> None:
    ranks = [StepReport([OpReport(1, rank)], forwards=[(1, 0.1 * rank)]) for rank in range(1, 4)]
    here, *others = (pickle.loads(pickle.dumps(KVCoreWorkerMetadata([rank]))) for rank in ranks)
    for other in others:
        here = here.aggregate(other)
    assert b"StepReport" not in pickle.dumps(here)  # no class of kvcore's but the metadata's own
    merged = here.merged()
    assert merged.reports == [OpReport(1, rank) for rank in range(1, 4)]
    assert merged.forwards == [(1, pytest.approx(0.3))]


def test_what_is_no_report_stops_kvcore_and_raises_in_no_thread_of_vllm() -> None:
    assert "not a step report of" in _unpickled(b"\xc1").merged().stopped
    report = StepReport([OpReport(1, 2)], counted={"name": object()})  # type: ignore[dict-item]
    sent = pickle.loads(pickle.dumps(KVCoreWorkerMetadata([report])))
    assert "could not be encoded" in sent.merged().stopped
    both = KVCoreWorkerMetadata([StepReport()]).aggregate(sent).merged()
    assert "could not be encoded" in both.stopped


def test_a_step_without_work_is_no_bytes() -> None:
    assert KVCoreMetadata.of(StepPlan()).payload == b""
    plan = StepPlan(cancel=[3], empty_step=True)
    assert pickle.loads(pickle.dumps(KVCoreMetadata.of(plan))).plan() == plan
