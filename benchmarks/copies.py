"""Copies between an engine's pages and canonical blocks, against memcpy.

`python -m benchmarks.copies`. Gather copies pages to slots (an offload), scatter copies slots to
pages (a load). Pages and slots are in random order. Everything runs on one thread and in memory of
huge pages. The bar is three quarters of libc's memcpy of as many bytes in the same run. Two ways to
do the same in torch are measured for context.

`--host-time` measures instead what the host does for a copy between a GPU and the host, until it is
issued: on a device that does nothing, so that no GPU is needed. `python -m benchmarks.kernels`
compares the ways over the link on a GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import mmap
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from matplotlib.figure import Figure

from benchmarks._report import Report, Row
from kvcore.memory.copy.base import Copy, DeviceOps, Units
from kvcore.memory.copy.link import LinkOps
from kvcore.memory.copy.link import Way as LinkWay
from kvcore.memory.copy.native import NativeOps
from kvcore.memory.device import CpuDevice, Device, Stream, serve_devices
from kvcore.memory.layout import (
    KVView,
    Plane,
    arena_layout,
    from_strides,
    unit_tokens,
    vllm_cpu_layout,
)
from kvcore.model.shape import BlockShape

BAR = 0.75
HUGE_PAGE = 2 << 20
COLUMNS = ("model", "layout", "page", "block", "way", "direction", "GB/s", "of memcpy")


class Model(NamedTuple):
    name: str
    layers: int
    kv_heads: int
    head_dim: int
    tokens: int
    """Tokens that a copy moves: 94 MB of SmolLM2, 268 MB of Llama, more than any cache holds."""


class Pages(NamedTuple):
    order: str
    """"vec" is vLLM's CPU cache; the others name the physical order of vLLM's GPU cache."""
    page_tokens: int


class Way(NamedTuple):
    """One way to copy in both directions, and the number of rounds to measure it for."""

    gather: Callable[[], object]
    scatter: Callable[[], object]
    rounds: int


MODELS = (Model("SmolLM2-135M", 30, 3, 64, 4096), Model("Llama-3-8B", 32, 8, 128, 2048))
PAGES = (
    Pages("vec", 128),
    Pages("LBHNC", 128),
    Pages("LBHNC", 16),
    Pages("LBNHC", 128),
    Pages("LBNHC", 16),
)
BLOCKS = (16, 128)


def huge(nbytes: int) -> torch.Tensor:
    """Return ``nbytes`` bytes on huge pages, all of them written to."""
    memory = mmap.mmap(-1, nbytes + HUGE_PAGE)
    memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_PAGE
    return whole[start : start + nbytes].fill_(1)


class Case:
    """An engine's cache, an arena, and the units of each that are copied to the other."""

    def __init__(self, model: Model, pages: Pages, block_tokens: int) -> None:
        layers, heads, dim = model.layers, model.kv_heads, model.head_dim
        self.shape = BlockShape(layers, heads, dim, block_tokens, "bfloat16")
        self.unit = unit_tokens(pages.page_tokens, block_tokens)
        self.nbytes = model.tokens // block_tokens * self.shape.nbytes
        self.engine = self._engine(model, pages)
        self.arena_bytes, self.other = huge(self.nbytes), huge(self.nbytes)
        slots = model.tokens // block_tokens
        arena = arena_layout(self.shape, slots)
        self.arena = KVView(arena, [self.arena_bytes.view(torch.bfloat16)])
        rng = np.random.default_rng(0)
        page_order = rng.permutation(self.engine.layout.num_pages)
        self.pages = self._units(page_order[: model.tokens // pages.page_tokens], pages.page_tokens)
        self.slots = self._units(rng.permutation(slots), block_tokens)

    def _units(self, order: Units, tokens: int) -> Units:
        each = tokens // self.unit
        return (order[:, None] * each + np.arange(each)).ravel()

    def _engine(self, model: Model, pages: Pages) -> KVView:
        layers, heads, dim = model.layers, model.kv_heads, model.head_dim
        count, tokens = model.tokens // pages.page_tokens + 4, pages.page_tokens
        raw = [huge(count * heads * tokens * 2 * dim * 2) for _ in range(layers)]
        tensors = [r.view(torch.bfloat16) for r in raw]
        if pages.order == "vec":
            layout = vllm_cpu_layout(
                "vec",
                layers=layers,
                num_pages=count,
                page_tokens=tokens,
                kv_heads=heads,
                head_dim=dim,
                dtype="bfloat16",
            )
            return KVView(layout, tensors)
        if pages.order == "LBHNC":
            tensors = [t.view(count, heads, tokens, 2 * dim) for t in tensors]
        else:
            tensors = [t.view(count, tokens, heads, 2 * dim).transpose(1, 2) for t in tensors]
        return KVView(from_strides(tensors, self.shape), tensors)

    def with_ops(self, ops: DeviceOps, rounds: int) -> Way:
        a, b = (self.engine, self.pages), (self.arena, self.slots)
        return Way(
            lambda: ops.copy_blocks(*a, *b, unit_tokens=self.unit),
            lambda: ops.copy_blocks(*b, *a, unit_tokens=self.unit),
            rounds,
        )

    def with_torch(self, copy: TorchCopy, rounds: int) -> Way:
        a, b = (self.engine, self.pages), (self.arena, self.slots)
        return Way(
            lambda: over_planes(copy, *a, *b, self.unit),
            lambda: over_planes(copy, *b, *a, self.unit),
            rounds,
        )


TorchCopy = Callable[[torch.Tensor, Units, int, torch.Tensor, Units, int], None]


def over_planes(
    copy: TorchCopy, src: KVView, src_units: Units, dst: KVView, dst_units: Units, unit: int
) -> None:
    """Call `copy` for K and for V of every layer."""
    for sources, targets in zip(src.layout.planes, dst.layout.planes, strict=True):
        for a, b in zip(sources, targets, strict=True):
            per = src.layout.page_tokens // unit, dst.layout.page_tokens // unit
            of, to = in_units(src, a, unit), in_units(dst, b, unit)
            copy(of, src_units, per[0], to, dst_units, per[1])


def in_units(view: KVView, plane: Plane, unit: int) -> torch.Tensor:
    """Return a plane as a view `[pages, units of a page, heads, tokens, dim]`."""
    layout, token = view.layout, plane.token.stride
    size = (
        layout.num_pages,
        layout.page_tokens // unit,
        layout.kv_heads,
        unit,
        plane.head_dim,
    )
    stride = (plane.page, unit * token, plane.head, token, plane.dim.stride)
    return view.tensors[plane.tensor].as_strided(size, stride, plane.offset)


def index_copy(
    src: torch.Tensor, src_units: Units, src_per: int, dst: torch.Tensor, dst_units: Units, per: int
) -> None:
    """Copy all units of a plane in two index operations."""
    places = [torch.from_numpy(i) for i in (*divmod(src_units, src_per), *divmod(dst_units, per))]
    dst[places[2], places[3]] = src[places[0], places[1]]


def each_copy(
    src: torch.Tensor, src_units: Units, src_per: int, dst: torch.Tensor, dst_units: Units, per: int
) -> None:
    """Copy each unit of a plane by a `copy_` of its own."""
    for a, b in zip(src_units.tolist(), dst_units.tolist(), strict=True):
        dst[divmod(b, per)].copy_(src[divmod(a, src_per)])


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def against(call: Callable[[], object], baseline: Callable[[], object], rounds: int) -> Row:
    """Return the best time of `call` in seconds, and its median speed relative to the baseline.

    The two take turns, so that other work on the machine affects both alike.
    """
    times, ratios = [], []
    for _ in range(rounds):
        base, own = timed(baseline), timed(call)
        times.append(own)
        ratios.append((base + timed(baseline)) / 2 / own)
    return {"seconds": min(times), "ratio": statistics.median(ratios)}


def measure(case: Case, rounds: int, context: bool) -> Iterable[tuple[str, str, float, float]]:
    """Yield rows (way, direction, GB/s, ratio to memcpy)."""
    libc = ctypes.CDLL(None)
    libc.memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    pointers = case.arena_bytes.data_ptr(), case.other.data_ptr()

    def memcpy() -> None:
        libc.memcpy(*pointers, case.nbytes)

    yield "memcpy", "-", case.nbytes / min(timed(memcpy) for _ in range(rounds)) / 1e9, 1.0
    ways = {"kvcore native": case.with_ops(NativeOps(), rounds)}
    if context:
        ways["torch index"] = case.with_torch(index_copy, 3)
        ways["torch copy_ each"] = case.with_torch(each_copy, 3)
    for name, way in ways.items():
        for direction in ("gather", "scatter"):
            found = against(getattr(way, direction), memcpy, way.rounds)
            yield name, direction, case.nbytes / found["seconds"] / 1e9, found["ratio"]


# ---- what the host does for a copy that a GPU carries out ----


class IdleDevice(Device):
    """A device in the place of torch's "meta": it takes work and does none."""

    def __init__(self, name: torch.device) -> None:
        self.name = name
        self._stream = CpuDevice(torch.device("cpu")).stream()

    @property
    def queues(self) -> bool:
        return True

    def enter(self) -> None:
        pass

    def current(self) -> AbstractContextManager[object]:
        return nullcontext()

    def stream(self) -> Stream:
        return self._stream

    def current_stream(self) -> Stream:
        return self._stream

    def register(self, address: int, nbytes: int) -> None:
        pass

    def unregister(self, address: int) -> None:
        pass

    def reaches(self, tensor: torch.Tensor) -> bool:
        return True

    def upload(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array)

    def copy_batch(self, dst: Units, src: Units, sizes: Units, *, registered: bool = True) -> None:
        pass

    def synchronize(self) -> None:
        pass


class NoKernels(DeviceOps):
    name: ClassVar[str] = "none"
    priority: ClassVar[int] = 0

    def supports(self, src: KVView, dst: KVView) -> bool:
        return True

    def copy(self, copy: Copy) -> None:
        pass


HOST_COLUMNS = ("copy", "layers", "blocks", "way", "first ms", "later ms")


def host_times(rounds: int) -> Iterator[Row]:
    """Yield what a save of 16 blocks of 256 tokens costs the host, in Llama-3-8B's shape."""
    undo = serve_devices("meta", IdleDevice)
    blocks, tokens = 16, 256
    for count, order in itertools.product((32, 1), ("tokens first", "heads first")):
        shape = BlockShape(count, 8, 128, tokens, "bfloat16")
        size = (blocks, tokens, 8, 256) if order == "tokens first" else (blocks, 8, tokens, 256)
        tensors = [torch.empty(size, dtype=torch.bfloat16, device="meta") for _ in range(count)]
        if order == "tokens first":
            tensors = [tensor.transpose(1, 2) for tensor in tensors]
        engine = KVView(from_strides(tensors, shape), tensors)
        memory = torch.empty(blocks * shape.nbytes // 2, dtype=torch.bfloat16)
        arena = KVView(arena_layout(shape, blocks), [memory])
        units = np.random.default_rng(0).permutation(blocks)
        for way in (LinkWay.STAGED, None):
            ops = LinkOps(NoKernels(), NoKernels(), way)
            copy = partial(ops.copy_blocks, engine, units, arena, units)
            first = timed(copy)
            later = min(timed(copy) for _ in range(rounds))  # without what else the machine does
            yield {
                "copy": f"pages of {order}", "layers": count, "blocks": blocks,
                "way": "chosen" if way is None else way.value,
                "first ms": first * 1e3, "later ms": later * 1e3,
            }  # fmt: skip
    undo()


def draw(figure: Figure, rows: Sequence[Row]) -> None:
    """Plot every native copy as a bar, and the share of memcpy that it has to reach."""
    axes = figure.subplots(1, 2, sharex=True, sharey=True)
    for ax, direction in zip(axes, ("gather", "scatter"), strict=True):
        mine = [r for r in rows if r["way"] == "kvcore native" and r["direction"] == direction]
        names = [f"{r['model']} {r['layout']}/{r['page']}, blocks of {r['block']}" for r in mine]
        ax.barh(names, [r["of memcpy"] for r in mine])
        ax.axvline(BAR, color="black", linestyle=":")
        ax.set(title=direction, xlabel="of memcpy")
        ax.tick_params(axis="y", labelsize="x-small")
    axes[0].invert_yaxis()


def draw_host(figure: Figure, rows: Sequence[Row]) -> None:
    """Plot the milliseconds of a copy after the first."""
    ax = figure.subplots()
    names = [f"{row['copy']}, {row['layers']} layers, {row['way']}" for row in rows]
    ax.barh(names, [row["later ms"] for row in rows])
    ax.invert_yaxis()
    ax.set_xlabel("ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.copies")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of each native copy")
    parser.add_argument("--no-context", action="store_true", help="do not measure torch's ways")
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument(
        "--host-time", action="store_true", help="what the host does for copies of a GPU"
    )
    options = parser.parse_args()
    if options.host_time:
        report = Report("copies_host", HOST_COLUMNS, "no device", {"rounds": 50 * options.rounds})
        for row in host_times(50 * options.rounds):
            report.add(**row)
        report.finish(options.out, draw_host)
        return
    torch.set_num_threads(1)
    report = Report("copies", COLUMNS, "libc memcpy on one thread", {"rounds": options.rounds})
    for model in MODELS:
        for pages in PAGES:
            for block in BLOCKS:
                case = Case(model, pages, block)
                for result in measure(case, options.rounds, not options.no_context):
                    values = (model.name, *pages, block, *result)
                    report.add(**dict(zip(COLUMNS, values, strict=True)))
                del case
    report.finish(options.out, draw)
    low = [r for r in report.rows if r["way"] == "kvcore native" and r["of memcpy"] < BAR]
    print(f"{len(low)} native copies below {BAR:.0%} of memcpy")


if __name__ == "__main__":
    main()
