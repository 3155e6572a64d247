"""The argument checks of the kernel and its naive twin."""

from __future__ import annotations

import torch

from kvcore.errors import LayoutError, UnsupportedError
from kvcore.memory.layout import KVView

__all__ = ["DTYPES", "MIN_DIM", "check_rows"]

MIN_DIM = 16
"""The smallest width of the tiles that matrix units multiply."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_rows(
    queries: torch.Tensor,
    positions: torch.Tensor,
    view: KVView,
    layer: int,
    page_table: torch.Tensor | None,
    soft_cap: float,
    window: int,
    latent_dim: int,
) -> None:
    """Raise LayoutError or UnsupportedError for invalid arguments. Reads no memory."""
    layout = view.layout
    plane = layout.planes[layer][0]
    if queries.dim() != 3 or queries.shape[1] % layout.kv_heads or not queries.shape[1]:
        raise LayoutError(
            f"queries of {tuple(queries.shape)}; supported is [rows, heads, dim] with a multiple "
            f"of {layout.kv_heads} heads"
        )
    if queries.shape[2] != plane.head_dim or queries.stride(2) != 1:
        raise LayoutError(
            f"queries of dim {queries.shape[2]} and stride {queries.stride(2)} for keys of dim "
            f"{plane.head_dim}: give contiguous rows of the same dim"
        )
    if plane.head_dim < MIN_DIM:
        raise UnsupportedError(f"keys of dim {plane.head_dim}; supported is {MIN_DIM} or more")
    if page_table is None and layout.page_tokens != 1:
        raise LayoutError(
            f"pages of {layout.page_tokens} tokens without a page table: give one; only pages of "
            "one token need none"
        )
    table = (layout.num_pages,) if page_table is None else tuple(page_table.shape)
    if positions.shape != queries.shape[:1] or len(table) != 1:
        raise LayoutError(
            f"positions of {tuple(positions.shape)} and a page table of {table} for "
            f"{len(queries)} rows: give one position for each row "
            "and a flat page table"
        )
    if queries.dtype not in DTYPES or view.tensors[plane.tensor].dtype != queries.dtype:
        raise UnsupportedError(
            f"attention of {queries.dtype} over {view.tensors[plane.tensor].dtype}; supported is "
            "bfloat16, float16 or float32, the same for both"
        )
    if soft_cap < 0 or window < 0:
        raise LayoutError(
            f"soft cap {soft_cap} and window {window} must not be negative; 0 means none"
        )
    if (layout.kv_factor == 1) != (0 < latent_dim <= plane.head_dim):
        raise LayoutError(
            f"latent_dim {latent_dim} for KV of {layout.kv_factor} parts of dim {plane.head_dim}: "
            "for a latent give the number of dims that are values (MLA: 512 of 576), else 0"
        )
