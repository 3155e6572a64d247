"""Rows of KV as kernels of a blend take them: by addresses and strides, as plain arguments.

A launch then needs no table on the device, and so no upload. Packed KV, whose dims are not
contiguous, exists on CPUs only and is not supported.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from kvcore.errors import LayoutError, UnsupportedError
from kvcore.memory.layout import Axis, KVView, Plane

__all__ = ["Strided", "arguments", "check_count", "common_width", "strided_plane", "strided_rows"]

_WIDEST = 16
"""Bytes of the widest load or store of one thread, on every supported GPU."""


class Strided(NamedTuple):
    """Where one plane is: its address in bytes, and its strides and head dim in elements."""

    address: int
    page: int
    head: int
    token: int
    dim: int


def strided_rows(part: torch.Tensor) -> Strided:
    """Return computed rows ``[rows, kv_heads, dim]`` as pages of one token."""
    row, head, dim = part.stride()
    size = part.shape[2]
    if dim != 1 and size > 1:
        raise UnsupportedError(f"rows with a stride of {dim} between dims: give contiguous dims")
    return Strided(part.data_ptr(), row, head, 0, size)


def strided_plane(view: KVView, plane: Plane) -> Strided:
    """Return one plane of pages. Raises UnsupportedError if it is packed."""
    if plane.dim != Axis(1) or plane.token.inner != 1:
        raise UnsupportedError("packed KV: kernels of a blend read contiguous dims only")
    tensor = view.tensors[plane.tensor]
    address = tensor.data_ptr() + plane.offset * view.layout.itemsize
    return Strided(address, plane.page, plane.head, plane.token.stride, plane.head_dim)


def common_width(parts: Iterable[Strided], itemsize: int) -> int:
    """Return the largest power of two up to 16 that divides all addresses, strides and heads.

    The result is in bytes.
    """
    addresses, sizes = _WIDEST, 0
    for address, page, head, token, dim in parts:
        addresses |= address
        sizes |= page | head | token | dim
    together = addresses | sizes * itemsize
    return max(itemsize, together & -together)


def arguments(sources: Sequence[Strided], targets: Sequence[Strided], factor: int) -> list[int]:
    """Return ``kvcore_kernels.merge.kernel.ADDRESSES`` for one or two planes.

    Strides and dims are in units of ``factor`` elements. A plane that is alone is given twice.
    """
    found: list[int] = []
    for source, target in zip(sources, targets, strict=True):
        a, row, a_head, _, dim = source
        b, page, head, token, _ = target
        found += (
            a, row // factor, a_head // factor, b, page // factor, head // factor,
            token // factor, dim // factor,
        )  # fmt: skip
    return found if len(sources) == 2 else found * 2


def check_count(rows: int) -> None:
    """Raise LayoutError for more rows than a launch counts: kernels count them in int32."""
    if rows >= 1 << 31:
        raise LayoutError(f"{rows} rows in one call; fewer than {1 << 31} are supported: split it")
