"""The launch of the copy."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from kvcore.errors import UnsupportedError
from kvcore.memory.copy.base import Copy, HeadRange
from kvcore.memory.copy.cache import ViewCache
from kvcore.memory.device import Device, Event, device_of
from kvcore.memory.layout import KVView
from kvcore_kernels.copy.kernel import bounded_copy_kernel, copy_kernel
from kvcore_kernels.lang import word_type
from kvcore_kernels.launcher import Launcher
from kvcore_kernels.planes import (
    FIELDS,
    HEAD_DIM,
    PlaneTable,
    Words,
    guard,
    is_contiguous,
    kernel_device,
    plane_table,
    power_of_two,
    to_device,
    widen,
)

__all__ = ["CopyTile", "copy_units", "prepare", "tile_for"]

_TILE_BYTES = 16 << 10
"""Bytes that a program copies: 128 threads with eight 16-byte loads each in flight.

Derived from the latency of Hopper and CDNA3. With it an H200 gathers 32 MiB in 20 us, 3.3 TB/s read
and written together. Other sizes were not tried."""
_WARPS = 4
_STRIDED, _PACKED = 4096, 2048
"""Words of a program's tile if each has its own address; more of them would spill registers."""
_MOST_TILES = 65535
"""Tiles of a unit, which are the third axis of a launch. A tile has at most 2^14 rows, so rows of a
unit are numbered below 2^30."""


class CopyTile(NamedTuple):
    """The compile-time constants of a copy."""

    words: Words
    contiguous: bool
    cut: bool
    rows: int
    dim: int

    def constants(self) -> dict[str, Any]:
        return {
            "FIELDS": FIELDS,
            "DTYPE": word_type(self.words.size),
            "MULTIPLE": self.words.width // self.words.size,
            "WIDTH": self.words.width,
            "UNIT": self.contiguous,
            "CUT": self.cut,
            "ROWS": self.rows,
            "DIM": self.dim,
        }


class _Plan(NamedTuple):
    """What a copy between two views needs, whichever units it copies.

    ``sources`` and ``targets`` are on the device once ``sent`` has passed.
    """

    device: Device
    sources: torch.Tensor
    targets: torch.Tensor
    planes: int
    tile: CopyTile
    sent: Event


def copy_units(copy: Copy, programs: int | None = None) -> None:
    """Carry out a copy, all layers in one launch.

    `kvcore.memory.copy.base.DeviceOps.copy_blocks` has checked it. ``programs`` bounds the programs
    of the launch; without it every tile has one. Memory is a GPU's, or registered host memory,
    which the kernel accesses over the link. Only the chosen units of ``dst`` are written. The work
    is enqueued on the GPU's current stream; the host does not wait. If a unit occurs twice in
    ``dst_units``, the order of the writes is undefined. Thread-safe. Raises UnsupportedError if a
    unit has too many rows for a launch.
    """
    if copy.is_empty:
        return
    src, src_units, dst, dst_units, layers, unit_tokens, heads = copy
    device = kernel_device((src, dst))
    with guard(device):
        plan = _plan(src, dst, layers, unit_tokens, heads, device)
        units = to_device((src_units, dst_units), device)
        stream = plan.device.current_stream()
        if not plan.sent.passed():
            stream.follow(plan.sent)
        pages = [view.layout.page_tokens // unit_tokens for view in (src, dst)]
        sizes = heads.size, unit_tokens, *pages
        tiles = _tiles(plan.tile, unit_tokens, heads)
        launch = _launcher(plan.tile, programs is not None)
        tables = plan.sources, plan.targets, *units
        if programs is None:
            launch(device, (len(src_units), plan.planes, tiles), *tables, *sizes)
        else:
            count = len(src_units) * plan.planes * tiles
            grid = (min(programs, count),)
            launch(device, grid, *tables, len(src_units), plan.planes, *sizes)
        stream.hold(plan.sources)


@cache
def _launcher(tile: CopyTile, bounded: bool) -> Launcher:
    kernel = bounded_copy_kernel if bounded else copy_kernel
    return Launcher(kernel, tile.constants(), num_warps=_WARPS)


def prepare(src: KVView, dst: KVView, unit_tokens: int, programs: int | None = None) -> None:
    """Compile every copy from one view to another: of all layers, and of each on its own.

    Copies no unit. Blocks for seconds if there is something to compile.
    """
    none = np.full(1, -1, dtype=np.int64)
    count = min(src.layout.layers, dst.layout.layers)
    heads = HeadRange(0, 0, min(src.layout.kv_heads, dst.layout.kv_heads))
    seen = set()
    for layers in (range(count), *((layer,) for layer in range(count))):
        _, tile = _tables(src, dst, layers, unit_tokens, heads)
        if tile not in seen:
            seen.add(tile)
            copy_units(Copy(src, none, dst, none, layers, unit_tokens, heads), programs)


_plans = ViewCache()


def _plan(
    src: KVView,
    dst: KVView,
    layers: Sequence[int],
    unit_tokens: int,
    heads: HeadRange,
    device: torch.device,
) -> _Plan:
    """Return the plan of a copy, made once for these views. Its tables are sent to ``device``."""

    def make() -> _Plan:
        (source, target), tile = _tables(src, dst, layers, unit_tokens, heads)
        here = device_of(device)
        sources, targets = to_device((source.rows, target.rows), device)
        sent = here.current_stream().record()
        return _Plan(here, sources, targets, len(source.rows), tile, sent)

    return _plans.get((src, dst), (tuple(layers), unit_tokens, heads), make)


def _tables(
    src: KVView, dst: KVView, layers: Sequence[int], unit_tokens: int, heads: HeadRange
) -> tuple[list[PlaneTable], CopyTile]:
    planes = [plane_table(src, layers, heads.src), plane_table(dst, layers, heads.dst)]
    planes, words = widen(planes, src.layout.itemsize)
    tile = tile_for(
        words,
        contiguous=is_contiguous(planes),
        cut=any(table.cut for table in planes),
        rows=heads.size * unit_tokens,
        dim=int(planes[0].rows[:, HEAD_DIM].max()),
    )
    if _tiles(tile, unit_tokens, heads) > _MOST_TILES:
        raise UnsupportedError(
            f"units of {unit_tokens} tokens and {heads.size} heads: a launch serves "
            f"{_MOST_TILES * tile.rows} rows a unit; copy smaller units"
        )
    return planes, tile


def _tiles(tile: CopyTile, unit_tokens: int, heads: HeadRange) -> int:
    return -(-heads.size * unit_tokens // tile.rows)


def tile_for(words: Words, *, contiguous: bool, cut: bool, rows: int, dim: int) -> CopyTile:
    """Return a tile of about `_TILE_BYTES` for ``rows`` rows of ``dim`` words."""
    area = _TILE_BYTES // words.size
    if not contiguous:
        area = min(area, _PACKED if cut else _STRIDED)
    width = min(power_of_two(dim), area // 4)
    return CopyTile(words, contiguous, cut, min(power_of_two(rows), area // width), width)
