"""Covering sets have every pair, and are smaller than what they stand for."""

from __future__ import annotations

from itertools import combinations, product

from hypothesis import given
from hypothesis import strategies as st

from support.pairs import cover


@given(st.dictionaries(st.integers(), st.sets(st.integers(0, 20)), min_size=1, max_size=12))
def test_everything_is_there_and_no_row_is_idle(rows: dict[int, set[int]]) -> None:
    taken = cover(rows)
    assert set().union(*(rows[row] for row in taken)) == set().union(*rows.values())
    seen: set[int] = set()
    for row in taken:
        assert rows[row] - seen, "a row that adds nothing"
        seen |= rows[row]


@given(st.lists(st.integers(1, 4), min_size=2, max_size=4))
def test_every_pair_of_a_product_is_there(sizes: list[int]) -> None:
    rows = list(product(*map(range, sizes)))
    taken = cover({row: set(combinations(enumerate(row), 2)) for row in rows})
    for one, other in combinations(range(len(sizes)), 2):
        pairs = {(row[one], row[other]) for row in taken}
        assert pairs == set(product(range(sizes[one]), range(sizes[other])))
    assert len(taken) <= len(rows)


def test_ten_rows_of_81_have_every_pair_of_four_factors() -> None:
    rows = list(product(range(3), repeat=4))
    assert len(cover({row: set(combinations(enumerate(row), 2)) for row in rows})) <= 12


def test_what_is_dear_is_taken_last() -> None:
    rows = {"dear": {1, 2}, "cheap": {1}, "other": {2}}
    assert cover(rows) == ["dear"]
    assert cover(rows, cost=lambda row: 9.0 if row == "dear" else 1.0) == ["cheap", "other"]
