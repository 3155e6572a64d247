"""What a pause, changed weights, a hung read and errors of kvcore do to a real vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvcore.harness.compare import SPACE
from kvcore.harness.engine_process import run_program
from kvcore.harness.models import tiny_model
from kvcore.testing.faults.process import write_injector

pytestmark = pytest.mark.engine

HERE = Path(__file__).parent


def run(
    program: str, model: Path, *arguments: object, plugin: Path | None = None
) -> list[dict[str, Any]]:
    """Run a history in a process of its own; return what it prints."""
    path = [*([] if plugin is None else [plugin]), HERE]
    said = run_program(
        "vllm", model, HERE / program, model, *arguments, path=path, env=SPACE, timeout_s=500
    )
    return [json.loads(line) for line in said.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def history(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    other = tiny_model("llama", layers=4, heads=4, kv_heads=2, head_dim=64, seed=5)
    disk, faults = tmp_path_factory.mktemp("kv"), tmp_path_factory.mktemp("faults")
    write_injector(faults)
    return run("vllm_lifecycle.py", model, other, disk, faults, plugin=faults)[-1]


def test_a_pause_renews_the_namespace_and_leaves_the_disk_alone(history: dict[str, Any]) -> None:
    found = history["pauses"]
    assert found["again"]["reused"] > 0
    assert found["paused"]["reused"] == 0
    assert found["first"]["tokens"] == found["again"]["tokens"] == found["paused"]["tokens"]
    assert found["kept"] >= 2 * found["before"] > 0, "what was kept is there, beside the new"


@pytest.mark.parametrize("how", ["reload_weights", "load_weights"])
def test_kv_of_weights_that_were_changed_without_a_reset_is_not_served(
    history: dict[str, Any], how: str
) -> None:
    found = history[how]
    assert found["again"]["reused"] > 0
    assert found["changed"]["reused"] == 0
    assert found["changed"]["tokens"] == found["right"]["tokens"] != found["first"]["tokens"]
    assert found["later"]["tokens"] == found["right"]["tokens"]


def test_a_read_that_hangs_holds_up_no_pause(history: dict[str, Any]) -> None:
    found = history["hangs"]
    assert found["hung"]["tokens"] == found["first"]["tokens"]
    assert found["waited"] > 1.5, "a read from the disk hung until the load's deadline"
    assert found["took"] < 15


@pytest.fixture(
    scope="module",
    params=[(), pytest.param(("--all",), marks=pytest.mark.exhaustive)],
    ids=["in turn", "everywhere"],
)
def errors(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What errors did, each with its load in the step or between steps in turn, or in both."""
    small = tiny_model("llama")  # a hundred times a few steps
    *starts, found = run("vllm_guard.py", small, *request.param, *map(",".join, AT_THE_START))
    return {**found, "starts": starts, "everywhere": bool(request.param)}


AT_THE_START = (["tell_untried", "warm_up_blends"], ["watch_weights"])
"""Functions of the connector's module that raise when it is made, those of a group together."""

HARMLESS = ("KVCoreStats", "KVCorePromMetrics", "PrometheusSink", "Metrics.transferred")
"""Parts without which kvcore serves on: counts are lost, and nothing else."""

CALLED = {
    "KVCoreConnector": (
        "build_connector_meta", "build_connector_worker_meta", "get_block_ids_with_load_errors",
        "get_kv_connector_stats", "get_num_new_matched_tokens", "get_transfer_results",
        "handle_preemptions", "has_pending_push_work", "request_finished_all_groups",
        "start_load_kv", "update_connector_output", "update_state_after_alloc",
        "wait_for_layer_load", "wait_for_save",
    ),
    "WorkerGuard": ("begin", "count_on", "end_forward", "finished_loads", "take_report"),
    "_Ledger": ("promise", "told"),
    "KVCoreMetadata": ("plan",),
}  # fmt: skip
"""Some of what must be among the parts that were found."""


@pytest.mark.parametrize("load", ["between steps", "in the step"])
def test_an_error_in_any_call_ends_kvcore_and_not_vllm(errors: dict[str, Any], load: str) -> None:
    """What was promised is computed; the answer is that of an engine without kvcore."""
    found = errors[load]
    wrong = {name: part for name, part in found.items() if not (part["same"] and part["after"])}
    assert not wrong
    wanted = {f"{owner}.{name}" for owner, names in CALLED.items() for name in names}
    others = {} if errors["everywhere"] else errors["between steps"] | errors["in the step"]
    assert wanted <= found.keys() | others.keys()
    assert len(found) > (40 if errors["everywhere"] else 30)
    assert not [name for name, part in found.items() if not part["raised"]]
    stopped = {name for name in found if not name.startswith(HARMLESS)}
    assert not [name for name in stopped if not found[name]["why"]]
    assert errors["reused"], "kvcore serves between the errors"


def test_an_error_at_the_start_ends_kvcore_and_not_vllm(errors: dict[str, Any]) -> None:
    found = errors["starts"]
    wanted = [["PrometheusSink", *names] for names in AT_THE_START]
    assert [each["raised"] for each in found] == wanted
    assert [each["answers"] for each in found] == [[errors["right"]] * 2] * 2
