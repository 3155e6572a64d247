"""Covering sets of tests' parameters: every pair is there, and few rows are."""

from __future__ import annotations

from itertools import combinations, product

from hypothesis import given
from hypothesis import strategies as st

from support.pairs import Row, covering, paired, pairs_of

SIZES = st.lists(st.integers(1, 4), min_size=2, max_size=4)


@given(sizes=SIZES, data=st.data())
def test_every_pair_of_values_is_in_a_row(sizes: list[int], data: st.DataObject) -> None:
    factors = [range(size) for size in sizes]
    whole: list[Row] = [*product(*factors)]
    elsewhere = data.draw(st.lists(st.sampled_from(whole), max_size=3))
    costs = {row: data.draw(st.integers(1, 3)) for row in whole[:8]}
    rows = covering(whole, given=elsewhere, cost=lambda row: costs.get(row, 1))
    for (i, ones), (j, others) in combinations(enumerate(factors), 2):
        for one, other in product(ones, others):
            assert any(row[i] == one and row[j] == other for row in [*rows, *elsewhere])
    assert set(rows) <= set(whole)
    for number, row in enumerate(rows):
        seen = set().union(*map(pairs_of, [*elsewhere, *rows[:number]]))
        assert not pairs_of(row) <= seen, "a row covers nothing new"


@given(rows=st.lists(st.tuples(*[st.integers(0, 2)] * 3), min_size=1))
def test_a_product_may_lack_rows(rows: list[Row]) -> None:
    chosen = covering(rows)
    assert set(chosen) <= set(rows)
    assert set().union(*map(pairs_of, chosen)) == set().union(*map(pairs_of, rows))


def test_two_factors_are_their_product() -> None:
    assert sorted(covering(product("ab", "xyz"))) == [*product("ab", "xyz")]


def test_three_factors_of_three_need_few_more_rows_than_nine() -> None:
    assert 9 <= len(covering(product("abc", "xyz", "123"))) <= 11


def test_a_row_that_costs_more_is_taken_only_where_its_pairs_need_it() -> None:
    whole = product("ab", ("quick", "slow"), "1234")
    rows = covering(whole, cost=lambda row: 1 + 9 * (row[1] == "slow"))
    assert sum(row[1] == "slow" for row in rows) == 4


def test_pairs_that_run_elsewhere_need_no_row() -> None:
    rows = covering(product("ab", "xy"), given=[("a", "x")])
    assert sorted(rows) == [("a", "y"), ("b", "x"), ("b", "y")]


def test_rows_are_spread_over_the_values() -> None:
    """All pairs of the second and the third factor run elsewhere, so any row will do for them."""
    elsewhere = product("c", "xy", "1234")
    rows = covering(product("ab", "xy", "1234"), given=elsewhere)
    assert len(rows) == 8
    assert sum(row[1] == "x" for row in rows) == 4


def test_paired_has_every_row_and_marks_those_that_no_pair_needs() -> None:
    factors = ([1, 2, 3], "abc", [True, False])
    made = paired(*factors, name=repr)
    assert [param.values for param in made] == list(product(*factors))
    assert made[0].id == "1-'a'-True"
    daily = [param.values for param in made if not param.marks]
    assert 9 <= len(daily) < len(made)
    wanted = set().union(*map(pairs_of, product(*factors)))
    assert set().union(*map(pairs_of, daily)) == wanted
    assert {mark.name for param in made for mark in param.marks} == {"exhaustive"}
