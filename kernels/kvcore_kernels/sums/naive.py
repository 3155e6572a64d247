"""The naive twin: kvcore's checksums in torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvcore.memory.checksums import tensor_sums
from kvcore_kernels.sums.checks import check_sums

__all__ = ["sums"]


def sums(data: torch.Tensor, offsets: Sequence[int], nbytes: int) -> list[int]:
    """Compute `kvcore_kernels.sums.launch.sums`."""
    check_sums(data, offsets, nbytes)
    return tensor_sums(data, offsets, nbytes)
