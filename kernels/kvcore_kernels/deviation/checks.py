"""The argument checks of the kernel and its naive twin."""

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
    """Return K and V, or K alone. Raise LayoutError or UnsupportedError for invalid arguments."""
    parts = check_fresh(keys, values, view, layer, slots)
    held = [view.tensors[plane.tensor].dtype for plane in view.layout.planes[layer]]
    for dtype in [*held, *(part.dtype for part in parts)]:
        if dtype not in DTYPES or dtype != keys.dtype:
            raise UnsupportedError(
                f"the distance of {dtype} to {keys.dtype}: supported is bfloat16, float16 or "
                "float32, the same for all; unpack quantised KV first"
            )
    return parts
