"""HiCache where there is no CUDA: what it needs beside the stand-ins for missing modules.

    host memory         is not pinned, there being no device to pin it for, but as pinned memory is
                        it is all there from the start: written to once
    10 GiB of memory    that it leaves to others are 1 GiB here
    transfer_kv_direct  SGLang imports it for GPUs only; here it is slices copied in torch

For ``hicache_io_backend="direct"`` with ``hicache_mem_layout="layer_first"``, the one pair of
settings whose copies go through that function alone.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvcore.errors import UnsupportedError

if TYPE_CHECKING:
    import torch

__all__ = ["SETTINGS", "stand_in", "transfer_kv_direct"]

SETTINGS = {"hicache_io_backend": "direct", "hicache_mem_layout": "layer_first"}
"""The engine's arguments that HiCache runs with here."""


def stand_in(base: Any, mha: Any) -> None:
    """Prepare SGLang in this process and in those forked from it. May be called again.

    ``base`` and ``mha`` are the modules of that name of its ``mem_cache.pool_host``.

    Raises:
        UnsupportedError: there is a CUDA device, which HiCache serves itself.
    """
    import torch

    if torch.cuda.is_available():
        raise UnsupportedError("HiCache needs no stand-ins where there is a CUDA device")
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 1 << 30
    mha.transfer_kv_direct = transfer_kv_direct
    real = base.HostKVCache.__init__
    if not hasattr(real, "__wrapped__"):

        @functools.wraps(real)
        def unpinned(self: Any, *args: Any, **options: Any) -> None:
            real(self, *args, **{**options, "pin_memory": False})
            for buffer in _tensors(self.kv_buffer):
                buffer.zero_()

        base.HostKVCache.__init__ = unpinned


def _tensors(buffers: Any) -> Sequence[torch.Tensor]:
    return list(buffers) if isinstance(buffers, (list, tuple)) else [buffers]


def transfer_kv_direct(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """``dst[dst_indices] = src[src_indices]`` for each pair of buffers ``[slots, heads, dim]``.

    Slots that follow each other on both sides are one copy, as in SGLang's own function.
    """
    runs = list(_runs(src_indices.tolist(), dst_indices.tolist()))
    for source, target in zip(src_layers, dst_layers, strict=True):
        for a, b, count in runs:
            target[b : b + count].copy_(source[a : a + count])


def _runs(sources: Sequence[int], targets: Sequence[int]) -> list[tuple[int, int, int]]:
    """(source, target, slots) of stretches in which both sides go up by one."""
    found: list[tuple[int, int, int]] = []
    for a, b in zip(sources, targets, strict=True):
        if found and found[-1][0] + found[-1][2] == a and found[-1][1] + found[-1][2] == b:
            found[-1] = (found[-1][0], found[-1][1], found[-1][2] + 1)
        else:
            found.append((a, b, 1))
    return found
