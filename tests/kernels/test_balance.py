"""Sums of scores in units of their means against the naive twin."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.errors import LayoutError
from kvcore_kernels.balance.launch import BLOCK, balanced
from kvcore_kernels.balance.naive import balanced as naive

SIZES = st.sampled_from([0, 1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5])


@given(size=SIZES, seed=st.integers(0, 99), scale=st.sampled_from([1e-40, 1e-9, 1.0, 1e12]))
@settings(max_examples=25)
def test_it_is_the_naive_twin(size: int, seed: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    one, other = torch.rand(2, 2 * size, generator=generator)[:, ::2]
    torch.testing.assert_close(balanced(one * scale, other), naive(one * scale, other))


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_nothing_zeros_and_broken_rows(value: float) -> None:
    """Zeros add nothing. A broken row breaks the mean, as it does in torch."""
    other = torch.rand(BLOCK + 3)
    one = torch.zeros(BLOCK + 3)
    one[BLOCK + 1] = value
    torch.testing.assert_close(balanced(one, other), naive(one, other), equal_nan=True)


def test_what_does_not_fit_is_refused() -> None:
    for launch in (balanced, naive):
        with pytest.raises(LayoutError, match="equally long"):
            launch(torch.zeros(3), torch.zeros(4))
        with pytest.raises(LayoutError, match="float32"):
            launch(torch.zeros(3), torch.zeros(3, dtype=torch.float16))
