"""The launch of the copy that rotates K."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from kvcore.fusion.rope import Pairing, Rope
from kvcore.memory.copy.base import Copy, HeadRange, Units
from kvcore.memory.layout import KVView
from kvcore_kernels.fusion_rows import check_count
from kvcore_kernels.lang import float_type
from kvcore_kernels.launcher import Launcher
from kvcore_kernels.planes import (
    FIELDS,
    PlaneTable,
    common_width,
    guard,
    is_contiguous,
    kernel_device,
    plane_table,
    power_of_two,
    to_device,
)
from kvcore_kernels.shift.checks import check_shift
from kvcore_kernels.shift.kernel import shift_kernel

__all__ = ["ShiftTile", "Shifts", "copy_shifted", "tile_for"]

_TILE, _STRIDED = 4096, 2048
"""Elements of a program; fewer if each has its own address. Untuned: no GPU was at hand."""
_WARPS = 4
_ALIGNED = 4
"""Distances are padded to a multiple, so that the sines, behind the cosines, begin at 16 bytes."""


class ShiftTile(NamedTuple):
    """The compile-time constants of a rotating copy.

    ``half`` is the number of pairs. ``tail`` is whether further dims follow them.
    """

    dtype: str
    width: int
    contiguous: bool
    cut: bool
    half: int
    tail: bool
    neighbours: bool
    rows: int
    dim: int

    def constants(self) -> dict[str, Any]:
        kind = float_type(self.dtype)
        return {
            "FIELDS": FIELDS,
            "DTYPE": kind,
            "MULTIPLE": self.width * 8 // kind.primitive_bitwidth,
            "WIDTH": self.width,
            "UNIT": self.contiguous,
            "CUT": self.cut,
            "HALF": self.half,
            "TAIL": self.tail,
            "PAIRS": power_of_two(self.half),
            "NEIGHBOURS": self.neighbours,
            "ROWS": self.rows,
            "DIM": self.dim,
        }


class _Turns(NamedTuple):
    """The angles of every distinct distance: ``cos`` and ``sin`` are ``[ropes, distances, half]``.

    ``units`` has the index of each unit's distance, and ``planes`` that of each plane's rope; -1
    means none.
    """

    units: Units
    planes: Units
    cos: torch.Tensor
    sin: torch.Tensor


def copy_shifted(copy: Copy, ropes: Sequence[Rope | None], distances: Units) -> None:
    """Copy units from ``src`` to ``dst`` with K moved, all layers in one launch.

    K of ``layers[i]`` is rotated by ``ropes[i]`` (None: not rotated), and K of unit ``u`` by
    ``distances[u]`` tokens. As in `Rope.shift`, the rotation is in float32 and rounded once, and
    the bits are kept if the distance is 0. V is copied. With units of one token, every token has
    its own distance. The host computes angles once for each distinct distance.

    Only the chosen units of ``dst`` are written. The work is enqueued on the GPU's current stream;
    the host does not wait. If a unit occurs twice in ``dst_units``, the order of the writes is
    undefined. Thread-safe. Raises LayoutError or UnsupportedError for arguments that do not fit
    each other: KV must be bfloat16 or wider, and all ropes must pair dims in the same way.
    Fewer than 2^31 rows (units x heads x tokens) are supported.
    """
    check_shift(copy, ropes, distances)
    if copy.is_empty:
        return
    src, src_units, dst, dst_units, layers, unit_tokens, heads = copy
    planes = plane_table(dst, layers, heads.dst)
    shifts = Shifts(
        src, src_units, planes, dst.layout.page_tokens, dst_units, layers, unit_tokens, heads,
        ropes, distances, kernel_device((src, dst)),
    )  # fmt: skip
    shifts.launch(0)


class Shifts:
    """Copies of the same units in several launches. All tables are sent to the device once.

    The arguments are those of `copy_shifted`, without checks, but ``target`` is the table of the
    planes that one launch writes.
    """

    def __init__(
        self,
        src: KVView,
        src_units: Units,
        target: PlaneTable,
        target_page_tokens: int,
        dst_units: Units,
        layers: Sequence[int],
        unit_tokens: int,
        heads: HeadRange,
        ropes: Sequence[Rope | None],
        distances: Units,
        device: torch.device,
    ) -> None:
        tables = [plane_table(src, layers, heads.src), target]
        total = len(src_units) * heads.size * unit_tokens
        check_count(total)
        rope = next((rope for rope in ropes if rope), None)
        head_dim = max(plane.head_dim for layer in layers for plane in src.layout.planes[layer])
        tile = tile_for(
            src.layout.dtype, rope, head_dim,
            width=common_width(tables, src.layout.itemsize),
            contiguous=is_contiguous(tables), cut=any(table.cut for table in tables),
        )  # fmt: skip
        turns = _turns(ropes, distances, src.layout.kv_factor, tile.half)
        self._device = device
        self._grid = -(-total // tile.rows), len(target.rows)
        arrays = (tables[0].rows, target.rows, turns.planes, src_units, dst_units, turns.units)
        with guard(device):
            sent = to_device(arrays, device)
            angles = to_device((turns.cos.numpy(), turns.sin.numpy()), device)
        self._arguments = (
            *sent, *angles,
            len(src_units), heads.size, unit_tokens,
            src.layout.page_tokens // unit_tokens, target_page_tokens // unit_tokens,
            turns.cos.shape[1],
        )  # fmt: skip
        self._launch = _launcher(tile)

    def launch(self, first: int) -> None:
        """Copy planes of the source from number ``first`` on to the planes of the target."""
        self._launch(self._device, self._grid, *self._arguments, first)


@cache
def _launcher(tile: ShiftTile) -> Launcher:
    return Launcher(shift_kernel, tile.constants(), num_warps=_WARPS)


def tile_for(
    dtype: str, rope: Rope | None, head_dim: int, *, width: int, contiguous: bool, cut: bool
) -> ShiftTile:
    """Return the tile for rows of ``head_dim``; without a rope they are only copied.

    It does not depend on the number of rows, so that nothing is compiled for another one.
    """
    half = rope.rotary_dim // 2 if rope else 1
    area = _TILE if contiguous else _STRIDED
    dim = power_of_two(head_dim)
    rows = max(1, area // dim)
    tail = rope is not None and rope.rotary_dim < rope.head_dim
    neighbours = rope is not None and rope.pairing is Pairing.GPTJ
    return ShiftTile(dtype, width, contiguous, cut, half, tail, neighbours, rows, dim)


def _turns(ropes: Sequence[Rope | None], distances: Units, kv_factor: int, half: int) -> _Turns:
    moves = np.unique(distances[distances != 0])
    units = np.where(distances == 0, -1, np.searchsorted(moves, distances))
    distinct = list(dict.fromkeys(rope for rope in ropes if rope))
    planes = np.full((len(ropes), kv_factor), -1)
    for row, rope in zip(planes, ropes, strict=True):
        if rope:
            row[0] = distinct.index(rope)
    padded = np.zeros(-(-len(moves) // _ALIGNED) * _ALIGNED, dtype=np.int64)
    padded[: len(moves)] = moves
    angles = [rope.cos_sin(torch.from_numpy(padded)) for rope in distinct]
    none = torch.zeros(1, len(padded), half)
    cos, sin = (torch.stack([pair[i] for pair in angles]) if angles else none for i in (0, 1))
    return _Turns(units, planes.ravel(), cos, sin)
