"""Launches attention of scattered rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from kvcore.layout import KVView, Plane
from kvcore_kernels.attend.checks import check_rows
from kvcore_kernels.attend.kernel import attend_kernel
from kvcore_kernels.planes import guard, to_device

__all__ = ["AttendTile", "attend_rows", "constants", "tile_for"]


class AttendTile(NamedTuple):
    """Rows times query heads, and keys, of a program; warps and pipeline stages. Untuned: no GPU
    was at hand. Chosen so that no build for sm_80 or later or gfx942 spills."""

    rows: int
    keys: int
    warps: int
    stages: int


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
    """Attention of some rows of one request over its KV of ``layer``, in paged memory.

    ``queries`` is ``[rows, q_heads, head_dim]``, ``positions`` the true position of each row, and
    ``page_table`` the request's pages in order (int32 or int64): token t lies in page
    ``page_table[t // page_tokens]``. The row at position p sees keys 0..p, or the last ``window``
    of them: all of these must be written, and finite. Rows may be in any order; sorted ones, whose
    tiles span few positions, are fast. ``latent_dim`` is for MLA with absorbed weights: K is the
    latent, V its first dims. ``soft_cap`` bounds the scores by c tanh(s / c).

    Returns ``[rows, q_heads, v_dim]``, of the queries' dtype. Enqueued on the current stream; the
    host does not wait, so positions beyond the page table cannot be refused: they see its tokens.
    Raises LayoutError or UnsupportedError for arguments that do not fit each other.
    """
    check_rows(queries, positions, view, layer, page_table, soft_cap, window, latent_dim)
    planes = view.layout.planes[layer]
    key, value = planes[0], planes[-1]
    v_dim = latent_dim or value.head_dim
    out = queries.new_empty(*queries.shape[:2], v_dim)
    if not len(queries):
        return out
    heads = view.layout.kv_heads
    tile, fixed = constants(
        queries.shape[1] // heads, view.layout.page_tokens, key, value, v_dim,
        latent=bool(latent_dim), window=window, capped=soft_cap > 0,
        full=queries.dtype == torch.float32,
    )  # fmt: skip
    with guard(queries.device):
        strides = to_device([_strides(key), _strides(value)], queries.device)
        packs = queries.shape[1] // fixed["GROUP"]
        attend_kernel[(-(-len(queries) // (tile.rows // fixed["GROUP"])), packs)](
            queries, out, positions, page_table,
            _base(view, key), _base(view, value), *strides,
            len(queries), len(page_table) * view.layout.page_tokens,
            queries.stride(0), queries.stride(1), scale, soft_cap,
            **fixed, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return out


def constants(
    group: int,
    page_tokens: int,
    key: Plane,
    value: Plane,
    v_dim: int,
    *,
    latent: bool,
    window: int,
    capped: bool,
    full: bool,
) -> tuple[AttendTile, dict[str, Any]]:
    """The tile for these shapes and what the compiler sees of them; ``full`` is float32."""
    dim = key.head_dim
    main = max(16, 1 << (dim.bit_length() - 1))
    tile = tile_for(dim, full=full)
    pack = max(size for size in range(1, tile.rows + 1) if group % size == 0)
    return tile, {
        "GROUP": pack,
        "SPLIT": group // pack,
        "HEAD_DIM": dim,
        "V_DIM": v_dim,
        "PAGE": page_tokens,
        "WINDOW": window,
        "CAPPED": capped,
        "LATENT": latent and v_dim == main,
        "K_TOKEN": key.token.inner,
        "K_DIM": key.dim.inner,
        "V_TOKEN": value.token.inner,
        "V_INNER": value.dim.inner,
        "M": tile.rows,
        "N": tile.keys,
        "MAIN": main,
        "TAIL": _power_of_two(dim - main),
        "V_TILE": _power_of_two(v_dim),
    }


def tile_for(dim: int, *, full: bool) -> AttendTile:
    """The tile for a head of ``dim``."""
    if dim > 256:
        return AttendTile(16, 16, 8, 1)
    if full or dim > 192:
        return AttendTile(32, 16, 8, 1)
    if dim > 128:
        return AttendTile(32, 32, 8, 1)
    return AttendTile(64, 32, 8, 2)


def _strides(plane: Plane) -> np.ndarray[Any, np.dtype[np.int64]]:
    token, dim = plane.token, plane.dim
    return np.array(
        [plane.page, plane.head, token.stride, token.inner_stride, dim.stride, dim.inner_stride],
        dtype=np.int64,
    )


def _base(view: KVView, plane: Plane) -> torch.Tensor:
    """The plane's memory from its first element on."""
    tensor = view.tensors[plane.tensor]
    return tensor.as_strided((1,), (1,), tensor.storage_offset() + plane.offset)


def _power_of_two(count: int) -> int:
    """The smallest power of two that is at least ``count``, and 16, as matrix units want."""
    return max(16, 1 << max(count - 1, 0).bit_length())
