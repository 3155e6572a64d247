"""A vLLM that names no connector, with one variable set: kvcore serves it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcore.harness.compare import SMALL, answers, counted, settle_and_empty
from kvcore.harness.engine_process import EngineProcess
from kvcore.harness.prompts import windows

pytestmark = [pytest.mark.engine, pytest.mark.exhaustive]

ENVIRONMENTS = Path(__file__).parents[2] / ".venvs"


@pytest.mark.parametrize("version", ["0.32", "0.30", "0.33"])
@pytest.mark.parametrize("on", [True, False])
def test_a_start_without_an_argument(model: Path, tmp_path: Path, version: str, on: bool) -> None:
    python = ENVIRONMENTS / f"vllm-{version}" / "bin" / "python"
    if version != "0.32" and not python.exists():
        pytest.skip(f"make env-vllm-{version}")
    settings = tmp_path / "kvcore.toml"
    word = "true" if on else "false"
    settings.write_text(f'[vllm]\nswitch_on = {word}\n[host]\ncapacity = "64MiB"\n')
    [document] = windows(model, 1, 400, 400, seed=8)
    with EngineProcess(
        model,
        kvcore=None,
        env={"KVCORE_CONFIG": str(settings)},
        python=None if version == "0.32" else python,
        **SMALL,
    ) as process:
        [cold] = answers(process, [document])
        settle_and_empty(process)
        [warm] = answers(process, [document])
        assert warm.token_ids == cold.token_ids
        assert warm.cached_tokens == (399 if on else 0), "all but the last token"
        assert counted(process, "kvcore_hits_total") == (1 if on else 0)
