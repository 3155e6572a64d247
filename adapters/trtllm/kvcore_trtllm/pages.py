"""Pages as the engine counts them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvcore.adapting.paging import PageTables, of_its_group

NO_PAGE = -1
"""The engine's mark for a block without a page in a layer group."""


def places(group: int, pages: Iterable[int]) -> Iterable[int]:
    """One number for each page that there is: page indices are the layer group's own."""
    return (of_its_group(group, page) for page in pages if page != NO_PAGE)


def page_deltas(data: Any) -> PageTables:
    """The pages a request got since the last word of it, for each layer group."""
    grouped: PageTables | None = getattr(data, "new_block_ids_by_layer_group", None)
    return grouped or [data.new_block_ids]
