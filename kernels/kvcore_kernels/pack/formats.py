"""Conversion to and from 8 bits (e4m3 and int8), by integer arithmetic that every GPU has."""

# Triton compiles these bodies from their source; its types are not Python's.
# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["decode", "encode"]


@triton.jit
def encode(x, FP8: tl.constexpr, NATIVE: tl.constexpr):
    """Return the nearest int8 code of a float32 that is finite and within the format's range.

    Ties go to the even code. int8: the last place of x + 1.5 2^23 is a unit, so the addition rounds
    to an integer. e4m3: adding just under half of the 20 lower bits rounds the mantissa to 3 bits.
    Below 2^-6 the step is 2^-9, which is the last place of a number near 2^14. NATIVE: the GPU has
    the instruction.
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
    """Return the float32 value of an int8 code."""
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
