"""Tests of prompts: every token is one that the model has."""

import json
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
