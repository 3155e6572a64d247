"""No error of kvcore reaches an engine, except where nothing but its end would be right."""

from __future__ import annotations

from typing import Any

import pytest

from kvcore.connector.guard import Guard, Neutral, covered, covers
from kvcore.errors import ConfigError, PagesInUse


class Base:
    def inherited(self) -> int:
        raise NotImplementedError


@covered(
    {
        "count": Neutral(lambda: -1),
        "promise": Neutral(list),
        "made": Neutral(lambda: "none", (ConfigError,)),
    }
)
class Half(Base):
    """One half of a connector."""

    def __init__(self) -> None:
        self.told: list[tuple[str, BaseException]] = []
        self.guard = Guard(lambda why, error: self.told.append((why, error)))

    def count(self, upto: int, *, by: int = 1) -> int:
        return upto // by

    def promise(self, error: BaseException) -> list[str]:
        raise error

    @classmethod
    def made(cls, error: Exception | None = None) -> str:
        if error is not None:
            raise error
        return cls.__name__

    def _failed(self, name: str, error: Exception, args: tuple[Any, ...]) -> list[str] | None:
        self.told.append((name, error))
        if isinstance(error, KeyError):
            raise ValueError("a second error, in the recovery")
        return ["failed"] if name == "promise" else None


def test_an_error_stops_kvcore_and_is_answered_with_nothing() -> None:
    half = Half()
    assert half.count(4, by=2) == 2
    assert not half.told
    assert half.count(4, by=0) == -1
    [(name, error)] = half.told
    assert name == "count"
    assert isinstance(error, ZeroDivisionError)


def test_what_was_promised_is_failed_and_not_passed_over() -> None:
    half = Half()
    assert half.promise(OSError()) == ["failed"]
    assert half.guard.run("load", lambda: 1 // 0, 0, lambda: 7) == 7


def test_a_second_error_in_the_recovery_reaches_no_engine(
    caplog: pytest.LogCaptureFixture,
) -> None:
    half = Half()
    assert half.promise(KeyError()) == []
    assert "a second error, in the recovery" in caplog.text
    assert half.guard.run("load", lambda: 1 // 0, 0, lambda: {}["promise"]) == 0
    assert Guard(_raising).run("load", lambda: 1 // 0, 5) == 5


def _raising(why: str, error: BaseException) -> None:
    raise ValueError("the stop")


@pytest.mark.parametrize("error", [PagesInUse("a copy"), KeyboardInterrupt()], ids=repr)
def test_what_must_end_the_engine_does(error: BaseException) -> None:
    half = Half()
    with pytest.raises(type(error)):
        half.promise(error)

    def fails() -> int:
        raise error

    with pytest.raises(type(error)):
        half.guard.run("load", fails, 0)
    assert not half.told


def test_a_class_method_passes_wrong_settings_on_and_nothing_else() -> None:
    assert Half.made() == "Half"
    assert Half.made(OSError()) == "none"
    with pytest.raises(ConfigError):
        Half.made(ConfigError("wrong"))


def test_no_method_can_be_forgotten() -> None:
    with pytest.raises(TypeError, match="later"):

        @covered({"now": Neutral(int)})
        class Class:
            def now(self) -> None: ...
            def later(self) -> None: ...

    with pytest.raises(TypeError, match="gone"):
        covered({"gone": Neutral(int)})(type("Class", (), {}))
    assert covers(Half, "count")
    assert covers(Half, "made")
