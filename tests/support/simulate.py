"""Prompts, traces and runs of the simulator."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from kvcore.cli.app import app
from kvcore.cli.simulate.run import Outcome, Scenario, Way, simulate
from kvcore.cli.simulate.trace import TraceRequest, _keys

BLOCK = 16
ROOMY = Scenario(host_blocks=4096, block_tokens=BLOCK, block_bytes=BLOCK * 1000, way=Way.ALWAYS)
FAR_APART = 1000.0
"""Seconds: whatever one request started has ended when the next comes."""


def line(at: float, ids: Sequence[int], tokens: int | None = None, **other: Any) -> str:
    told = {"timestamp": at * 1e3, "input_length": tokens or len(ids) * BLOCK, "output_length": 1}
    return json.dumps({**told, "hash_ids": list(ids), **other}) + "\n"


def write(path: Path, lines: Sequence[str]) -> Path:
    path.write_text("".join(lines))
    return path


def conversations(seed: int, count: int, longest: int = 12) -> list[list[int]]:
    """Block ids of prompts, many of which begin as an earlier one does."""
    picks = random.Random(seed)
    prompts: list[list[int]] = []
    for n in range(count):
        start = picks.choice(prompts)[: picks.randint(0, longest)] if prompts else []
        own = [1000 * (n + 1) + i for i in range(picks.randint(1, longest - len(start) + 1))]
        prompts.append(start + own)
    return prompts


def replay(scenario: Scenario, prompts: Sequence[Sequence[int]], gap: float = 1000.0) -> Outcome:
    return simulate(
        scenario,
        (
            TraceRequest(n * gap, len(ids) * BLOCK, 1, _keys(list(ids)))
            for n, ids in enumerate(prompts)
        ),
    )


def run(*args: str, code: int = 0) -> str:
    result = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"}).invoke(app, ["simulate", *args])
    assert result.exit_code == code, result.output
    return result.output
