"""What the driver of SGLang adds to an engine's arguments."""

from __future__ import annotations

import builtins
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from kvcore.harness.driver import KV_ON_A_CPU

TOKEN_NBYTES = 3 * 2 * 2 * 64 * 4
"""Bytes of a token's KV in the model below: layers x K and V x heads x dimension x 4 of float32."""


@pytest.fixture
def bounded(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    monkeypatch.setattr(builtins, "__import__", builtins.__import__)  # the driver replaces it
    made = importlib.import_module("kvcore_sglang.testing.driver").bounded
    assert callable(made)
    return made  # type: ignore[no-any-return]


@pytest.fixture
def model(tmp_path: Path) -> str:
    config = {
        "model_type": "llama", "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "hidden_size": 256,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def test_a_pool_of_no_size_is_bounded(model: str, bounded: Callable[..., dict[str, Any]]) -> None:
    made = bounded(model, {"dtype": "float32", "page_size": 16})
    assert made.pop("max_total_tokens") == KV_ON_A_CPU // TOKEN_NBYTES
    assert made == {"dtype": "float32", "page_size": 16}
    assert bounded(model, {})["max_total_tokens"] == KV_ON_A_CPU // (TOKEN_NBYTES // 2)


@pytest.mark.parametrize("given", [{"max_total_tokens": 512}, {"mem_fraction_static": 0.5}])
def test_a_size_that_was_given_stays(
    model: str, given: dict[str, Any], bounded: Callable[..., dict[str, Any]]
) -> None:
    assert bounded(model, given) == given
