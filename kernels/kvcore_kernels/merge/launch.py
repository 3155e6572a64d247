"""The launch of the merge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch

from kvcore.memory.layout import KVView
from kvcore_kernels.fusion_rows import (
    Strided,
    arguments,
    check_count,
    common_width,
    strided_plane,
    strided_rows,
)
from kvcore_kernels.lang import word_type
from kvcore_kernels.launcher import Launcher
from kvcore_kernels.merge.checks import check_merge
from kvcore_kernels.merge.kernel import merge_kernel
from kvcore_kernels.planes import power_of_two

__all__ = ["MergeTile", "merge_parts", "merge_rows", "tile_for"]

_TILE_BYTES = 16 << 10
"""Bytes that a program copies. Untuned: no GPU was at hand."""
_MOST_WORDS = 2048
"""Words of a program; more narrow ones would spill registers."""
_WARPS = 4


@dataclass(frozen=True)
class MergeTile:
    """The compile-time constants of the merge. A word has ``size`` bytes, addresses ``width``."""

    size: int
    width: int
    rows: int
    dim: int

    def constants(self) -> dict[str, Any]:
        return {
            "DTYPE": word_type(self.size),
            "MULTIPLE": self.width // self.size,
            "WIDTH": self.width,
            "ROWS": self.rows,
            "DIM": self.dim,
        }

    @cached_property
    def launch(self) -> Launcher:
        """The launcher of the kernel with these constants."""
        return Launcher(merge_kernel, self.constants(), num_warps=_WARPS)


def merge_rows(
    keys: torch.Tensor, values: torch.Tensor | None, view: KVView, layer: int, slots: torch.Tensor
) -> None:
    """Write computed rows of one layer into ``view``, K and V in one launch.

    ``keys`` and ``values`` are ``[rows, kv_heads, dim]`` with contiguous dims; ``values`` is None
    for a latent (MLA). ``slots`` is ``[rows]``, int32 or int64, on the same device. Row r is
    written to token ``slots[r] % page_tokens`` of page ``slots[r] // page_tokens``, or skipped if
    its slot is below 0. Bits are copied. The work is enqueued on the current stream, and nothing is
    sent to the device. The host does not wait, so a slot beyond the pages is not detected. Raises
    LayoutError for arguments that do not fit each other, UnsupportedError for packed KV.
    """
    parts = check_merge(keys, values, view, layer, slots)
    into = [strided_plane(view, plane) for plane in view.layout.planes[layer]]
    merge_parts(parts, into, slots, view.layout.page_tokens)


def merge_parts(
    parts: Sequence[torch.Tensor], into: Sequence[Strided], slots: torch.Tensor, page_tokens: int
) -> None:
    """Do `merge_rows` without checks. There are one or two parts, and as many planes."""
    rows, heads = parts[0].shape[:2]
    if not rows:
        return
    check_count(rows * heads)
    itemsize = parts[0].element_size()
    given = [strided_rows(part) for part in parts]
    tile = tile_for(
        common_width((*given, *into), itemsize), max(part.dim for part in given), itemsize
    )
    tile.launch(
        slots.device, (-(-rows * heads // tile.rows), len(parts)),
        slots.contiguous(), *arguments(given, into, tile.size // itemsize),
        rows, heads, page_tokens,
    )  # fmt: skip


@cache
def tile_for(width: int, dim: int, itemsize: int) -> MergeTile:
    """Return a tile of `_TILE_BYTES` for heads of ``dim`` elements."""
    size = min(width, 8)
    area = min(_TILE_BYTES // size, _MOST_WORDS)
    wide = min(power_of_two(-(-dim * itemsize // size)), area // 4)
    return MergeTile(size, width, area // wide, wide)
