"""The CUDA driver's batched copy: many copies in one call, done by the GPU's copy engines.

    cuMemcpyBatchAsync(dsts, srcs, sizes, count, attrs, attrIdxs, numAttrs, failIdx, stream)

CUDA 12.8 has this call. CUDA 13 gives a shorter signature (without ``failIdx``) to the same name of
its runtime, and to ``_v2`` of its driver. `batch_copy` therefore asks the driver for the call as of
12.8, which every later driver answers. The stream must not be the legacy default stream.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Addresses", "BatchCopy", "batch_copy"]

Addresses = npt.NDArray[np.int64]

_NAME = b"cuMemcpyBatchAsync"
_SINCE = 12080
"""CUDA 12.8, as the driver counts versions."""
_IN_STREAM_ORDER = 1
"""CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: a source is read after the stream's earlier work.

It is right for every source. The staging of a save needs it, because it is filled by a kernel that
the stream has waited for. Reading in any order, and the flag "prefer overlap", changed no rate on
an H200.
"""


class _Location(ctypes.Structure):
    _fields_ = (("type", c_uint), ("id", c_int))


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes. The hints are for managed memory only."""

    _fields_ = (
        ("order", c_uint),
        ("source", _Location),
        ("target", _Location),
        ("flags", c_uint),
    )


SIGNATURE = ctypes.CFUNCTYPE(
    c_uint, c_void_p, c_void_p, c_void_p, c_size_t, c_void_p, c_void_p, c_size_t, c_void_p, c_void_p
)
"""The call's C type: it returns a CUresult."""


class BatchCopy:
    """The driver's call, ``function`` of type `SIGNATURE`. Thread-safe."""

    def __init__(self, function: Callable[..., int]) -> None:
        self._function = function
        self._attributes = _Attributes(_IN_STREAM_ORDER)
        self._first = c_size_t(0)  # the attributes hold from copy 0 on

    def __call__(self, dst: Addresses, src: Addresses, sizes: Addresses, stream: int) -> int:
        """Enqueue the copies on ``stream``, a handle other than 0. Return the CUresult: 0 is good.

        The arrays may be freed afterwards. If it fails, some of the copies may be enqueued.
        """
        failed = c_size_t(0)
        return self._function(
            dst.ctypes.data,
            src.ctypes.data,
            sizes.ctypes.data,
            len(sizes),
            ctypes.addressof(self._attributes),
            ctypes.addressof(self._first),
            1,
            ctypes.addressof(failed),
            stream,
        )


@cache
def batch_copy() -> BatchCopy | None:
    """Return the driver's batched copy, or None if the driver is older than CUDA 12.8."""
    try:
        driver: Any = ctypes.CDLL("libcuda.so.1")
        find = driver.cuGetProcAddress_v2
    except (OSError, AttributeError):
        return None
    address, status = c_void_p(), c_int()
    if find(_NAME, byref(address), c_int(_SINCE), c_uint64(0), byref(status)) or not address.value:
        return None
    return BatchCopy(SIGNATURE(address.value))
