"""The host's part of a blend in Llama-3-8B's shape: what it asks of a GPU, without one.

In a process of its own: in this one the kernels are interpreted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

LAUNCHES = 11
"""Most launches of kvcore's own in a layer, the engine's write of KV included."""
LAYERS = 32


@pytest.fixture(scope="module", params=["runs", "key+value"])
def asked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    path: Path = tmp_path_factory.mktemp("blend") / "counts.json"
    command = [sys.executable, "-m", "benchmarks.blend_host", "--json", str(path)]
    command += ["--selector", request.param, "--tokens", "2048"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert path.exists(), done.stdout + done.stderr
    return json.loads(path.read_text())


def test_a_layer_waits_for_nothing_and_sends_nothing(asked: Any) -> None:
    layers = {name: one for name, one in asked["sections"].items() if name != "before"}
    assert len([name for name in layers if name.startswith("layer")]) == LAYERS
    for name, one in layers.items():
        assert one["waits"] == {}, name
        assert one["uploads"] == 0, name


def test_a_layer_launches_little(asked: Any) -> None:
    for layer in range(LAYERS):
        launches = asked["sections"][f"layer {layer}"]["launches"]
        assert sum(launches.values()) <= LAUNCHES, launches
        assert launches["merge_kernel"] == 1


def test_before_the_layers_all_tables_are_sent_without_a_wait(asked: Any) -> None:
    before = asked["sections"]["before"]
    assert before["waits"] == {}
    assert 1 <= before["uploads"] <= 6


def test_no_blend_compiles_what_was_not_prepared(asked: Any) -> None:
    """Prompts of several lengths, after `FusionOps.prepare`."""
    assert asked["builds"] == []
