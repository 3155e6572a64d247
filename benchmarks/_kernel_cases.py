"""The cases of `benchmarks.kernels`: every op at every size, with other ways to do the same.

This imports Triton. Without a GPU, set TRITON_INTERPRET before importing it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from kvcore.fusion.attend import Attention, attend_rows, look_of, look_rows
from kvcore.fusion.rope import Pairing, Rope
from kvcore.fusion.select import keep_top
from kvcore.memory.copy.base import Copy, DeviceOps, HeadRange, Units
from kvcore.memory.copy.link import Way
from kvcore.memory.copy.reference import ReferenceOps
from kvcore.memory.layout import KVView, arena_layout, from_strides, trtllm_layout
from kvcore.model.shape import BlockShape
from kvcore_kernels.attend import launch as attend
from kvcore_kernels.choose import launch as choose
from kvcore_kernels.deviation import launch as deviation
from kvcore_kernels.deviation import naive as naive_deviation
from kvcore_kernels.merge import launch as merge
from kvcore_kernels.merge import naive as naive_merge
from kvcore_kernels.ops import KernelOps, TritonOps
from kvcore_kernels.pack import launch as pack
from kvcore_kernels.pack import naive as naive_pack
from kvcore_kernels.shift import launch as shift
from kvcore_kernels.shift import naive as naive_shift

__all__ = ["DRY", "FULL", "Case", "Scale", "cases", "expanded", "useful_flops"]

OURS, TORCH = "triton", "torch"
ANGLES = 2.0**-7
"""Tolerance of rotated K: a GPU fuses multiply and add, one unit in bfloat16's last place."""
WEIGHTS = 2e-2
"""Tolerance of attention in bfloat16: half an ulp of weights and of result, on both sides."""


class Scale(NamedTuple):
    """Sizes of a run.

    Ways that make a call for every piece run up to ``pieces`` blocks; ways that wait for every
    block run up to ``naive`` blocks.
    """

    shape: BlockShape
    query_heads: int
    blocks: tuple[int, ...]
    host_blocks: tuple[int, ...]
    pieces: int
    naive: int
    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    shares: tuple[float, ...]
    scores: int
    """Most scores of an attention that torch computes too."""
    question: int
    """Rows of a question. They attend to all keys before them."""


FULL = Scale(
    BlockShape(32, 8, 128, 16, "bfloat16"), 32,
    blocks=(1, 16, 128, 1024, 2048), host_blocks=(1, 16, 128, 512), pieces=16, naive=16,
    rows=(256, 4096, 65536), contexts=(4096, 16384, 65536), shares=(0.05, 0.15, 1.0),
    scores=1 << 32, question=64,
)  # fmt: skip
"""Llama-3-8B's shape, in which a block of 16 tokens is 2 MiB."""

