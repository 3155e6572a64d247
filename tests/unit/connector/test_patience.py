"""How long a request has waited, and still may: against a sum over all moments."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.connector.patience import MOST_WAITED, Patience
from support.budget import examples

DEADLINE_S = 30


def steps() -> Any:
    """Calls, each with the seconds that pass before it. Whole seconds, so that sums are exact."""
    calls = st.sampled_from(["begin", "end", "renew", "spend", "promise", "came"])
    return st.lists(st.tuples(st.integers(0, 12), calls), max_size=12)


@settings(max_examples=examples(300))
@given(steps())
def test_each_second_in_which_it_waits_counts_once(taken: list[tuple[int, str]]) -> None:
    """But those in which another engine's promise is waited for."""
    patience, now = Patience(DEADLINE_S), 0
    waits, waited, promised_until = False, 0, 0
    for passed, call in taken:
        for _ in range(passed):
            waited += waits and now >= promised_until
            now += 1
        if call in {"begin", "promise", "came"}:
            patience.begin(now)
            waits = True
        if call == "promise":
            patience.free_until = promised_until = now + 5
        elif call == "came":
            patience.free_until = promised_until = now
        elif call == "end":
            patience.end(now)
            waits = False
        elif call == "renew":
            patience.renew()
            waits, waited, promised_until = False, 0, 0
        elif call == "spend":
            patience.end(now)
            patience.spend()
            waits, waited = False, max(waited, DEADLINE_S)
    patience.end(now)
    assert patience.waited_s == waited
    assert patience.is_over == (waited >= DEADLINE_S)
    assert patience.left_s == pytest.approx(
        max(DEADLINE_S - waited, (1 - MOST_WAITED) * DEADLINE_S)
    )


@pytest.mark.parametrize("deadline_s", [1e-9, 0.5, 30.0, 1e9])
@pytest.mark.parametrize("share", [0.0, 0.5, MOST_WAITED, 1.0, 1.5])
def test_what_is_left_is_never_nothing(deadline_s: float, share: float) -> None:
    """A deadline of 0 would mean none, or be refused."""
    patience = Patience(deadline_s, share * deadline_s)
    assert 0 < patience.left_s <= deadline_s
    assert patience.may_begin == (share <= MOST_WAITED)
    assert patience.is_over == (share >= 1)


def test_a_clock_that_goes_back_gives_no_time_back() -> None:
    patience = Patience(30.0)
    patience.begin(10.0)
    patience.end(20.0)
    patience.begin(20.0)
    patience.end(5.0)
    assert patience.waited_s == 10.0


def test_who_does_not_wait_may_be_told_so_twice() -> None:
    patience = Patience(30.0)
    patience.begin(1.0)
    patience.end(4.0)
    patience.end(9.0)
    assert patience.waited_s == 3.0
