"""The naive twin: kvcore's definition on gathered rows."""

from __future__ import annotations

import torch

from kvcore.fusion.select import deviation
from kvcore.memory.layout import KVView
from kvcore_kernels.deviation.checks import check_deviations
from kvcore_kernels.rows import gather_rows

__all__ = ["deviations"]


def deviations(
    keys: torch.Tensor, values: torch.Tensor | None, view: KVView, layer: int, slots: torch.Tensor
) -> torch.Tensor:
    """Compute `kvcore_kernels.deviation.launch.deviations` on a copy of the cached rows."""
    parts = check_deviations(keys, values, view, layer, slots)
    found = [
        deviation(part, gather_rows(view, layer, kv, slots.clamp_min(0)))
        for kv, part in enumerate(parts)
    ]
    return torch.stack(found).masked_fill(slots < 0, float("nan"))
