"""Page tables in the engine's numbers: pages are counted within each layer group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvcore.connector.page_table import PageTables, of_its_group
from kvcore.errors import CapacityError
from kvcore.model.spec import LayerGroup

NO_PAGE = -1
"""The engine's number for a block that has no page in a layer group."""


def places(group: int, pages: Iterable[int]) -> Iterable[int]:
    """Yield a number for each existing page that is unique across layer groups."""
    return (of_its_group(group, page) for page in pages if page != NO_PAGE)


def page_deltas(data: Any) -> PageTables:
    """Return the pages that a request got since its last step, for each layer group."""
    grouped: PageTables | None = getattr(data, "new_block_ids_by_layer_group", None)
    return grouped or [data.new_block_ids]


def check_pages(groups: Sequence[LayerGroup], start: int, stop: int, pages: PageTables) -> None:
    """Raise CapacityError unless every layer group has pages for all tokens [start, stop)."""
    for group in groups:
        first = start // group.page_tokens
        last = -(-stop // group.page_tokens)
        table = pages[group.index]
        if len(table) < last or NO_PAGE in table[first:last]:
            raise CapacityError(
                f"tokens {start}..{stop} were promised and the engine gave pages "
                f"{list(table)[first:last]} of {group.page_tokens} tokens"
            )
