"""`kvcore bench`: what it asks of engines, in which order, and what it makes of the answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvcore.cli import bench
from kvcore.cli.app import app
from kvcore.errors import ConfigError
from kvcore.harness.engine_process import Generation


class FakeEngine:
    """An engine that caches whole prompts, over a store that outlives it where kvcore is given."""

    def __init__(self, kvcore: Mapping[str, Any] | None, store: set[str], told: list[str]) -> None:
        self.kvcore = kvcore
        self.own: set[str] = set()
        self.store = store
        self.told = told
        self.told.append("start" if kvcore is None else "start with kvcore")

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.told.append("end")

    def generate(self, prompts: Sequence[str], max_tokens: int) -> list[Generation]:
        self.told.append(f"ask {len(prompts)}")
        return [self._answer(prompt, max_tokens) for prompt in prompts]

    def _answer(self, prompt: str, max_tokens: int) -> Generation:
        stored = self.kvcore is not None and prompt in self.store and prompt not in self.own
        cached = 90 if stored or prompt in self.own else 0
        self.own.add(prompt)
        if self.kvcore is not None:
            self.store.add(prompt)
        seconds = 0.1 if cached else 1.0
        told = {"reused_tokens": 90, "tiers": {"host": 90}} if stored else {}
        return Generation(
            "r", [1] * max_tokens, "", 100, cached, seconds, seconds, "length", kvcore=told
        )

    def reset_prefix_cache(self, timeout_s: float = 0) -> None:
        self.told.append("reset")
        self.own.clear()

    def settle(self, timeout_s: float) -> None:
        self.told.append("settle")


def run(restart: bool) -> tuple[list[bench.Pass], list[str]]:
    told: list[str] = []
    store: set[str] = set()
    start: Any = lambda kvcore: FakeEngine(kvcore, store, told)  # noqa: E731
    return list(bench.passes(start, {}, ["a", "b", "c"], 4, restart=restart)), told


def test_each_contender_is_asked_in_turn_with_the_engines_own_cache_out_of_the_way() -> None:
    done, told = run(restart=True)
    assert [each.contender for each in done] == [
        "cold", "own cache", "kvcore miss", "kvcore hit", "kvcore restarted"
    ]  # fmt: skip
    alone = ["ask 1"] * 3
    assert told == [
        "start", "ask 1", *alone, *alone, "ask 3", "reset", "ask 3", "end",
        "start with kvcore", "ask 1", *alone, "settle", "reset", *alone, "settle", "reset",
        "ask 3", "end", "start with kvcore", "ask 1", *alone, "end",
    ]  # fmt: skip
    shares = [sum(answer.cached_tokens for answer in each.answers) for each in done]
    assert shares == [0, 270, 0, 270, 270]
    assert "kvcore restarted" not in [each.contender for each in run(restart=False)[0]]


def test_rows_are_ratios_to_the_cold_engine(tmp_path: Path) -> None:
    done, _ = run(restart=False)
    report = bench.report("toy", done, {})
    cold, own, miss, hit = report.rows
    assert (cold["ttft_to_cold"], cold["tokens_s_to_cold"]) == (1.0, 1.0)
    assert hit["ttft_s"] == 0.1
    assert (own["ttft_to_cold"], miss["ttft_to_cold"], hit["ttft_to_cold"]) == (0.1, 1.0, 0.1)
    assert (miss["tokens_s"], miss["found_in"], hit["found_in"]) == (None, "", "host 270")
    assert (hit["cached_share"], hit["answers_differ"]) == (0.9, 0)
    wrong = done[3]._replace(answers=list(run(restart=False)[0][3].answers))
    wrong.answers[0].token_ids[0] = 7
    differ = bench.report("toy", [*done[:3], wrong], {}).rows[3]["answers_differ"]
    assert differ == 1
    written = json.loads(report.finish(tmp_path).read_text())
    assert written["rows"][3]["contender"] == "kvcore hit"


def test_prompts_of_a_file(tmp_path: Path) -> None:
    text, lines = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    text.write_text("one\n\n  two \nthree\n")
    lines.write_text('{"prompt": "a\\nb", "other": 1}\n')
    assert bench.read_prompts(text, 2) == ["one", "two"]
    assert bench.read_prompts(lines, 9) == ["a\nb"]
    for wrong in ("nonsense", "[]", '{"prompt": 3}', '{"prompt": ""}', "[" * 5000):
        lines.write_text('{"prompt": "fine"}\n' + wrong)
        with pytest.raises(ConfigError, match="line 2"):
            bench.read_prompts(lines, 9)
    text.write_text("\n")
    with pytest.raises(ConfigError, match="no prompt"):
        bench.read_prompts(text, 9)
    for missing in (tmp_path / "none", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read"):
            bench.read_prompts(missing, 9)


def test_made_up_prompts_have_no_beginning_in_common() -> None:
    made = bench.synthetic(20, 50)
    assert len({prompt.split()[0] for prompt in made}) == 20
    assert {len(prompt.split()) for prompt in made} == {51}
    assert made == bench.synthetic(20, 50)


@pytest.mark.slow
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    given: list[Any] = []

    def starter(*args: Any) -> Any:
        given.extend(args)
        return lambda kvcore: FakeEngine(kvcore, set(), told)

    monkeypatch.setattr(bench, "starter", starter)
    runner = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})
    command = ["bench", "MODEL", "--engine", "toy", "--count", "2", "--out", str(tmp_path)]
    result = runner.invoke(app, [*command, "--engine-arg", "max_model_len=4096"])
    assert result.exit_code == 0, result.output
    assert given[:2] == ["MODEL", "toy"]
    assert given[4] == {"max_model_len": 4096}
    assert "kvcore hit" in result.stdout
    assert json.loads((tmp_path / "bench.json").read_text())["notes"]["prompts"] == 2
    assert "kvcore restarted" not in result.stdout, "there is no tier that outlives the engine"
    wrong = runner.invoke(app, [*command, "--engine-arg", "nothing"])
    assert wrong.exit_code == 2
    assert "NAME=VALUE" in wrong.stderr
