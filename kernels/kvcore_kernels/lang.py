"""Device functions shared by several kernels."""

# Triton compiles these bodies from their source; its types are not Python's.
# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "along",
    "along_dim",
    "copy_dims",
    "float_type",
    "locate",
    "locate_unit",
    "plane_pointer",
    "word_type",
]


@triton.jit
def along(index, stride, inner, inner_stride, CUT: tl.constexpr):
    """Return the int64 offset of ``index`` (int32) on a ``kvcore.memory.layout.Axis``.

    If CUT is false, no run is packed.
    """
    if CUT:
        run = inner.to(tl.int32)
        offset = (index // run).to(tl.int64) * stride + (index % run).to(tl.int64) * inner_stride
    else:
        offset = index.to(tl.int64) * stride
    return offset


@triton.jit
def locate(plane, page, head, token, CUT: tl.constexpr, MULTIPLE: tl.constexpr):
    """Return the offset of element 0 of ``token`` in ``page`` and ``head`` from the plane's start.

    ``plane`` points to a row of ``planes.FIELDS`` int64 values. The other arguments broadcast. The
    result is int64 and hinted as a multiple of MULTIPLE; a hint by the caller would be lost when
    this function is inlined.
    """
    at = page.to(tl.int64) * tl.load(plane + 1) + head.to(tl.int64) * tl.load(plane + 2)
    at += along(token, tl.load(plane + 3), tl.load(plane + 4), tl.load(plane + 5), CUT)
    return tl.multiple_of(at, MULTIPLE)


@triton.jit
def locate_unit(
    plane, unit, page_units, unit_tokens, head, token, CUT: tl.constexpr, MULTIPLE: tl.constexpr
):
    """Do `locate` for ``token`` in ``unit``: a page has ``page_units`` units of ``unit_tokens``."""
    in_page = (unit % page_units).to(tl.int32) * unit_tokens + token
    return locate(plane, unit // page_units, head, in_page, CUT, MULTIPLE)


@triton.jit
def along_dim(plane, dim, CUT: tl.constexpr, UNIT: tl.constexpr):
    """Return the offset of ``dim`` in its row; UNIT means that every row is contiguous."""
    if UNIT:
        offset = dim
    else:
        offset = along(dim, tl.load(plane + 6), tl.load(plane + 7), tl.load(plane + 8), CUT)
    return offset


@triton.jit
def plane_pointer(plane, DTYPE: tl.constexpr, WIDTH: tl.constexpr):
    """Return the plane's address as a pointer to DTYPE, hinted as a multiple of WIDTH bytes."""
    address = tl.multiple_of(tl.load(plane), WIDTH)
    return tl.multiple_of(address.to(tl.pointer_type(DTYPE)), WIDTH)


@triton.jit
def copy_dims(
    source,
    target,
    src,  # pointers [ROWS] to element 0 of each row
    dst,
    real,
    FIRST: tl.constexpr,
    DIM: tl.constexpr,
    CUT: tl.constexpr,
    UNIT: tl.constexpr,
    MULTIPLE: tl.constexpr,
):
    """Copy rows from dim FIRST on, DIM at a time; the head dim is a multiple of MULTIPLE."""
    size = tl.multiple_of(tl.load(source + 9), MULTIPLE)
    for first in range(FIRST, size, DIM):
        dims = first + tl.arange(0, DIM)
        mask = real[:, None] & (dims < size)[None, :]
        values = tl.load(src[:, None] + along_dim(source, dims, CUT, UNIT)[None, :], mask=mask)
        tl.store(dst[:, None] + along_dim(target, dims, CUT, UNIT)[None, :], values, mask=mask)


def word_type(size: int) -> tl.dtype:
    """Return the integer type of ``size`` bytes: 1, 2, 4 or 8."""
    return {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}[size]


def float_type(name: str) -> tl.dtype:
    """Return the float type that torch calls ``name``."""
    return {"bfloat16": tl.bfloat16, "float16": tl.float16, "float32": tl.float32}[name]
