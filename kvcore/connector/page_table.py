"""An engine's pages as the device units of transfer graphs, and which graphs use which page.

tokens   0         16        32        48
pages    │   p0              │   p1              │      32 tokens each
blocks   │   b0    │   b1    │   b2    │              16 tokens each
units    │   u     │   u+1   │   v     │              gcd(32, 16) = 16: cut by neither
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from math import gcd

import numpy as np

from kvcore.model.spec import LayerGroup
from kvcore.transfer.graph import SKIP, OpReport, TransferGraph, UnitTable

__all__ = [
    "PageTables",
    "PageUsers",
    "Paging",
    "Place",
    "has_gap",
    "of_its_group",
    "of_one_pool",
    "pages_of",
    "unit_table",
]

PageTables = Sequence[Sequence[int]]
"""Page tables of a request, one for each layer group."""

Place = Callable[[int, int], int]
"""One number for a page of a layer group; equal numbers are the same memory."""


def of_one_pool(group: int, page: int) -> int:
    """Groups draw their pages from one pool: a page's index says it all."""
    return page


def of_its_group(group: int, page: int) -> int:
    """Page indices are the group's own."""
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
    """Device units of blocks [start, stop) of a request whose pages in ``group`` are ``pages``.

    ``no_page`` is the engine's mark for a page that it dropped or never had. Units there, beyond
    the pages, and before ``from_token`` (the engine holds those) are SKIP.
    """
    unit = gcd(group.page_tokens, block_tokens)
    per_page, per_block = group.page_tokens // unit, block_tokens // unit
    positions = np.arange(start * per_block, stop * per_block, dtype=np.int64)
    table = np.asarray(pages, dtype=np.int64)
    page = positions // per_page
    inside = page < len(table)
    ids = np.full(len(positions), no_page, dtype=np.int64)
    ids[inside] = table[page[inside]]
    units = ids * per_page + positions % per_page
    units[(ids == no_page) | (positions * unit < from_token)] = SKIP
    return UnitTable.of(units.reshape(stop - start, per_block), unit)


def has_gap(table: UnitTable) -> bool:
    """Whether some unit has no place on the device."""
    return bool((table.array() == SKIP).any())


def pages_of(
    units: Iterable[UnitTable], groups: Sequence[LayerGroup], place: Place = of_one_pool
) -> list[int]:
    """Every page of which a unit is copied, as ``place`` numbers it, ascending."""
    found: set[int] = set()
    for table, group in zip(units, groups, strict=True):
        flat = table.array().ravel()
        per_page = group.page_tokens // table.unit_tokens
        own = np.unique(flat[flat != SKIP] // per_page).tolist()
        found.update(place(group.index, page) for page in own)
    return sorted(found)


class Paging:
    """How one engine pages a model: `unit_table` and `pages_of` over all its layer groups.

    ``no_page`` and ``place`` are theirs. Page tables are looked up by the groups' index.
    """

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        block_tokens: int,
        *,
        no_page: int,
        place: Place = of_one_pool,
    ) -> None:
        self._groups = groups
        self._block_tokens = block_tokens
        self._no_page = no_page
        self._place = place

    def units(
        self, pages: PageTables, start: int, stop: int, from_token: int = 0
    ) -> list[UnitTable]:
        """Units of blocks [start, stop), a table for each group. SKIP as `unit_table` says."""
        return [
            self._table(group, pages[group.index], start, stop, from_token)
            for group in self._groups
        ]

    def whole_units(self, pages: PageTables, start: int, stop: int) -> list[UnitTable] | None:
        """`units` where every token has a place on the device; None where one has none."""
        tables = self.units(pages, start, stop)
        return None if any(map(has_gap, tables)) else tables

    def no_units(self, start: int, stop: int) -> list[UnitTable]:
        """Units of blocks [start, stop) that are to go no further than host memory."""
        return [self._table(group, (), start, stop, 0) for group in self._groups]

    def pages_of(self, units: Iterable[UnitTable]) -> list[int]:
        """Every page of which a unit is copied, as ``place`` numbers it, ascending."""
        return pages_of(units, self._groups, self._place)

    def _table(
        self, group: LayerGroup, pages: Sequence[int], start: int, stop: int, from_token: int
    ) -> UnitTable:
        return unit_table(
            group, pages, self._block_tokens, start, stop, from_token, no_page=self._no_page
        )


class PageUsers:
    """The graphs in flight that read or write the engine's pages.

    A step that gives a page to another request must wait for the graphs that use it. Pages are
    numbers, as a `Place` makes them. Not thread-safe; owned by the leader.
    """

    def __init__(self) -> None:
        self._ops: dict[int, set[int]] = {}  # graph -> its ops on the device that have not ended
        self._pages: dict[int, list[int]] = {}  # graph -> the pages it uses
        self._users: dict[int, set[int]] = {}  # page -> graphs that use it

    @property
    def graphs(self) -> AbstractSet[int]:
        """Graphs that have an op on the device which has not ended; a view."""
        return self._ops.keys()

    def add(self, graph: TransferGraph, pages: Sequence[int]) -> None:
        """Note that ``graph`` uses ``pages`` until its ops on the device have ended."""
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
        """Note that an op has ended. Return True if it was the last of its graph on the device: the
        graph uses no page any more."""
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
        """Yield those of ``pages`` that graphs use, each with the graphs. Change nothing
        meanwhile."""
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
