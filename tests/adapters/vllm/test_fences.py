"""A step waits for every save if vLLM may write pages in a way that kvcore does not know."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, make_dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from kvcore.config import load_config
from kvcore.connector.leader import LeaderParts
from kvcore.connector.step_transport import Outbox
from kvcore.explain.recorder import RequestRecorder
from kvcore.index import BlockIndex, TierSpec
from kvcore.manager import KVManager
from kvcore.model.shape import BlockShape
from kvcore.model.spec import LayerGroup, ModelDescription
from kvcore.telemetry.metrics import Metrics
from kvcore_vllm.fences import unknown_writers
from kvcore_vllm.leader import Leader
from kvcore_vllm.messages import StepPlan

MODEL = ModelDescription(
    BlockShape(2, 2, 64, 16, "float16"), (LayerGroup(0, 16, (0, 1)),), b"f" * 32, 1
)


@dataclass
class Output:
    """A step of vLLM in which nothing gets a page, with the fields that kvcore knows."""

    scheduled_new_reqs: list[Any] = field(default_factory=list)
    scheduled_cached_reqs: Any = field(default_factory=lambda: SimpleNamespace(new_block_ids=[]))
    num_common_prefix_blocks: list[int] = field(default_factory=list)
    new_block_ids_to_zero: list[int] | None = None
    kv_cache_block_copies: list[Any] | None = None
    block_table_updates: dict[str, Any] | None = None
    kv_connector_block_state: Any = None


@pytest.fixture
def side() -> Leader:
    outbox, recorder = Outbox(1), RequestRecorder()
    index = BlockIndex([TierSpec("host", 8)])
    parts = LeaderParts[Any](
        manager=KVManager(index, outbox),
        transport=outbox,
        metrics=Metrics("leader"),
        recorder=recorder,
    )
    made = Leader(load_config(None, {}), MODEL, parts, outbox, {})
    saves = SimpleNamespace(graphs={5, 3, 8}, among=lambda pages: [])
    made._users = saves  # type: ignore[assignment]
    return made


@pytest.mark.parametrize("name", ["moved_block_ids", "kv_cache_rows", "blocks"])
def test_every_save_is_fenced_if_the_output_has_an_unknown_field(
    side: Leader, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "kvcore.vllm.scheduler")
    newer = make_dataclass("Newer", [(name, list, None)], bases=(Output,))
    plan = StepPlan(late_saves=[SimpleNamespace(graph_id=8)])  # type: ignore[list-item]
    assert side._fences(plan, newer()) == [3, 5], "the step's own saves come after its forward"
    side._fences(plan, newer())
    (line,) = caplog.messages
    assert line.endswith(name)


def test_known_fields_fence_what_they_name_only(side: Leader) -> None:
    assert side._fences(StepPlan(), Output()) == []  # type: ignore[arg-type]


def test_the_installed_vllm_has_no_unknown_field() -> None:
    from vllm.v1.core.sched.output import SchedulerOutput

    assert unknown_writers(SchedulerOutput) == ()
