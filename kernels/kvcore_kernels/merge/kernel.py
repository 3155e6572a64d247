"""The kernel that copies rows of one plane to their slots."""

# Triton compiles these bodies from their source; its types are not Python's.
# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["ADDRESSES", "merge_kernel"]

ADDRESSES = (
    "k_from", "k_from_row", "k_from_head", "k_to", "k_page", "k_head", "k_token", "k_dim",
    "v_from", "v_from_row", "v_from_head", "v_to", "v_page", "v_head", "v_token", "v_dim",
)  # fmt: skip


@triton.jit(
    do_not_specialize=["rows", "heads", "page_tokens", *ADDRESSES],
    do_not_specialize_on_alignment=["slots"],
)
def merge_kernel(
    slots,  # int32 or int64 [rows]
    k_from: tl.int64,  # address of the fresh K; strides are in words
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
    DTYPE: tl.constexpr,
    MULTIPLE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
):
    """Copy fresh rows to their slots, K in programs (tile, 0) and V in programs (tile, 1).

    pages[plane, slots[r] // page_tokens, head, slots[r] % page_tokens, :] = fresh[plane, r, head, :]

    A program copies ROWS rows of ``rows x heads``. Slots below 0 are skipped. Offsets in memory are
    int64; rows are counted in int32.
    """  # noqa: E501 - one line of maths
    number = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row, head = number // heads, (number % heads).to(tl.int64)
    slot = tl.load(slots + row, mask=row < rows, other=-1).to(tl.int64)
    page, token = slot // page_tokens, slot % page_tokens
    first = tl.program_id(1) == 0
    src = row.to(tl.int64) * tl.where(first, k_from_row, v_from_row)
    src += head * tl.where(first, k_from_head, v_from_head)
    dst = page * tl.where(first, k_page, v_page) + token * tl.where(first, k_token, v_token)
    dst += head * tl.where(first, k_head, v_head)
    source = tl.multiple_of(tl.where(first, k_from, v_from), WIDTH)
    target = tl.multiple_of(tl.where(first, k_to, v_to), WIDTH)
    from_row = tl.multiple_of(source.to(tl.pointer_type(DTYPE)), WIDTH)
    to_row = tl.multiple_of(target.to(tl.pointer_type(DTYPE)), WIDTH)
    from_row += tl.multiple_of(src, MULTIPLE)
    to_row += tl.multiple_of(dst, MULTIPLE)
    size = tl.multiple_of(tl.where(first, k_dim, v_dim).to(tl.int32), MULTIPLE)
    for start in range(0, size, DIM):
        dims = start + tl.arange(0, DIM)
        mask = (slot >= 0)[:, None] & (dims < size)[None, :]
        values = tl.load(from_row[:, None] + dims[None, :], mask=mask)
        tl.store(to_row[:, None] + dims[None, :], values, mask=mask)
