"""What the two-host demo calls wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("rich")

from demo.cluster import COLD, FAR, LOCAL, Answer, problems, table

COLD_ONE = Answer(COLD, 0, 100, 1.0, {"host": 16}, [1, 2], "text")
GOOD = [
    COLD_ONE,
    replace(COLD_ONE, phase=FAR, ttft_s=0.2, tiers={"host": 16, "shared": 80}),
    replace(COLD_ONE, phase=LOCAL, ttft_s=0.1, tiers={"host": 96}),
]


def test_nothing_is_wrong_with_a_good_run() -> None:
    assert problems(GOOD) == []
    assert table("title", GOOD).row_count == 3


@pytest.mark.parametrize("place", [1, 2])
def test_other_tokens_are_wrong(place: int) -> None:
    answers = list(GOOD)
    answers[place] = replace(GOOD[place], token_ids=[1, 3])
    [line] = problems(answers)
    assert "[1, 3], but host a says [1, 2]" in line


@pytest.mark.parametrize(
    ("place", "tiers"),
    [(0, {"shared": 96}), (1, {}), (1, {"host": 96}), (2, {"shared": 80, "host": 16}), (2, {})],
)
def test_kv_from_elsewhere_is_wrong(place: int, tiers: dict[str, int]) -> None:
    answers = list(GOOD)
    answers[place] = replace(GOOD[place], tiers=tiers)
    [line] = problems(answers)
    assert "its KV came from" in line
