"""The naive twin: kvcore's definition."""

from __future__ import annotations

import torch

from kvcore.fusion.select import balanced as kvcore_balanced
from kvcore_kernels.balance.checks import check_pair

__all__ = ["balanced"]


def balanced(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Compute `kvcore_kernels.balance.launch.balanced`."""
    check_pair(one, other)
    return kvcore_balanced(one, other)
