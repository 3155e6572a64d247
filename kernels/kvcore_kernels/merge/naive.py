"""The naive twin: one index operation for K and one for V."""

from __future__ import annotations

import torch

from kvcore.memory.layout import KVView
from kvcore_kernels.merge.checks import check_merge
from kvcore_kernels.rows import scatter_rows

__all__ = ["merge_rows"]


def merge_rows(
    keys: torch.Tensor, values: torch.Tensor | None, view: KVView, layer: int, slots: torch.Tensor
) -> None:
    """Compute `kvcore_kernels.merge.launch.merge_rows`; waits for the device."""
    for kv, part in enumerate(check_merge(keys, values, view, layer, slots)):
        scatter_rows(view, layer, kv, slots[slots >= 0], part[slots >= 0])
