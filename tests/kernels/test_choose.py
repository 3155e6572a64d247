"""The choice of rows, in the interpreter, against kvcore's own `keep_top` and `Threshold`."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvcore.errors import LayoutError
from kvcore.fusion.ops import TorchFusion
from kvcore.fusion.rows import Rows
from kvcore_kernels.choose import launch, naive
from support.budget import examples

# Few values, so that many are equal, and all that sorting finds hard.
SCORES = st.lists(
    st.sampled_from([0.0, -0.0, 1.0, 1.5, -2.0, 1e-45, math.inf, -math.inf, math.nan, 3.4e38])
    | st.floats(width=32),
    max_size=40,
)


def listed(scores: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows with gaps, ascending, and their scores."""
    return torch.arange(len(scores)) * 3 + 5, torch.tensor(scores, dtype=torch.float32)


@given(scores=SCORES, count=st.integers(0, 45))
@example(scores=[], count=3)
@example(scores=[0.0, -0.0, 0.0], count=2)
@settings(max_examples=examples(25))
def test_the_highest_in_order(scores: list[float], count: int) -> None:
    rows, values = listed(scores)
    assert torch.equal(launch.keep_top(rows, values, count), naive.keep_top(rows, values, count))


@given(
    scores=SCORES,
    bound=st.sampled_from([0.0, 1.0, -2.0, math.inf, -math.inf]) | st.floats(-1e3, 1e3),
    limits=st.lists(st.integers(0, 45), min_size=2, max_size=2).map(sorted),
)
@settings(max_examples=examples(25))
def test_above_a_bound(scores: list[float], bound: float, limits: list[int]) -> None:
    ours, right = (twin.keep_above(*listed(scores), bound, *limits) for twin in (launch, naive))
    assert torch.equal(ours.number, right.number)
    assert torch.equal(ours.rows, right.rows)


@pytest.mark.parametrize("size", [1, 63, 500, 9000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lists_longer_than_a_block(size: int, dtype: torch.dtype) -> None:
    """9000 scores are three blocks; in bfloat16 many of them are equal."""
    scores = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
    rows = torch.arange(size) * 2
    for count in (1, size // 7, size):
        ours = launch.keep_top(rows, scores, count)
        assert torch.equal(ours, naive.keep_top(rows, scores, count))


@pytest.mark.parametrize("total", [1, 63, 9000])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_the_highest_are_kept_among_rows_without_a_score(total: int, share: float) -> None:
    """The kernel keeps the rows that torch keeps, also over several blocks."""
    generator = torch.Generator().manual_seed(total)
    positions = torch.arange(total) * 2 + 1
    scored = torch.rand(total, generator=generator) < share
    offset_of = torch.full((2 * total + 1,), -1)
    offset_of[positions[scored]] = 0
    scores = torch.randn(total, generator=generator)[scored].bfloat16().float()
    chunk = scored.nonzero()[:, 0]
    for count in {0, len(scores) // 7, len(scores)}:
        rows = Rows(positions, chunk, positions[scored])
        (wanted, index, places), going = TorchFusion().keep(rows, offset_of, scores, count)
        found = launch.keep_rows(positions, offset_of, scores, count)
        for ours, right in zip(found, (wanted, going, index, places), strict=True):
            assert torch.equal(ours, right)


@pytest.mark.parametrize("twin", [launch, naive])
def test_what_does_not_fit_is_refused(twin) -> None:  # type: ignore[no-untyped-def]
    rows, scores = listed([1.0, 2.0])
    with pytest.raises(LayoutError, match="int64 rows and one score"):
        twin.keep_top(rows.int(), scores, 1)
    with pytest.raises(LayoutError, match="int64 rows and one score"):
        twin.keep_top(rows, scores[:1], 1)
    with pytest.raises(LayoutError, match="at least 3 and at most 2"):
        twin.keep_above(rows, scores, 0.0, 3, 2)
    with pytest.raises(LayoutError, match="at least -1"):
        twin.keep_top(rows, scores, -1)
