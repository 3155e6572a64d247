"""The packed formats, and the argument checks of the kernels and their naive twins."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvcore.errors import LayoutError, UnsupportedError
from kvcore.memory.copy.base import HeadRange, Units
from kvcore.memory.layout import KVView

__all__ = ["LARGEST", "SMALLEST", "WIDE", "check_pack"]

LARGEST = {"float8_e4m3fn": 448.0, "int8": 127.0}
"""The largest value of each packed format."""
SMALLEST = 2.0**-100
"""The smallest maximum from which a scale is computed, so that no scale is subnormal."""
WIDE = ("bfloat16", "float16", "float32")


def check_pack(
    wide: KVView,
    units: Units,
    packed: KVView,
    blocks: Units,
    scales: torch.Tensor,
    layers: Sequence[int],
    heads: HeadRange,
) -> int:
    """Return the tokens per unit. Raise LayoutError or UnsupportedError for invalid arguments.

    Reads no memory. In ``heads``, ``src`` is a head of ``wide`` and ``dst`` one of ``packed``.
    """
    a, b = wide.layout, packed.layout
    if a.dtype not in WIDE or b.dtype not in LARGEST:
        raise UnsupportedError(
            f"{a.dtype} packed as {b.dtype}: supported are {', '.join(WIDE)}, "
            f"packed as {', '.join(LARGEST)}"
        )
    if units.ndim != 2 or len(units) != len(blocks) or blocks.ndim != 1:
        raise LayoutError(
            f"units of {units.shape} for blocks of {blocks.shape}: give a row of units per block"
        )
    tokens, left = divmod(b.page_tokens, max(int(units.shape[1]), 1))
    if left or not tokens or a.page_tokens % tokens:
        raise LayoutError(
            f"{units.shape[1]} units for a block of {b.page_tokens} tokens and pages of "
            f"{a.page_tokens}: a unit must divide both"
        )
    _check_planes(wide, packed, layers, heads)
    wanted = b.num_pages, b.layers, b.kv_factor, b.kv_heads
    if scales.dtype != torch.float32 or tuple(scales.shape) != wanted:
        raise LayoutError(
            f"scales of {scales.dtype} {tuple(scales.shape)}: give float32 {wanted} "
            "(slots, layers, parts, heads)"
        )
    if not scales.is_contiguous():
        raise LayoutError(f"scales of strides {scales.stride()} are not contiguous: make them so")
    for what, numbers, most in (
        ("unit", units, a.num_pages * (a.page_tokens // tokens)),
        ("block", blocks, b.num_pages),
    ):
        if numbers.size and int(numbers.max()) >= most:
            raise LayoutError(f"{what} {int(numbers.max())} is out of range: there are {most}")
    return tokens


def _check_planes(wide: KVView, packed: KVView, layers: Sequence[int], heads: HeadRange) -> None:
    a, b = wide.layout, packed.layout
    if any(not 0 <= layer < min(a.layers, b.layers) for layer in layers):
        raise LayoutError(
            f"layers {list(layers)} are out of range: there are {a.layers} and {b.layers}"
        )
    if min(heads) < 0 or heads.src + heads.size > a.kv_heads or heads.dst + heads.size > b.kv_heads:
        raise LayoutError(
            f"{heads} is out of range: there are {a.kv_heads} wide and {b.kv_heads} packed heads"
        )
    for layer in layers:
        dims = [[plane.head_dim for plane in layout.planes[layer]] for layout in (a, b)]
        if dims[0] != dims[1]:
            raise LayoutError(f"layer {layer}: head dims {dims[0]} and {dims[1]} must be equal")
