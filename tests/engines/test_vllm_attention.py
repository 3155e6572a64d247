"""Third parties' hooks around the attention of a real vLLM's layers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvcore.harness.compare import answers, assert_same_answers, settle_and_empty
from kvcore.harness.compare import small_engine as engine
from kvcore.harness.engine_process import EngineProcess, Generation
from kvcore.harness.models import tiny_model
from kvcore.harness.prompts import windows
from kvcore_vllm.testing import rig

pytestmark = pytest.mark.engine

WATCHING = Path(__file__).with_name("watching")
CONFIG: dict[str, Any] = {"host": {"capacity": "64MiB"}}


def environment(folder: Path, *hooks: str) -> dict[str, str]:
    (folder / "kvcore_wanted.py").write_text(f"HOOKS = {hooks}\n")
    path = [str(WATCHING), str(folder), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(path)}


@pytest.fixture(scope="module")
def model() -> Path:
    return tiny_model("llama", layers=3)


@pytest.fixture(scope="module")
def asked(model: Path) -> list[list[int]]:
    return windows(model, 6, 30, 90, seed=5)


@pytest.fixture(scope="module")
def plain(model: Path, asked: list[list[int]]) -> list[Generation]:
    with engine(model, None, enable_prefix_caching=False) as process:
        return answers(process, asked, batch=3)


def answered(process: EngineProcess) -> list[int]:
    """Lengths of the prompts that a hook computed the attention of."""
    lines = process.log.read_text().splitlines()
    return sorted(int(x.rsplit("rows=", 1)[1]) for x in lines if "answered request=" in x)


@pytest.mark.parametrize(
    "v2",
    [
        pytest.param(False, id="V1"),
        # In Triton's interpreter, and kvcore's part is the same.
        pytest.param(True, id="V2", marks=pytest.mark.exhaustive),
    ],
)
def test_a_hook_answers_in_the_engines_place_and_one_that_fails_is_left_out(
    model: Path, asked: list[list[int]], plain: list[Generation], tmp_path: Path, v2: bool
) -> None:
    """Tokens stay, so q, k, v, positions and rows are what they are said to be."""
    env = environment(tmp_path, "answer", "fail") | (dict(rig.V2) if v2 else {})
    with engine(model, CONFIG, env=env) as process:
        runner = "vllm.v1.worker.cpu.model_runner." if v2 else "vllm.v1.worker.cpu_model_runner."
        assert process.wait_ready()["runner"].startswith(runner)
        alone = answers(process, asked[:3])
        told = answered(process)
        together = answers(process, asked[3:], batch=3)
        log = process.log.read_text()
    assert_same_answers([*alone, *together], plain)
    assert told == sorted(map(len, asked[:3]))
    assert log.count("'fail' failed at layer") == 1


@pytest.mark.parametrize(
    "compiled",
    [
        pytest.param(rig.PIECEWISE, id="in pieces"),
        pytest.param({"enforce_eager": False}, id="whole", marks=pytest.mark.exhaustive),
    ],
)
def test_a_hook_changes_what_attention_gives_in_a_compiled_model(
    model: Path,
    asked: list[list[int]],
    plain: list[Generation],
    tmp_path: Path,
    compiled: Mapping[str, Any],
) -> None:
    """It spoils what decodes give: the first token, of the prompt's rows, stays. What was stored
    under it is not found by an engine without."""
    wanted = environment(tmp_path, "answer", "silence")
    config = {**CONFIG, "disk": {"path": str(tmp_path / "kv"), "capacity": "64MiB"}}
    with engine(model, config, env=wanted, **compiled) as process:
        assert (process.wait_ready()["pieces"] > 0) == (compiled is rig.PIECEWISE)
        spoilt = answers(process, asked)
        assert answered(process) == sorted(map(len, asked))
        settle_and_empty(process)
        process.reset_prefix_cache()
        assert sum(a.reused_tokens for a in answers(process, asked)) > 0
    with engine(model, config) as process:
        got = answers(process, asked)
    assert_same_answers(got, plain)
    assert sum(a.reused_tokens for a in got) == 0
    assert [a.token_ids[0] for a in spoilt] == [a.token_ids[0] for a in plain]
    assert all(a.token_ids != b.token_ids for a, b in zip(spoilt, plain, strict=True))
