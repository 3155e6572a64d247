"""The longest contiguous pieces that a copy of units consists of, for engines that copy bytes.

Within a unit, runs of elements that are adjacent on both sides are one piece. Elements are ordered
by dim, token, head and plane there, whichever of them is innermost:

    canonical block to block     a block is one piece
    HND page to block            a unit of one head of K, or of V
    NHD page to block            one head of one token

The pieces of a unit are computed once for two views and kept. A copy then only adds the places of
its units, and joins pieces of neighbouring units.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvcore.memory.copy.base import HeadRange, Units, plane_rows
from kvcore.memory.copy.cache import ViewCache
from kvcore.memory.layout import KVView

__all__ = ["Pieces", "UnitPieces", "run_bytes", "unit_pieces"]

Array = npt.NDArray[np.int64]

_ADDRESS, _PAGE, _HEAD, _TOKEN, _TOKEN_INNER, _TOKEN_STEP = range(6)
_DIM, _DIM_INNER, _DIM_STEP, _HEAD_DIM = range(6, 10)


class Pieces(NamedTuple):
    """Bytes to copy: ``sizes[i]`` from address ``src[i]`` to address ``dst[i]``."""

    dst: Array
    src: Array
    sizes: Array


class _Side(NamedTuple):
    """Where the pieces of a unit are on one side; the place of the unit is added. In bytes."""

    start: Array  # [pieces]: addresses in the unit that is first in page 0
    tensor: Array
    page: Array
    token: Array
    token_inner: Array
    token_step: Array

    def at(self, units: Units, page_units: int, unit_tokens: int) -> Array:
        """Return addresses [pieces, units]."""
        page, unit = np.divmod(units, page_units)
        found: Array = self.start[:, None] + self.page[:, None] * page
        if page_units > 1:
            token = unit * unit_tokens
            outer, inner = token // self.token_inner[:, None], token % self.token_inner[:, None]
            found = found + outer * self.token[:, None] + inner * self.token_step[:, None]
        return found

    def take(self, chosen: Array) -> _Side:
        return _Side(*(column[chosen] for column in self))


class UnitPieces(NamedTuple):
    """The pieces of one unit of ``unit_tokens`` tokens, whichever unit it is.

    ``cut`` of them are one unit of the copy: memory that is packed in short runs of tokens needs
    smaller units.
    """

    src: _Side
    dst: _Side
    sizes: Array
    unit_tokens: int
    cut: int
    src_page_units: int
    dst_page_units: int

    @property
    def mean(self) -> int:
        """The mean size of a piece in bytes; 0 without pieces."""
        return int(self.sizes.sum()) // max(len(self.sizes), 1)

    def of(self, src_units: Units, dst_units: Units) -> Pieces:
        """Return the pieces of a copy of these units. Neighbouring ones are joined."""
        if self.cut > 1:
            steps = np.arange(self.cut)
            src_units = (src_units[:, None] * self.cut + steps).ravel()
            dst_units = (dst_units[:, None] * self.cut + steps).ravel()
        src = self.src.at(src_units, self.src_page_units, self.unit_tokens)
        dst = self.dst.at(dst_units, self.dst_page_units, self.unit_tokens)
        sizes = self.sizes[:, None]
        goes_on = (src[:, 1:] == src[:, :-1] + sizes) & (dst[:, 1:] == dst[:, :-1] + sizes)
        if not goes_on.any():
            return Pieces(dst.ravel(), src.ravel(), np.repeat(self.sizes, len(src_units)))
        first = np.ones(src.shape, dtype=bool)
        first[:, 1:] = ~goes_on
        begin = np.flatnonzero(first)
        lengths = np.diff(begin, append=first.size)
        return Pieces(
            dst.ravel()[begin], src.ravel()[begin], self.sizes[begin // len(src_units)] * lengths
        )


_kept = ViewCache()


def unit_pieces(
    src: KVView, dst: KVView, layers: Sequence[int], unit_tokens: int, heads: HeadRange
) -> UnitPieces:
    """Return the pieces of a unit of a copy. The arguments are those of `DeviceOps.copy`."""
    chosen = tuple(layers)
    return _kept.get(
        (src, dst),
        (chosen, unit_tokens, heads),
        lambda: _unit_pieces(src, dst, chosen, unit_tokens, heads),
    )


def run_bytes(
    src: KVView, dst: KVView, layers: Sequence[int], unit_tokens: int, heads: HeadRange
) -> int:
    """Return the bytes of the shortest run within a plane's unit: no piece is shorter."""
    chosen = tuple(layers)

    def find() -> int:
        of, to = plane_rows(src, chosen, heads.src), plane_rows(dst, chosen, heads.dst)
        unit = _uncut(unit_tokens, of, to)
        runs = (_runs(a, b, unit, heads.size)[0] for a, b in zip(of, to, strict=True))
        return src.layout.itemsize * min(runs)

    return _kept.get((src, dst), ("run", chosen, unit_tokens, heads), find)


