"""Offers the Triton operations to kvcore. Light: Triton is imported when they are made."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from kvcore.errors import UnsupportedError
from kvcore.plugins import OpsPlugin, hookimpl

if TYPE_CHECKING:
    from kvcore.memory.copy import DeviceOps

__all__ = ["kvcore_ops"]


@hookimpl
def kvcore_ops() -> list[OpsPlugin]:
    return [OpsPlugin("triton", _make)]


def _make() -> DeviceOps:
    """Raises UnsupportedError where there is no Triton or no GPU that torch can use."""
    if find_spec("triton") is None:
        raise UnsupportedError(
            "Triton is not installed: copies on a GPU fall back to torch's index operations; "
            'pip install "triton>=3.6"'
        )
    import torch

    if not torch.cuda.is_available():
        raise UnsupportedError(
            "torch sees no CUDA or ROCm device, which the Triton copies need; copies in host "
            "memory use the native or the reference operations"
        )
    from kvcore_kernels.ops import TritonOps

    return TritonOps()
