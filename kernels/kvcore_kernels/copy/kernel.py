"""The copy of one unit of one plane."""

# Triton compiles these bodies from their source; its types are not Python's.
# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from kvcore_kernels.lang import along_dim, locate, plane_pointer

__all__ = ["copy_kernel"]


@triton.jit(
    do_not_specialize=["heads", "unit_tokens", "src_page_units", "dst_page_units"],
    do_not_specialize_on_alignment=["sources", "targets", "src_units", "dst_units"],
)
def copy_kernel(
    sources,  # int64 [planes, FIELDS]
    targets,  # int64 [planes, FIELDS]
    src_units,  # int64 [units]
    dst_units,  # int64 [units]
    heads,
    unit_tokens,
    src_page_units,
    dst_page_units,
    FIELDS: tl.constexpr,
    WORD: tl.constexpr,
    WIDTH: tl.constexpr,
    UNIT: tl.constexpr,
    CUT: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
):
    """dst[plane, unit b, head, token, :] = src[plane, unit a, head, token, :]

    Program (unit, plane, tile) moves ROWS rows of ``heads x unit_tokens``, tokens fastest, which is
    the canonical block's order. Words are integers: bits move, whatever they mean. A unit below 0
    on either side is left out. All offsets are int64.
    """
    row = tl.program_id(0).to(tl.int64)
    a, b = tl.load(src_units + row), tl.load(dst_units + row)
    if (a >= 0) & (b >= 0):
        source = sources + tl.program_id(1) * FIELDS
        target = targets + tl.program_id(1) * FIELDS
        rows = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
        head, token = rows // unit_tokens, rows % unit_tokens
        src_token = (a % src_page_units).to(tl.int32) * unit_tokens + token
        dst_token = (b % dst_page_units).to(tl.int32) * unit_tokens + token
        src_row = locate(source, a // src_page_units, head, src_token, CUT, WIDTH // WORD)
        dst_row = locate(target, b // dst_page_units, head, dst_token, CUT, WIDTH // WORD)
        dtype: tl.constexpr = (
            tl.int64
            if WORD == 8
            else (tl.int32 if WORD == 4 else (tl.int16 if WORD == 2 else tl.int8))
        )
        src_base = plane_pointer(source, dtype, WIDTH)
        dst_base = plane_pointer(target, dtype, WIDTH)
        words = tl.multiple_of(tl.load(source + 9), WIDTH // WORD)
        for first in range(0, words, DIM):
            dims = first + tl.arange(0, DIM)
            mask = (rows < heads * unit_tokens)[:, None] & (dims < words)[None, :]
            src_at = src_row[:, None] + along_dim(source, dims, CUT, UNIT)[None, :]
            dst_at = dst_row[:, None] + along_dim(target, dims, CUT, UNIT)[None, :]
            tl.store(dst_base + dst_at, tl.load(src_base + src_at, mask=mask), mask=mask)
