"""The naive twin: a row at a time, in float64."""

from __future__ import annotations

import torch

from kvcore.layout import KVView
from kvcore_kernels.attend.checks import check_rows

__all__ = ["attend_rows"]


def attend_rows(
    queries: torch.Tensor,
    positions: torch.Tensor,
    view: KVView,
    layer: int,
    page_table: torch.Tensor,
    *,
    scale: float,
    soft_cap: float = 0.0,
    window: int = 0,
    latent_dim: int = 0,
) -> torch.Tensor:
    """As `kvcore_kernels.attend.launch.attend_rows`. Waits for the device, for every row."""
    check_rows(queries, positions, view, layer, page_table, soft_cap, window, latent_dim)
    keys, values = (_rows(view, layer, kv, page_table) for kv in (0, view.layout.kv_factor - 1))
    if latent_dim:
        values = values[..., :latent_dim]
    group = queries.shape[1] // view.layout.kv_heads
    out = torch.empty(*queries.shape[:2], values.shape[-1], dtype=queries.dtype)
    for row, position in enumerate(positions.tolist()):
        first = max(0, position - window + 1) if window else 0
        for head in range(queries.shape[1]):
            seen = slice(first, position + 1)
            scores = keys[seen, head // group] @ queries[row, head].double() * scale
            if soft_cap:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            out[row, head] = scores.softmax(0) @ values[seen, head // group]
    return out


def _rows(view: KVView, layer: int, kv: int, page_table: torch.Tensor) -> torch.Tensor:
    """K or V of the tokens in ``page_table``, ``[tokens, kv_heads, dim]``."""
    layout = view.layout
    plane = layout.planes[layer][kv]
    token = torch.tensor([plane.token(t) for t in range(layout.page_tokens)])
    dim = torch.tensor([plane.dim(d) for d in range(plane.head_dim)])
    head = torch.arange(layout.kv_heads) * plane.head
    page = page_table.long() * plane.page + plane.offset
    at = page[:, None, None, None] + token[:, None, None] + head[:, None] + dim
    tensor = view.tensors[plane.tensor]
    flat = tensor.as_strided((layout.last_offset(plane) + 1,), (1,), tensor.storage_offset())
    return flat[at.flatten(0, 1)].double()
