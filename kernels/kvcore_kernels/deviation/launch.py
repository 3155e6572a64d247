"""The launch of the deviation."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from kvcore.memory.layout import KVView
from kvcore_kernels.deviation.checks import check_deviations
from kvcore_kernels.deviation.kernel import deviation_kernel
from kvcore_kernels.lang import float_type
from kvcore_kernels.planes import (
    FIELDS,
    common_width,
    guard,
    is_contiguous,
    plane_table,
    power_of_two,
    to_device,
)
from kvcore_kernels.rows import fresh_view

__all__ = ["DeviationTile", "deviations", "tile_for"]

_TILE = 2048
"""Elements of K (or V) of one head that a program holds. Untuned: no GPU was at hand."""
_WARPS = 4


class DeviationTile(NamedTuple):
    """The compile-time constants of the deviation."""

    dtype: str
    width: int
    contiguous: bool
    cut: bool
    rows: int
    dim: int

    def constants(self) -> dict[str, Any]:
        kind = float_type(self.dtype)
        return {
            "FIELDS": FIELDS,
            "DTYPE": kind,
            "MULTIPLE": self.width * 8 // kind.primitive_bitwidth,
            "WIDTH": self.width,
            "UNIT": self.contiguous,
            "CUT": self.cut,
            "ROWS": self.rows,
            "DIM": self.dim,
        }


def deviations(
    keys: torch.Tensor, values: torch.Tensor | None, view: KVView, layer: int, slots: torch.Tensor
) -> torch.Tensor:
    """Return the squared distance of pages to computed rows: float32 ``[2, rows]``, K then V.

    The arguments are those of `kvcore_kernels.merge.launch.merge_rows`, but ``view`` is not
    written. Its K must have been moved to the positions of these rows. The result is a sum over
    this view's heads; tensor-parallel ranks sum theirs. It is NaN if a slot is below 0, so such a
    row is chosen first. A latent (``values`` None) gives ``[1, rows]``. The work is enqueued on the
    current stream; the host does not wait. Raises LayoutError or UnsupportedError for arguments
    that do not fit each other.
    """
    parts = check_deviations(keys, values, view, layer, slots)
    out = torch.empty(len(parts), len(keys), dtype=torch.float32, device=keys.device)
    if not len(keys):
        return out
    fresh = fresh_view(parts, view.layout.dtype)
    planes = [plane_table(fresh, [0], 0), plane_table(view, [layer], 0)]
    tile = tile_for(
        view.layout.dtype, max(part.shape[2] for part in parts),
        width=common_width(planes, view.layout.itemsize),
        contiguous=is_contiguous(planes), cut=any(table.cut for table in planes),
    )  # fmt: skip
    with guard(keys.device):
        tables = to_device([table.rows for table in planes], keys.device)
        deviation_kernel[(-(-len(keys) // tile.rows), len(parts))](
            *tables, slots.contiguous(), out,
            len(keys), view.layout.kv_heads, view.layout.page_tokens,
            **tile.constants(), num_warps=_WARPS,
        )  # fmt: skip
    return out


def tile_for(
    dtype: str, head_dim: int, *, width: int, contiguous: bool, cut: bool
) -> DeviationTile:
    """Return the tile for heads of ``head_dim``."""
    dim = power_of_two(head_dim)
    return DeviationTile(dtype, width, contiguous, cut, max(1, _TILE // dim), dim)
