"""The launch of the average over neighbours."""

from __future__ import annotations

import torch

from kvcore_kernels.choose.checks import check_scores
from kvcore_kernels.launcher import Launcher
from kvcore_kernels.smooth.kernel import smooth_kernel

__all__ = ["BLOCK", "WARPS", "smoothed"]

BLOCK = 256
"""Scores of a program. Untuned: no GPU was at hand."""
WARPS = 2

_launch = Launcher(smooth_kernel, {"BLOCK": BLOCK}, num_warps=WARPS)


def smoothed(rows: torch.Tensor, scores: torch.Tensor, reach: int) -> torch.Tensor:
    """Return each score averaged over the rows up to ``reach`` tokens away: float32 ``[n]``.

    ``rows`` is int64 ``[n]`` and ascends. The result is that of `kvcore.fusion.select.smoothed`.
    The work is enqueued on the current stream; the host does not wait. Thread-safe.
    """
    check_scores(rows, scores, 0, 0)
    scores = scores.float().contiguous()
    out = torch.empty_like(scores)
    size = rows.shape[0]
    if size:
        grid = (-(-size // BLOCK),)
        _launch(rows.device, grid, rows.contiguous(), scores, out, size, reach)
    return out
