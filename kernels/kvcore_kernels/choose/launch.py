"""The launch of the choice of rows."""

from __future__ import annotations

import math

import torch

from kvcore_kernels.choose.checks import Kept, check_scores
from kvcore_kernels.choose.kernel import choose_kernel, keep_kernel
from kvcore_kernels.launcher import Launcher

__all__ = ["BLOCK", "WARPS", "keep_above", "keep_rows", "keep_top"]

WARPS = 16
BLOCK = 2048
"""Scores that the program processes together. One number, so that nothing is compiled for a list of
another size. Untuned: no GPU was at hand."""

_launch_choose = Launcher(choose_kernel, {"BLOCK": BLOCK}, num_warps=WARPS)
_launch_keep = Launcher(keep_kernel, {"BLOCK": BLOCK}, num_warps=WARPS)
_ONE = (1,)


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
    _launch_choose(
        rows.device, _ONE, rows.contiguous(), scores.contiguous(), out, kept,
        size, most, float(bound), min(least, most), most,
    )  # fmt: skip
    return Kept(out, kept)


def keep_rows(
    positions: torch.Tensor,
    offset_of: torch.Tensor,
    scores: torch.Tensor,
    count: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keep the ``count`` rows with a score that `keep_top` keeps, and all rows without one.

    ``positions`` is int64 ``[n]`` and ascends. A row has a score if ``offset_of`` (int64) is not
    below 0 at its position; ``scores`` has one for each of these rows, in their order, and not
    fewer than ``count``. Returns, as int64: the positions of the kept rows, their indices in
    ``positions``, the indices among the kept of those with a score, and the positions of these. The
    work is enqueued on the current stream; the host does not wait. Thread-safe.
    """
    size, total = scores.shape[0], positions.shape[0]
    check_scores(positions[:size], scores, count, size)
    room = total - size + count
    out = positions.new_empty(2 * (room + count))
    _launch_keep(
        positions.device, _ONE, positions.contiguous(), offset_of, scores.contiguous(), out,
        total, size, count, room,
    )  # fmt: skip
    return (
        out[:room],
        out[room : 2 * room],
        out[2 * room : 2 * room + count],
        out[2 * room + count :],
    )
