"""The launch of checksums of blocks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvcore.memory.checksums import FIRST, KEY, SECOND
from kvcore_kernels.launcher import Launcher
from kvcore_kernels.planes import guard, to_device
from kvcore_kernels.sums.checks import check_sums
from kvcore_kernels.sums.kernel import sum_kernel

__all__ = ["constants", "sums"]

_BLOCK = 1024
_STEPS = 8
"""A program reads 64 KiB, so a block of a few MiB gives a GPU enough programs. Untuned: no GPU was
at hand."""


def constants() -> dict[str, int]:
    """Return the compile-time constants."""
    return {"KEY": KEY, "FIRST": FIRST, "SECOND": SECOND, "BLOCK": _BLOCK, "STEPS": _STEPS}


_launch = Launcher(sum_kernel, constants(), num_warps=4)


def sums(data: torch.Tensor, offsets: Sequence[int], nbytes: int) -> list[int]:
    """Return `kvcore.memory.checksums` of blocks of ``nbytes`` bytes at ``offsets`` of ``data``.

    ``data`` is flat bytes. Offsets and the data's address are multiples of 16, and ``data`` extends
    to the end of each block's last 8-byte word. This is one launch on the current stream, for which
    the host waits. Thread-safe.
    """
    check_sums(data, offsets, nbytes)
    if not offsets:
        return []
    words, rest = -(-nbytes // 8), nbytes % 8
    parts = -(-words // (_BLOCK * _STEPS))
    out = torch.empty((len(offsets), parts), dtype=torch.int64, device=data.device)
    at = min(offsets)
    view = data[at : at + (len(data) - at) // 8 * 8].view(torch.int64)
    places = np.array([(offset - at) // 8 for offset in offsets], dtype=np.int64)
    last = (1 << 8 * rest) - 1 if rest else -1
    with guard(data.device):
        (places_there,) = to_device([places], data.device)
    _launch(data.device, (parts, len(offsets)), view, places_there, out, words, last)
    return [value % 2**64 for value in out.sum(1).tolist()]
