"""The argument checks of the kernel and its naive twin."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kvcore.errors import LayoutError

__all__ = ["Kept", "check_scores"]


class Kept(NamedTuple):
    """Chosen rows, on the device that chose them.

    The first ``number[0]`` of ``rows`` (int64) are the chosen ones; the others are -1.
    """

    rows: torch.Tensor
    number: torch.Tensor


def check_scores(rows: torch.Tensor, scores: torch.Tensor, least: int, most: int) -> None:
    """Raise LayoutError for invalid arguments. Reads no memory."""
    if rows.dim() != 1 or rows.shape != scores.shape or rows.dtype != torch.int64:
        raise LayoutError(
            f"rows of {rows.dtype} {tuple(rows.shape)} with scores of {tuple(scores.shape)}: "
            "give int64 rows and one score for each"
        )
    if not 0 <= least <= most:
        raise LayoutError(f"at least {least} and at most {most} rows: give 0 <= least <= most")
