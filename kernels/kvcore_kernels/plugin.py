"""The plugin that offers the Triton operations. Triton is imported only when they are created."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from kvcore.errors import UnsupportedError
from kvcore.plugins import OpsPlugin, hookimpl

if TYPE_CHECKING:
    from kvcore.fusion.ops import FusionOps
    from kvcore.memory.copy import DeviceOps

__all__ = ["kvcore_ops"]


@hookimpl
def kvcore_ops() -> list[OpsPlugin]:
    return [OpsPlugin("triton", _copies, _fusion)]


def _copies() -> DeviceOps:
    """Return the Triton copies. Raises UnsupportedError without Triton, or a GPU for torch."""
    _check()
    from kvcore_kernels.ops import TritonOps

    return TritonOps()


def _fusion() -> FusionOps:
    """Return the Triton operations of a blend. Raises UnsupportedError as `_copies` does."""
    _check()
    from kvcore_kernels.fusion import TritonFusion

    return TritonFusion()


def _check() -> None:
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
