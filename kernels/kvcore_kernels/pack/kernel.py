"""The kernels that pack and unpack one block of one head of one plane."""

# Triton compiles these bodies from their source; its types are not Python's.
# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from kvcore_kernels.lang import along_dim, locate, locate_unit, plane_pointer
from kvcore_kernels.pack.formats import decode, encode

__all__ = ["pack_kernel", "unpack_kernel"]


@triton.jit
def _wide(
    plane, units, token, head, page_units, unit_tokens, BLOCK: tl.constexpr, DTYPE: tl.constexpr,
    WIDTH: tl.constexpr, MULTIPLE: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """Return pointers to the rows of ``token`` in the block's units, and which rows exist."""
    unit = tl.load(units + token // unit_tokens, mask=token < BLOCK, other=-1)
    at = locate_unit(plane, unit, page_units, unit_tokens, head, token % unit_tokens, CUT, MULTIPLE)
    return plane_pointer(plane, DTYPE, WIDTH) + at, unit >= 0


@triton.jit
def _largest(values):
    """Return the largest absolute value; infinity if a value is not finite."""
    size = tl.abs(values)
    return tl.max(tl.max(tl.where(size <= 3.4028234663852886e38, size, float("inf")), 1), 0)


@triton.jit
def _scale(size, MOST: tl.constexpr, SMALLEST: tl.constexpr):
    """Return the scale and its inverse; NaN and 0 if ``size`` is not finite."""
    size = tl.maximum(size, SMALLEST)
    most = tl.full([], MOST, tl.float32)
    finite = size <= 3.4028234663852886e38
    scale = tl.where(finite, tl.div_rn(size, most), float("nan"))
    return scale, tl.where(finite, tl.div_rn(most, size), 0.0)


@triton.jit
def _codes(values, factor, MOST: tl.constexpr, FP8: tl.constexpr, NATIVE: tl.constexpr):
    """Return the codes of ``values * factor``; all 0 if the factor is 0."""
    small = tl.minimum(tl.maximum(values * factor, -MOST), MOST)
    return encode(tl.where(factor > 0.0, small, 0.0), FP8, NATIVE)


@triton.jit
def _store_codes(
    target, block, token, head, mask, values, factor, dims, MOST: tl.constexpr,
    PACKED_WIDTH: tl.constexpr, CUT: tl.constexpr, UNIT: tl.constexpr, FP8: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    at = locate(target, block, head, token, CUT, PACKED_WIDTH)
    dst = plane_pointer(target, tl.int8, PACKED_WIDTH) + at
    codes = _codes(values, factor, MOST, FP8, NATIVE)
    tl.store(dst[:, None] + along_dim(target, dims, CUT, UNIT)[None, :], codes, mask=mask)


@triton.jit(
    do_not_specialize=["first_head", "slot_planes", "slot_heads", "unit_tokens", "page_units"],
    do_not_specialize_on_alignment=["sources", "targets", "places", "units", "blocks"],
)
def pack_kernel(
    sources,  # int64 [planes, FIELDS]
    targets,  # int64 [planes, FIELDS]
    places,  # int64 [planes]: which of a slot's planes each is
    units,  # int64 [blocks, UNITS]
    blocks,  # int64 [blocks]
    scales,  # float32 [slots, slot_planes, slot_heads]
    first_head: tl.int32,
    slot_planes: tl.int32,
    slot_heads: tl.int32,
    unit_tokens: tl.int32,
    page_units: tl.int32,
    FIELDS: tl.constexpr,
    UNITS: tl.constexpr,
    BLOCK: tl.constexpr,
    DTYPE: tl.constexpr,
    WIDTH: tl.constexpr,
    MULTIPLE: tl.constexpr,
    PACKED_WIDTH: tl.constexpr,
    UNIT: tl.constexpr,
    CUT: tl.constexpr,
    FP8: tl.constexpr,
    NATIVE: tl.constexpr,
    MOST: tl.constexpr,
    SMALLEST: tl.constexpr,
    TOKENS: tl.constexpr,
    DIM: tl.constexpr,
):
    """Pack blocks: scale = max |x| / MOST, code = round(x MOST / max |x|).

    The maximum is over the tokens and dims of a block, so there is one float32 scale for each
    block, plane and head. It is NaN if a value is not finite, so that the block is unpacked to NaN.
    Program (block, plane, head) reads its block once if it fits a tile. Otherwise it reads it
    twice, the second time from the cache. Blocks and units below 0 are skipped.
    """
    block = tl.load(blocks + tl.program_id(0))
    plane, head = tl.program_id(1), tl.program_id(2)
    source, target = sources + plane * FIELDS, targets + plane * FIELDS
    mine = units + tl.program_id(0).to(tl.int64) * UNITS
    dims = tl.arange(0, DIM)
    real = dims < tl.multiple_of(tl.load(source + 9), MULTIPLE)
    src_dims = along_dim(source, dims, CUT, UNIT)
    place = (block * slot_planes + tl.load(places + plane)) * slot_heads + first_head + head
    if (block >= 0) & (TOKENS >= BLOCK):
        token = tl.arange(0, TOKENS)
        src, there = _wide(
            source, mine, token, head, page_units, unit_tokens, BLOCK, DTYPE, WIDTH, MULTIPLE, CUT
        )
        mask = there[:, None] & real[None, :]
        values = tl.load(src[:, None] + src_dims[None, :], mask=mask, other=0.0).to(tl.float32)
        scale, factor = _scale(_largest(values), MOST, SMALLEST)
        tl.store(scales + place, scale)
        _store_codes(
            target, block, token, head, mask, values, factor, dims, MOST, PACKED_WIDTH, CUT, UNIT,
            FP8, NATIVE,
        )  # fmt: skip
    elif block >= 0:
        size = tl.zeros([], tl.float32)
        for first in range(0, BLOCK, TOKENS):
            token = first + tl.arange(0, TOKENS)
            src, there = _wide(
                source, mine, token, head, page_units, unit_tokens, BLOCK, DTYPE, WIDTH, MULTIPLE,
                CUT,
            )  # fmt: skip
            mask = there[:, None] & real[None, :]
            values = tl.load(src[:, None] + src_dims[None, :], mask=mask, other=0.0)
            size = tl.maximum(size, _largest(values.to(tl.float32)))
        scale, factor = _scale(size, MOST, SMALLEST)
        tl.store(scales + place, scale)
        for first in range(0, BLOCK, TOKENS):
            token = first + tl.arange(0, TOKENS)
            src, there = _wide(
                source, mine, token, head, page_units, unit_tokens, BLOCK, DTYPE, WIDTH, MULTIPLE,
                CUT,
            )  # fmt: skip
            mask = there[:, None] & real[None, :]
            values = tl.load(src[:, None] + src_dims[None, :], mask=mask, other=0.0)
            _store_codes(
                target, block, token, head, mask, values.to(tl.float32), factor, dims, MOST,
                PACKED_WIDTH, CUT, UNIT, FP8, NATIVE,
            )  # fmt: skip


@triton.jit(
    do_not_specialize=["first_head", "slot_planes", "slot_heads", "unit_tokens", "page_units"],
    do_not_specialize_on_alignment=["sources", "targets", "places", "units", "blocks"],
)
def unpack_kernel(
    sources,  # int64 [planes, FIELDS]: packed
    targets,  # int64 [planes, FIELDS]: wide
    places,  # int64 [planes]: which of a slot's planes each is
    units,  # int64 [blocks, UNITS]
    blocks,  # int64 [blocks]
    scales,  # float32 [slots, slot_planes, slot_heads]
    first_head: tl.int32,
    slot_planes: tl.int32,
    slot_heads: tl.int32,
    unit_tokens: tl.int32,
    page_units: tl.int32,
    FIELDS: tl.constexpr,
    UNITS: tl.constexpr,
    BLOCK: tl.constexpr,
    DTYPE: tl.constexpr,
    WIDTH: tl.constexpr,
    MULTIPLE: tl.constexpr,
    PACKED_WIDTH: tl.constexpr,
    UNIT: tl.constexpr,
    CUT: tl.constexpr,
    FP8: tl.constexpr,
    NATIVE: tl.constexpr,
    TOKENS: tl.constexpr,
    DIM: tl.constexpr,
):
    """Unpack blocks: x = value of the code * scale, rounded to DTYPE.

    Program (block, plane, head) unpacks one block. Blocks and units below 0 are skipped.
    """
    block = tl.load(blocks + tl.program_id(0))
    if block >= 0:
        plane, head = tl.program_id(1), tl.program_id(2)
        source, target = sources + plane * FIELDS, targets + plane * FIELDS
        mine = units + tl.program_id(0).to(tl.int64) * UNITS
        dims = tl.arange(0, DIM)
        real = dims < tl.multiple_of(tl.load(source + 9), MULTIPLE)
        src_dims, dst_dims = along_dim(source, dims, CUT, UNIT), along_dim(target, dims, CUT, UNIT)
        place = (block * slot_planes + tl.load(places + plane)) * slot_heads + first_head + head
        scale = tl.load(scales + place)
        src_base = plane_pointer(source, tl.int8, PACKED_WIDTH)
        for first in range(0, BLOCK, TOKENS):
            token = first + tl.arange(0, TOKENS)
            dst, there = _wide(
                target, mine, token, head, page_units, unit_tokens, BLOCK, DTYPE, WIDTH, MULTIPLE,
                CUT,
            )  # fmt: skip
            mask = there[:, None] & real[None, :]
            src = src_base + locate(source, block, head, token, CUT, PACKED_WIDTH)
            codes = tl.load(src[:, None] + src_dims[None, :], mask=mask, other=0)
            values = (decode(codes, FP8, NATIVE) * scale).to(DTYPE)
            tl.store(dst[:, None] + dst_dims[None, :], values, mask=mask)
