"""Every ingredient of an identity counts, and configurations keep what can change KV."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvcore.model.ingredients import (
    OTHER,
    MediaIdentity,
    ModelIdentity,
    ingredients,
    kv_fields,
    split_config,
)

MODEL = ModelIdentity(
    config={"text": {"hidden_size": 64, "eps": 1e-5}},
    weights=b"w",
    load=None,
    code=None,
    compute_dtype="torch.bfloat16",
    quantization=None,
    kv_dtype="torch.bfloat16",
    kv_scales=None,
    rope=None,
    windows=None,
    attention=None,
    lora=None,
    draft=None,
    states=None,
    own=None,
    alone=(),
)
MEDIA = MediaIdentity(config={}, encoder=None)


@pytest.mark.parametrize("name", [each.name for each in ingredients(ModelIdentity)])
def test_each_ingredient_of_a_model_counts(name: str) -> None:
    other: Any = {"text": {}} if name == "config" else b"o" if name == "weights" else "other"
    assert replace(MODEL, **{name: other}).fingerprint != MODEL.fingerprint


@pytest.mark.parametrize("name", [each.name for each in ingredients(MediaIdentity)])
def test_each_ingredient_of_media_counts(name: str) -> None:
    other: Any = {"vision_config": {}} if name == "config" else "other"
    assert replace(MEDIA, **{name: other}).medium(b"picture") != MEDIA.medium(b"picture")
    assert MEDIA.medium(b"picture") != MEDIA.medium(b"another")


def test_known_answer() -> None:
    """If this fails, every block stored so far is lost to users: say so in the changelog."""
    assert MODEL.fingerprint.hex() == "934f1353b476fc65eacd165d1b036b71"


def test_why_an_engine_is_alone_is_no_ingredient() -> None:
    assert replace(MODEL, alone=("dummy weights",)).fingerprint == MODEL.fingerprint


def test_every_ingredient_is_told_for_every_engine() -> None:
    told = [*ingredients(ModelIdentity), *ingredients(MediaIdentity), *OTHER]
    assert len({each.name for each in told}) == len(told) - 1  # both records have a config
    assert all(all(each) for each in told)


def test_the_page_is_current() -> None:
    tool = importlib.import_module("tools.identity")
    page = (Path(__file__).parents[3] / "docs" / "identity.md").read_text()
    assert tool.page() == page, "python -m tools.identity > docs/identity.md"


# -- configurations -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": 65},
        {"rope_scaling": {"factor": 4.0}},
        {"a_field_of_next_year": 1},
        {"top_k": 2},
        {"router": {"top_k": 2}},
        {"ffn_config": {"temperature": 0.5}},
    ],
)
def test_what_can_change_kv_counts(change: dict[str, Any]) -> None:
    base = {"hidden_size": 64, "rope_scaling": {"factor": 8.0}}
    assert kv_fields(base | change) != kv_fields(base)


def test_what_cannot_is_left_out() -> None:
    noise = {"transformers_version": "9", "use_cache": False, "new_default": None}
    assert kv_fields({"hidden_size": 64} | noise) == {"hidden_size": 64}


def test_parts_for_media_are_apart_from_those_for_text() -> None:
    text = {"hidden_size": 64, "transformers_version": "9"}
    whole = {
        "text_config": {"hidden_size": 64},
        "vision_config": {"patch_size": 14},
        "quantization_config": {"bits": 4},
        "use_cache": True,
    }
    assert split_config(whole, text) == (
        {"text": {"hidden_size": 64}, "outside": {"quantization_config": {"bits": 4}}},
        {"vision_config": {"patch_size": 14}},
    )
    assert split_config(text, text) == ({"text": {"hidden_size": 64}}, {})
