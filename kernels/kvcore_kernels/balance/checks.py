"""The argument checks of the kernel and its naive twin."""

from __future__ import annotations

import torch

from kvcore.errors import LayoutError

__all__ = ["check_pair"]


def check_pair(one: torch.Tensor, other: torch.Tensor) -> None:
    """Raise LayoutError for invalid arguments. Reads no memory."""
    if one.dim() != 1 or one.shape != other.shape or not one.dtype == other.dtype == torch.float32:
        raise LayoutError(
            f"scores of {one.dtype} {tuple(one.shape)} and {other.dtype} {tuple(other.shape)}: "
            "give two equally long lists of float32"
        )
