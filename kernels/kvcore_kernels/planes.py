"""Tables that describe planes of KV to kernels, and the device that kernels run on."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvcore.memory.copy.base import plane_rows
from kvcore.memory.device import device_of
from kvcore.memory.layout import KVView

__all__ = [
    "FIELDS",
    "HEAD_DIM",
    "PlaneTable",
    "Words",
    "common_width",
    "guard",
    "is_contiguous",
    "kernel_device",
    "plane_table",
    "power_of_two",
    "to_device",
    "widen",
]

Table = npt.NDArray[np.int64]

FIELDS = 10
"""Number of columns of `kvcore.memory.copy.base.plane_rows`, which ``kvcore_kernels.lang.locate``
reads."""

_ADDRESS = 0
_STRIDES = (1, 2, 3, 5)
_DIM, _DIM_INNER = 6, 7
HEAD_DIM = 9
_TOKEN_INNER = 4

_WIDEST = 16
"""Bytes of the widest load or store of one thread, on every supported GPU."""


class Words(NamedTuple):
    """The words in which elements are copied.

    A word has ``size`` bytes, at most 8. Addresses are multiples of ``width`` bytes, at most 16.
    """

    size: int
    width: int


class PlaneTable(NamedTuple):
    """Planes as ``rows`` ``[planes, FIELDS]``; ``cut`` means that an axis of a plane is packed."""

    rows: Table
    cut: bool


def plane_table(view: KVView, layers: Sequence[int], first_head: int) -> PlaneTable:
    """Return planes of ``layers``, K before V, starting at ``first_head``. Reads no memory.

    The rows are shared: they cannot be written to.
    """
    table = plane_rows(view, layers, first_head)
    cut = bool((table[:, [_TOKEN_INNER, _DIM_INNER]] != 1).any())
    return PlaneTable(table, cut)


def widen(tables: Sequence[PlaneTable], itemsize: int) -> tuple[list[PlaneTable], Words]:
    """Return the tables in units of the widest words that fit all of them, and these words.

    Words are wider than elements only if each row of a head is contiguous in every table.
    """
    width = common_width(tables, itemsize)
    size = min(width, 8)
    factor = size // itemsize
    if factor <= 1:
        return list(tables), Words(itemsize, width)
    return [_in_words(table, factor) for table in tables], Words(size, width)


def is_contiguous(tables: Sequence[PlaneTable]) -> bool:
    """Return True if every row of a head is contiguous in all tables."""
    return all(not table.cut and bool((table.rows[:, _DIM] == 1).all()) for table in tables)


def common_width(tables: Sequence[PlaneTable], itemsize: int) -> int:
    """Return the largest power of two up to 16 that divides all addresses, strides and heads.

    The result is in bytes. It is ``itemsize`` if rows are not contiguous.
    """
    return min(_common_width(table, itemsize) for table in tables)


def _common_width(table: PlaneTable, itemsize: int) -> int:
    rows = table.rows
    if table.cut or (rows[:, _DIM] != 1).any():
        return itemsize
    in_bytes = [rows[:, _ADDRESS], *(rows[:, [*_STRIDES, HEAD_DIM]] * itemsize).T]
    together = int(np.bitwise_or.reduce(np.concatenate(in_bytes)))
    lowest = together & -together
    return max(itemsize, min(_WIDEST, lowest))


def _in_words(table: PlaneTable, factor: int) -> PlaneTable:
    rows = table.rows.copy()
    rows[:, [*_STRIDES, HEAD_DIM]] //= factor
    return PlaneTable(rows, table.cut)


def kernel_device(views: Sequence[KVView]) -> torch.device:
    """Return the device of a kernel over these views: the GPU of any of them, else the CPU."""
    devices = [tensor.device for view in views for tensor in view.tensors]
    return next((device for device in devices if device.type != "cpu"), devices[0])


def guard(device: torch.device) -> AbstractContextManager[object]:
    """Make ``device`` current, because Triton launches on the current device's current stream."""
    return device_of(device).current()


def to_device(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    """Copy arrays of one dtype to ``device``, flat, in one copy that the host does not wait for."""
    flat = device_of(device).upload(np.concatenate([a.ravel() for a in arrays]))
    return list(torch.split(flat, [array.size for array in arrays]))


def power_of_two(count: int, least: int = 1) -> int:
    """Return the smallest power of two >= ``count`` and >= ``least``, itself a power of two."""
    return max(least, 1 << max(count - 1, 0).bit_length())
