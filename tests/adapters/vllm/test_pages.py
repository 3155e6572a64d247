"""Pages that vLLM writes by itself, and configurations in which kvcore cannot wait for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
from vllm.v1.core.sched.output import SchedulerOutput

from kvcore.connector.page_table import PageUsers
from kvcore.errors import UnsupportedError
from kvcore_vllm.connector import KVCoreConnector
from kvcore_vllm.leader import Leader
from kvcore_vllm.messages import StepPlan
from support.worker import load_graph


@pytest.fixture
def side() -> Leader:
    """A leader with a save of pages 3 and 4 in flight."""
    made = Leader.__new__(Leader)
    made._users, made._load_pages = PageUsers(), []
    made._users.add(load_graph(9), [3, 4])
    return made


def pages_of(*groups: list[int]) -> Any:
    return SimpleNamespace(block_ids=groups, new_block_ids=[None, groups])


@pytest.mark.parametrize(
    "written",
    [
        {"scheduled_new_reqs": [pages_of([1], [3])]},
        {"scheduled_cached_reqs": pages_of([1], [3])},
        {"new_block_ids_to_zero": [1, 3]},
        {"kv_cache_block_copies": [KVCacheBlockCopy(src_block_id=7, dst_block_id=4)]},
        {"block_table_updates": {"r": ([1, 2], [4])}},
    ],
    ids=["of a new request", "of a running request", "zeroed", "copied to", "put into a table"],
)
def test_a_save_is_waited_for_before_vllm_writes_its_pages(
    side: Leader, written: dict[str, Any]
) -> None:
    output = SchedulerOutput.make_empty()
    assert side._fences(StepPlan(), output) == []
    for name, value in written.items():
        setattr(output, name, value)
    assert side._fences(StepPlan(), output) == [9]


def test_a_save_is_waited_for_before_a_load_writes_its_pages(side: Leader) -> None:
    """Its request is not in the step's output: it is scheduled once the load has ended."""
    side._load_pages = [1, 3]
    assert side._fences(StepPlan(), SchedulerOutput.make_empty()) == [9]
    assert side._fences(StepPlan(), SchedulerOutput.make_empty()) == []


def test_a_page_that_is_copied_from_needs_no_fence(side: Leader) -> None:
    output = SchedulerOutput.make_empty()
    output.kv_cache_block_copies = [KVCacheBlockCopy(src_block_id=4, dst_block_id=7)]
    assert side._fences(StepPlan(), output) == []


def vllm_config(**fields: Any) -> Any:
    parallel = SimpleNamespace(pipeline_parallel_size=1, tensor_parallel_size=1)
    return SimpleNamespace(parallel_config=parallel, speculative_config=None, **fields)


# -- sleep --------------------------------------------------------------------------------------


def connector(**disk: Any) -> KVCoreConnector:
    made = KVCoreConnector.__new__(KVCoreConnector)
    transfer = SimpleNamespace(kv_connector_extra_config={"disk": disk})
    model = SimpleNamespace(enable_sleep_mode=True)
    made._vllm_config = vllm_config(model_config=model, kv_transfer_config=transfer)
    return made


@pytest.fixture
def told_of_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.33's interface, which tells connectors when it sleeps."""
    monkeypatch.setattr(KVConnectorBase_V1, "unregister_kv_caches", lambda _: None, raising=False)


def test_sleep_is_not_served_if_vllm_does_not_tell_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(KVConnectorBase_V1, "unregister_kv_caches", raising=False)
    made, told = connector(), list[Exception]()
    monkeypatch.setattr(made, "_stand_aside", told.append)
    assert made._describe() is None
    assert "enable_sleep_mode" in str(*told)


@pytest.mark.usefixtures("told_of_sleep")
def test_sleep_is_served_unless_a_disk_reads_into_device_memory() -> None:
    connector()._check_sleep()
    with pytest.raises(UnsupportedError, match=r"disk\.to_device = off"):
        connector(to_device="on", path="/kv")._check_sleep()
