"""The naive twin: kvcore's `keep_top`, and a threshold that waits for the device."""

from __future__ import annotations

import math

import torch

from kvcore.fusion.select import keep_top as kvcore_keep_top
from kvcore_kernels.choose.checks import Kept, check_scores

__all__ = ["keep_above", "keep_top"]


def keep_top(rows: torch.Tensor, scores: torch.Tensor, count: int) -> torch.Tensor:
    """Compute `kvcore_kernels.choose.launch.keep_top`."""
    check_scores(rows, scores, count, count)
    return kvcore_keep_top(rows, scores, count)


def keep_above(
    rows: torch.Tensor, scores: torch.Tensor, bound: float, least: int, most: int
) -> Kept:
    """Compute `kvcore_kernels.choose.launch.keep_above`, counting on the host."""
    check_scores(rows, scores, least, most)
    above = int((torch.nan_to_num(scores.float(), nan=math.inf) > bound).sum())
    count = min(max(above, least), most, len(rows))
    kept = rows.new_full((min(most, len(rows)),), -1)
    kept[:count] = kvcore_keep_top(rows, scores, count)
    return Kept(kept, torch.tensor([count], dtype=torch.int32, device=rows.device))
