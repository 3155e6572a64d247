"""The blends of `make gpu` in vLLM: what engines are asked, and what is made of the answers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tools.gpu.parts import _vllm_blends
from tools.gpu.parts._vllm_blends import GAP, RATIO, Blends, mixed
from tools.gpu.parts._vllm_times import REHEARSAL
from tools.gpu.record import Record, read


class FakeEngine:
    """Answers in a given time. It has the chunks that `warm` gave it."""

    def __init__(self, args: dict[str, Any], ttft: float, *, blends: bool) -> None:
        self.args, self.blends, self._ttft = args, blends, ttft
        self.held: set[tuple[int, ...]] = set()
        self.asked: list[list[int]] = []

    def generate(self, prompts: list[list[int]], count: int, fusion: dict[str, Any]) -> list[Any]:
        [prompt] = prompts
        assert fusion["ratio"] == RATIO
        assert all(tuple(prompt[a:b]) in self.held for a, b in fusion["chunks"])
        self.asked.append(prompt)
        first = len(self.asked) == 1  # not counted: something may be compiled
        found = {"blended_tokens": 7} if self.blends else {"declined": "too short"}
        return [SimpleNamespace(ttft_s=self._ttft + 100 * first, kvcore={"fusion": found})]


class FakeSetup:
    """Makes an engine a call; the first one takes 3 s for an answer, the second 2 s."""

    def __init__(self, scratch: Path, *, blends: bool = True) -> None:
        self.gpu, self.scratch, self.engines = False, scratch, list[FakeEngine]()
        self._blends = blends

    @contextmanager
    def engine(
        self, model: Path, kvcore: dict[str, Any], cache: str, **args: Any
    ) -> Iterator[FakeEngine]:
        assert (model / "config.json").is_file()
        assert kvcore["fusion"]["enabled"]
        made = FakeEngine(args, 3.0 - len(self.engines), blends=self._blends)
        self.engines.append(made)
        yield made


@pytest.fixture(autouse=True)
def warmed(monkeypatch: pytest.MonkeyPatch) -> None:
    def warm(process: FakeEngine, chunks: list[list[int]]) -> None:
        process.held.update(map(tuple, chunks))

    monkeypatch.setattr(_vllm_blends, "warm", warm)


def test_a_blend_is_timed_with_both_choices_of_operators(tmp_path: Path) -> None:
    setup: Any = FakeSetup(tmp_path)
    Blends(setup, REHEARSAL).take(Record(tmp_path / "lines.jsonl"))
    chosen, own, ratio = read(tmp_path / "lines.jsonl")
    assert (chosen["value"], own["value"]) == (3000, 2000)
    assert ratio["value"] == pytest.approx(1.5)
    assert ratio["what"] == own["what"] != chosen["what"]
    plain, kernels = setup.engines
    assert "compilation_config" not in plain.args
    assert "+rotary_embedding" in kernels.args["compilation_config"]["custom_ops"]
    assert plain.asked == kernels.asked
    assert len(plain.asked) == REHEARSAL.prompts + 1
    assert {len(prompt) for prompt in plain.asked} == {REHEARSAL.lengths[-1]}
    assert len({tuple(prompt[:GAP]) for prompt in plain.asked}) == len(plain.asked)


def test_a_prompt_that_is_not_blended_gives_no_time(tmp_path: Path) -> None:
    setup: Any = FakeSetup(tmp_path, blends=False)
    with pytest.raises(RuntimeError, match="was not blended"):
        Blends(setup, REHEARSAL).take(Record(tmp_path / "lines.jsonl"))
    assert not (tmp_path / "lines.jsonl").exists() or not read(tmp_path / "lines.jsonl")


def test_a_prompt_has_every_chunk_once_and_a_question() -> None:
    chunks = [[i] * 16 for i in range(1, 4)]
    prompt = mixed(100, 80, 1, chunks)
    assert len(prompt.tokens) == 80
    assert sorted(prompt.tokens[a:b] for a, b in prompt.spans) == chunks
    assert prompt.spans[-1][1] < 80