DRY = Scale(
    BlockShape(1, 2, 16, 4, "float32"), 4,
    blocks=(1, 2), host_blocks=(1,), pieces=1, naive=1,
    rows=(3,), contexts=(12,), shares=(0.5, 1.0), scores=1 << 20,
    question=2,
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A task, and several ways to do it. ``ways[OURS]`` is kvcore's kernel.

    Args:
        amount: bytes read and written, bytes over the link, or useful flops; 0 means no floor.
        floor: the rate of the machine to compare with: "copy", "to host", "to device", "flash".
        bar: the share of that rate that our way must reach.
        written: the tensors that the ways write to; empty if they return their result.
        tolerance: of a result, both relative and absolute; 0 compares every bit.
    """

    op: str
    size: str
    amount: int
    floor: str
    ways: Mapping[str, Callable[[], object]]
    bar: float | None = None
    written: Sequence[Tensor] = ()
    tolerance: float = 0.0
    context: int = 0


def cases(scale: Scale, device: torch.device, largest: int) -> Iterator[Case]:
    """Yield all cases whose KV on one side is at most ``largest`` bytes."""
    make = _Cases(scale, device, np.random.default_rng(0))
    for blocks in scale.blocks:
        if blocks * scale.shape.nbytes <= largest:
            yield from make.copies(blocks, "tokens")
            yield from make.copies(blocks, "pieces")
            yield make.shifted(blocks)
            yield from make.packed(blocks, "float8_e4m3fn")
            yield from make.packed(blocks, "int8")
    for blocks in scale.host_blocks:
        if blocks * scale.shape.nbytes <= largest:
            yield from make.over_the_link(blocks)
    for rows in scale.rows:
        yield from make.of_rows(rows)
    for context in scale.contexts:
        for share in scale.shares:
            yield make.attention(context, share)
        yield make.look(context)


@dataclass(frozen=True)
class _Cases:
    scale: Scale
    device: torch.device
    random: np.random.Generator = field(repr=False)

    def copies(self, blocks: int, order: str) -> Iterator[Case]:
        """Copy pages to blocks on the device, and back."""
        engine, pages = self._engine(blocks, order)
        arena, slots = self._arena(blocks, self.scale.shape)
        for way, a, b in (
            ("gather", (engine, pages), (arena, slots)),
            ("scatter", (arena, slots), (engine, pages)),
        ):
            ways = {OURS: _copy(KernelOps(), a, b), TORCH: _copy(ReferenceOps(), a, b)}
            if order == "pieces" and blocks <= self.scale.pieces:
                ways |= _piece_by_piece(self.scale.shape, a, b)
            yield Case(
                f"{way}, {order}", self._size(blocks), 2 * blocks * self.scale.shape.nbytes,
                "copy", ways, 0.85, b[0].tensors,
            )  # fmt: skip

    def over_the_link(self, blocks: int) -> Iterator[Case]:
        """Copy pages to blocks in pinned host memory, and back, by every way over the link.

        OURS is the way that is chosen. The bar is for the largest size.
        """
        host, slots = self._arena(blocks, self.scale.shape, host=True)
        nbytes, size = blocks * self.scale.shape.nbytes, self._size(blocks)
        for order in ("tokens", "pieces"):
            engine, pages = self._engine(blocks, order)
            for op, floor, a, b in (
                (f"to the host, {order}", "to host", (engine, pages), (host, slots)),
                (f"from the host, {order}", "to device", (host, slots), (engine, pages)),
            ):
                ways = {OURS: _copy(TritonOps(), a, b), TORCH: _copy(ReferenceOps(), a, b)}
                if self.device.type != "cpu":
                    some = [one for one in Way if order == "pieces" or one is not Way.ENGINE]
                    ways |= {one.value: _copy(TritonOps(one), a, b) for one in some}
                    ways["kernel, unbounded"] = _copy(KernelOps(), a, b)
                yield Case(op, size, nbytes, floor, ways, 0.90, b[0].tensors)

    def shifted(self, blocks: int) -> Case:
        """Copy blocks to pages, with K rotated."""
        shape = self.scale.shape
        engine, pages = self._engine(blocks, "tokens")
        arena, slots = self._arena(blocks, shape)
        ropes = [Rope(shape.head_dim, shape.head_dim, Pairing.NEOX, 5e5)] * shape.layers
        heads = HeadRange(0, 0, shape.kv_heads)
        layers = list(range(shape.layers))
        copy = Copy(arena, slots, engine, pages, layers, shape.block_tokens, heads)
        args = copy, ropes, np.full(blocks, 1000)
        return Case(
            "shift", self._size(blocks), 2 * blocks * shape.nbytes, "copy",
            {OURS: partial(shift.copy_shifted, *args),
             TORCH: partial(naive_shift.copy_shifted, *args)},
            0.85, engine.tensors, ANGLES,
        )  # fmt: skip

    def packed(self, blocks: int, dtype: str) -> Iterator[Case]:
        """Pack pages into blocks of 8-bit codes, and unpack them."""
        shape = self.scale.shape
        engine, pages = self._engine(blocks, "tokens")
        arena, slots = self._arena(blocks, replace(shape, dtype=dtype))
        size = blocks, shape.layers, shape.kv_factor, shape.kv_heads
        scales = torch.zeros(size, device=self.device)
        rest = list(range(shape.layers)), HeadRange(0, 0, shape.kv_heads)
        there = engine, pages[:, None], arena, slots, scales, *rest
        back = arena, slots, scales, engine, pages[:, None], *rest
        amount = blocks * (shape.nbytes + shape.nbytes // shape.itemsize)
        short = "e4m3" if dtype != "int8" else dtype
        for op, name, args, written in (
            ("pack", "pack_blocks", there, [arena.tensors[0].view(torch.int8), scales]),
            ("unpack", "unpack_blocks", back, engine.tensors),
        ):
            ways: dict[str, Callable[[], object]] = {OURS: partial(getattr(pack, name), *args)}
            if blocks <= self.scale.naive:
                ways[TORCH] = partial(getattr(naive_pack, name), *args)
            pack.pack_blocks(*there)  # type: ignore[arg-type]  # so that there is something to unpack
            yield Case(f"{op} {short}", self._size(blocks), amount, "copy", ways, 0.85, written)

    def of_rows(self, rows: int) -> Iterator[Case]:
        """Deviation, merge and choice of rows of one layer. Deviation precedes merge."""
        shape = replace(self.scale.shape, layers=1)
        view, _ = self._engine(-(-rows // shape.block_tokens), "tokens", shape)
        slots = torch.from_numpy(self.random.permutation(rows)).to(self.device)
        fresh = [self._normal(rows, shape.kv_heads, shape.head_dim) for _ in range(2)]
        amount = 2 * 2 * fresh[0].nbytes
        args = (*fresh, view, 0, slots)
        yield Case(
            "deviation", f"{rows} rows", amount, "copy",
            {OURS: partial(deviation.deviations, *args),
             TORCH: partial(naive_deviation.deviations, *args)},
            tolerance=1e-4,
        )  # fmt: skip
        yield Case(
            "merge", f"{rows} rows", amount, "copy",
            {OURS: partial(merge.merge_rows, *args), TORCH: partial(naive_merge.merge_rows, *args)},
            0.85, view.tensors,
        )  # fmt: skip
        order, scores = torch.arange(1, rows + 1, device=self.device), self._normal(rows).float()
        chosen = order, scores, max(1, rows * 15 // 100)
        yield Case(
            "choose", f"{rows} rows", 0, "",
            {OURS: partial(choose.keep_top, *chosen), TORCH: partial(keep_top, *chosen)},
        )  # fmt: skip

    def attention(self, context: int, share: float) -> Case:
        """Attention of rows at random positions over one layer's pages."""
        picked = np.sort(self.random.permutation(context)[: max(1, int(share * context))])
        paged, dense = self._layer(context, picked)
        heads, dim = self.scale.query_heads, self.scale.shape.head_dim
        ways: dict[str, Callable[[], object]] = {
            OURS: partial(attend.attend_rows, *paged, scale=dim**-0.5)
        }
        if len(picked) * context * heads <= self.scale.scores:
            ways[TORCH] = partial(attend_rows, *dense, Attention(dim**-0.5))
            ways["masked SDPA"] = _masked(*dense, dim**-0.5)
        flops = useful_flops(picked, heads, dim)
        size = f"{share:.0%} of {context}"
        return Case(
            "attend", size, flops, "flash", ways, 0.60, tolerance=WEIGHTS, context=context
        )  # fmt: skip

    def look(self, context: int) -> Case:
        """Torch's attention of a question that notes what each key gets, beside attention alone.

        The difference between the two is what a kernel could save.
        """
        picked = np.arange(context)[-self.scale.question :]
        paged, dense = self._layer(context, picked)
        heads, scale = self.scale.query_heads, self.scale.shape.head_dim**-0.5
        queries, positions, keys, values = dense
        look = look_of(positions, picked.tolist(), 0, positions[:0], ())
        interest = torch.zeros(heads, context, device=self.device)
        ways: dict[str, Callable[[], object]] = {
            TORCH: partial(look_rows, queries, look, keys, values, Attention(scale), interest),
            "attention alone": partial(attend.attend_rows, *paged, scale=scale),
        }
        read = dense[2].nbytes + dense[3].nbytes
        return Case("look", f"{context} tokens", read, "copy", ways, tolerance=WEIGHTS)

    def _layer(
        self, context: int, picked: Units
    ) -> tuple[tuple[Tensor, Tensor, KVView, int, Tensor], tuple[Tensor, ...]]:
        """Return rows at positions ``picked`` of one layer as arguments of two attentions.

        The first is over pages, the second over K and V in order.
        """
        shape = replace(self.scale.shape, layers=1)
        view, pages = self._engine(-(-context // shape.block_tokens), "tokens", shape)
        positions = torch.from_numpy(picked).to(self.device)
        queries = self._normal(len(picked), self.scale.query_heads, shape.head_dim)
        table = torch.from_numpy(pages).to(self.device)
        slots = (table[:, None] * shape.block_tokens + torch.arange(
            shape.block_tokens, device=self.device)).ravel()[:context]  # fmt: skip
        keys, values = (_dense(view, kv, slots) for kv in range(2))
        return (queries, positions, view, 0, table), (queries, positions, keys, values)

    def _size(self, blocks: int) -> str:
        """Return the size of the KV on the unpacked side, in words."""
        return f"{blocks * self.scale.shape.nbytes / (1 << 20):g} MiB"

    def _normal(self, *size: int) -> Tensor:
        dtype = getattr(torch, self.scale.shape.dtype)
        return torch.randn(size, dtype=dtype, device=self.device)

    def _engine(
        self, blocks: int, order: str, shape: BlockShape | None = None
    ) -> tuple[KVView, Units]:
        """Return an engine's pages of one block each, and the page of each block in random order.

        "tokens" is a tensor a layer in which all heads of a token are together, as in vLLM.
        "pieces" is one tensor in which a head's K of a page is one run, and so is its V, as in a
        canonical block.
        """
        shape = shape or self.scale.shape
        heads, tokens, dim = shape.kv_heads, shape.block_tokens, shape.head_dim
        order_of = self.random.permutation(blocks).astype(np.int64)
        if order == "pieces":
            memory = self._normal(blocks * shape.nbytes // shape.itemsize)
            return KVView(trtllm_layout(shape, blocks, tokens, "HND"), [memory]), order_of
        tensors = [
            self._normal(blocks, tokens, heads, 2 * dim).transpose(1, 2)
            for _ in range(shape.layers)
        ]
        return KVView(from_strides(tensors, shape), tensors), order_of

    def _arena(self, blocks: int, shape: BlockShape, host: bool = False) -> tuple[KVView, Units]:
        """Return canonical blocks on the device or in pinned memory, and slots in random order."""
        memory = self._normal(blocks * shape.nbytes // shape.itemsize).to(
            getattr(torch, shape.dtype)
        )
        if host:
            memory = memory.cpu()
            memory = memory.pin_memory() if self.device.type == "cuda" else memory
        order = self.random.permutation(blocks).astype(np.int64)
        return KVView(arena_layout(shape, blocks), [memory]), order


_Side = tuple[KVView, Units]


def _copy(ops: DeviceOps, src: _Side, dst: _Side) -> Callable[[], object]:
    return partial(ops.copy_blocks, *src, *dst)


def _piece_by_piece(shape: BlockShape, src: _Side, dst: _Side) -> dict[str, Callable[[], object]]:
    """Return two ways: a copy for each run (cudaMemcpyAsync on a GPU), and all in one call."""
    run = shape.block_tokens * shape.head_dim
    sources, targets = [], []
    for a, b in zip(src[1].tolist(), dst[1].tolist(), strict=True):
        for planes in zip(src[0].layout.planes, dst[0].layout.planes, strict=True):
            for one, other in zip(*planes, strict=True):
                for head in range(shape.kv_heads):
                    of = one.offset + a * one.page + head * one.head
                    to = other.offset + b * other.page + head * other.head
                    sources.append(src[0].tensors[0].narrow(0, of, run))
                    targets.append(dst[0].tensors[0].narrow(0, to, run))

    def each() -> None:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=True)

    # torch's batched copy has no public name; its optimizers and FSDP use this one.
    return {
        "a copy a piece": each,
        "batched copies": lambda: torch._foreach_copy_(targets, sources),
    }


def _dense(view: KVView, kv: int, slots: Tensor) -> Tensor:
    """Return K or V of one layer's tokens in order: [tokens, kv_heads, dim]."""
    layout, memory = view.layout, view.tensors[0]
    whole = memory.transpose(1, 2).reshape(-1, layout.kv_heads, memory.shape[-1])
    return whole[slots].chunk(2, dim=-1)[kv].contiguous()


def expanded(kv: Tensor, heads: int) -> Tensor:
    """Give every query head its own K or V: [tokens, kv_heads, dim] -> [1, heads, tokens, dim]."""
    return kv.repeat_interleave(heads // kv.shape[1], 1).transpose(0, 1)[None].contiguous()


def _masked(
    queries: Tensor, positions: Tensor, keys: Tensor, values: Tensor, scale: float
) -> Callable[[], object]:
    """Return torch's attention over all keys. Its mask and expanded K and V are made beforehand."""
    heads = queries.shape[1]
    mask = positions[:, None] >= torch.arange(len(keys), device=keys.device)
    q = queries.transpose(0, 1)[None].contiguous()
    k, v = expanded(keys, heads), expanded(values, heads)

    def way() -> Tensor:
        out = functional.scaled_dot_product_attention(q, k, v, mask, scale=scale)
        return out[0].transpose(0, 1)

    return way


def useful_flops(positions: Units, heads: int, dim: int) -> int:
    """Return the multiplications and additions for the keys that rows at ``positions`` see."""
    return int(4 * heads * dim * (positions + 1).sum())
