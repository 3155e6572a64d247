"""The argument checks of the kernel and its naive twin."""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.errors import LayoutError, UnsupportedError
from kvcore.fusion.rope import Rope
from kvcore.memory.copy.base import Copy, Units, check_copy

__all__ = ["DTYPES", "check_shift"]

DTYPES = ("bfloat16", "float16", "float32")


def check_shift(copy: Copy, ropes: Sequence[Rope | None], distances: Units) -> None:
    """Raise LayoutError or UnsupportedError for invalid arguments. Reads no memory."""
    check_copy(copy)
    layout, layers, src_units = copy.src.layout, copy.layers, copy.src_units
    if len(ropes) != len(layers) or distances.shape != src_units.shape:
        raise LayoutError(
            f"{len(ropes)} ropes for {len(layers)} layers and distances of {distances.shape} for "
            f"units of {src_units.shape}: give one rope per layer and one distance per unit"
        )
    if layout.dtype not in DTYPES:
        raise UnsupportedError(
            f"cannot rotate K of {layout.dtype}: supported are {', '.join(DTYPES)}; unpack it first"
        )
    rotating = [(layer, rope) for layer, rope in zip(layers, ropes, strict=True) if rope]
    if rotating and layout.kv_factor != 2:
        raise UnsupportedError(
            "a latent (MLA) stores its positions elsewhere: give no ropes for it"
        )
    for layer, rope in rotating:
        if rope.head_dim != layout.planes[layer][0].head_dim:
            raise LayoutError(
                f"layer {layer}: a rope of head dim {rope.head_dim} for K of head dim "
                f"{layout.planes[layer][0].head_dim}"
            )
    if len({(rope.rotary_dim, rope.pairing) for _, rope in rotating}) > 1:
        raise UnsupportedError(
            "layers differ in pairing or in the number of rotated dims: shift them in separate "
            "calls"
        )
