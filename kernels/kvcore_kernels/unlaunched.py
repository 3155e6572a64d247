"""Launches of kernels on a machine without a GPU: everything but the kernel itself happens.

    with unlaunched(names.append) as builds:
        TritonFusion().merge(...)      binds the arguments, and looks the build up
    builds                             the builds that a GPU would have compiled

For tests and benchmarks of the host's part. Kernels must not have been decorated for the
interpreter.
"""

# mypy: disable-error-code="import-not-found,import-untyped"

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import triton
from torch.utils._python_dispatch import _disable_current_modes
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from kvcore.errors import UnsupportedError
from kvcore_kernels.launcher import BUILDS
from kvcore_kernels.merge.kernel import merge_kernel

__all__ = ["unlaunched"]

_BEFORE_ARGUMENTS = 9
"""What Triton passes to a compiled kernel before the kernel's own arguments."""


class _Driver:
    """A driver of one device that takes launches."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class _Kernel:
    """A build that tells that it was launched, and fills the indices that it returns with 0."""

    function = packed_metadata = None

    def __init__(self, name: str, out: int, told: Callable[[str], object]) -> None:
        self._name = name
        self._out = out
        self._told = told

    def launch_metadata(self, *_: object) -> object:
        return None

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        """Return what launches on ``grid``, as Triton's builds do."""

        def runner(*given: Any) -> None:
            driver = triton.runtime.driver.active
            stream = driver.get_current_stream(driver.get_current_device())
            metadata = self.launch_metadata(grid, stream, *given)
            hooks = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
            self.run(*grid, stream, None, None, metadata, *hooks, *given)

        return runner

    def run(self, *given: Any) -> None:
        self._told(self._name)
        if self._out >= 0:
            out = given[_BEFORE_ARGUMENTS + self._out]
            if out.dtype == torch.int64:
                counting = torch._C._len_torch_dispatch_stack()
                with _disable_current_modes() if counting else nullcontext():
                    out.zero_()


@contextmanager
def unlaunched(told: Callable[[str], object]) -> Iterator[list[tuple[str, str]]]:
    """Call ``told`` with the name of each kernel that is launched, and do not run it.

    Yields the list of builds, (kernel, specialization) each, that grows by each one that is not
    compiled yet. Raises UnsupportedError if Triton interprets kernels in this process.
    """
    if not isinstance(merge_kernel, JITFunction):
        raise UnsupportedError("kernels are interpreted in this process: unset TRITON_INTERPRET")
    builds: list[tuple[str, str]] = []
    used: list[Any] = []

    def compiled(self: Any, key: str, signature: object, device: int, *_: object) -> _Kernel:
        name = self.fn.__name__
        builds.append((name, key))
        used.append(self)
        names = self.arg_names
        kernel = _Kernel(name, names.index("out") if "out" in names else -1, told)
        self.device_caches[device][0][key] = kernel
        return kernel

    before = triton.runtime.driver._active
    triton.runtime.driver.set_active(_Driver())
    try:
        with (
            mock.patch.object(JITFunction, "_do_compile", compiled),
            mock.patch.dict(BUILDS, clear=True),
        ):
            yield builds
    finally:
        triton.runtime.driver._active = before
        for kernel in used:
            kernel.device_caches.clear()
