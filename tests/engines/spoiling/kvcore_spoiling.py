"""Mistakes with the states of resume points, which the tests of states must see.

Put this folder on PYTHONPATH and kvcore finds it by its entry point. The file that the environment
variable ``KVCORE_SPOIL`` names has the mistake that is made at the time, if any:

    zeros     a load fills the states with zeros
    group     a load leaves out one group of states
    earlier   states are saved as those of the boundary before theirs
    fail      a load of states fails
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import wraps
from pathlib import Path
from typing import Any

from kvcore.errors import TransferError
from kvcore.worker.executors import DeviceCopy
from kvcore_vllm.leader import Leader

ORDER = Path(os.environ["KVCORE_SPOIL"])


def _order() -> str:
    return ORDER.read_text() if ORDER.exists() else ""


def _spoil_loads() -> None:
    right = DeviceCopy._copy_point

    @wraps(right)
    def wrong(self: Any, graph: Any, first: int, rows: Sequence[int], places: Any) -> None:
        points, memory, order = self._points, self._point_rows, _order()
        loads = self._to_device
        if loads and order == "fail":
            raise TransferError("a mistake on purpose")
        if loads and order == "group":
            last = max(part.group for part in points)
            kept = [i for i, part in enumerate(points) if part.group != last]
            self._points, self._point_rows = [points[i] for i in kept], [memory[i] for i in kept]
        right(self, graph, first, rows, places)
        self._points, self._point_rows = points, memory
        if loads and order == "zeros":
            for part in points:
                page = int(graph.units[part.group].array()[first + part.row, 0])
                for tensor in part.pages.tensors:
                    tensor[page].zero_()

    DeviceCopy._copy_point = wrong  # type: ignore[method-assign]


def _spoil_saves() -> None:
    right = Leader._whole_points

    @wraps(right)
    def wrong(self: Any, offered: Any) -> Any:
        found = right(self, offered)
        if _order() == "earlier":
            step = self._model.point.every * self._block
            found = {boundary - step: pages for boundary, pages in found.items() if boundary > step}
        return found

    Leader._whole_points = wrong  # type: ignore[method-assign]


_spoil_loads()
_spoil_saves()
