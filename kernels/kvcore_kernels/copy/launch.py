"""The launch of the copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from kvcore.memory.copy.base import HeadRange, Units
from kvcore.memory.layout import KVView
from kvcore_kernels.copy.kernel import copy_kernel
from kvcore_kernels.lang import word_type
from kvcore_kernels.planes import (
    FIELDS,
    HEAD_DIM,
    Words,
    guard,
    is_contiguous,
    kernel_device,
    plane_table,
    power_of_two,
    to_device,
    widen,
)

__all__ = ["CopyTile", "copy_units", "tile_for"]

_TILE_BYTES = 16 << 10
"""Bytes that a program copies: 128 threads with eight 16-byte loads each in flight.

Untuned: derived from the latency of Hopper and CDNA3, because no GPU was at hand."""
_WARPS = 4
_STRIDED, _PACKED = 4096, 2048
"""Words of a program's tile if each has its own address; more of them would spill registers."""


class CopyTile(NamedTuple):
    """The compile-time constants of a copy."""

    words: Words
    contiguous: bool
    cut: bool
    rows: int
    dim: int

    def constants(self) -> dict[str, Any]:
        return {
            "FIELDS": FIELDS,
            "DTYPE": word_type(self.words.size),
            "MULTIPLE": self.words.width // self.words.size,
            "WIDTH": self.words.width,
            "UNIT": self.contiguous,
            "CUT": self.cut,
            "ROWS": self.rows,
            "DIM": self.dim,
        }


def copy_units(
    src: KVView,
    src_units: Units,
    dst: KVView,
    dst_units: Units,
    layers: Sequence[int],
    unit_tokens: int,
    heads: HeadRange,
) -> None:
    """Copy ``src_units[i]`` of ``src`` to ``dst_units[i]`` of ``dst``, all layers in one launch.

    The arguments are those of `kvcore.memory.copy.base.DeviceOps.copy`, checked by its
    `copy_blocks`. Memory is a GPU's, or pinned host memory, which the kernel accesses over the
    link. Only the chosen units of ``dst`` are written. The work is enqueued on the GPU's current
    stream; the host does not wait. If a unit occurs twice in ``dst_units``, the order of the writes
    is undefined. Thread-safe.
    """
    if not (len(src_units) and len(layers) and heads.size):
        return
    itemsize = src.layout.itemsize
    planes = [plane_table(src, layers, heads.src), plane_table(dst, layers, heads.dst)]
    (source, target), words = widen(planes, itemsize)
    rows = heads.size * unit_tokens
    tile = tile_for(
        words,
        contiguous=is_contiguous((source, target)),
        cut=source.cut or target.cut,
        rows=rows,
        dim=int(source.rows[:, HEAD_DIM].max()),
    )
    device = kernel_device((src, dst))
    with guard(device):
        arrays = to_device((source.rows, target.rows, src_units, dst_units), device)
        grid = (len(src_units), len(source.rows), -(-rows // tile.rows))
        copy_kernel[grid](
            *arrays,
            heads.size,
            unit_tokens,
            src.layout.page_tokens // unit_tokens,
            dst.layout.page_tokens // unit_tokens,
            **tile.constants(),
            num_warps=_WARPS,
        )


def tile_for(words: Words, *, contiguous: bool, cut: bool, rows: int, dim: int) -> CopyTile:
    """Return a tile of about `_TILE_BYTES` for ``rows`` rows of ``dim`` words."""
    area = _TILE_BYTES // words.size
    if not contiguous:
        area = min(area, _PACKED if cut else _STRIDED)
    width = min(power_of_two(dim), area // 4)
    return CopyTile(words, contiguous, cut, min(power_of_two(rows), area // width), width)
