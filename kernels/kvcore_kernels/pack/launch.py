"""The launches of packing and unpacking."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from kvcore.memory.copy.base import HeadRange, Units
from kvcore.memory.layout import KVView
from kvcore_kernels.lang import float_type
from kvcore_kernels.launcher import Launcher
from kvcore_kernels.pack.checks import LARGEST, SMALLEST, check_pack
from kvcore_kernels.pack.kernel import pack_kernel, unpack_kernel
from kvcore_kernels.planes import (
    FIELDS,
    HEAD_DIM,
    common_width,
    guard,
    is_contiguous,
    kernel_device,
    plane_table,
    power_of_two,
    to_device,
)

__all__ = ["PackTile", "has_fp8", "pack_blocks", "tile_for", "unpack_blocks"]

_TILE, _STRIDED = 4096, 2048
"""Elements of a program; fewer if each has its own address. Untuned: no GPU was at hand."""
_WARPS = 4
_FP8_FROM = (8, 9)
"""The first NVIDIA compute capability with e4m3 instructions; other GPUs use integers."""


class PackTile(NamedTuple):
    """The compile-time constants of packing and unpacking.

    ``wide`` is the dtype of the wide side. Addresses are multiples of ``width`` bytes on the wide
    side and of ``packed_width`` bytes on the packed side.
    """

    wide: str
    packed: str
    units: int
    block: int
    width: int
    packed_width: int
    contiguous: bool
    cut: bool
    native: bool
    tokens: int
    dim: int

    def constants(self) -> dict[str, Any]:
        """Return the constants of both kernels; packing also needs `limits`."""
        kind = float_type(self.wide)
        return {
            "FIELDS": FIELDS,
            "UNITS": self.units,
            "BLOCK": self.block,
            "DTYPE": kind,
            "WIDTH": self.width,
            "MULTIPLE": self.width * 8 // kind.primitive_bitwidth,
            "PACKED_WIDTH": self.packed_width,
            "UNIT": self.contiguous,
            "CUT": self.cut,
            "FP8": self.packed != "int8",
            "NATIVE": self.native,
            "TOKENS": self.tokens,
            "DIM": self.dim,
        }

    def limits(self) -> dict[str, float]:
        return {"MOST": LARGEST[self.packed], "SMALLEST": SMALLEST}


def pack_blocks(
    src: KVView,
    src_units: Units,
    dst: KVView,
    dst_blocks: Units,
    scales: torch.Tensor,
    layers: Sequence[int],
    heads: HeadRange,
) -> None:
    """Gather units of ``src`` into packed blocks of ``dst``, all layers in one launch.

    ``dst`` is float8_e4m3fn or int8, and each of its pages is a block. ``src`` is bfloat16, float16
    or float32. ``src_units`` is ``[blocks, n]``: block ``dst_blocks[i]`` consists of its n units of
    ``page_tokens / n`` tokens each. ``scales`` is contiguous float32 ``[slots, layers, parts,
    heads]`` of ``dst``. A code c of a block, layer, part and head means c times its scale. The
    scale maps the largest value to the format's largest. If a value is not finite, the scale is NaN
    and the codes are 0. Units and blocks below 0 are skipped and do not affect scales. Pack a block
    in one call, because packing the rest later would change its scale.

    Only the chosen blocks, and their scales of ``heads`` and ``layers``, are written. Memory is a
    GPU's or pinned. The work is enqueued on the current stream; the host does not wait.
    Thread-safe. Raises LayoutError or UnsupportedError for arguments that do not fit each other.
    """
    _launch(True, src, src_units, dst, dst_blocks, scales, layers, heads)


def unpack_blocks(
    src: KVView,
    src_blocks: Units,
    scales: torch.Tensor,
    dst: KVView,
    dst_units: Units,
    layers: Sequence[int],
    heads: HeadRange,
) -> None:
    """Scatter packed blocks of ``src`` to units of ``dst``, all layers in one launch.

    This is the inverse of `pack_blocks`, with the same arguments; in ``heads``, ``src`` is the
    packed side. Units and blocks below 0 are skipped.
    """
    flipped = HeadRange(heads.dst, heads.src, heads.size)
    _launch(False, dst, dst_units, src, src_blocks, scales, layers, flipped)


def _launch(
    packing: bool,
    wide: KVView,
    units: Units,
    packed: KVView,
    blocks: Units,
    scales: torch.Tensor,
    layers: Sequence[int],
    heads: HeadRange,
) -> None:
    """Pack or unpack. In ``heads``, ``src`` is the wide side."""
    tokens = check_pack(wide, units, packed, blocks, scales, layers, heads)
    if not (units.size and len(layers) and heads.size):
        return
    wide_table, packed_table = (
        plane_table(wide, layers, heads.src), plane_table(packed, layers, heads.dst)
    )  # fmt: skip
    device = kernel_device((wide, packed))
    tables = [wide_table, packed_table]
    tile = tile_for(
        wide.layout.dtype, packed.layout.dtype, units.shape[1], packed.layout.page_tokens,
        int(wide_table.rows[:, HEAD_DIM].max()),
        width=common_width([wide_table], wide.layout.itemsize),
        packed_width=common_width([packed_table], 1),
        contiguous=is_contiguous(tables), cut=any(table.cut for table in tables),
        native=has_fp8(device),
    )  # fmt: skip
    parts = packed.layout.kv_factor
    places = (np.asarray(layers)[:, None] * parts + np.arange(parts)).ravel()
    chosen = np.where((units >= 0).any(1), blocks, -1)
    with guard(device):
        rows = [table.rows for table in (tables if packing else reversed(tables))]
        arrays = to_device((*rows, places, units, chosen), device)
    _launcher(tile, packing)(
        device, (len(blocks), len(places), heads.size),
        *arrays, scales, heads.dst, packed.layout.layers * parts, packed.layout.kv_heads,
        tokens, wide.layout.page_tokens // tokens,
    )  # fmt: skip


@cache
def _launcher(tile: PackTile, packing: bool) -> Launcher:
    if packing:
        return Launcher(pack_kernel, tile.constants() | tile.limits(), num_warps=_WARPS)
    return Launcher(unpack_kernel, tile.constants(), num_warps=_WARPS)


def has_fp8(device: torch.device) -> bool:
    """Return True if a GPU has an instruction for e4m3 that Triton uses."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= _FP8_FROM


def tile_for(
    wide: str,
    packed: str,
    units: int,
    block: int,
    head_dim: int,
    *,
    width: int,
    packed_width: int,
    contiguous: bool,
    cut: bool,
    native: bool,
) -> PackTile:
    """Return the tile for blocks of ``block`` tokens in ``units`` units, with ``head_dim``."""
    dim = power_of_two(head_dim)
    area = _TILE if contiguous else _STRIDED
    tokens = max(1, min(power_of_two(block), area // dim))
    return PackTile(
        wide, packed, units, block, width, packed_width, contiguous, cut,
        native and packed != "int8", tokens, dim,
    )  # fmt: skip
