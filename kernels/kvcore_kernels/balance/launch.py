"""The launch of the sum of two kinds of scores."""

from __future__ import annotations

import torch

from kvcore_kernels.balance.checks import check_pair
from kvcore_kernels.balance.kernel import balance_kernel
from kvcore_kernels.launcher import Launcher

__all__ = ["BLOCK", "WARPS", "balanced"]

BLOCK = 1024
"""Scores of a program, and of each step in which it reads all of them. Untuned: no GPU was at hand.
"""
WARPS = 4

_launch = Launcher(balance_kernel, {"BLOCK": BLOCK}, num_warps=WARPS)


def balanced(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the sum of two float32 ``[n]``, each in units of its mean: float32 ``[n]``.

    The result is that of `kvcore.fusion.select.balanced`, up to the rounding of the means. The work
    is enqueued on the current stream; the host does not wait. Thread-safe.
    """
    check_pair(one, other)
    out = torch.empty_like(one, memory_format=torch.contiguous_format)
    size = one.shape[0]
    if size:
        grid = (-(-size // BLOCK),)
        _launch(one.device, grid, one.contiguous(), other.contiguous(), out, size)
    return out
