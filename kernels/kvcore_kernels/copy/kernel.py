"""The copy kernels: a tile of one unit of one plane at a time.

The host checks that a unit has fewer than 2^31 rows, so a row's number in its unit is int32.
Offsets, units and the number of a tile among all tiles are int64.
"""

# Triton compiles these bodies from their source; its types are not Python's.
# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from kvcore_kernels.lang import copy_dims, locate_unit, plane_pointer

__all__ = ["bounded_copy_kernel", "copy_kernel"]


@triton.jit
def _copy_tile(
    source, target, a, b, first, heads, unit_tokens, src_page_units, dst_page_units,
    DTYPE: tl.constexpr, MULTIPLE: tl.constexpr, WIDTH: tl.constexpr, UNIT: tl.constexpr,
    CUT: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Copy ROWS rows, from row ``first`` on, of unit ``a`` of one plane to unit ``b``."""
    if (a >= 0) & (b >= 0):
        rows = first + tl.arange(0, ROWS)
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


@triton.jit(
    do_not_specialize=["heads", "unit_tokens", "src_page_units", "dst_page_units"],
    do_not_specialize_on_alignment=["sources", "targets", "src_units", "dst_units"],
)
def copy_kernel(
    sources,  # int64 [planes, FIELDS]
    targets,  # int64 [planes, FIELDS]
    src_units,  # int64 [units]
    dst_units,  # int64 [units]
    heads: tl.int32,
    unit_tokens: tl.int32,
    src_page_units: tl.int32,
    dst_page_units: tl.int32,
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
    on either side is skipped.
    """
    row = tl.program_id(0).to(tl.int64)
    plane = tl.program_id(1) * FIELDS
    _copy_tile(
        sources + plane, targets + plane, tl.load(src_units + row), tl.load(dst_units + row),
        tl.program_id(2) * ROWS, heads, unit_tokens, src_page_units, dst_page_units,
        DTYPE, MULTIPLE, WIDTH, UNIT, CUT, ROWS, DIM,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "units", "planes", "heads", "unit_tokens", "src_page_units", "dst_page_units",
    ],
    do_not_specialize_on_alignment=["sources", "targets", "src_units", "dst_units"],
)  # fmt: skip
def bounded_copy_kernel(
    sources,  # int64 [planes, FIELDS]
    targets,  # int64 [planes, FIELDS]
    src_units,  # int64 [units]
    dst_units,  # int64 [units]
    units: tl.int32,
    planes: tl.int32,
    heads: tl.int32,
    unit_tokens: tl.int32,
    src_page_units: tl.int32,
    dst_page_units: tl.int32,
    FIELDS: tl.constexpr,
    DTYPE: tl.constexpr,
    MULTIPLE: tl.constexpr,
    WIDTH: tl.constexpr,
    UNIT: tl.constexpr,
    CUT: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
):
    """Do what `copy_kernel` does with any number of programs, which take turns at the tiles."""
    tiles = tl.cast((heads * unit_tokens + ROWS - 1) // ROWS, tl.int64)
    each = tl.cast(planes, tl.int64) * tiles
    total = each * units
    for number in range(tl.program_id(0).to(tl.int64), total, tl.num_programs(0).to(tl.int64)):
        row, plane = number // each, number % each // tiles * FIELDS
        _copy_tile(
            sources + plane, targets + plane, tl.load(src_units + row), tl.load(dst_units + row),
            (number % tiles).to(tl.int32) * ROWS, heads, unit_tokens, src_page_units,
            dst_page_units, DTYPE, MULTIPLE, WIDTH, UNIT, CUT, ROWS, DIM,
        )  # fmt: skip
