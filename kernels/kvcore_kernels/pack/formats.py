"""Numbers in 8 bits: e4m3 and int8, by integer arithmetic that every GPU has."""

# Triton compiles these bodies from their source; its types are not Python's.
# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["decode", "encode"]


@triton.jit
def encode(x, FP8: tl.constexpr, NATIVE: tl.constexpr):
    """float32, finite and within the format, to its nearest code (of two, the even): int8.

    int8: x + 1.5 2^23 has units in its last place, so the sum is rounded to one. e4m3: 3 bits of
    mantissa are what is left after adding just under half of the 20 others; below 2^-6 the step is
    2^-9, which is the last place of a number near 2^14. NATIVE: the GPU has the instruction.
    """
    if not FP8:
        code = (x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    elif NATIVE:
        code = x.to(tl.float8e4nv).to(tl.int8, bitcast=True)
    else:
        size = tl.abs(x)
        bits = size.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
        small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
        code = sign | tl.where(size < 0.015625, small, normal)
    return code.to(tl.int8)


@triton.jit
def decode(code, FP8: tl.constexpr, NATIVE: tl.constexpr):
    """The float32 that an int8 code stands for."""
    if not FP8:
        x = code.to(tl.float32)
    elif NATIVE:
        x = code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        low = code.to(tl.int32) & 0x7F
        normal = ((low << 20) + 0x3C000000).to(tl.float32, bitcast=True)
        size = tl.where(low < 8, low.to(tl.float32) * 0.001953125, normal)
        size = tl.where(low == 0x7F, float("nan"), size)
        sign = (code.to(tl.int32) & 0x80) << 24
        x = (size.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    return x
