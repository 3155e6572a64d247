"""An engine's pages as device units of transfer graphs, and the graphs that use each page.

tokens   0         16        32        48
pages    │   p0              │   p1              │      32 tokens each
blocks   │   b0    │   b1    │   b2    │              16 tokens each
units    │   u     │   u+1   │   v     │              gcd(32, 16) = 16: cut by neither
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from math import gcd
from typing import NamedTuple

import numpy as np

from kvcore.model.points import PageWindow, PointShape
from kvcore.model.spec import LayerGroup
from kvcore.transfer.graph import SKIP, OpReport, TransferGraph, UnitTable

__all__ = [
    "PageTables",
    "PageUsers",
    "Paging",
    "Place",
    "PointPages",
    "has_gap",
    "of_its_group",
    "of_one_pool",
    "pages_of",
    "unit_table",
]


class PointPages(NamedTuple):
    """The last ``rows`` rows of the resume point behind ``blocks`` blocks.

    ``states`` has the page of each group of states. Windows are in the request's page tables.
    """

    rows: int
    blocks: int
    states: Mapping[int, int]


PageTables = Sequence[Sequence[int]]
"""Page tables of a request, one for each layer group."""

Place = Callable[[int, int], int]
"""Returns the number of a page of a layer group. Pages with equal numbers are the same memory."""


def of_one_pool(group: int, page: int) -> int:
    """Return ``page`` itself: all groups draw their pages from one pool."""
    return page


def of_its_group(group: int, page: int) -> int:
    """Combine ``group`` and ``page``: each group has page indices of its own."""
    return group << 40 | page


def unit_table(
    group: LayerGroup,
    pages: Sequence[int],
    block_tokens: int,
    start: int,
    stop: int,
    from_token: int = 0,
    *,
    no_page: int,
) -> UnitTable:
    """Return the device units of blocks [start, stop) of a request.

    ``pages`` are the request's pages in ``group``. ``no_page`` is the engine's mark for a page that
    it dropped or never had. Units in such pages, units beyond ``pages``, and units before
    ``from_token``, which the engine already holds, are SKIP.
    """
    unit = gcd(group.page_tokens, block_tokens)
    per_page, per_block = group.page_tokens // unit, block_tokens // unit
    first, last = start * per_block // per_page, -(-stop * per_block // per_page)
    ids = np.full(last - first, no_page, dtype=np.int64)
    known = pages[first:last]
    ids[: len(known)] = known
    of_pages = ids[:, np.newaxis] * per_page + np.arange(per_page)
    of_pages[ids == no_page] = SKIP
    units = of_pages.ravel()[start * per_block - first * per_page :][: (stop - start) * per_block]
    units[: max(-(-from_token // unit) - start * per_block, 0)] = SKIP
    return UnitTable.of(units.reshape(stop - start, per_block), unit)


def has_gap(table: UnitTable) -> bool:
    """Return True if a unit of the table is SKIP: it has no place on the device."""
    return bool((table.array() == SKIP).any())


def pages_of(
    units: Iterable[UnitTable], groups: Sequence[LayerGroup], place: Place = of_one_pool
) -> list[int]:
    """Return every page that contains a copied unit, numbered by ``place``, ascending."""
    found: set[int] = set()
    for table, group in zip(units, groups, strict=True):
        flat = table.array().ravel()
        per_page = group.page_tokens // table.unit_tokens
        own = set((flat[flat != SKIP] // per_page).tolist())  # np.unique takes longer
        found.update(place(group.index, page) for page in own)
    return sorted(found)


class Paging:
    """The paging of one model in one engine: `unit_table` and `pages_of` over all layer groups.

    See those functions for ``no_page`` and ``place``. A group finds its page table by its index.
    ``point`` is what resume points have, if the model keeps any.
    """

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        block_tokens: int,
        *,
        no_page: int,
        place: Place = of_one_pool,
        point: PointShape | None = None,
    ) -> None:
        self._point = point
        self._groups = groups
        self._block_tokens = block_tokens
        self._no_page = no_page
        self._place = place

    def units(
        self,
        pages: PageTables,
        start: int,
        stop: int,
        from_token: int = 0,
        point: PointPages | None = None,
    ) -> list[UnitTable]:
        """Return the `unit_table` of blocks [start, stop) for each group.

        With ``point``, the rows of a resume point follow.
        """
        found = []
        for group in self._groups:
            if group.of == "states":
                found.append(self._states(group, stop - start, point))
            elif group.of == "windows":
                own = pages[group.index]
                found.append(self._windows(group, own, stop - start, from_token, point))
            else:
                table = self._table(group, pages[group.index], start, stop, from_token)
                found.append(_with_rows(table, point))
        return found

    def whole_units(
        self, pages: PageTables, start: int, stop: int, point: PointPages | None = None
    ) -> list[UnitTable] | None:
        """Return `units`, or None if a token has no place on the device."""
        tables = self.units(pages, start, stop)
        for group, table in zip(self._groups, tables, strict=True):
            if has_gap(table) and group.of == "blocks":
                return None
        if point is None:
            return tables
        if not self.sees(pages, point.blocks):
            return None
        return self.units(pages, start, stop, point=point)

    def sees(self, pages: PageTables, blocks: int, start: int = 0, stop: int | None = None) -> bool:
        """Return True if the windows of the point behind ``blocks`` blocks have their pages.

        With ``stop`` the model goes on at this token, and has the tokens before ``start``.
        """
        assert self._point is not None
        for window in self._point.seen:
            group = self._groups[window.group]
            unit, size = gcd(group.page_tokens, self._block_tokens), self._block_tokens
            first = max(blocks * size - window.tokens, 0)
            begin = first if stop is None else max(first, start, stop - window.before)
            end = blocks * size if stop is None else stop
            block, own = first // size, pages[group.index]
            table = self._table(group, own, block, blocks, 0).array().ravel()
            before = block * size
            if (table[(begin - before) // unit : -(-(end - before) // unit)] == SKIP).any():
                return False
        return True

    def _states(self, group: LayerGroup, blocks: int, point: PointPages | None) -> UnitTable:
        """Return the table of a group of states: a page for each row of the states."""
        units = [SKIP] * blocks
        if point is not None:
            assert self._point is not None
            before = self._point.rows(point.blocks) - point.rows
            with_states = max(self._point.state_rows - before, 0)
            units += [point.states[group.index]] * with_states
            units += [SKIP] * (point.rows - with_states)
        return UnitTable.of(np.array(units, dtype=np.int64).reshape(-1, 1), group.page_tokens)

    def _windows(
        self,
        group: LayerGroup,
        pages: Sequence[int],
        blocks: int,
        from_token: int,
        point: PointPages | None,
    ) -> UnitTable:
        """Return the table of a group of windows: units of a block for each of its own rows."""
        assert self._point is not None
        for window in self._point.page_windows:
            if window.group == group.index:
                return self._last_pages(window, group, pages, blocks, from_token, point)
        unit = gcd(group.page_tokens, self._block_tokens)
        rows = 0 if point is None else point.rows
        units = np.full((blocks + rows, self._block_tokens // unit), SKIP, dtype=np.int64)
        if point is not None:
            stop, before = point.blocks, self._point.rows(point.blocks) - rows
            first = max(stop - max(part.blocks for part in self._point.windows), 0)
            known = self._table(group, pages, first, stop, from_token).array()
            for row in range(max(before, self._point.state_rows), before + rows):
                part = self._point.window_rows[row - self._point.state_rows]
                if part.group == group.index:
                    units[blocks + row - before] = known[stop - 1 - part.distance - first]
        return UnitTable.of(units, unit)

    def _last_pages(
        self,
        window: PageWindow,
        group: LayerGroup,
        pages: Sequence[int],
        blocks: int,
        from_token: int,
        point: PointPages | None,
    ) -> UnitTable:
        """Return the table of a `PageWindow`: its last pages, from the boundary backwards.

        Each row of states and pages has all of them, as it may hold bytes of any.
        """
        assert self._point is not None
        rows = 0 if point is None else point.rows
        units = np.full((blocks + rows, window.pages), SKIP, dtype=np.int64)
        if point is not None:
            before = self._point.rows(point.blocks) - rows
            first = max(point.blocks - -(-window.tokens // self._block_tokens), 0)
            known = self._table(group, pages, first, point.blocks, from_token).array().ravel()
            last = known[::-1][: window.pages]
            units[blocks : blocks + max(self._point.state_rows - before, 0), : len(last)] = last
        return UnitTable.of(units, group.page_tokens)

    def pages_of(self, units: Iterable[UnitTable]) -> list[int]:
        """Return every page that contains a copied unit, numbered by ``place``, ascending."""
        return pages_of(units, self._groups, self._place)

    def _table(
        self, group: LayerGroup, pages: Sequence[int], start: int, stop: int, from_token: int
    ) -> UnitTable:
        return unit_table(
            group, pages, self._block_tokens, start, stop, from_token, no_page=self._no_page
        )


def _with_rows(table: UnitTable, point: PointPages | None) -> UnitTable:
    """Return a table with a row without units for each row of ``point``."""
    if point is None:
        return table
    more = np.full((point.rows, table.units_per_block), SKIP, dtype=np.int64)
    return UnitTable.of(np.concatenate([table.array(), more]), table.unit_tokens)


class PageUsers:
    """The graphs in flight that read or write the engine's pages.

    A step that gives a page to another request must wait for the graphs that use it. Pages are the
    numbers that a `Place` returns. Not thread-safe; owned by the leader.
    """

    def __init__(self) -> None:
        self._ops: dict[int, set[int]] = {}  # graph -> its ops on the device that have not ended
        self._pages: dict[int, list[int]] = {}  # graph -> the pages that it uses
        self._users: dict[int, set[int]] = {}  # page -> graphs that use it

    @property
    def graphs(self) -> AbstractSet[int]:
        """The graphs with a device op that has not ended; a live view."""
        return self._ops.keys()

    def add(self, graph: TransferGraph, pages: Sequence[int]) -> None:
        """Record that ``graph`` uses ``pages`` until its device ops have ended.

        A graph without device ops is ignored.
        """
        graph_id = graph.graph_id
        assert graph_id not in self._ops, f"graph {graph_id} uses pages already"
        ops = {op.op_id for op in graph.ops if op.path.touches_device}
        if not ops:
            return
        self._ops[graph_id] = ops
        self._pages[graph_id] = list(pages)
        for page in pages:
            self._users.setdefault(page, set()).add(graph_id)

    def ended(self, report: OpReport) -> bool:
        """Record the end of an op.

        Returns True if it was the graph's last device op, so that the graph uses no page any more.
        """
        ops = self._ops.get(report.graph_id, set())
        if report.op_id not in ops:
            return False
        ops.discard(report.op_id)
        if ops:
            return False
        del self._ops[report.graph_id]
        for page in self._pages.pop(report.graph_id):
            users = self._users[page]
            users.discard(report.graph_id)
            if not users:
                del self._users[page]
        return True

    def among(self, pages: AbstractSet[int]) -> Iterator[tuple[int, AbstractSet[int]]]:
        """Yield each of ``pages`` that is in use, with the graphs that use it.

        The graphs are a live view. Do not call `add` or `ended` during the iteration.
        """
        for page in pages & self._users.keys():
            yield page, self._users[page]

    def check_integrity(self) -> None:
        """Raise AssertionError unless graphs, their pages and the users of each page agree."""
        found: dict[int, set[int]] = {}
        for graph_id, pages in self._pages.items():
            for page in pages:
                found.setdefault(page, set()).add(graph_id)
        assert found == self._users, "pages in use and their graphs differ"
        assert self._pages.keys() == self._ops.keys(), "graphs in use and their pages differ"
