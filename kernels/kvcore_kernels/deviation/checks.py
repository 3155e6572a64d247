"""What both twins refuse."""

from __future__ import annotations

import torch

from kvcore.errors import UnsupportedError
from kvcore.memory.layout import KVView
from kvcore_kernels.rows import check_fresh

__all__ = ["DTYPES", "check_deviations"]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_deviations(
    keys: torch.Tensor, values: torch.Tensor | None, view: KVView, layer: int, slots: torch.Tensor
) -> list[torch.Tensor]:
    """K and V, or K alone; LayoutError or UnsupportedError for what does not fit."""
    parts = check_fresh(keys, values, view, layer, slots)
    held = [view.tensors[plane.tensor].dtype for plane in view.layout.planes[layer]]
    for dtype in [*held, *(part.dtype for part in parts)]:
        if dtype not in DTYPES or dtype != keys.dtype:
            raise UnsupportedError(
                f"the distance of {dtype} to {keys.dtype}: supported is bfloat16, float16 or "
                "float32, one for all; unpack quantised KV first"
            )
    return parts
