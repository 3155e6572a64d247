"""What the demo of fusion says about each way of answering."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("rich")

from demo.rag import FULL, Answer, divergence, summary, table

LIKELIEST = {7: math.log(0.75), 8: math.log(0.25)}
ONE = Answer(FULL, 0, 2.0, [7, 1, 2, 3], 0, 1.0, True, LIKELIEST)
TWO = replace(ONE, prompt=1, found=False)


def logprobs(*probabilities: float) -> dict[int, float]:
    return {token: math.log(each) for token, each in enumerate(probabilities)}


def test_a_way_is_compared_with_the_full_prefill_of_the_same_prompt() -> None:
    other = {7: math.log(0.25), 8: math.log(0.75)}
    blends = [
        replace(ONE, way="blend", ttft_s=0.5, token_ids=[7, 1, 9, 3], share=0.2, likeliest=other),
        replace(TWO, way="blend", ttft_s=0.5, share=0.4),
    ]
    full, blend = summary([ONE, TWO, *blends])
    assert (full.divergence, full.agreement, full.speed_up) == (0, 1, 1)
    assert (blend.agreement, blend.speed_up) == ((0.5 + 1) / 2, 4)
    assert blend.share == pytest.approx(0.3)
    assert blend.divergence == pytest.approx(0.5 * math.log(3) / 2)  # of one prompt in two
    assert table("title", [full, blend]).row_count == 2


def test_facts_count_only_where_the_full_prefill_finds_them() -> None:
    lucky = [replace(each, way="blend", found=not each.found) for each in (ONE, TWO)]
    full, blend = summary([ONE, TWO, *lucky])
    assert (full.found, full.known) == (1, 1)
    assert (blend.found, blend.known) == (0, 1)


def test_a_model_that_finds_nothing_is_told_no_share_of_it() -> None:
    [row] = summary([replace(ONE, found=False)])
    assert row.known == 0
    [*_, facts] = table("title", [row]).columns
    assert list(facts.cells) == ["-"]


def test_tokens_that_one_side_lacks_count_as_one() -> None:
    right, got = logprobs(0.5, 0.25, 0.125), logprobs(0.25, 0.25)
    expected = 0.5 * math.log(0.5 / 0.25) + 0.25 * math.log(0.25 / 0.5)
    assert divergence(got, right) == pytest.approx(expected)


WEIGHTS = st.lists(st.floats(1e-4, 1.0), min_size=2, max_size=6)


@given(WEIGHTS, WEIGHTS, st.integers(1, 6), st.integers(1, 6))
def test_it_is_no_more_than_the_whole_distributions_divergence(
    one: list[float], other: list[float], kept: int, others_kept: int
) -> None:
    size = min(len(one), len(other))
    p, q = ([w / sum(ws[:size]) for w in ws[:size]] for ws in (one, other))
    whole = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    found = divergence(logprobs(*q[:others_kept]), logprobs(*p[:kept]))
    assert 0 <= found <= whole + 1e-6
    assert divergence(logprobs(*p[:kept]), logprobs(*p[:kept])) == 0
