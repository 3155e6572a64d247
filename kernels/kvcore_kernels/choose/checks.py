"""What both twins refuse."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kvcore.errors import LayoutError

__all__ = ["Kept", "check_scores"]


class Kept(NamedTuple):
    """``rows``, int64, whose first ``number[0]`` are the chosen ones and the others -1; both on the
    device that chose."""

    rows: torch.Tensor
    number: torch.Tensor


def check_scores(rows: torch.Tensor, scores: torch.Tensor, least: int, most: int) -> None:
    """Raise LayoutError for arguments that do not fit. Reads no memory."""
    if rows.dim() != 1 or rows.shape != scores.shape or rows.dtype != torch.int64:
        raise LayoutError(
            f"rows of {rows.dtype} {tuple(rows.shape)} with scores of {tuple(scores.shape)}: "
            "give an int64 row and a score each"
        )
    if not 0 <= least <= most:
        raise LayoutError(f"at least {least} and at most {most} rows; 0 <= least <= most is wanted")
