"""Scores, budgets and the choice: against naive twins, and at their edges."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.controls import ChunkHeads, HeadsToo, RandomRows
from kvcore.errors import ConfigError
from kvcore.fusion.select import (
    Budget,
    Candidates,
    KeyDeviation,
    KeyValueDeviation,
    QuestionAttention,
    QuestionDeviation,
    Ratio,
    RelativeDeviation,
    Selector,
    Smoothed,
    Threshold,
    ValueDeviation,
    attention_mass,
    deviation,
    keep_top,
    narrow,
)

SELECTORS: list[Selector] = [
    KeyDeviation(),
    ValueDeviation(),
    KeyValueDeviation(),
    RelativeDeviation(),
    ChunkHeads(),
    RandomRows(),
    QuestionAttention(),
    QuestionDeviation(),
    HeadsToo(QuestionDeviation()),
    Smoothed(KeyDeviation()),
]
LAYERS = 10


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def candidates(rows: int = 12, heads: int = 2, layer: int = 1, seed: int = 0) -> Candidates:
    keys, values, cached_keys, cached_values = drawn(4, rows, heads, 8, seed=seed)
    return Candidates(
        layer=layer,
        rows=torch.arange(rows) * 3 + 5,
        keys=keys,
        values=values,
        cached_keys=cached_keys,
        cached_values=cached_values,
        offsets=torch.arange(rows) % 5,
        question=drawn(rows, seed=seed + 1).abs(),
    )


def never() -> Tensor:
    raise AssertionError("a ratio does not look at scores")


# --- scores -----------------------------------------------------------------------------------


def naive_deviation(fresh: Tensor, cached: Tensor) -> list[float]:
    return [
        sum((float(a) - float(b)) ** 2 for a, b in zip(x.flatten(), y.flatten(), strict=True))
        for x, y in zip(fresh, cached, strict=True)
    ]


def test_deviation_is_the_sum_of_squares_over_heads_and_dims() -> None:
    fresh, cached = drawn(2, 5, 3, 4)
    expected = torch.tensor(naive_deviation(fresh, cached))
    assert torch.allclose(deviation(fresh, cached), expected, rtol=1e-5)


def test_deviation_of_half_precision_is_taken_in_float32() -> None:
    fresh = torch.full((1, 1, 4), 300.0, dtype=torch.float16)  # 300^2 overflows float16
    assert deviation(fresh, torch.zeros_like(fresh)).tolist() == [4 * 300.0**2]


def test_attention_mass_takes_the_most_interested_row_and_all_heads() -> None:
    probabilities = torch.tensor([[[0.1, 0.9], [0.6, 0.4]], [[0.5, 0.5], [0.2, 0.8]]])
    assert torch.allclose(attention_mass(probabilities), torch.tensor([0.6 + 0.5, 0.9 + 0.8]))


@pytest.mark.parametrize("selector", SELECTORS, ids=lambda selector: selector.name)
def test_ranks_that_add_their_heads_up_choose_as_one(selector: Selector) -> None:
    """Tensor parallelism: each rank sees one head; reduced scores are those of all heads."""
    whole = candidates(heads=2)
    ranks = [
        replace(
            whole,
            keys=whole.keys[:, [head]],
            values=whole.values[:, [head]],
            cached_keys=whole.cached_keys[:, [head]],
            cached_values=whole.cached_values[:, [head]],
        )
        for head in range(2)
    ]
    scores = []
    for own, other in (ranks, ranks[::-1]):
        parts = _parts_of(selector, other)
        scores.append(
            selector.score(replace(own, reduce=lambda part, parts=parts: part + parts.pop(0)))
        )
        assert not parts
    assert torch.allclose(scores[0], selector.score(whole), rtol=1e-5)
    assert torch.allclose(scores[0], scores[1], rtol=1e-5)


def _parts_of(selector: Selector, rank: Candidates) -> list[Tensor]:
    """What a rank gives to the sum, in order."""
    parts: list[Tensor] = []

    def record(part: Tensor) -> Tensor:
        parts.append(part)
        return part

    selector.score(replace(rank, reduce=record))
    return parts


def test_a_rank_alone_would_choose_otherwise() -> None:
    """That the reduction matters: without it the two ranks disagree."""
    whole = candidates(heads=2, rows=40)
    halves = [
        replace(whole, keys=whole.keys[:, [h]], cached_keys=whole.cached_keys[:, [h]])
        for h in (0, 1)
    ]
    chosen = [narrow(KeyDeviation(), Ratio(0.2), half, LAYERS, 40) for half in halves]
    assert not torch.equal(*chosen)


def test_relative_deviation_of_a_cache_of_zeros_is_one() -> None:
    view = candidates()
    view = replace(view, cached_keys=torch.zeros_like(view.keys))
    assert torch.allclose(RelativeDeviation().score(view), torch.ones(12))


def test_combined_score_is_mass_times_deviation_to_a_power() -> None:
    view = candidates()
    assert view.question is not None
    root = view.key_deviation.sqrt()
    for power in (1.0, 2.0, 3.0):
        expected = view.question * root**power
        assert torch.allclose(QuestionDeviation(power).score(view), expected, rtol=1e-4)


def test_random_rows_are_the_same_at_every_layer() -> None:
    view = candidates()
    half = replace(view, rows=view.rows[::2], layer=5)
    assert torch.equal(RandomRows(3).score(view)[::2], RandomRows(3).score(half))
    assert not torch.equal(RandomRows(3).score(view), RandomRows(4).score(view))


@pytest.mark.parametrize("selector", [QuestionAttention(), QuestionDeviation()])
def test_without_a_question_the_error_says_what_to_do(selector: Selector) -> None:
    assert selector.needs_question
    with pytest.raises(ConfigError, match="run the question"):
        selector.score(replace(candidates(), question=None))


def test_heads_come_before_everything_else() -> None:
    view = candidates(rows=12)  # chunks of 5, 5 and 2
    kept = narrow(HeadsToo(KeyDeviation(), heads=2), Ratio(0.5), view, LAYERS, 12)
    assert kept.tolist() == view.rows[[0, 1, 5, 6, 10, 11]].tolist()
    one_more = narrow(HeadsToo(KeyDeviation(), heads=1), Ratio(4 / 12), view, LAYERS, 12)
    others = [i for i in range(12) if i % 5]
    best = max(others, key=lambda i: float(view.key_deviation[i]))
    assert one_more.tolist() == sorted([*view.rows[[0, 5, 10]].tolist(), int(view.rows[best])])


def test_smoothed_scores_are_means_over_neighbours() -> None:
    view = replace(candidates(rows=4), rows=torch.tensor([3, 4, 5, 9]))
    a, b, c, d = KeyDeviation().score(view).tolist()
    expected = torch.tensor([a + b, a + b + c, b + c, d]) / 3
    assert torch.allclose(Smoothed(KeyDeviation()).score(view), expected)


def test_wrappers_need_what_they_wrap_needs() -> None:
    for wrapper in (HeadsToo, Smoothed):
        assert wrapper(QuestionAttention()).needs_question
        assert not wrapper(KeyDeviation()).needs_question


@pytest.mark.parametrize("selector", SELECTORS, ids=lambda selector: selector.name)
def test_selectors_score_no_rows(selector: Selector) -> None:
    assert selector.score(candidates(rows=0)).shape == (0,)


# --- budgets ----------------------------------------------------------------------------------

ratios = st.floats(0.001, 1)


@given(ratio=ratios, spread=st.floats(0, 1), layers=st.integers(3, 64), tokens=st.integers(0, 5000))
def test_shares_fall_with_depth_and_keep_their_mean(
    ratio: float, spread: float, layers: int, tokens: int
) -> None:
    budget = Ratio(ratio, spread)
    shares = [budget.share(layer, layers) for layer in range(2, layers)]
    assert sum(shares) / len(shares) == pytest.approx(ratio)
    assert all(0 <= b <= a + 1e-12 <= 1 + 1e-9 for a, b in pairwise(shares))
    counts = [budget.rows_at(layer, layers, tokens, never) for layer in range(layers)]
    assert counts == sorted(counts, reverse=True)
    assert counts[:2] == [tokens] * 2


@given(percent=st.integers(1, 100), tokens=st.integers(1, 3000))
def test_a_ratio_is_rounded_up(percent: int, tokens: int) -> None:
    """Never to nothing; and 7% of 100 rows are 7, though 0.07 * 100 is more in floating point."""
    count = Ratio(percent / 100).rows_at(2, LAYERS, tokens, never)
    assert count == -(-percent * tokens // 100)
    assert count >= 1


def test_ratio_zero_computes_no_row_of_a_chunk_at_any_layer() -> None:
    assert Ratio(0).is_reuse
    assert [Ratio(0).rows_at(layer, LAYERS, 100, never) for layer in range(LAYERS)] == [0] * LAYERS
    assert not Ratio(0.001).is_reuse


def test_a_threshold_counts_rows_above_it_once() -> None:
    scores = torch.tensor([0.1, 0.5, math.nan, 0.9, 0.5])
    budget = Threshold(0.4, floor=0.2, ceiling=0.6)
    assert budget.rows_at(2, LAYERS, 10, lambda: scores) == 4
    assert budget.rows_at(2, LAYERS, 5, lambda: scores) == 3  # the ceiling
    assert budget.rows_at(2, LAYERS, 30, lambda: scores) == 6  # the floor
    assert budget.rows_at(3, LAYERS, 10, never) == 10


@pytest.mark.parametrize(
    ("make", "arguments", "says"),
    [
        (Ratio, {"ratio": 1.5}, "from 0 to 1, got 1.5"),
        (Ratio, {"ratio": math.nan}, "from 0 to 1"),
        (Ratio, {"ratio": 0.1, "spread": 2}, "spread"),
        (Ratio, {"ratio": 0.1, "full_layers": 1}, "only on the token"),
        (Threshold, {"bound": 1, "full_layers": 0}, "only on the token"),
        (Threshold, {"bound": 1, "floor": 0.5, "ceiling": 0.1}, "floor <= ceiling"),
    ],
)
def test_settings_out_of_range_are_refused(make: Any, arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make(**arguments)


# --- the choice -------------------------------------------------------------------------------


@given(
    scores=st.lists(st.floats(width=32, allow_nan=True), min_size=1, max_size=30),
    count=st.integers(0, 35),
)
def test_keep_top_against_sorting(scores: list[float], count: int) -> None:
    rows = torch.arange(len(scores)) * 7
    worth = [math.inf if math.isnan(score) else score for score in scores]
    worth = [min(max(score, -3.4028235e38), 3.4028235e38) for score in worth]
    best = sorted(range(len(scores)), key=lambda i: (-worth[i], i))[:count]
    kept = keep_top(rows, torch.tensor(scores), count)
    assert kept.tolist() == [i * 7 for i in sorted(best)]


@pytest.mark.parametrize("budget", [Ratio(0.3), Ratio(0.3, spread=0.5), Threshold(3.0)], ids=repr)
@pytest.mark.parametrize("selector", SELECTORS, ids=lambda selector: selector.name)
def test_rows_only_leave(selector: Selector, budget: Budget) -> None:
    tokens = 40
    view, alive = candidates(rows=tokens), torch.arange(tokens)
    for layer in range(LAYERS - 1):
        fresh = candidates(rows=tokens, layer=layer, seed=layer)
        now = replace(
            fresh,
            rows=view.rows[alive],
            keys=fresh.keys[alive],
            values=fresh.values[alive],
            cached_keys=fresh.cached_keys[alive],
            cached_values=fresh.cached_values[alive],
            offsets=view.offsets[alive],
            question=view.question[alive] if view.question is not None else None,
        )
        kept = narrow(selector, budget, now, LAYERS, tokens)
        assert set(kept.tolist()) <= set(now.rows.tolist())
        assert kept.tolist() == sorted(kept.tolist())
        if layer + 1 < budget.full_layers:
            assert torch.equal(kept, now.rows)
        elif isinstance(budget, Ratio):
            assert len(kept) == budget.rows_at(layer + 1, LAYERS, tokens, never)
        alive = torch.searchsorted(view.rows, kept)


def test_the_last_layer_chooses_nothing() -> None:
    view = candidates(layer=LAYERS - 1)
    assert torch.equal(narrow(KeyDeviation(), Ratio(0.1), view, LAYERS, 12), view.rows)
