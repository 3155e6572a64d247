"""The naive twin: kvcore's definition, over all tokens up to the last row."""

from __future__ import annotations

import torch

from kvcore.fusion.select import smoothed as kvcore_smoothed
from kvcore_kernels.choose.checks import check_scores

__all__ = ["smoothed"]


def smoothed(rows: torch.Tensor, scores: torch.Tensor, reach: int) -> torch.Tensor:
    """Compute `kvcore_kernels.smooth.launch.smoothed`; waits for the device."""
    check_scores(rows, scores, 0, 0)
    return kvcore_smoothed(rows, scores, reach, int(rows[-1]) + 1) if len(rows) else scores.float()
