"""Launches of kernels that look their build up by what can differ between two launches.

Triton binds and inspects every argument of a launch to find its build, which takes a CPU about 40
us. The kernels here are compiled for their constants, the dtypes of their tensors, and a few
alignments and strides. So a launcher finds a build by these, and then starts it:

    launcher ── first launch of a kind ──▶ Triton binds, compiles and launches
             ── every other one ──▶ the build of that kind, `CompiledKernel.__getitem__`
"""

# mypy: disable-error-code="import-not-found,import-untyped"

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from triton.runtime.jit import JITFunction

from kvcore_kernels.planes import guard

__all__ = ["BUILDS", "Launcher"]

BUILDS: dict[tuple[Any, ...], Any] = {}
"""Triton's builds by launcher, device and kind of arguments. It grows by what is compiled."""

_DIRECT = torch.version.hip is None
"""Triton's builds for AMD also depend on the sizes of tensors, so Triton finds those itself."""


class Launcher:
    """A kernel and its compile-time constants, which follow its other arguments. Thread-safe.

    ``options`` are Triton's, such as ``num_warps``.
    """

    def __init__(self, kernel: Any, constants: Mapping[str, Any], **options: int) -> None:
        self._kernel = kernel
        self._fixed = {**constants, **options}
        self._direct = _DIRECT and isinstance(kernel, JITFunction)
        if self._direct:
            last = kernel.arg_names[-len(constants) :]
            self._constants = [constants[name] for name in last]
            self._kinds = [
                (param.num, not (param.do_not_specialize or param.do_not_specialize_on_alignment))
                for param in kernel.params[: -len(constants)]
                if not (param.do_not_specialize and param.annotation_type)
            ]

    def __call__(self, device: torch.device, grid: tuple[int, ...], *given: Any) -> None:
        """Launch on the current stream of ``device``. The host does not wait."""
        with guard(device):
            if not self._direct:
                self._kernel[grid](*given, **self._fixed)
                return
            kinds = [_kind(given[number], aligned) for number, aligned in self._kinds]
            key = (self, device.index, *kinds)
            build = BUILDS.get(key)
            if build is not None:
                build[(*grid, 1, 1)[:3]](*given, *self._constants)
                return
            build = self._kernel[grid](*given, **self._fixed)
            if build is not None:
                BUILDS[key] = build


def _kind(value: Any, aligned: bool) -> object:
    """Return what a build depends on: a tensor's dtype and alignment, or a number."""
    if isinstance(value, torch.Tensor):
        return (value.dtype, value.data_ptr() % 16 == 0) if aligned else value.dtype
    return value
