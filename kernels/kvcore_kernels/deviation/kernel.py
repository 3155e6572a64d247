"""The kernel for the squared distance of some rows of one plane."""

# Triton compiles these bodies from their source; its types are not Python's.
# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from kvcore_kernels.lang import along_dim, locate, plane_pointer

__all__ = ["deviation_kernel"]


@triton.jit(
    do_not_specialize=["rows", "heads", "page_tokens"],
    do_not_specialize_on_alignment=["fresh", "cached", "slots"],
)
def deviation_kernel(
    fresh,  # int64 [planes, FIELDS]: the computed rows, a page of one token each
    cached,  # int64 [planes, FIELDS]
    slots,  # int32 or int64 [rows]
    out,  # float32 [planes, rows]
    rows,
    heads,
    page_tokens,
    FIELDS: tl.constexpr,
    DTYPE: tl.constexpr,
    MULTIPLE: tl.constexpr,
    WIDTH: tl.constexpr,
    UNIT: tl.constexpr,
    CUT: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
):
    """Compute the squared distance of rows to their slots, in float32 and one pass.

    out[plane, r] = sum over head and dim of (fresh[plane, r] - pages[plane, slots[r]])^2

    It is NaN if the slot is below 0. Program (tile, plane) processes ROWS rows with all their
    heads. It keeps DIM partial sums for each row, and adds them up at the end.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slots + row, mask=row < rows, other=-1).to(tl.int64)
    a, b = fresh + tl.program_id(1) * FIELDS, cached + tl.program_id(1) * FIELDS
    a_base, b_base = plane_pointer(a, DTYPE, WIDTH), plane_pointer(b, DTYPE, WIDTH)
    page, token = slot // page_tokens, (slot % page_tokens).to(tl.int32)
    size = tl.multiple_of(tl.load(a + 9), MULTIPLE)
    sums = tl.zeros([ROWS, DIM], tl.float32)
    dims = tl.arange(0, DIM)
    mask = (slot >= 0)[:, None] & (dims < size)[None, :]
    a_dims, b_dims = along_dim(a, dims, CUT, UNIT), along_dim(b, dims, CUT, UNIT)
    for h in range(heads):
        head = token * 0 + h
        a_row = a_base + locate(a, row, head, token * 0, CUT, MULTIPLE)
        b_row = b_base + locate(b, page, head, token, CUT, MULTIPLE)
        x = tl.load(a_row[:, None] + a_dims[None, :], mask=mask, other=0.0).to(tl.float32)
        y = tl.load(b_row[:, None] + b_dims[None, :], mask=mask, other=0.0).to(tl.float32)
        sums += (x - y) * (x - y)
    total = tl.where(slot >= 0, tl.sum(sums, 1), float("nan"))
    tl.store(out + tl.program_id(1) * rows + row, total, mask=row < rows)
