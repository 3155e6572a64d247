"""What is part of vLLM's steps: loads where vLLM recovers from them, and the requests of hooks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.output import SchedulerOutput

from kvcore.harness.models import tiny_model
from kvcore_vllm.build import _recovers_in_step
from kvcore_vllm.connector import KVCoreConnector
from kvcore_vllm.messages import Promises


@pytest.mark.parametrize(
    ("asynchronous", "stages", "runner", "recovers"),
    [
        (False, 1, "0", True),
        (True, 1, "0", False),
        (False, 2, "0", False),
        (False, 1, "1", False),
        (True, 1, "1", False),
    ],
    ids=["plain", "asynchronous", "pipeline stages", "V2", "V2 asynchronous"],
)
def test_loads_are_part_of_a_step_only_if_vllm_recovers_there(
    monkeypatch: pytest.MonkeyPatch, asynchronous: bool, stages: int, runner: str, recovers: bool
) -> None:
    config = EngineArgs(str(tiny_model("llama")), enforce_eager=True).create_engine_config()
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", runner)
    config.scheduler_config.async_scheduling = asynchronous
    config.parallel_config.pipeline_parallel_size = stages
    assert config.use_v2_model_runner is (runner == "1")
    assert _recovers_in_step(config) is recovers


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("v2", [False, True])
def test_only_for_hooks_v2_is_told_to_call_before_the_forward(hooked: bool, v2: bool) -> None:
    """V2 names the requests of the forward in that call. It costs time in every step."""
    connector = KVCoreConnector.__new__(KVCoreConnector)
    told: Any = SimpleNamespace(build_connector_meta=lambda output: output, last_plan=None)
    connector._scheduler, connector._hooks = told, ["a plugin's"] * hooked
    connector._waiting, connector._pages = [], []
    connector._taken = None, Promises()
    connector._vllm_config = SimpleNamespace(use_v2_model_runner=v2)  # type: ignore[assignment]
    output: Any = connector.build_connector_meta(SchedulerOutput.make_empty())
    assert output.has_sync_kv_loads is (hooked and v2)
