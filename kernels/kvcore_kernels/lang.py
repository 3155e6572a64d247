"""Device functions that several kernels share."""

# Triton compiles these bodies from their source; its types are not Python's.
# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["along", "along_dim", "locate", "plane_pointer"]


@triton.jit
def along(index, stride, inner, inner_stride, CUT: tl.constexpr):
    """``kvcore.layout.Axis`` at ``index``, an int32; not CUT means that no run is packed. int64."""
    if CUT:
        run = inner.to(tl.int32)
        offset = (index // run).to(tl.int64) * stride + (index % run).to(tl.int64) * inner_stride
    else:
        offset = index.to(tl.int64) * stride
    return offset


@triton.jit
def locate(plane, page, head, token, CUT: tl.constexpr, MULTIPLE: tl.constexpr):
    """Offset of element 0 of ``token`` in ``page`` and ``head``, after the plane's address.

    ``plane`` points at a row of ``planes.FIELDS`` int64. The rest broadcast. int64, and known to be
    a multiple of MULTIPLE: a hint on the value that a call returns would be lost in inlining it.
    """
    at = page.to(tl.int64) * tl.load(plane + 1) + head.to(tl.int64) * tl.load(plane + 2)
    at += along(token, tl.load(plane + 3), tl.load(plane + 4), tl.load(plane + 5), CUT)
    return tl.multiple_of(at, MULTIPLE)


@triton.jit
def along_dim(plane, dim, CUT: tl.constexpr, UNIT: tl.constexpr):
    """Offset of ``dim`` in its row; UNIT says that every row is contiguous."""
    if UNIT:
        offset = dim
    else:
        offset = along(dim, tl.load(plane + 6), tl.load(plane + 7), tl.load(plane + 8), CUT)
    return offset


@triton.jit
def plane_pointer(plane, DTYPE: tl.constexpr, WIDTH: tl.constexpr):
    """The plane's address as a pointer to DTYPE, a multiple of WIDTH bytes."""
    address = tl.multiple_of(tl.load(plane), WIDTH)
    return tl.multiple_of(address.to(tl.pointer_type(DTYPE)), WIDTH)
