"""The device operations of a blend in Triton, on a prompt's KV indexed by position."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcore.errors import UnsupportedError
from kvcore.fusion.attend import Attention
from kvcore.fusion.ops import Kept, Place, Placing, Sample, TorchFusion, token_tables
from kvcore.fusion.plan import LayerKV
from kvcore.fusion.rope import Rope
from kvcore.fusion.rows import Rows
from kvcore.memory.copy.base import Copy, DeviceOps, HeadRange
from kvcore.memory.layout import KVView
from kvcore_kernels.attend.checks import MIN_DIM
from kvcore_kernels.attend.launch import attend_parts
from kvcore_kernels.balance.launch import balanced
from kvcore_kernels.choose.launch import keep_rows
from kvcore_kernels.deviation.checks import DTYPES
from kvcore_kernels.deviation.launch import parts_off
from kvcore_kernels.fusion_rows import strided_rows
from kvcore_kernels.merge.launch import merge_parts
from kvcore_kernels.planes import kernel_device, plane_table
from kvcore_kernels.rows import fresh_view
from kvcore_kernels.shift.checks import check_shift
from kvcore_kernels.shift.launch import Shifts
from kvcore_kernels.smooth.launch import smoothed

__all__ = ["TritonFusion"]

_SAMPLE_ROWS = 2


class _Nowhere(Placing):
    """The places of a source without tokens."""

    def place(self, layer: int) -> None:
        pass


class _TritonPlacing(Placing):
    """One launch a layer, in units of one token, because a place begins anywhere."""

    def __init__(self, shifts: Shifts, planes: int) -> None:
        self._shifts = shifts
        self._planes = planes

    def place(self, layer: int) -> None:
        self._shifts.launch(layer * self._planes)


class TritonFusion(TorchFusion):
    """Operations of one launch each. Torch handles unsupported cases (a dtype, a small head).

    Only `placing` sends anything to the device. All other arguments of kernels are numbers.
    """

    compiles = True

    def supports(self, device: torch.device) -> bool:
        return device.type == "cuda"

    def prepare(self, sample: Sample, copies: DeviceOps) -> None:
        """Launch every kernel once, over a prompt of two tokens in memory of its own."""
        count = _SAMPLE_ROWS
        queries, fresh = sample.queries[:count], LayerKV(*(part[:count] for part in sample.fresh))
        size = (count, *fresh.keys.shape[1:])
        dtype = getattr(torch, sample.pages.layout.dtype)
        kv = LayerKV(*(torch.zeros(size, dtype=dtype, device=queries.device) for _ in range(2)))
        still: list[Rope | None] = [None] * len(sample.ropes)
        turning = next((i for i, rope in enumerate(sample.ropes) if rope), 0)
        for ropes in (still, sample.ropes):
            self.placing(sample.pages, kv, [Place(0, 1, 1, 1)], ropes, copies).place(turning)
        every = torch.arange(count, device=queries.device)
        self.merge(kv, every, fresh)
        scores = self.deviation(fresh, every, kv, every)[0]
        self.smooth(every, scores, 1, count)
        self.balance(scores, scores)
        self.keep(Rows(every, every, every), every, scores, 1)
        for attention in dict.fromkeys(sample.attention):
            self.attend(queries, every, kv, attention)

    def placing(
        self,
        source: KVView,
        into: LayerKV,
        places: Sequence[Place],
        ropes: Sequence[Rope | None],
        copies: DeviceOps,
        *,
        again: bool = False,
    ) -> Placing:
        """Send tables of all tokens and layers to the device. K is rotated in every copy."""
        src, dst, distances = token_tables(places)
        if not len(src):
            return _Nowhere()
        target = _view(into)
        heads = HeadRange(0, 0, target.layout.kv_heads)
        layers = range(source.layout.layers)
        try:
            _check_ropes(ropes)
            one = source.select_layers([0])
            for rope in dict.fromkeys(ropes):
                check_shift(Copy(one, src, target, dst, [0], 1, heads), [rope], distances)
            shifts = Shifts(
                source, src, plane_table(target, [0], 0), 1, dst, layers, 1, heads, ropes,
                distances, kernel_device((source, target)),
            )  # fmt: skip
        except UnsupportedError:
            return super().placing(source, into, places, ropes, copies, again=again)
        return _TritonPlacing(shifts, source.layout.kv_factor)

    def merge(self, into: LayerKV, rows: Tensor, fresh: LayerKV) -> None:
        if fresh.keys.dtype != into.keys.dtype:
            return super().merge(into, rows, fresh)
        return merge_parts(fresh, [strided_rows(part) for part in into], rows, 1)

    def deviation(
        self, fresh: Sequence[Tensor], which: Tensor, cached: Sequence[Tensor], rows: Tensor
    ) -> Tensor:
        dtype = fresh[0].dtype
        if dtype not in DTYPES or any(part.dtype != dtype for part in (*fresh, *cached)):
            return super().deviation(fresh, which, cached, rows)
        return parts_off(fresh, which, [strided_rows(part) for part in cached], rows, 1)

    def smooth(self, rows: Tensor, scores: Tensor, reach: int, end: int) -> Tensor:
        return smoothed(rows, scores, reach)

    def balance(self, one: Tensor, other: Tensor) -> Tensor:
        return balanced(one, other)

    def keep(self, rows: Rows, offset_of: Tensor, scores: Tensor, count: int) -> Kept:
        positions, going, chunk, places = keep_rows(rows.positions, offset_of, scores, count)
        return Kept(Rows(positions, chunk, places), going)

    def attend(
        self, queries: Tensor, positions: Tensor, kv: LayerKV, attention: Attention
    ) -> Tensor:
        if queries.shape[2] < MIN_DIM or not queries.dtype == kv.keys.dtype in DTYPES:
            return super().attend(queries, positions, kv, attention)
        return attend_parts(
            queries, positions, kv.keys, kv.values,
            attention.scale, attention.soft_cap, attention.window or 0,
        )  # fmt: skip


def _check_ropes(ropes: Sequence[Rope | None]) -> None:
    if len({(rope.rotary_dim, rope.pairing) for rope in ropes if rope}) > 1:
        raise UnsupportedError("layers differ in pairing or in the number of rotated dims")


def _view(parts: Sequence[Tensor]) -> KVView:
    return fresh_view(parts, str(parts[0].dtype).removeprefix("torch."))
