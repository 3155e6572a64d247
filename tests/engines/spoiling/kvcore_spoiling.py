"""Mistakes with resume points, which the tests of states and windows must see.

Put this folder on PYTHONPATH and kvcore finds it by its entry point. The file that the environment
variable ``KVCORE_SPOIL`` names has the mistake that is made at the time, if any:

    zeros     a load fills states and windows with zeros
    group     a load leaves out the last group of them, whose pages are those of a new engine
    group N   the same with group N
    windows   the same with the last group of windows
    stage     a load leaves out what the last stage of a pipeline has of them
    earlier   they are saved as those of the boundary before theirs
    fail      a load of a point fails
    hold      of each block the part of the last rank, of the last stage, is not written to stores
              until the file is gone
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from functools import wraps
from pathlib import Path
from typing import Any

from kvcore.connector.page_table import Paging
from kvcore.errors import TransferError
from kvcore.memory.points import PointCopies, PointMemory
from kvcore.tiers.remote.tier import StoreTier
from kvcore.worker.executors import DeviceCopy
from kvcore_vllm import saves

ORDER = Path(os.environ["KVCORE_SPOIL"])


def _order() -> str:
    return ORDER.read_text() if ORDER.exists() else ""


def _spoil_loads() -> None:
    right = DeviceCopy._copy_point

    @wraps(right)
    def wrong(self: Any, graph: Any, first: int, rows: Sequence[int], places: Any) -> None:
        points, memory, order = self._points, self._point_rows, _order()
        name, _, number = order.partition(" ")
        spoils = name in ("fail", "group", "windows", "zeros")
        if not self._to_device or not (spoils or (name == "stage" and _is_last_stage())):
            right(self, graph, first, rows, places)
            return
        if order == "fail":
            raise TransferError("a mistake on purpose")
        spoiled = points
        if name in ("group", "windows"):
            last = points.windows[-1].group if name == "windows" else _last(points)
            left, spoiled = _without_a_group(points, memory, int(number or last))
            self._points, self._point_rows = left
        right(self, graph, first, rows, places)
        self._points, self._point_rows = points, memory
        _zero(graph, first, rows, spoiled)

    DeviceCopy._copy_point = wrong  # type: ignore[method-assign]


def _is_last_stage() -> bool:
    from vllm.distributed.parallel_state import get_pp_group

    return bool(get_pp_group().is_last_rank)


def _last(points: PointCopies) -> int:
    return max(part.group for part in (*points.states, *points.windows, *points.pages))


def _without_a_group(
    points: PointCopies, memory: PointMemory, group: int
) -> tuple[tuple[PointCopies, PointMemory], PointCopies]:
    """Return all but one group, with their memory, and that group."""
    pairs = [
        list(zip(parts, views, strict=True))
        for parts, views in (
            (points.states, memory.states),
            (points.windows, memory.windows),
            (points.pages, memory.pages),
        )
    ]
    kept: list[Any] = [[pair for pair in kind if pair[0].group != group] for kind in pairs]
    left = PointCopies(*([part for part, _ in kind] for kind in kept))
    rest = PointMemory(*([view for _, view in kind] for kind in kept))
    gone: list[Any] = [[part for part, _ in kind if part.group == group] for kind in pairs]
    assert any(gone), f"no group {group} in the points"
    return (left, rest), PointCopies(*gone)


def _zero(graph: Any, first: int, rows: Sequence[int], points: PointCopies) -> None:
    """Fill with zeros the pages to which a load copies these parts of a point.

    Layers of several groups may share one memory, so no more is filled than what a part has.
    """
    for part in points.states:
        page = int(graph.units[part.group].array()[first + part.row, 0])
        for tensor in part.pages.tensors:
            tensor[page].zero_()
    for part in points.pages:
        page = int(graph.units[part.group].array()[first + part.row, part.page])
        if page >= 0 and first + part.row in rows:
            for piece in part.pieces:
                whole = part.pages.tensors[piece.layer]
                whole[page, piece.offset : piece.offset + piece.nbytes].zero_()
    for window in points.windows:
        table = graph.units[window.group]
        found = table.array()[[first + row for row in window.rows if first + row in rows]]
        size = window.pages.layout.page_tokens // table.unit_tokens
        for page in set((found[found >= 0] // max(size, 1)).tolist()):
            for tensor in window.pages.tensors:
                tensor[page].zero_()


def _spoil_saves() -> None:
    right, save = saves.whole_points, saves.Saves._states

    @wraps(save)
    def saving(self: Any, output: Any, lane: Any) -> None:
        nonlocal step
        step = self._model.point.every * self._block
        save(self, output, lane)

    @wraps(right)
    def wrong(offered: Any, groups: Any, block: int) -> Any:
        found = right(offered, groups, block)
        if _order() == "earlier":
            found = {boundary - step: pages for boundary, pages in found.items() if boundary > step}
        return found

    choose = saves.of_states

    @wraps(choose)
    def standing_out(*asked: Any) -> Any:
        """No policy declines what is of the boundary before."""
        found = choose(*asked)
        return found._replace(ends=found.offered) if _order() == "earlier" else found

    step = 0
    saves.Saves._states = saving  # type: ignore[method-assign]
    saves.whole_points = wrong
    saves.of_states = standing_out
    table = Paging._windows

    @wraps(table)
    def shifted(self: Any, group: Any, pages: Any, blocks: int, begin: int, point: Any) -> Any:
        """The block before, in each row of a window."""
        if point is not None and _order() == "earlier":
            back = max(self._block_tokens // group.page_tokens, 1)
            pages = [*pages[:back], *pages[:-back]]
        return table(self, group, pages, blocks, begin, point)

    Paging._windows = shifted  # type: ignore[method-assign]


def _hold_writes() -> None:
    right = StoreTier.write

    @wraps(right)
    def holding(self: Any, requests: Any) -> Any:
        part, shape = self._shard.part, self._shard.shape
        last = (part.heads[1], part.layers[1]) == (shape.kv_heads, shape.layers)
        while last and _order() == "hold":
            time.sleep(0.02)
        return right(self, requests)

    StoreTier.write = holding  # type: ignore[method-assign]


_spoil_loads()
_spoil_saves()
_hold_writes()
