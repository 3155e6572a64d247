"""Pages as the engine counts them, and device units as transfer graphs do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import gcd
from typing import Any

import numpy as np
from kvcore_trtllm.describe import LayerGroup

from kvcore.transfer.graph import SKIP, UnitTable

NO_PAGE = -1
"""The engine's mark for a block without a page in a layer group."""

Pages = Sequence[Sequence[int]]
"""Page tables of a request, one for each layer group."""


def place(group: int, page: int) -> int:
    """One number for a page of a layer group: page indices are the group's own."""
    return group << 40 | page


def places(group: int, pages: Iterable[int]) -> Iterable[int]:
    return (place(group, page) for page in pages if page != NO_PAGE)


def page_deltas(data: Any) -> Pages:
    """The pages a request got since the last word of it, for each layer group."""
    grouped: Pages | None = getattr(data, "new_block_ids_by_layer_group", None)
    return grouped or [data.new_block_ids]


def unit_table(
    group: LayerGroup,
    pages: Sequence[int],
    block_tokens: int,
    start: int,
    stop: int,
    from_token: int = 0,
) -> UnitTable:
    """Device units of blocks [start, stop) of a request whose pages are ``pages``.

    SKIP before ``from_token`` (the engine holds it), where there is no page, and beyond the pages.
    """
    unit = gcd(group.page_tokens, block_tokens)
    per_page, per_block = group.page_tokens // unit, block_tokens // unit
    positions = np.arange(start * per_block, stop * per_block, dtype=np.int64)
    table = np.asarray(pages, dtype=np.int64)
    page = positions // per_page
    inside = page < len(table)
    ids = np.full(len(positions), NO_PAGE, dtype=np.int64)
    ids[inside] = table[page[inside]]
    units = ids * per_page + positions % per_page
    units[(ids == NO_PAGE) | (positions * unit < from_token)] = SKIP
    return UnitTable.of(units.reshape(stop - start, per_block), unit)


def pages_of(units: Iterable[UnitTable], groups: Sequence[LayerGroup]) -> list[int]:
    """Every page of which a unit is copied, as `place` numbers it."""
    found: set[int] = set()
    for table, group in zip(units, groups, strict=True):
        flat = table.array().ravel()
        per_page = group.page_tokens // table.unit_tokens
        own = np.unique(flat[flat != SKIP] // per_page).tolist()
        found.update(place(group.index, page) for page in own)
    return sorted(found)


def has_gap(table: UnitTable) -> bool:
    """Whether some unit has no place on the device."""
    return bool((table.array() == SKIP).any())
