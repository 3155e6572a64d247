"""The attention that benchmarks give SGLang on a CPU, against attention over the whole square."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from kvcore_sglang.attention import attend_rows  # noqa: E402
from support.budget import examples  # noqa: E402


@settings(max_examples=examples(60), deadline=None)
@given(
    tokens=st.integers(1, 40),
    new=st.integers(1, 40),
    kv_heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 3]),
    scale=st.sampled_from([None, 0.25]),
    seed=st.integers(0, 99),
)
def test_rows_are_those_of_the_whole_square(
    tokens: int, new: int, kv_heads: int, group: int, scale: float | None, seed: int
) -> None:
    rows = min(new, tokens)
    torch.manual_seed(seed)
    query = torch.randn(tokens, kv_heads * group, 8)
    key, value = torch.randn(tokens, kv_heads, 8), torch.randn(tokens, kv_heads, 8)
    wide_key, wide_value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", query, wide_key) * (scale or 8**-0.5)
    future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(future, -torch.inf).softmax(-1)
    square = torch.einsum("hqk,khd->qhd", weights, wide_value)

    found = attend_rows(query[tokens - rows :], key, value, scale)

    torch.testing.assert_close(found, square[tokens - rows :], rtol=1e-5, atol=1e-5)
