"""HiCache without CUDA: what it needs besides the stand-ins for missing modules.

    host memory         is not pinned, because there is no device, but is written to once, so that
                        it is all allocated from the start, as pinned memory is
    reserved memory     1 GiB is left to other programs instead of 10 GiB
    transfer_kv_direct  SGLang imports it for GPUs only; here torch copies slices
    slots of pages      SGLang before 0.5.22 finds them with Triton on a CPU too; here Python does

Only for ``hicache_io_backend="direct"`` with ``hicache_mem_layout="layer_first"``: with these
settings all copies use that function.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvcore.errors import UnsupportedError

if TYPE_CHECKING:
    import torch

__all__ = ["SETTINGS", "extend_slots", "find_slots_in_python", "stand_in", "transfer_kv_direct"]

SETTINGS = {"hicache_io_backend": "direct", "hicache_mem_layout": "layer_first"}
"""The engine's arguments with which HiCache runs here."""


def stand_in(base: Any, mha: Any) -> None:
    """Prepare SGLang in this process and its later forks. Idempotent.

    ``base`` and ``mha`` are the modules of these names in its ``mem_cache.pool_host``. Raises
    UnsupportedError if there is a CUDA device, which HiCache serves by itself.
    """
    import torch

    if torch.cuda.is_available():
        raise UnsupportedError("HiCache needs no stand-ins on a machine with a CUDA device")
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 1 << 30
    mha.transfer_kv_direct = transfer_kv_direct
    real = base.HostKVCache.__init__
    if not hasattr(real, "__wrapped__"):

        @functools.wraps(real)
        def unpinned(self: Any, *args: Any, **options: Any) -> None:
            given = inspect.signature(real).bind(self, *args, **options)
            given.arguments["pin_memory"] = False
            real(*given.args, **given.kwargs)
            for buffer in _tensors(self.kv_buffer):
                buffer.zero_()

        base.HostKVCache.__init__ = unpinned


def find_slots_in_python(paged: Any) -> None:
    """Replace the Triton kernels of the module ``mem_cache.allocator.paged`` if a CPU needs them.

    Idempotent. Takes effect in this process and its later forks.
    """
    if not hasattr(paged, "alloc_decode_naive"):
        paged.alloc_extend_kernel = _Launch(extend_slots)
        paged.alloc_decode_kernel = _Launch(_decode_slots)


class _Launch:
    """A function that is called as a Triton kernel is: ``kernel[grid](...)``."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self._function


def extend_slots(
    prefix_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    out_indices: torch.Tensor,
    padded: int,
    page_size: int,
) -> None:
    """Write the slots of tokens ``prefix_lens`` to ``seq_lens`` of each request to ``out_indices``.

    ``last_loc`` has the slot of the last token of each prefix. A page that is begun is taken from
    ``free_pages``, from the first on. If there are too few, the slots are of no use, and SGLang
    drops them. ``padded`` is for the kernel only.
    """
    slots: list[int] = []
    pages = iter(free_pages.tolist())
    requests = zip(prefix_lens.tolist(), seq_lens.tolist(), last_loc.tolist(), strict=True)
    for start, end, slot in requests:
        for position in range(start, end):
            slot = slot + 1 if position % page_size else next(pages, 0) * page_size
            slots.append(slot)
    out_indices.copy_(out_indices.new_tensor(slots))


def _decode_slots(seq_lens: torch.Tensor, *rest: Any) -> None:
    """Do what `extend_slots` does, for the last token of each request."""
    extend_slots(seq_lens - 1, seq_lens, *rest)


def _tensors(buffers: Any) -> Sequence[torch.Tensor]:
    return list(buffers) if isinstance(buffers, (list, tuple)) else [buffers]


def transfer_kv_direct(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Set ``dst[dst_indices] = src[src_indices]`` for each pair of buffers ``[slots, heads, dim]``.

    Consecutive slots on both sides are one copy, as in SGLang's own function.
    """
    runs = list(_runs(src_indices.tolist(), dst_indices.tolist()))
    for source, target in zip(src_layers, dst_layers, strict=True):
        for a, b, count in runs:
            target[b : b + count].copy_(source[a : a + count])


def _runs(sources: Sequence[int], targets: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return (source, target, slots) of runs in which both sides go up by one."""
    found: list[tuple[int, int, int]] = []
    for a, b in zip(sources, targets, strict=True):
        if found and found[-1][0] + found[-1][2] == a and found[-1][1] + found[-1][2] == b:
            found[-1] = (found[-1][0], found[-1][1], found[-1][2] + 1)
        else:
            found.append((a, b, 1))
    return found
