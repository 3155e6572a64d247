"""Imports every kernel: for tools and tests that want them decorated at one time."""

from __future__ import annotations

from kvcore_kernels.attend.kernel import attend_kernel
from kvcore_kernels.copy.kernel import copy_kernel

__all__ = ["KERNELS"]

KERNELS = (attend_kernel, copy_kernel)
