"""The launch of the merge."""

from __future__ import annotations

import torch

from kvcore.memory.layout import KVView
from kvcore_kernels.copy.launch import tile_for
from kvcore_kernels.merge.checks import check_merge
from kvcore_kernels.merge.kernel import merge_kernel
from kvcore_kernels.planes import HEAD_DIM, guard, is_contiguous, plane_table, to_device, widen
from kvcore_kernels.rows import fresh_view

__all__ = ["merge_rows"]

_WARPS = 4


def merge_rows(
    keys: torch.Tensor, values: torch.Tensor | None, view: KVView, layer: int, slots: torch.Tensor
) -> None:
    """Write computed rows of one layer into ``view``, K and V in one launch.

    ``keys`` and ``values`` are ``[rows, kv_heads, dim]`` with any strides; ``values`` is None for a
    latent (MLA). ``slots`` is ``[rows]``, int32 or int64, on the same device. Row r is written to
    token ``slots[r] % page_tokens`` of page ``slots[r] // page_tokens``, or skipped if its slot is
    below 0. Bits are copied. The work is enqueued on the current stream. The host does not wait, so
    a slot beyond the pages is not detected. Raises LayoutError for arguments that do not fit each
    other.
    """
    parts = check_merge(keys, values, view, layer, slots)
    if not len(keys):
        return
    fresh = fresh_view(parts, view.layout.dtype)
    planes = [plane_table(fresh, [0], 0), plane_table(view, [layer], 0)]
    (source, target), words = widen(planes, view.layout.itemsize)
    heads = view.layout.kv_heads
    tile = tile_for(
        words,
        contiguous=is_contiguous((source, target)),
        cut=source.cut or target.cut,
        rows=len(keys) * heads,
        dim=int(source.rows[:, HEAD_DIM].max()),
    )
    with guard(keys.device):
        tables = to_device((source.rows, target.rows), keys.device)
        grid = (-(-len(keys) * heads // tile.rows), len(source.rows))
        merge_kernel[grid](
            *tables, slots.contiguous(), len(keys), heads, view.layout.page_tokens,
            **tile.constants(), num_warps=_WARPS,
        )  # fmt: skip
