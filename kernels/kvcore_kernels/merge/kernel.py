"""The kernel that copies rows of one plane to their slots."""

# Triton compiles these bodies from their source; its types are not Python's.
# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from kvcore_kernels.lang import copy_dims, locate, plane_pointer

__all__ = ["merge_kernel"]


@triton.jit(
    do_not_specialize=["rows", "heads", "page_tokens"],
    do_not_specialize_on_alignment=["sources", "targets", "slots"],
)
def merge_kernel(
    sources,  # int64 [planes, FIELDS]: the fresh rows, a page of one token each
    targets,  # int64 [planes, FIELDS]
    slots,  # int32 or int64 [rows]
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
    """Copy fresh rows to their slots.

    pages[plane, slots[r] // page_tokens, head, slots[r] % page_tokens, :] = fresh[plane, r, head, :]

    Program (tile, plane) copies ROWS rows of ``rows x heads``. Slots below 0 are skipped. Offsets
    in memory are int64; rows are counted in int32.
    """  # noqa: E501 - one line of maths
    number = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row, head = number // heads, number % heads
    slot = tl.load(slots + row, mask=row < rows, other=-1).to(tl.int64)
    source = sources + tl.program_id(1) * FIELDS
    target = targets + tl.program_id(1) * FIELDS
    token = (slot % page_tokens).to(tl.int32)
    src_row = locate(source, row, head, token * 0, CUT, MULTIPLE)
    dst_row = locate(target, slot // page_tokens, head, token, CUT, MULTIPLE)
    src = plane_pointer(source, DTYPE, WIDTH) + src_row
    dst = plane_pointer(target, DTYPE, WIDTH) + dst_row
    copy_dims(source, target, src, dst, slot >= 0, 0, DIM, CUT, UNIT, MULTIPLE)
