"""The device operations of a blend in Triton, on a prompt's KV indexed by position."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvcore.errors import UnsupportedError
from kvcore.fusion.attend import Attention
from kvcore.fusion.ops import Place, TorchFusion
from kvcore.fusion.plan import LayerKV
from kvcore.fusion.rope import Rope
from kvcore.memory.copy.base import HeadRange
from kvcore.memory.layout import KVView
from kvcore_kernels.attend.launch import attend_rows
from kvcore_kernels.choose.launch import keep_top
from kvcore_kernels.deviation.launch import deviations
from kvcore_kernels.merge.launch import merge_rows
from kvcore_kernels.rows import fresh_view
from kvcore_kernels.shift.launch import copy_shifted

__all__ = ["TritonFusion"]


class TritonFusion(TorchFusion):
    """Operations of one launch each. Torch handles unsupported cases (a dtype, a small head)."""

    def supports(self, device: torch.device) -> bool:
        return device.type == "cuda"

    def place(
        self, staged: LayerKV, into: LayerKV, places: Sequence[Place], rope: Rope | None
    ) -> None:
        """Copy all places in one launch, in units of one token, because a place begins anywhere."""
        src, dst, distances = _tokens(places)
        source, target = _view(staged), _view(into)
        heads = HeadRange(0, 0, source.layout.kv_heads)
        try:
            copy_shifted(source, src, target, dst, [0], 1, heads, [rope], distances)
        except UnsupportedError:
            super().place(staged, into, places, rope)

    def merge(self, into: LayerKV, rows: Tensor, fresh: LayerKV) -> None:
        merge_rows(fresh.keys, fresh.values, _view(into), 0, rows)

    def deviation(self, fresh: Tensor, cached: Tensor) -> Tensor:
        every = torch.arange(len(fresh), dtype=torch.int32, device=fresh.device)
        try:
            return deviations(fresh, None, _view([cached]), 0, every)[0]
        except UnsupportedError:
            return super().deviation(fresh, cached)

    def keep_top(self, rows: Tensor, scores: Tensor, count: int) -> Tensor:
        return keep_top(rows, scores, count)

    def attend(
        self, queries: Tensor, positions: Tensor, kv: LayerKV, attention: Attention
    ) -> Tensor:
        every = torch.arange(len(kv.keys), dtype=torch.int32, device=queries.device)
        try:
            return attend_rows(
                queries, positions, _view(kv), 0, every,
                scale=attention.scale, soft_cap=attention.soft_cap, window=attention.window or 0,
            )  # fmt: skip
        except UnsupportedError:
            return super().attend(queries, positions, kv, attention)


def _view(parts: Sequence[Tensor]) -> KVView:
    return fresh_view(parts, str(parts[0].dtype).removeprefix("torch."))


def _tokens(places: Sequence[Place]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return each token's index in the staging, its position and its distance; int64."""
    table = np.array(places, dtype=np.int64).reshape(-1, len(Place._fields))
    first, length, position, distance = table.T
    index = np.arange(length.sum()) - np.repeat(np.cumsum(length) - length, length)
    return (
        np.repeat(first, length) + index,
        np.repeat(position, length) + index,
        np.repeat(distance, length),
    )
