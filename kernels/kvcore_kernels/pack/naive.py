"""The naive twin: gather everything, divide, round and scatter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from kvcore.memory.copy.base import HeadRange, Units
from kvcore.memory.layout import KVView
from kvcore_kernels.pack.checks import LARGEST, SMALLEST, check_pack
from kvcore_kernels.rows import gather_rows, scatter_rows

__all__ = ["pack_blocks", "unpack_blocks"]


def pack_blocks(
    src: KVView,
    src_units: Units,
    dst: KVView,
    dst_blocks: Units,
    scales: torch.Tensor,
    layers: Sequence[int],
    heads: HeadRange,
) -> None:
    """Compute `kvcore_kernels.pack.launch.pack_blocks`, one block and plane at a time."""
    tokens = check_pack(src, src_units, dst, dst_blocks, scales, layers, heads)
    largest = LARGEST[dst.layout.dtype]
    most = torch.tensor(largest, device=src.tensors[0].device)  # torch inverts a Python divisor
    chosen, held = _head_slices(heads)
    for block, from_slots, to_slots in _pairs(src_units, dst_blocks, tokens):
        for layer in layers:
            for kv in range(src.layout.kv_factor):
                wide = gather_rows(src, layer, kv, from_slots)[:, chosen].float()
                size = wide.abs().amax((0, 2)).clamp_min(SMALLEST)
                size = torch.where(size.isfinite(), size, float("nan"))
                scales[block, layer, kv, held] = size / most
                small = (wide * (most / size)[:, None]).clamp(-largest, largest)
                small = torch.where(size.isnan()[:, None], 0.0, small)
                rows = gather_rows(dst, layer, kv, to_slots)
                rows[:, held] = (
                    small.round().to(rows.dtype)
                    if rows.dtype == torch.int8
                    else small.to(rows.dtype)
                )
                scatter_rows(dst, layer, kv, to_slots, rows)


def unpack_blocks(
    src: KVView,
    src_blocks: Units,
    scales: torch.Tensor,
    dst: KVView,
    dst_units: Units,
    layers: Sequence[int],
    heads: HeadRange,
) -> None:
    """Compute `kvcore_kernels.pack.launch.unpack_blocks`, one block and plane at a time."""
    flipped = HeadRange(heads.dst, heads.src, heads.size)
    tokens = check_pack(dst, dst_units, src, src_blocks, scales, layers, flipped)
    held, chosen = _head_slices(heads)
    for block, to_slots, from_slots in _pairs(dst_units, src_blocks, tokens):
        for layer in layers:
            for kv in range(src.layout.kv_factor):
                small = gather_rows(src, layer, kv, from_slots)[:, held].float()
                wide = small * scales[block, layer, kv, held][:, None]
                rows = gather_rows(dst, layer, kv, to_slots)
                rows[:, chosen] = wide.to(rows.dtype)
                scatter_rows(dst, layer, kv, to_slots, rows)


def _head_slices(heads: HeadRange) -> tuple[slice, slice]:
    return slice(heads.src, heads.src + heads.size), slice(heads.dst, heads.dst + heads.size)


def _pairs(
    units: Units, blocks: Units, tokens: int
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yield each block with the wide and the packed slots of its chosen units."""
    for row, block in zip(units, blocks.tolist(), strict=True):
        if block < 0 or not (row >= 0).any():
            continue
        (places,) = np.nonzero(row >= 0)
        steps = np.arange(tokens)
        wide = (row[places][:, None] * tokens + steps).ravel()
        packed = block * len(row) * tokens + (places[:, None] * tokens + steps).ravel()
        yield block, torch.from_numpy(wide), torch.from_numpy(packed)
