"""The rig's configurations are what they say: a step is scheduled before the output of the last one
is read, and Model Runner V2 runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcore.harness.compare import small_engine as engine
from kvcore.harness.prompts import windows
from kvcore_vllm.testing import rig

pytestmark = pytest.mark.engine

HOST = {
    "block": {"tokens": 16},
    "host": {"capacity": "64MiB"},
    "vllm": {"min_load_tokens": 1},
}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_steps_overlap_only_with_asynchronous_scheduling(
    model: Path, tmp_path: Path, asynchronous: bool
) -> None:
    prompts = windows(model, 3, 60, 200, seed=8)
    steps = tmp_path / "steps"
    with engine(model, HOST, asynchronous=asynchronous, steps=str(steps)) as process:
        assert process.wait_ready()["runner"].startswith("vllm.v1.worker.cpu_model_runner.")
        cold = process.generate(prompts, max_tokens=8)
        process.reset_prefix_cache()
        warm = process.generate(prompts, max_tokens=8)
    assert [a.token_ids for a in warm] == [a.token_ids for a in cold]
    assert all(answer.reused_tokens for answer in warm)
    seen = rig.overlap(steps)
    assert seen.steps >= 2 * 8
    assert seen.ahead >= seen.steps // 2 if asynchronous else seen.ahead == 0, seen


@pytest.mark.exhaustive
def test_model_runner_v2_answers_as_v1_does_and_loads(model: Path) -> None:
    prompts = windows(model, 1, 60, 100, seed=9)
    with engine(model, None) as process:
        right = process.generate(prompts, max_tokens=4)
    with engine(model, HOST, env=rig.V2, asynchronous=True) as process:
        assert process.wait_ready()["runner"].startswith("vllm.v1.worker.cpu.model_runner.")
        cold = process.generate(prompts, max_tokens=4)
        process.reset_prefix_cache()
        warm = process.generate(prompts, max_tokens=4)
    assert [a.token_ids for a in cold] == [a.token_ids for a in right]
    assert [a.token_ids for a in warm] == [a.token_ids for a in right]
    assert all(answer.reused_tokens >= 48 for answer in warm)


@pytest.mark.exhaustive
def test_a_graph_in_pieces_answers_as_eager_layers_do_and_loads(model: Path) -> None:
    prompts = windows(model, 2, 60, 100, seed=10)
    with engine(model, None) as process:
        assert process.wait_ready()["pieces"] == 0
        right = process.generate(prompts, max_tokens=4)
    with engine(model, HOST, **rig.PIECEWISE) as process:
        assert process.wait_ready()["pieces"] >= 2 * 4  # the attention of each layer is a piece
        cold = process.generate(prompts, max_tokens=4)
        process.reset_prefix_cache()
        warm = process.generate(prompts, max_tokens=4)
    assert [a.token_ids for a in cold] == [a.token_ids for a in right]
    assert [a.token_ids for a in warm] == [a.token_ids for a in right]
    assert all(answer.reused_tokens for answer in warm)
