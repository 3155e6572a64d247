"""The kernel that chooses the highest scores of a list, in one program."""

# Triton compiles these bodies from their source; its types are not Python's.
# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["choose_kernel", "keep_kernel"]


@triton.jit
def _number(scores, at, size):
    """Return scores as `torch.nan_to_num` does, with NaN as infinity; -infinity past the end."""
    x = tl.load(scores + at, mask=at < size, other=0.0).to(tl.float32)
    largest = 3.4028234663852886e38
    x = tl.where(x > largest, largest, tl.where(x < -largest, -largest, x))
    x = tl.where(x == x, x, float("inf"))
    return tl.where(at < size, x, float("-inf"))


@triton.jit
def _key(scores, at, size):
    """Return an integer in [0, 2^32) that sorts like the score, -0 as 0; -1 past the end."""
    x = _number(scores, at, size)
    x = tl.where(x == 0.0, 0.0, x)
    bits = x.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(at < size, ordered.to(tl.int64) + 2147483648, -1)


@triton.jit
def _cut(scores, size, count, BLOCK: tl.constexpr):
    """Return the key of the ``count``-th highest score, and how many keys are above it."""
    offsets = tl.arange(0, BLOCK)
    cut = tl.zeros([], tl.int64)
    for bit in range(32):
        candidate = cut + (tl.full([], 2147483648, tl.int64) >> bit)
        reach = 0
        for start in range(0, size, BLOCK):
            reach += tl.sum((_key(scores, start + offsets, size) >= candidate).to(tl.int32), 0)
        cut = tl.where(reach >= count, candidate, cut)
    higher = 0
    for start in range(0, size, BLOCK):
        higher += tl.sum((_key(scores, start + offsets, size) > cut).to(tl.int32), 0)
    return cut, higher


@triton.jit(
    do_not_specialize=["size", "room", "bound", "least", "most"],
    do_not_specialize_on_alignment=["rows", "scores", "out", "kept"],
)
def choose_kernel(
    rows,  # int64 [size]
    scores,  # [size]
    out,  # int64 [room]
    kept,  # int32 [1]
    size: tl.int32,
    room: tl.int32,
    bound: tl.float32,
    least: tl.int32,
    most: tl.int32,
    BLOCK: tl.constexpr,
):
    """Write the k rows of highest score to ``out`` in their order, followed by -1.

    Of equal scores the earlier rows are taken. k = min(max(number above bound, least), most), and
    kept[0] = k; most <= size. The k-th highest score is found bit by bit from the highest bit, by
    32 counts over the list, which stays in the cache. One program does it all, because several
    would have to synchronize their counts.
    """
    offsets = tl.arange(0, BLOCK)
    above = 0
    for start in range(0, size, BLOCK):
        above += tl.sum((_number(scores, start + offsets, size) > bound).to(tl.int32), 0)
    count = tl.minimum(tl.maximum(above, least), most)
    tl.store(kept, count)
    cut, higher = _cut(scores, size, count, BLOCK)
    taken = 0
    equals = 0
    for start in range(0, size, BLOCK):
        key = _key(scores, start + offsets, size)
        equal = (key == cut).to(tl.int32)
        chosen = (key > cut) | ((key == cut) & (equals + tl.cumsum(equal, 0) <= count - higher))
        place = taken + tl.cumsum(chosen.to(tl.int32), 0) - 1
        row = tl.load(rows + start + offsets, mask=chosen, other=0)
        tl.store(out + place, row, mask=chosen)
        taken += tl.sum(chosen.to(tl.int32), 0)
        equals += tl.sum(equal, 0)
    for start in range(0, room, BLOCK):
        at = start + offsets
        tl.store(out + at, tl.full([BLOCK], -1, tl.int64), mask=(at >= count) & (at < room))


@triton.jit(
    do_not_specialize=["total", "size", "count", "room"],
    do_not_specialize_on_alignment=["positions", "offset_of", "scores", "out"],
)
def keep_kernel(
    positions,  # int64 [total], ascending
    offset_of,  # int64: below 0 at positions without cached KV
    scores,  # [size], one for each row with cached KV
    out,  # int64 [room + room + count + count]
    total: tl.int32,
    size: tl.int32,
    count: tl.int32,
    room: tl.int32,
    BLOCK: tl.constexpr,
):
    """Keep the ``count`` rows of highest score and all rows without one; room of them together.

    Writes four lists: the positions of the kept rows, their indices in ``positions``, the indices
    in the first list of those with a score, and the positions of these. The choice is that of
    `choose_kernel`; ``count`` <= ``size``.
    """
    offsets = tl.arange(0, BLOCK)
    cut, higher = _cut(scores, size, count, BLOCK)
    seen = 0
    equals = 0
    taken = 0
    kept = 0
    for start in range(0, total, BLOCK):
        at = start + offsets
        there = at < total
        position = tl.load(positions + at, mask=there, other=0)
        cached = there & (tl.load(offset_of + position, mask=there, other=-1) >= 0)
        nth = seen + tl.cumsum(cached.to(tl.int32), 0) - 1
        key = _key(scores, tl.where(cached, nth, size), size)
        equal = (cached & (key == cut)).to(tl.int32)
        best = (key > cut) | ((key == cut) & (equals + tl.cumsum(equal, 0) <= count - higher))
        stays = cached & best
        goes = there & (stays | (cached == 0))
        place = taken + tl.cumsum(goes.to(tl.int32), 0) - 1
        tl.store(out + place, position, mask=goes)
        tl.store(out + room + place, at.to(tl.int64), mask=goes)
        place_kept = 2 * room + kept + tl.cumsum(stays.to(tl.int32), 0) - 1
        tl.store(out + place_kept, place.to(tl.int64), mask=stays)
        tl.store(out + count + place_kept, position, mask=stays)
        seen += tl.sum(cached.to(tl.int32), 0)
        equals += tl.sum(equal, 0)
        taken += tl.sum(goes.to(tl.int32), 0)
        kept += tl.sum(stays.to(tl.int32), 0)
