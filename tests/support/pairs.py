"""Covering sets: few rows of a product in which every pair of values still comes together.

    versions, runs, cases = ("0.30", "0.33"), ("sync", "async", "v2"), ("hit", "restart")
    covering(itertools.product(versions, runs, cases))

Six rows of twelve: each version runs in each configuration, and both cases run on each version and
in each configuration. A fault that needs three certain values together may be missed.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from typing import Any

__all__ = ["covering", "pairs_of"]

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
    rows run elsewhere. The row with the most new pairs for its ``cost`` comes first. If there are
    several, it is the one whose values were used least, so that no value gets most of the rows.
    """
    rows = list(product)
    left = set().union(*map(pairs_of, rows)) - set().union(*map(pairs_of, given))
    chosen: list[Row] = []
    used: Counter[tuple[int, Hashable]] = Counter()

    def worth(row: Row) -> tuple[float, int]:
        return len(left & pairs_of(row)) / cost(row), -sum(used[each] for each in enumerate(row))

    while left:
        best = max(rows, key=worth)
        chosen.append(best)
        used.update(enumerate(best))
        left -= pairs_of(best)
    return chosen
