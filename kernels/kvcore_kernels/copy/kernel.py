"""The copy kernel: a tile of one unit of one plane per program."""

# Triton compiles these bodies from their source; its types are not Python's.
# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from kvcore_kernels.lang import copy_dims, locate_unit, plane_pointer

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
    DTYPE: tl.constexpr,
    MULTIPLE: tl.constexpr,
    WIDTH: tl.constexpr,
    UNIT: tl.constexpr,
    CUT: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
):
    """Copy units: dst[plane, unit b, head, token, :] = src[plane, unit a, head, token, :].

    Program (unit, plane, tile) copies ROWS rows of ``heads x unit_tokens``. Tokens vary fastest, as
    in a canonical block. Words are integers, so bits are copied whatever they mean. A unit below 0
    on either side is skipped. All offsets are int64.
    """
    row = tl.program_id(0).to(tl.int64)
    a, b = tl.load(src_units + row), tl.load(dst_units + row)
    if (a >= 0) & (b >= 0):
        source = sources + tl.program_id(1) * FIELDS
        target = targets + tl.program_id(1) * FIELDS
        rows = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
        head, token = rows // unit_tokens, rows % unit_tokens
        src_row = locate_unit(source, a, src_page_units, unit_tokens, head, token, CUT, MULTIPLE)
        dst_row = locate_unit(target, b, dst_page_units, unit_tokens, head, token, CUT, MULTIPLE)
        copy_dims(
            source,
            target,
            plane_pointer(source, DTYPE, WIDTH) + src_row,
            plane_pointer(target, DTYPE, WIDTH) + dst_row,
            rows < heads * unit_tokens,
            0,
            DIM,
            CUT,
            UNIT,
            MULTIPLE,
        )
