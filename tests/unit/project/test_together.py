"""Checks of many cases in one test lose no case and no failure."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.together import for_every


def test_every_failure_is_reported_and_every_case_is_tried(tmp_path: Path) -> None:
    seen = []

    @for_every({"one": 1, "two": 2, "three": 3})
    def check(case: int, tmp_path: Path) -> None:
        seen.append((case, tmp_path))
        assert case != 1, "the first"
        if case == 3:
            raise KeyError("the last")

    with pytest.raises(pytest.fail.Exception) as failed:
        check(tmp_path=tmp_path)
    assert seen == [(case, tmp_path) for case in (1, 2, 3)]
    told = str(failed.value)
    assert told.startswith("2 of 3: one, three\n")
    assert all(words in told for words in ("the first", "KeyError: 'the last'"))


def test_no_case_at_all_is_a_failure() -> None:
    @for_every([])
    def check(case: str) -> None:
        pass

    with pytest.raises(AssertionError, match="no cases"):
        check()


def test_cases_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="share a name"):
        for_every(["a", "b", "a"])


@for_every(["a", "b"])
def test_pytest_gives_the_fixtures(case: str, tmp_path: Path) -> None:
    assert case in ("a", "b")
    assert tmp_path.is_dir()
