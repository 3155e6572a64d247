"""No error of kvcore reaches an engine, except where nothing but its end would be right."""

from __future__ import annotations

import pytest

from kvcore.connector.guard import Guard, guarded


class Half:
    """One half of a connector with a guard."""

    def __init__(self) -> None:
        self.told: list[tuple[str, BaseException]] = []
        self._guard = Guard(lambda why, error: self.told.append((why, error)))

    @guarded(-1)
    def count(self, upto: int, *, by: int = 1) -> int:
        return upto // by


def test_an_error_stops_kvcore_and_is_answered_with_nothing() -> None:
    half = Half()
    assert half.count(4, by=2) == 2
    assert not half.told
    assert half.count(4, by=0) == -1
    [(why, error)] = half.told
    assert why == "an error in count"
    assert isinstance(error, ZeroDivisionError)


def test_what_was_promised_is_failed_and_not_passed_over() -> None:
    half = Half()
    assert half._guard.run("load", lambda: 1 // 0, 0, lambda: 7) == 7
    with pytest.raises(KeyError):  # it cannot even be failed: the engine must not go on
        half._guard.run("load", lambda: 1 // 0, 0, lambda: {}["promise"])


def test_an_interrupt_is_no_error_of_kvcore() -> None:
    half = Half()

    def interrupted() -> int:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        half._guard.run("load", interrupted, 0)
    assert not half.told
