"""The launch of attention of scattered rows."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch

from kvcore.memory.layout import Axis, KVView, Plane
from kvcore_kernels.attend.checks import MIN_DIM, check_rows
from kvcore_kernels.attend.kernel import attend_kernel
from kvcore_kernels.launcher import Launcher
from kvcore_kernels.planes import power_of_two

__all__ = ["AttendTile", "attend_parts", "attend_rows", "constants", "tile_for"]


class AttendTile(NamedTuple):
    """Rows times query heads, and keys, of a program; warps and pipeline stages.

    Untuned: no GPU was at hand. These are the largest of the tried tiles whose builds for sm_80,
    sm_90, sm_100 and gfx942 spill nothing and fit the shared memory.
    """

    rows: int
    keys: int
    warps: int
    stages: int


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
    """Compute attention of some rows of one request over its paged KV of ``layer``.

    ``queries`` is ``[rows, q_heads, head_dim]``. ``positions`` has the true position of each row.
    ``page_table`` has the request's pages in order (int32 or int64): token t is in page
    ``page_table[t // page_tokens]``. None is for pages of one token, and means page t. The row at
    position p sees keys 0..p, or the last ``window``
    of them. All of these must be written and finite. Pages between the windows of two rows may
    have any content, but must be valid pages. Rows may be in any order; sorted rows are fast,
    because their tiles span few positions. ``latent_dim`` is for MLA with absorbed weights: K is
    the latent, and V is its first dims. ``soft_cap`` bounds the scores by c tanh(s / c).

    Returns ``[rows, q_heads, v_dim]`` in the queries' dtype. The work is enqueued on the current
    stream. The host does not wait, so positions beyond the page table are not detected: such rows
    see the tokens of the page table. Raises LayoutError or UnsupportedError for arguments that do
    not fit each other.
    """
    check_rows(queries, positions, view, layer, page_table, soft_cap, window, latent_dim)
    planes = view.layout.planes[layer]
    key, value = planes[0], planes[-1]
    heads, page_tokens = view.layout.kv_heads, view.layout.page_tokens
    return _launch(
        queries, positions, _base(view, key), _base(view, value), key, value, heads,
        page_table, page_tokens,
        (view.layout.num_pages if page_table is None else len(page_table)) * page_tokens,
        scale, soft_cap, window, latent_dim,
    )  # fmt: skip


def attend_parts(
    queries: torch.Tensor,
    positions: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    soft_cap: float,
    window: int,
) -> torch.Tensor:
    """Compute `attend_rows` over K and V ``[tokens, kv_heads, dim]``, without checks."""
    return _launch(
        queries, positions, keys, values, _plane(*keys.stride(), keys.shape[2]),
        _plane(*values.stride(), values.shape[2]), keys.shape[1], None, 1, keys.shape[0],
        scale, soft_cap, window, 0,
    )  # fmt: skip


@cache
def _plane(token: int, head: int, dim: int, size: int) -> Plane:
    return Plane(0, 0, token, head, Axis(token), Axis(dim), size)


def _launch(
    queries: torch.Tensor,
    positions: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    key: Plane,
    value: Plane,
    heads: int,
    page_table: torch.Tensor | None,
    page_tokens: int,
    tokens: int,
    scale: float,
    soft_cap: float,
    window: int,
    latent_dim: int,
) -> torch.Tensor:
    rows, query_heads, _ = queries.shape
    v_dim = latent_dim or value.head_dim
    out = queries.new_empty(rows, query_heads, v_dim)
    if not rows:
        return out
    launch, grid_rows, group, strides = _build(
        query_heads // heads, 0 if page_table is None else page_tokens, key, value, v_dim,
        bool(latent_dim), window, soft_cap > 0, queries.dtype == torch.float32,
    )  # fmt: skip
    query_row, query_head, _ = queries.stride()
    launch(
        queries.device, (-(-rows // grid_rows), query_heads // group),
        queries, out, positions, positions if page_table is None else page_table,
        keys, values, *strides, rows, tokens, query_row, query_head, scale, soft_cap,
    )  # fmt: skip
    return out


class _Built(NamedTuple):
    """A launcher; the rows and query heads of a program; the strides that the kernel takes."""

    launch: Launcher
    rows: int
    heads: int
    strides: tuple[int, ...]


@cache
def _build(
    group: int, page_tokens: int, key: Plane, value: Plane, v_dim: int,
    latent: bool, window: int, capped: bool, full: bool,
) -> _Built:  # fmt: skip
    tile, fixed = constants(
        group, page_tokens, key, value, v_dim,
        latent=latent, window=window, capped=capped, full=full,
    )  # fmt: skip
    launch = Launcher(attend_kernel, fixed, num_warps=tile.warps, num_stages=tile.stages)
    pack = fixed["GROUP"]
    return _Built(launch, tile.rows // pack, pack, (*_strides(key), *_strides(value)))


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
    """Return the tile for these shapes and the compile-time constants.

    ``page_tokens`` 0 means that there is no page table. ``full`` means float32.
    """
    dim = key.head_dim
    main = max(16, 1 << (dim.bit_length() - 1))
    tile = tile_for(dim, full=full, plain=not (window or capped))
    if not page_tokens:  # V is prefetched as K is, which takes shared memory and registers
        narrow = full and dim > 64
        tile = tile._replace(rows=32 if narrow else tile.rows, stages=min(tile.stages, 2))
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
        "K_TOKEN_RUN": key.token.inner,
        "K_DIM_RUN": _dim_run(key),
        "V_TOKEN_RUN": value.token.inner,
        "V_DIM_RUN": _dim_run(value),
        "M": tile.rows,
        "N": tile.keys,
        "MAIN": main,
        "TAIL": power_of_two(dim - main, MIN_DIM),
        "V_TILE": power_of_two(v_dim, MIN_DIM),
    }


def tile_for(dim: int, *, full: bool, plain: bool) -> AttendTile:
    """Return the tile for heads of ``dim``; ``plain`` means no window and no cap on scores."""
    if full:
        return AttendTile(64, 32, 8, 2) if dim <= 128 else AttendTile(32, 16, 8, 1)
    if dim > 256:
        return AttendTile(32, 16, 8, 1)
    if dim > 192 or (dim > 128 and not plain):
        return AttendTile(64, 32, 8, 2)
    if dim > 128:
        return AttendTile(64, 64, 8, 2)
    if plain and dim in (64, 128):
        return AttendTile(128, 64, 8, 3)
    return AttendTile(128, 32, 8, 2)


def _strides(plane: Plane) -> tuple[int, ...]:
    token, dim = plane.token, plane.dim
    return (
        plane.page, plane.head,
        token.stride, token.inner_stride,
        dim.stride, dim.inner_stride,
    )  # fmt: skip


def _dim_run(plane: Plane) -> int:
    """Return the dims of a packed run; 0 if they are contiguous and need no offsets."""
    return 0 if plane.dim == Axis(1) else plane.dim.inner


def _base(view: KVView, plane: Plane) -> torch.Tensor:
    """Return the plane's memory from its first element on."""
    tensor = view.tensors[plane.tensor]
    return tensor.as_strided((1,), (1,), tensor.storage_offset() + plane.offset)
