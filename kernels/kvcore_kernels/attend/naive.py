"""The naive twin: one row at a time, in float64."""

from __future__ import annotations

import torch

from kvcore.memory.layout import KVView
from kvcore_kernels.attend.checks import check_rows
from kvcore_kernels.rows import gather_rows

__all__ = ["attend_rows"]


def attend_rows(
    queries: torch.Tensor,
    positions: torch.Tensor,
    view: KVView,
    layer: int,
    page_table: torch.Tensor | None,
    *,
    scale: float,
    soft_cap: float = 0.0,
    window: int = 0,
    latent_dim: int = 0,
) -> torch.Tensor:
    """Compute `kvcore_kernels.attend.launch.attend_rows`; waits for the device for every row."""
    check_rows(queries, positions, view, layer, page_table, soft_cap, window, latent_dim)
    page = view.layout.page_tokens
    if page_table is None:
        page_table = torch.arange(view.layout.num_pages, device=queries.device)
    offsets = torch.arange(page, device=page_table.device)
    slots = (page_table.long()[:, None] * page + offsets).flatten()
    last = view.layout.kv_factor - 1
    keys, values = (gather_rows(view, layer, kv, slots).double() for kv in (0, last))
    if latent_dim:
        values = values[..., :latent_dim]
    group = queries.shape[1] // view.layout.kv_heads
    out = queries.new_empty(*queries.shape[:2], values.shape[-1])
    for row, position in enumerate(positions.tolist()):
        first = max(0, position - window + 1) if window else 0
        for head in range(queries.shape[1]):
            seen = slice(first, position + 1)
            scores = keys[seen, head // group] @ queries[row, head].double() * scale
            if soft_cap:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            out[row, head] = scores.softmax(0) @ values[seen, head // group]
    return out
