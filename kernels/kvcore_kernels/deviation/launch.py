"""The launch of the deviation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch

from kvcore.memory.layout import KVView
from kvcore_kernels.deviation.checks import check_deviations
from kvcore_kernels.deviation.kernel import deviation_kernel
from kvcore_kernels.fusion_rows import (
    Strided,
    arguments,
    check_count,
    common_width,
    strided_plane,
    strided_rows,
)
from kvcore_kernels.lang import float_type
from kvcore_kernels.launcher import Launcher
from kvcore_kernels.planes import power_of_two

__all__ = ["DeviationTile", "deviations", "parts_off", "tile_for"]

_TILE = 2048
"""Elements of K (or V) of one head that a program holds. Untuned: no GPU was at hand."""
_WARPS = 4


@dataclass(frozen=True)
class DeviationTile:
    """The compile-time constants of the deviation, of chosen or of all computed rows."""

    dtype: str
    width: int
    rows: int
    dim: int
    chosen: bool

    def constants(self) -> dict[str, Any]:
        kind = float_type(self.dtype)
        return {
            "WHICH": self.chosen,
            "DTYPE": kind,
            "MULTIPLE": self.width * 8 // kind.primitive_bitwidth,
            "WIDTH": self.width,
            "ROWS": self.rows,
            "DIM": self.dim,
        }

    @cached_property
    def launch(self) -> Launcher:
        """The launcher of the kernel with these constants."""
        return Launcher(deviation_kernel, self.constants(), num_warps=_WARPS)


def deviations(
    keys: torch.Tensor, values: torch.Tensor | None, view: KVView, layer: int, slots: torch.Tensor
) -> torch.Tensor:
    """Return the squared distance of pages to computed rows: float32 ``[2, rows]``, K then V.

    The arguments are those of `kvcore_kernels.merge.launch.merge_rows`, but ``view`` is not
    written. Its K must have been moved to the positions of these rows. The result is a sum over
    this view's heads; tensor-parallel ranks sum theirs. It is NaN if a slot is below 0, so such a
    row is chosen first. A latent (``values`` None) gives ``[1, rows]``. The work is enqueued on the
    current stream, and nothing is sent to the device. The host does not wait. Raises LayoutError or
    UnsupportedError for arguments that do not fit each other.
    """
    parts = check_deviations(keys, values, view, layer, slots)
    cached = [strided_plane(view, plane) for plane in view.layout.planes[layer]]
    return parts_off(parts, None, cached, slots, view.layout.page_tokens)


def parts_off(
    parts: Sequence[torch.Tensor],
    which: torch.Tensor | None,
    cached: Sequence[Strided],
    slots: torch.Tensor,
    page_tokens: int,
) -> torch.Tensor:
    """Do `deviations` of rows ``which`` (int64; None: all) of the parts, without checks."""
    rows, heads = slots.shape[0], parts[0].shape[1]
    out = torch.empty(len(parts), rows, dtype=torch.float32, device=slots.device)
    if not rows:
        return out
    check_count(rows)
    fresh = [strided_rows(part) for part in parts]
    width = common_width((*fresh, *cached), parts[0].element_size())
    dtype = str(parts[0].dtype).removeprefix("torch.")
    tile = tile_for(dtype, max(part.dim for part in fresh), width=width, chosen=which is not None)
    tile.launch(
        slots.device, (-(-rows // tile.rows), len(parts)),
        slots if which is None else which, slots.contiguous(), out,
        *arguments(fresh, cached, 1),
        rows, heads, page_tokens,
    )  # fmt: skip
    return out


@cache
def tile_for(dtype: str, head_dim: int, *, width: int, chosen: bool) -> DeviationTile:
    """Return the tile for heads of ``head_dim``."""
    dim = power_of_two(head_dim)
    return DeviationTile(dtype, width, max(1, _TILE // dim), dim, chosen)
