"""The argument checks of the kernel and its naive twin."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvcore.errors import LayoutError

__all__ = ["ALIGNED", "check_sums"]

ALIGNED = 16
"""Offsets and the data's address must be multiples of this many bytes."""


def check_sums(data: torch.Tensor, offsets: Sequence[int], nbytes: int) -> None:
    """Raise LayoutError for invalid arguments. Reads no memory."""
    if data.dtype != torch.uint8 or data.dim() != 1 or not data.is_contiguous():
        raise LayoutError(f"{data.dtype} of {tuple(data.shape)}: give flat, contiguous bytes")
    if data.data_ptr() % ALIGNED or any(offset % ALIGNED for offset in offsets):
        raise LayoutError(
            f"data or blocks do not begin at a multiple of {ALIGNED} bytes: align them"
        )
    most = len(data) - -(-nbytes // 8) * 8
    if nbytes < 1 or any(not 0 <= offset <= most for offset in offsets):
        raise LayoutError(
            f"blocks of {nbytes} bytes at {list(offsets)} exceed the {len(data)} bytes of data"
        )
