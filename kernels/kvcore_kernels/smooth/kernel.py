"""The kernel that averages scores over neighbouring rows."""

# Triton compiles these bodies from their source; its types are not Python's.
# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["smooth_kernel"]


@triton.jit(
    do_not_specialize=["size", "reach"], do_not_specialize_on_alignment=["rows", "scores", "out"]
)
def smooth_kernel(
    rows,  # int64 [size], ascending
    scores,  # float32 [size]
    out,  # float32 [size]
    size: tl.int32,
    reach: tl.int32,
    BLOCK: tl.constexpr,
):
    """Average each score over the tokens up to ``reach`` away; tokens without a row count as 0.

    out[i] = sum over j with |rows[j] - rows[i]| <= reach of scores[j], / (2 reach + 1)

    Rows ascend, so such a j is at most ``reach`` away from i. Terms are added in order of position.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + at, mask=at < size, other=0)
    total = tl.zeros([BLOCK], tl.float32)
    for step in range(2 * reach + 1):
        near = at + step - reach
        there = (near >= 0) & (near < size) & (at < size)
        other = tl.load(rows + near, mask=there, other=0)
        close = there & (other - row <= reach) & (row - other <= reach)
        total += tl.load(scores + near, mask=close, other=0.0)
    # `/` would be within two units of the last place on a GPU.
    mean = tl.div_rn(total, (2 * reach + 1).to(tl.float32))
    tl.store(out + at, mean, mask=at < size)