def _unit_pieces(
    src: KVView, dst: KVView, layers: tuple[int, ...], unit_tokens: int, heads: HeadRange
) -> UnitPieces:
    of, to = plane_rows(src, layers, heads.src), plane_rows(dst, layers, heads.dst)
    unit = _uncut(unit_tokens, of, to)
    offsets: tuple[list[Array], list[Array]] = ([], [])
    sizes = []
    for a, b in zip(of, to, strict=True):
        run, axes = _runs(a, b, unit, heads.size)
        for side, found in enumerate(offsets):
            total = np.zeros(1, dtype=np.int64)
            for axis in axes:
                total = (total[:, None] + axis[side]).ravel()
            found.append(total)
        sizes.append(np.full(len(total), run))
    item = src.layout.itemsize
    plane = np.repeat(np.arange(len(of)), [len(some) for some in sizes])
    source, target = (
        _side(view, rows[plane], np.concatenate(found), layers, plane, unit)
        for view, rows, found in ((src, of, offsets[0]), (dst, to, offsets[1]))
    )
    pages = [view.layout.page_tokens // unit for view in (src, dst)]
    joined = _joined(source, target, np.concatenate(sizes) * item)
    return UnitPieces(*joined, unit, unit_tokens // unit, *pages)


def _uncut(unit_tokens: int, *tables: Array) -> int:
    """Return the tokens of the largest unit in which no run of packed tokens ends."""
    for inner in np.unique(np.concatenate([rows[:, _TOKEN_INNER] for rows in tables])).tolist():
        unit_tokens = unit_tokens if inner == 1 else gcd(unit_tokens, inner)
    return unit_tokens


_Axis = tuple[Array, Array]


def _runs(a: Array, b: Array, unit: int, heads: int) -> tuple[int, list[_Axis]]:
    """Return the elements of a contiguous run of one plane, and the axes that it does not cover.

    An axis is the offsets of its indices on both sides, in elements.
    """
    head, token, dim = np.arange(heads), np.arange(unit), np.arange(int(a[_HEAD_DIM]))
    axes = [
        (head * a[_HEAD], head * b[_HEAD]),
        (_along(token, a[_TOKEN:_DIM]), _along(token, b[_TOKEN:_DIM])),
        (_along(dim, a[_DIM:_HEAD_DIM]), _along(dim, b[_DIM:_HEAD_DIM])),
    ]
    run = 1
    while True:
        inner = next((i for i, axis in enumerate(axes) if _adjacent(axis, run)), None)
        if inner is None:
            return run, axes
        run *= len(axes.pop(inner)[0])


def _along(index: Array, axis: Array) -> Array:
    stride, inner, inner_stride = axis
    found: Array = index // inner * stride + index % inner * inner_stride
    return found


def _adjacent(axis: _Axis, run: int) -> bool:
    steps = np.arange(len(axis[0])) * run
    return bool((axis[0] == steps).all() and (axis[1] == steps).all())


def _side(
    view: KVView, rows: Array, offsets: Array, layers: Sequence[int], plane: Array, unit: int
) -> _Side:
    """Return one side of pieces at ``offsets`` (elements) of the planes that ``rows`` describe."""
    item = view.layout.itemsize
    tensors = np.array([p.tensor for layer in layers for p in view.layout.planes[layer]])
    steps = rows[:, [_TOKEN, _TOKEN_INNER, _TOKEN_STEP]] * [item, 1, item]
    if view.layout.page_tokens == unit:
        steps = np.broadcast_to([0, 1, 0], steps.shape)  # a page has one unit: no step is made
    return _Side(
        rows[:, _ADDRESS] + offsets * item, tensors[plane], rows[:, _PAGE] * item, *steps.T
    )


def _joined(src: _Side, dst: _Side, sizes: Array) -> tuple[_Side, _Side, Array]:
    """Join pieces that are adjacent on both sides in every unit, and in the same tensors."""
    order = np.lexsort((dst.start, dst.tensor))
    src, dst, sizes = src.take(order), dst.take(order), sizes[order]
    goes_on = np.ones(max(len(sizes) - 1, 0), dtype=bool)
    for side in (src, dst):
        goes_on &= side.start[1:] == side.start[:-1] + sizes[:-1]
        for column in side[1:]:
            goes_on &= column[1:] == column[:-1]
    begin = np.flatnonzero(np.concatenate([[True], ~goes_on]))
    return src.take(begin), dst.take(begin), np.add.reduceat(sizes, begin)
