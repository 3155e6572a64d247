"""Access to rows of paged KV by torch's index operations, for the naive twins."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvcore.errors import LayoutError
from kvcore.memory.layout import Axis, KVLayout, KVView, Plane, sglang_layout

__all__ = ["check_fresh", "fresh_view", "gather_rows", "scatter_rows"]


def gather_rows(view: KVView, layer: int, kv: int, slots: torch.Tensor) -> torch.Tensor:
    """Return a copy of K or V of the tokens at ``slots``: ``[slots, kv_heads, dim]``."""
    plane = view.layout.planes[layer][kv]
    return _memory(view, plane)[_places(view.layout, plane, slots)]


def scatter_rows(
    view: KVView, layer: int, kv: int, slots: torch.Tensor, rows: torch.Tensor
) -> None:
    """Write ``rows``, ``[slots, kv_heads, dim]``, to ``slots``."""
    plane = view.layout.planes[layer][kv]
    _memory(view, plane)[_places(view.layout, plane, slots)] = rows


def _memory(view: KVView, plane: Plane) -> torch.Tensor:
    """Return the plane's memory, flat, from the tensor's first element."""
    tensor = view.tensors[plane.tensor]
    size = view.layout.last_offset(plane) + 1
    return tensor.as_strided((size,), (1,), tensor.storage_offset())


def _places(layout: KVLayout, plane: Plane, slots: torch.Tensor) -> torch.Tensor:
    """Return element offsets ``[slots, kv_heads, dim]``."""
    slots = slots.long()
    page, token = slots // layout.page_tokens, slots % layout.page_tokens
    row = plane.offset + page * plane.page + _along(plane.token, token)
    head = torch.arange(layout.kv_heads, device=slots.device) * plane.head
    dim = _along(plane.dim, torch.arange(plane.head_dim, device=slots.device))
    return row[:, None, None] + head[:, None] + dim


def _along(axis: Axis, index: torch.Tensor) -> torch.Tensor:
    return index // axis.inner * axis.stride + index % axis.inner * axis.inner_stride


def fresh_view(parts: Sequence[torch.Tensor], dtype: str) -> KVView:
    """View computed K and V (or a latent), ``[rows, kv_heads, dim]`` each, as one-token pages."""
    values = parts[1:] or None
    return KVView(sglang_layout(parts[:1], values, 1, dtype), list(parts))


def check_fresh(
    keys: torch.Tensor, values: torch.Tensor | None, view: KVView, layer: int, slots: torch.Tensor
) -> list[torch.Tensor]:
    """Return K and V, or K alone. Raise LayoutError unless they fit ``view`` and ``slots``."""
    planes = view.layout.planes[layer]
    parts = [keys] if values is None else [keys, values]
    if len(parts) != len(planes):
        raise LayoutError(
            f"{len(parts)} tensors of rows for KV of {len(planes)} parts: give keys and values, "
            "or for a latent only keys"
        )
    for part, plane in zip(parts, planes, strict=True):
        wanted = len(keys), view.layout.kv_heads, plane.head_dim
        if tuple(part.shape) != wanted:
            raise LayoutError(
                f"rows of {tuple(part.shape)}; this KV needs [rows, {wanted[1]}, {wanted[2]}]"
            )
    if slots.shape != keys.shape[:1] or slots.dtype not in (torch.int32, torch.int64):
        raise LayoutError(
            f"slots of {slots.dtype} {tuple(slots.shape)} for {len(keys)} rows: "
            "give one int32 or int64 slot for each"
        )
    return parts
