"""The launch of the choice of rows."""

from __future__ import annotations

import math

import torch

from kvcore_kernels.choose.checks import Kept, check_scores
from kvcore_kernels.choose.kernel import choose_kernel
from kvcore_kernels.planes import guard, power_of_two

__all__ = ["WARPS", "block_for", "keep_above", "keep_top"]

WARPS = 16
_BLOCK = 4096
"""Scores that are processed together. Untuned: no GPU was at hand."""


def keep_top(rows: torch.Tensor, scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return the ``count`` rows of highest score (all if there are fewer), in order of ``rows``.

    ``rows`` is int64 ``[n]`` and ``scores`` ``[n]`` of any float dtype. Of equal scores the earlier
    row is taken; NaN counts as the highest score. The result is that of
    `kvcore.fusion.select.keep_top`. The work is enqueued on the current stream; the host does not
    wait. Thread-safe.
    """
    check_scores(rows, scores, count, count)
    return _choose(rows, scores, math.inf, count, count).rows


def keep_above(
    rows: torch.Tensor, scores: torch.Tensor, bound: float, least: int, most: int
) -> Kept:
    """Return the rows that score above ``bound``, at least ``least`` and at most ``most`` of them.

    Their order, and the choice if there are too many or too few, are those of `keep_top`. The
    number of rows stays on the device; the host does not wait. ``rows`` of the result has space for
    ``most`` rows, or for all rows if there are fewer.
    """
    check_scores(rows, scores, least, most)
    return _choose(rows, scores, bound, least, most)


def _choose(rows: torch.Tensor, scores: torch.Tensor, bound: float, least: int, most: int) -> Kept:
    size = len(rows)
    most = min(most, size)
    out = rows.new_empty(most)
    kept = torch.empty(1, dtype=torch.int32, device=rows.device)
    with guard(rows.device):
        choose_kernel[(1,)](
            rows.contiguous(), scores.contiguous(), out, kept,
            size, most, float(bound), min(least, most), most,
            BLOCK=block_for(size), num_warps=WARPS,
        )  # fmt: skip
    return Kept(out, kept)


def block_for(size: int) -> int:
    """Return how many scores the program processes together."""
    return min(power_of_two(size, 512), _BLOCK)
