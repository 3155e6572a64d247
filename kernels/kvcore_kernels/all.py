"""All kernels, imported at once for tools and tests."""

from __future__ import annotations

from kvcore_kernels.attend.kernel import attend_kernel
from kvcore_kernels.balance.kernel import balance_kernel
from kvcore_kernels.choose.kernel import choose_kernel, keep_kernel
from kvcore_kernels.copy.kernel import bounded_copy_kernel, copy_kernel
from kvcore_kernels.deviation.kernel import deviation_kernel
from kvcore_kernels.merge.kernel import merge_kernel
from kvcore_kernels.pack.kernel import pack_kernel, unpack_kernel
from kvcore_kernels.shift.kernel import shift_kernel
from kvcore_kernels.smooth.kernel import smooth_kernel
from kvcore_kernels.sums.kernel import sum_kernel

__all__ = ["KERNELS"]

KERNELS = (
    attend_kernel,
    balance_kernel,
    bounded_copy_kernel,
    choose_kernel,
    copy_kernel,
    deviation_kernel,
    keep_kernel,
    merge_kernel,
    pack_kernel,
    shift_kernel,
    smooth_kernel,
    sum_kernel,
    unpack_kernel,
)
