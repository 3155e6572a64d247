"""Agents on two vLLM behind a server, while its parts break: the short form of `make soak`."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from kvcore_devtools.servers import need_client
from kvcore_devtools.soak_agents import TURNS, Outcome, write_script


def test_agents_ask_the_same_each_time_and_go_on_from_what_they_said() -> None:
    script = write_script(lambda prompt: [sum(prompt) % 500] * 6, 3)
    assert script == write_script(lambda prompt: [sum(prompt) % 500] * 6, 3)
    for asks in script:
        assert len(asks) == TURNS + 2, "its own turns, and two of its sub-agent"
        assert asks[0].prompt[:200] == script[0][0].prompt[:200]
        for before, after in itertools.pairwise(asks[:4]):
            whole = [*before.prompt, *before.answer]
            assert after.prompt[: len(whole)] == whole
        whole = [*asks[1].prompt, *asks[1].answer]
        assert asks[4].prompt[: len(whole)] == whole, "the agent goes on where it sent it out"


def test_memory_is_compared_after_the_first_epochs() -> None:
    flat, growing = [90 << 20] * 3 + [100 << 20] * 17, [(100 + 20 * n) << 20 for n in range(20)]
    assert Outcome(memory=flat).grown() < 1.0
    assert Outcome(memory=growing).grown() > 1.3
    assert Outcome(memory=growing[:6]).grown() == 1.0, "too few to say"


@pytest.mark.engine
@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", ["llama", "lfm2"])
def test_whatever_breaks_the_answers_are_those_of_vllm_alone(arch: str, tmp_path: Path) -> None:
    need_client("redis")
    command = [sys.executable, "-m", "kvcore_devtools.soak_agents", "--minutes", "1.5"]
    done = subprocess.run(
        [*command, "--arch", arch, "--folder", tmp_path],
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    assert re.search(r"[1-9]\d+ answers, all right", done.stdout)
    assert list(tmp_path.iterdir()) == []
