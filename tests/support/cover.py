"""Covering sets: few rows that between them have all that all rows have."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from typing import TypeVar

Row = TypeVar("Row", bound=Hashable)


def cover(
    rows: Mapping[Row, Collection[Hashable]], cost: Callable[[Row], float] = lambda row: 1.0
) -> list[Row]:
    """Return rows that have everything that any of ``rows`` has.

    ``rows`` says what each row has: pairs of values that must come together, for example. The row
    with the most that is new for its ``cost`` is taken first, and the first of those that are
    equal: that is not always the smallest set, but the same one every time.
    """
    left = set().union(*rows.values())
    taken: list[Row] = []
    while left:
        best = max(rows, key=lambda row: len(left.intersection(rows[row])) / cost(row))
        taken.append(best)
        left.difference_update(rows[best])
    return taken
