"""The naive twin: a copy to staging, `Rope.shift` there, and a copy to the target."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvcore.fusion.rope import Rope
from kvcore.memory.copy.base import Copy, HeadRange, Units
from kvcore.memory.copy.reference import ReferenceOps
from kvcore.memory.layout import KVView, arena_layout
from kvcore.model.shape import BlockShape
from kvcore_kernels.shift.checks import check_shift

__all__ = ["copy_shifted"]


def copy_shifted(copy: Copy, ropes: Sequence[Rope | None], distances: Units) -> None:
    """Compute `kvcore_kernels.shift.launch.copy_shifted` through a second copy of the units."""
    check_shift(copy, ropes, distances)
    if copy.is_empty:
        return
    src, src_units, dst, dst_units, layers, unit_tokens, heads = copy
    everywhere = np.where(dst_units < 0, -1, src_units)
    staging = np.arange(len(src_units))
    for layer, rope in zip(layers, ropes, strict=True):
        source, target = src.select_layers([layer]), dst.select_layers([layer])
        held = _staging(source, len(src_units), unit_tokens, heads.size)
        into, onward = HeadRange(heads.src, 0, heads.size), HeadRange(0, heads.dst, heads.size)
        ReferenceOps().copy(Copy(source, everywhere, held, staging, [0], unit_tokens, into))
        if rope:
            _shift(held, rope, distances)
        chosen = np.where(everywhere < 0, -1, staging)
        ReferenceOps().copy(Copy(held, chosen, target, dst_units, [0], unit_tokens, onward))


def _staging(view: KVView, units: int, unit_tokens: int, heads: int) -> KVView:
    """Return zeroed canonical blocks of one layer, ``unit_tokens`` each."""
    dims = [plane.head_dim for plane in view.layout.planes[0]]
    shape = BlockShape(
        1, heads, dims[0], unit_tokens, view.layout.dtype, len(dims), v_head_dim=dims[-1]
    )
    count = units * shape.nbytes // shape.itemsize
    dtype = getattr(torch, shape.dtype)
    memory = torch.zeros(count, dtype=dtype, device=view.tensors[0].device)
    return KVView(arena_layout(shape, units), [memory])


def _shift(view: KVView, rope: Rope, distances: Units) -> None:
    """Rotate K of every slot by its distance, in place."""
    layout = view.layout
    plane = layout.planes[0][0]
    size = layout.num_pages, layout.kv_heads, layout.page_tokens, plane.head_dim
    keys = view.tensors[0].as_strided(size, (plane.page, plane.head, plane.head_dim, 1))
    for page, distance in enumerate(distances.tolist()):
        keys[page] = rope.shift(keys[page], distance)
