"""Covering sets: few rows of a product in which every pair of values still comes together.

    versions, runs, cases = ("0.30", "0.33"), ("sync", "async", "v2"), ("hit", "restart")
    covering(itertools.product(versions, runs, cases))

Six rows of twelve: each version runs in each configuration, and both cases run on each version and
in each configuration. A fault that needs three certain values together may be missed.
`paired` makes a test's parameters of it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from typing import Any

import pytest

__all__ = ["cover", "covering", "paired", "pairs_of"]

Row = tuple[Hashable, ...]
Pair = tuple[tuple[int, Hashable], tuple[int, Hashable]]


def pairs_of(row: Row) -> set[Pair]:
    """Return every pair of a row's values, each value with the number of its factor."""
    return set(itertools.combinations(enumerate(row), 2))


def covering(
    product: Iterable[Row],
    *,
    given: Iterable[Row] = (),
    cost: Callable[[Row], float] = lambda row: 1.0,
) -> list[Any]:
    """Return rows of ``product`` that have every pair of values of two factors that is in it.

    ``product`` may lack rows that cannot be. The pairs of ``given`` count as covered, because these
    rows run elsewhere. Of rows with as many new pairs for their ``cost``, the one whose values were
    used least is taken, so that no value gets most of the rows.
    """
    rows = {row: pairs_of(row) for row in product}
    return cover(rows, had=set().union(*map(pairs_of, given)), cost=cost, values=enumerate)


def paired(*factors: Iterable[Hashable], name: Callable[[Any], str] = str) -> list[Any]:
    """Return the rows of a product as parameters of a test, of which `make test` runs few.

    Those are a covering set; all others are nightly. ``name`` gives what a value is called in ids.
    """
    rows = list(itertools.product(*factors))
    daily = set(covering(rows))
    return [
        pytest.param(
            *row,
            id="-".join(map(name, row)),
            marks=() if row in daily else pytest.mark.exhaustive,
        )
        for row in rows
    ]


def cover(
    rows: Mapping[Any, Collection[Hashable]],
    *,
    had: Collection[Hashable] = (),
    cost: Callable[[Any], float] = lambda row: 1.0,
    values: Callable[[Any], Iterable[Hashable]] = lambda row: (),
) -> list[Any]:
    """Return rows that between them have everything that any of ``rows`` has, but ``had``.

    ``rows`` says what each row has: pairs of values that must come together, for example. The row
    with the most that is new for its ``cost`` is taken first; of several, one whose ``values`` were
    used least, and then the first. That is not always the smallest set, but the same every time.
    """
    left = set().union(*rows.values()).difference(had)
    taken: list[Any] = []
    used: Counter[Hashable] = Counter()

    def worth(row: Any) -> tuple[float, int]:
        return len(left.intersection(rows[row])) / cost(row), -sum(
            map(used.__getitem__, values(row))
        )

    while left:
        best = max(rows, key=worth)
        taken.append(best)
        used.update(values(best))
        left.difference_update(rows[best])
    return taken
