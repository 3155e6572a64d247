"""The kernel that adds two kinds of scores, each in units of its mean."""

# Triton compiles these bodies from their source; its types are not Python's.
# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["balance_kernel"]


@triton.jit
def _mean(scores, size, BLOCK: tl.constexpr):
    """Return the mean of the scores, not below the smallest normal float."""
    offsets = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        total += tl.load(scores + start + offsets, mask=start + offsets < size, other=0.0)
    mean = tl.sum(total, 0) / size
    return tl.where(mean < 1.1754943508222875e-38, 1.1754943508222875e-38, mean)  # keeps NaN


@triton.jit(do_not_specialize=["size"], do_not_specialize_on_alignment=["one", "other", "out"])
def balance_kernel(
    one,  # float32 [size]
    other,  # float32 [size]
    out,  # float32 [size]
    size: tl.int32,
    BLOCK: tl.constexpr,
):
    """Compute out = one / mean(one) + other / mean(other).

    Each program reads all scores for the means, in the same order, and writes BLOCK results. So
    programs need not wait for each other, and a result does not depend on their order.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(one + at, mask=at < size, other=0.0) / _mean(one, size, BLOCK)
    y = tl.load(other + at, mask=at < size, other=0.0) / _mean(other, size, BLOCK)
    tl.store(out + at, x + y, mask=at < size)
