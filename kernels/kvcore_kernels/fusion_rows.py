"""Rows of KV as kernels of a blend take them: by addresses and strides, as plain arguments.

A launch then needs no table on the device, and so no upload. Packed KV, whose dims are not
contiguous, exists on CPUs only and is not supported.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from kvcore.errors import LayoutError, UnsupportedError
from kvcore.memory.layout import Axis, KVView, Plane

__all__ = ["Strided", "check_count", "common_width", "strided_plane", "strided_rows"]

_WIDEST = 16
"""Bytes of the widest load or store of one thread, on every supported GPU."""


class Strided(NamedTuple):
    """Where one plane is: its address in bytes, and its strides and head dim in elements."""

    address: int
    page: int
    head: int
    token: int
    dim: int

    def by(self, factor: int) -> Strided:
        """Return the same in units of ``factor`` elements."""
        if factor == 1:
            return self
        return Strided(self.address, *(value // factor for value in self[1:]))


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
    together = _WIDEST
    for part in parts:
        together |= part.address | (part.page | part.head | part.token | part.dim) * itemsize
    return max(itemsize, together & -together)


def check_count(rows: int) -> None:
    """Raise LayoutError for more rows than a launch counts: kernels count them in int32."""
    if rows >= 1 << 31:
        raise LayoutError(f"{rows} rows in one call; fewer than {1 << 31} are supported: split it")
