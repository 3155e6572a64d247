"""The kernel for checksums of blocks."""

# Triton compiles these bodies from their source; its types are not Python's.
# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["sum_kernel"]


@triton.jit(do_not_specialize=["last"])
def sum_kernel(
    data,  # int64
    offsets,  # int64 [blocks], in words
    out,  # int64 [blocks, parts]
    words,
    last: tl.int64,
    KEY: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Compute out = the sum over a part's words of m(w_i xor (i + 1) KEY), modulo 2^64.

    m(x) = z xor z >> 29, z = SECOND (y xor y >> 32), y = FIRST x. ``last`` masks the last word of
    a block. A program processes STEPS * BLOCK words of one block.
    """
    part = tl.program_id(0)
    block = tl.program_id(1).to(tl.int64)
    first = part.to(tl.int64) * (STEPS * BLOCK)  # a block may have more than 2^31 words
    base = data + tl.multiple_of(tl.load(offsets + block), 2) + first
    left = words - first
    total = tl.zeros([BLOCK], tl.uint64)
    for step in range(STEPS):
        i = step * BLOCK + tl.arange(0, BLOCK)
        real = i < left
        word = tl.load(base + i, mask=real, other=0)
        word = tl.where(i == left - 1, word & last, word)
        x = word.to(tl.uint64, bitcast=True) ^ ((first + i + 1).to(tl.uint64) * KEY)
        x = x * FIRST
        x = x ^ (x >> 32)
        x = x * SECOND
        x = x ^ (x >> 29)
        total += tl.where(real, x, tl.zeros([BLOCK], tl.uint64))
    sum = tl.sum(total, 0).to(tl.int64, bitcast=True)
    tl.store(out + block * tl.num_programs(0) + part, sum)
