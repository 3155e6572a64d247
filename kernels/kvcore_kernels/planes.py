"""Planes of KV as tables of integers that a kernel reads, and the device they are read on."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvcore.memory.copy.base import plane_rows
from kvcore.memory.layout import KVView

__all__ = [
    "FIELDS",
    "HEAD_DIM",
    "PlaneTable",
    "Words",
    "common_width",
    "device_of",
    "guard",
    "is_contiguous",
    "plane_table",
    "power_of_two",
    "to_device",
    "widen",
]

Table = npt.NDArray[np.int64]

FIELDS = 10
"""Columns of a row of `kvcore.memory.copy.base.plane_rows`. ``kvcore_kernels.lang.locate`` reads
them."""

_ADDRESS = 0
_STRIDES = (1, 2, 3, 5)
_DIM, _DIM_INNER = 6, 7
HEAD_DIM = 9
_TOKEN_INNER = 4

_WIDEST = 16
"""Bytes of the widest load or store of one thread, on every GPU served."""


class Words(NamedTuple):
    """How wide the elements may be moved: ``size`` bytes a word, addresses multiples of ``width``
    bytes, ``width`` at most 16 and ``size`` at most 8."""

    size: int
    width: int


class PlaneTable(NamedTuple):
    """``rows`` is ``[planes, FIELDS]``; ``cut`` says that an axis of a plane is packed."""

    rows: Table
    cut: bool


def plane_table(view: KVView, layers: Sequence[int], first_head: int) -> PlaneTable:
    """Planes of ``layers``, K before V, with addresses of ``first_head``. Reads no memory."""
    table = plane_rows(view, layers, first_head)
    cut = bool((table[:, [_TOKEN_INNER, _DIM_INNER]] != 1).any())
    return PlaneTable(table, cut)


def widen(tables: Sequence[PlaneTable], itemsize: int) -> tuple[list[PlaneTable], Words]:
    """The tables in the widest words that fit all of them, and how wide those are.

    Words are wider than elements only where each row of a head is contiguous in every table.
    """
    width = common_width(tables, itemsize)
    size = min(width, 8)
    factor = size // itemsize
    if factor <= 1:
        return list(tables), Words(itemsize, width)
    return [_in_words(table, factor) for table in tables], Words(size, width)


def is_contiguous(tables: Sequence[PlaneTable]) -> bool:
    """Whether every row of a head is one run of memory, in all of them."""
    return all(not table.cut and bool((table.rows[:, _DIM] == 1).all()) for table in tables)


def common_width(tables: Sequence[PlaneTable], itemsize: int) -> int:
    """The largest power of two up to 16 that divides every address, stride and head, in bytes;
    ``itemsize`` where rows are not contiguous."""
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


def device_of(views: Sequence[KVView]) -> torch.device:
    """Where a kernel over these views runs: the GPU of any of them, else the CPU."""
    devices = [tensor.device for view in views for tensor in view.tensors]
    return next((device for device in devices if device.type != "cpu"), devices[0])


def guard(device: torch.device) -> AbstractContextManager[object]:
    """Makes ``device`` the current one: Triton launches on the current device's current stream."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def to_device(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    """The arrays, all of one dtype, on ``device``, flat, by one copy that the host does not wait
    for."""
    flat = torch.from_numpy(np.concatenate([array.ravel() for array in arrays]))
    if device.type == "cuda":
        flat = flat.pin_memory().to(device, non_blocking=True)
    return list(torch.split(flat, [array.size for array in arrays]))


def power_of_two(count: int, least: int = 1) -> int:
    """The smallest power of two that is at least ``count``, and at least ``least``, one itself."""
    return max(least, 1 << max(count - 1, 0).bit_length())
