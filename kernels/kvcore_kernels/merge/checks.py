"""The argument checks of the kernel and its naive twin."""

from __future__ import annotations

import torch

from kvcore.errors import LayoutError
from kvcore.memory.layout import KVView
from kvcore_kernels.rows import check_fresh

__all__ = ["check_merge"]


def check_merge(
    keys: torch.Tensor, values: torch.Tensor | None, view: KVView, layer: int, slots: torch.Tensor
) -> list[torch.Tensor]:
    """Return K and V, or K alone. Raise LayoutError for invalid arguments. Reads no memory."""
    parts = check_fresh(keys, values, view, layer, slots)
    for part, plane in zip(parts, view.layout.planes[layer], strict=True):
        held = view.tensors[plane.tensor].dtype
        if part.dtype != held:
            raise LayoutError(f"rows of {part.dtype} for KV of {held}: convert the rows first")
    return parts
