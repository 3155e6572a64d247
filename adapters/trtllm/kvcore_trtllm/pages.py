"""Pages as the engine counts them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvcore.connector.page_table import PageTables, of_its_group
from kvcore.errors import CapacityError
from kvcore.model.spec import LayerGroup

NO_PAGE = -1
"""The engine's mark for a block without a page in a layer group."""


def places(group: int, pages: Iterable[int]) -> Iterable[int]:
    """One number for each page that there is: page indices are the layer group's own."""
    return (of_its_group(group, page) for page in pages if page != NO_PAGE)


def page_deltas(data: Any) -> PageTables:
    """The pages a request got since the last word of it, for each layer group."""
    grouped: PageTables | None = getattr(data, "new_block_ids_by_layer_group", None)
    return grouped or [data.new_block_ids]


def check_pages(groups: Sequence[LayerGroup], start: int, stop: int, pages: PageTables) -> None:
    """Raise CapacityError unless there is a page for every promised token [start, stop)."""
    for group in groups:
        first = start // group.page_tokens
        last = -(-stop // group.page_tokens)
        table = pages[group.index]
        if len(table) < last or NO_PAGE in table[first:last]:
            raise CapacityError(
                f"tokens {start}..{stop} were promised and the engine gave pages "
                f"{list(table)[first:last]} of {group.page_tokens} tokens"
            )
