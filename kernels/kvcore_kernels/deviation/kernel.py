"""The kernel for the squared distance of some rows of one plane."""

# Triton compiles these bodies from their source; its types are not Python's.
# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from kvcore_kernels.merge.kernel import ADDRESSES

__all__ = ["deviation_kernel"]


@triton.jit(
    do_not_specialize=["rows", "heads", "page_tokens", *ADDRESSES],
    do_not_specialize_on_alignment=["which", "slots", "out"],
)
def deviation_kernel(
    which,  # int64 [rows]: indices of the computed rows
    slots,  # int32 or int64 [rows]
    out,  # float32 [planes, rows]
    k_from: tl.int64,  # address of the computed K; strides are in elements
    k_from_row: tl.int64,
    k_from_head: tl.int64,
    k_to: tl.int64,  # address of K in the pages
    k_page: tl.int64,
    k_head: tl.int64,
    k_token: tl.int64,
    k_dim: tl.int64,
    v_from: tl.int64,
    v_from_row: tl.int64,
    v_from_head: tl.int64,
    v_to: tl.int64,
    v_page: tl.int64,
    v_head: tl.int64,
    v_token: tl.int64,
    v_dim: tl.int64,
    rows: tl.int32,
    heads: tl.int32,
    page_tokens: tl.int32,
    WHICH: tl.constexpr,
    DTYPE: tl.constexpr,
    MULTIPLE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
):
    """Compute the squared distance of rows to their slots, in float32 and one pass.

    out[plane, r] = sum over head and dim of (fresh[plane, which[r]] - pages[plane, slots[r]])^2

    It is NaN if the slot is below 0. If WHICH is false, which[r] is r. Program (tile, plane)
    processes ROWS rows with all their heads. It keeps DIM partial sums for each row, and adds them
    up at the end.
    """
    number = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slots + number, mask=number < rows, other=-1).to(tl.int64)
    row = number.to(tl.int64)
    if WHICH:
        row = tl.load(which + number, mask=number < rows, other=0)
    page, token = slot // page_tokens, slot % page_tokens
    first = tl.program_id(1) == 0
    fresh_head, cached_head = (
        tl.where(first, k_from_head, v_from_head),
        tl.where(first, k_head, v_head),
    )
    src = row * tl.where(first, k_from_row, v_from_row)
    dst = page * tl.where(first, k_page, v_page) + token * tl.where(first, k_token, v_token)
    source = tl.multiple_of(tl.where(first, k_from, v_from), WIDTH)
    target = tl.multiple_of(tl.where(first, k_to, v_to), WIDTH)
    a_base = tl.multiple_of(source.to(tl.pointer_type(DTYPE)), WIDTH)
    b_base = tl.multiple_of(target.to(tl.pointer_type(DTYPE)), WIDTH)
    size = tl.multiple_of(tl.where(first, k_dim, v_dim).to(tl.int32), MULTIPLE)
    sums = tl.zeros([ROWS, DIM], tl.float32)
    dims = tl.arange(0, DIM)
    mask = (slot >= 0)[:, None] & (dims < size)[None, :]
    for h in range(heads):
        a_row = a_base + tl.multiple_of(src + h * fresh_head, MULTIPLE)
        b_row = b_base + tl.multiple_of(dst + h * cached_head, MULTIPLE)
        x = tl.load(a_row[:, None] + dims[None, :], mask=mask, other=0.0).to(tl.float32)
        y = tl.load(b_row[:, None] + dims[None, :], mask=mask, other=0.0).to(tl.float32)
        sums += (x - y) * (x - y)
    total = tl.where(slot >= 0, tl.sum(sums, 1), float("nan"))
    place = tl.program_id(1).to(tl.int64) * rows + number
    tl.store(out + place, total, mask=number < rows)
