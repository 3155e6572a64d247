"""The kernel that copies rows of one plane, and rotates K of layers with positions."""

# Triton compiles these bodies from their source; its types are not Python's.
# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from kvcore_kernels.lang import along_dim, copy_dims, locate_unit, plane_pointer

__all__ = ["shift_kernel"]


@triton.jit
def _turned(x, y, c, s, moves, DTYPE: tl.constexpr):
    """Return x cos a - y sin a, rounded once; the same bits if the row does not move."""
    wide = x.to(tl.float32) * c - y.to(tl.float32) * s
    return tl.where(moves[:, None], wide.to(DTYPE), x)


@triton.jit
def _rotate_halves(
    source, target, src, dst, real, moves, c, s, HALF: tl.constexpr, PAIRS: tl.constexpr,
    DTYPE: tl.constexpr, CUT: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Rotate pairs of dims i and i + HALF."""
    pair = tl.arange(0, PAIRS)
    mask = real[:, None] & (pair < HALF)[None, :]
    x = tl.load(src[:, None] + along_dim(source, pair, CUT, UNIT)[None, :], mask=mask)
    y = tl.load(src[:, None] + along_dim(source, pair + HALF, CUT, UNIT)[None, :], mask=mask)
    x_new = _turned(x, y, c, s, moves, DTYPE)
    y_new = _turned(y, x, c, -s, moves, DTYPE)
    tl.store(dst[:, None] + along_dim(target, pair, CUT, UNIT)[None, :], x_new, mask=mask)
    tl.store(dst[:, None] + along_dim(target, pair + HALF, CUT, UNIT)[None, :], y_new, mask=mask)


@triton.jit
def _rotate_neighbours(
    source, target, src, dst, real, moves, c, s, HALF: tl.constexpr, PAIRS: tl.constexpr,
    DTYPE: tl.constexpr, CUT: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Rotate pairs of dims 2i and 2i + 1, which are loaded together and split in registers."""
    dims = tl.arange(0, 2 * PAIRS)
    mask = real[:, None] & (dims < 2 * HALF)[None, :]
    both = tl.load(src[:, None] + along_dim(source, dims, CUT, UNIT)[None, :], mask=mask)
    x, y = tl.split(tl.reshape(both, (ROWS, PAIRS, 2)))
    x_new = _turned(x, y, c, s, moves, DTYPE)
    y_new = _turned(y, x, c, -s, moves, DTYPE)
    both = tl.reshape(tl.join(x_new, y_new), (ROWS, 2 * PAIRS))
    tl.store(dst[:, None] + along_dim(target, dims, CUT, UNIT)[None, :], both, mask=mask)


@triton.jit(
    do_not_specialize=[
        "units", "heads", "unit_tokens", "src_page_units", "dst_page_units", "distances", "first",
    ],
    do_not_specialize_on_alignment=[
        "sources", "targets", "ropes", "src_units", "dst_units", "turns",
    ],
)  # fmt: skip
def shift_kernel(
    sources,  # int64 [planes, FIELDS]
    targets,  # int64 [planes, FIELDS]
    ropes,  # int64 [planes]: which rope, below 0 for a plane that is only copied
    src_units,  # int64 [units]
    dst_units,  # int64 [units]
    turns,  # int64 [units]: which distance, below 0 for none
    cos,  # float32 [ropes, distances, HALF]
    sin,
    units: tl.int32,
    heads: tl.int32,
    unit_tokens: tl.int32,
    src_page_units: tl.int32,
    dst_page_units: tl.int32,
    distances: tl.int32,
    first: tl.int32,  # the source plane of program (., 0)
    FIELDS: tl.constexpr,
    DTYPE: tl.constexpr,
    MULTIPLE: tl.constexpr,
    WIDTH: tl.constexpr,
    UNIT: tl.constexpr,
    CUT: tl.constexpr,
    HALF: tl.constexpr,
    TAIL: tl.constexpr,
    PAIRS: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
):
    """Copy and rotate: K[b] = R(distance f) K[a], V[b] = V[a].

    R turns pair (x, y) by its angle a: x' = x cos a - y sin a, y' = y cos a + x sin a. It is
    computed in float32 and rounded once to DTYPE. The first 2 HALF dims are pairs; a TAIL of dims
    after them is copied. Program (tile, plane) copies plane ``first + plane`` of ``sources`` to
    ``plane`` of ``targets``. It processes ROWS rows of ``units x heads x
    unit_tokens``, with tokens varying fastest, so short units share a program. Units below 0 are
    skipped. Offsets in memory are int64; rows are counted in int32.
    """
    number = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = number // (heads * unit_tokens)
    in_unit = number % (heads * unit_tokens)
    head, token = in_unit // unit_tokens, in_unit % unit_tokens
    a = tl.load(src_units + row, mask=row < units, other=-1)
    b = tl.load(dst_units + row, mask=row < units, other=-1)
    turn = tl.load(turns + row, mask=row < units, other=-1)
    real = (a >= 0) & (b >= 0)
    source = sources + (first + tl.program_id(1)) * FIELDS
    target = targets + tl.program_id(1) * FIELDS
    src = plane_pointer(source, DTYPE, WIDTH) + locate_unit(
        source, a, src_page_units, unit_tokens, head, token, CUT, MULTIPLE
    )
    dst = plane_pointer(target, DTYPE, WIDTH) + locate_unit(
        target, b, dst_page_units, unit_tokens, head, token, CUT, MULTIPLE
    )
    rope = tl.load(ropes + first + tl.program_id(1))
    if rope < 0:
        copy_dims(source, target, src, dst, real, 0, DIM, CUT, UNIT, MULTIPLE)
    else:
        if TAIL:
            copy_dims(source, target, src, dst, real, 2 * HALF, DIM, CUT, UNIT, MULTIPLE)
        moves = real & (turn >= 0)
        pair = tl.arange(0, PAIRS)
        mask = moves[:, None] & (pair < HALF)[None, :]
        angle = ((rope * distances + turn) * HALF)[:, None] + pair[None, :]
        c = tl.load(cos + angle, mask=mask, other=1.0)
        s = tl.load(sin + angle, mask=mask, other=0.0)
        if NEIGHBOURS:
            _rotate_neighbours(
                source, target, src, dst, real, moves, c, s, HALF, PAIRS, DTYPE, CUT, UNIT, ROWS
            )
        else:
            _rotate_halves(
                source, target, src, dst, real, moves, c, s, HALF, PAIRS, DTYPE, CUT, UNIT
            )
