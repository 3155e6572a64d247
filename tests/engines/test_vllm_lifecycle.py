"""What a pause, a change of weights and a hung read do to a real vLLM and to its tiers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvcore.harness.compare import SPACE
from kvcore.harness.models import tiny_model
from kvcore.testing.faults.process import write_injector

pytestmark = pytest.mark.engine

HERE = Path(__file__).parent


def run(model: Path, other: Path, disk: Path, **env: str) -> dict[str, Any]:
    """Run the history of `vllm_lifecycle` in a process of its own."""
    path = os.pathsep.join([*filter(None, [env.pop("PLUGIN", "")]), str(HERE), *sys.path])
    done = subprocess.run(
        [sys.executable, str(HERE / "vllm_lifecycle.py"), str(model), str(other), str(disk)],
        env={**os.environ, **SPACE, "PYTHONPATH": path, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, done.stdout[-4000:]
    found: dict[str, Any] = json.loads(lines[-1])
    return found


@pytest.fixture(scope="module")
def history(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    other = tiny_model("llama", layers=4, heads=4, kv_heads=2, head_dim=64, seed=5)
    return run(model, other, tmp_path_factory.mktemp("kv"))


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


def test_a_read_that_hangs_holds_up_no_pause(model: Path, tmp_path: Path) -> None:
    faults = tmp_path / "faults"
    write_injector(faults)
    found = run(model, model, tmp_path / "kv", FAULTS=str(faults), PLUGIN=str(faults))["hangs"]
    assert found["hung"]["tokens"] == found["first"]["tokens"]
    assert found["waited"] > 1.5, "a read from the disk hung until the load's deadline"
    assert found["took"] < 15
