"""Tests of prompts: every token is one that the model has."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvcore.harness import prompts


def folder(path: Path, config: dict[str, object]) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_tokens_are_of_the_models_vocabulary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tokenizer(text: str) -> dict[str, list[int]]:
        return {"input_ids": [0, 5, 99, 100, 198, 199, 4000]}

    made = SimpleNamespace(from_pretrained=lambda model: tokenizer)
    monkeypatch.setattr("transformers.AutoTokenizer", made)
    wide, small = {"vocab_size": 5000}, {"text_config": {"vocab_size": 100}}
    assert prompts.tokens(folder(tmp_path / "wide", wide))[:7] == [0, 5, 99, 100, 198, 199, 4000]
    found = prompts.tokens(folder(tmp_path / "small", small))
    assert found[:7] == [0, 5, 99, 2, 1, 2, 41]
    assert max(found) < 100


def test_a_text_is_tokenized_once_for_all_models_with_its_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []

    def from_pretrained(model: Path) -> Callable[[str], dict[str, list[int]]]:
        asked.append(model)
        return lambda text: {"input_ids": [len(asked), len(text) % 90]}

    made = SimpleNamespace(from_pretrained=from_pretrained)
    monkeypatch.setattr("transformers.AutoTokenizer", made)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    models = [folder(tmp_path / name, {"vocab_size": 100}) for name in ("one", "two", "other")]
    for model, text in zip(models, ("a", "a", "b"), strict=True):
        (model / "tokenizer.json").write_text(text)
    first, same, other = map(prompts.tokens, models)
    assert asked == [models[0], models[2]]
    assert first == same
    assert (first[0], other[0]) == (1, 2)
    assert first[1::2] == other[1::2]
