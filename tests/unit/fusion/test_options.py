"""What a request may say of fusion, and what it may not."""

from __future__ import annotations

from typing import Any

import pytest

from kvcore.errors import ConfigError
from kvcore.fusion.options import FusionOptions, fusion_options


@pytest.mark.parametrize("given", [None, True, {}, {"report": True}, "yes", []])
def test_nothing_said_is_the_default(given: Any) -> None:
    assert fusion_options(given, 10) == FusionOptions()


def test_what_is_said_is_taken() -> None:
    said = {"enabled": False, "ratio": 0, "chunks": [[0, 4], [4, 9]]}
    options = fusion_options({"fusion": said}, 9)
    assert options == FusionOptions(False, 0.0, ((0, 4), (4, 9)))
    assert fusion_options({"fusion": {"chunks": []}}, 9).chunks == ()


@pytest.mark.parametrize(
    "said",
    [
        "x" * 1_000_000,
        {"x" * 1_000_000: 1},
        {"enabled": ["x" * 1_000_000] * 9},
        {"chunks": [[0, 10**4000]]},
        [[["x" * 999] * 999] * 999],
    ],
)
def test_an_error_repeats_little_of_what_was_given(said: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        fusion_options({"fusion": said}, 10)
    assert len(str(refused.value)) < 600


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"ratio": 1.01}, "ratio is 1.01"),
        ({"ratio": -0.1}, "ratio is -0.1"),
        ({"ratio": float("nan")}, "ratio is nan"),
        ({"ratio": "0.1"}, "ratio"),
        ({"enabled": "no"}, "enabled"),
        ({"share": 0.1}, "share"),
        ({"chunks": [[0, 4], [3, 9]]}, r"\[3, 9\)"),
        ({"chunks": [[4, 4]]}, r"\[4, 4\)"),
        ({"chunks": [[0, 11]]}, r"\[0, 11\) in a prompt of 10"),
        ({"chunks": [[-1, 3]]}, r"\[-1, 3\)"),
        ({"chunks": [[1]]}, "chunks"),
        ({"chunks": 7}, "chunks"),
        (True, "True"),
    ],
)
def test_what_makes_no_sense_is_named(said: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        fusion_options({"fusion": said}, 10)
