"""The guard between an engine and kvcore: no error of kvcore ends the engine.

    engine ──▶ a method of a `covered` class ──▶ kvcore
                 │ an exception: logged once, kvcore stands aside
                 ▼
               a neutral answer, or what `broken` returns

A neutral answer is right only where nothing was promised to the engine before. Where it counts on
KV, ``broken`` must fail the promise in the way from which the engine recovers.

An `EngineMustEnd` passes: after it, ranks would meet in the wrong collectives, or a copy would
write to the pages of another request.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

from kvcore.errors import EngineMustEnd

__all__ = ["Guard", "Neutral", "Stop", "attempt", "covered", "covers"]

_log = logging.getLogger("kvcore.connector.guard")
_T = TypeVar("_T")
_C = TypeVar("_C", bound=type)
_COVERED = "__kvcore_covered__"


class Stop(Protocol):
    """Stops kvcore for a reason until the engine restarts, and logs it once with the error."""

    def __call__(self, why: str, error: BaseException) -> object: ...


def attempt(
    what: str, call: Callable[[], _T], otherwise: _T, passes: tuple[type[Exception], ...] = ()
) -> _T:
    """Return what ``call`` returns; on an error log it, and return ``otherwise``.

    For what is done after an error: it must not raise a second one. ``what`` names it in the log.
    Errors of the kinds ``passes`` are raised, as EngineMustEnd is.
    """
    raised: tuple[type[Exception], ...] = (EngineMustEnd, *passes)
    try:
        return call()
    except raised:
        raise
    except Exception:  # noqa: BLE001 - logged with its trace
        _log.exception("an error in %s", what)
        return otherwise


class Guard:
    """Runs kvcore's part of an engine's calls without raising. ``stop`` is called on each error."""

    def __init__(self, stop: Stop) -> None:
        self._stop = stop

    def run(
        self,
        name: str,
        call: Callable[[], _T],
        neutral: _T,
        broken: Callable[[], _T] | None = None,
    ) -> _T:
        """Return what ``call`` returns; on an error stop kvcore and return a substitute.

        ``name`` is the entry point, for the log. ``broken`` fails what was promised and returns the
        substitute. An error of ``stop`` or ``broken`` is logged, and the substitute is ``neutral``.
        Raises EngineMustEnd only.
        """
        try:
            return call()
        except EngineMustEnd:
            raise
        except Exception as error:  # noqa: BLE001 - logged with its trace, and kvcore stops
            why, found = f"an error in {name}", error
        attempt("the stop of kvcore", lambda: self._stop(why, found), None)
        return neutral if broken is None else attempt(f"{name}'s recovery", broken, neutral)


class Neutral(NamedTuple):
    """What a method returns after an error: ``make()``. Errors of the kinds ``passes`` are raised.

    Those are wrong settings, in what an engine calls while it starts, and steps that an engine can
    only be told to fail by an error.
    """

    make: Callable[[], Any]
    passes: tuple[type[Exception], ...] = ()


def covered(neutral: Mapping[str, Neutral]) -> Callable[[_C], _C]:
    """Decorate the class that an engine calls: no public method raises, but for `EngineMustEnd`.

    ``neutral`` says what each method and property returns after an error. TypeError is raised, when
    the class is made, for a public one that is missing: a new method cannot be forgotten. On an
    error the instance's ``_failed(name, error, args)`` is called, which stops kvcore and may return
    a substitute of its own; None means ``neutral``. ``args`` are the call's own, in the order of
    the method's parameters. A class method only logs.
    """

    def decorate(cls: _C) -> _C:
        methods = {name: part for name, part in vars(cls).items() if _is_method(name, part)}
        if missing := methods.keys() ^ neutral.keys():
            raise TypeError(f"{cls.__name__}: {sorted(missing)} are methods or neutral, not both")
        for name, part in methods.items():
            setattr(cls, name, _covered(name, part, neutral[name]))
        return cls

    return decorate


def covers(cls: type, name: str) -> bool:
    """Return True if a method that a class has by this name cannot raise, or is not kvcore's."""
    part: Any = inspect.getattr_static(cls, name)
    method: Any = part.fget if isinstance(part, property) else getattr(part, "__func__", part)
    own = str(getattr(inspect.unwrap(method), "__module__", "")).startswith("kvcore")
    return not own or hasattr(method, _COVERED)


def _is_method(name: str, part: object) -> bool:
    return not name.startswith("_") and (
        inspect.isfunction(part) or isinstance(part, (classmethod, staticmethod, property))
    )


def _covered(name: str, part: Any, neutral: Neutral) -> Any:
    if isinstance(part, property):
        return property(_covered(name, part.fget, neutral))
    method = part.__func__ if isinstance(part, classmethod) else part
    passes: tuple[type[Exception], ...] = (EngineMustEnd, *neutral.passes)

    @functools.wraps(method)
    def call(owner: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(owner, *args, **kwargs)
        except passes:
            raise
        except Exception as error:  # noqa: BLE001 - logged with its trace, and kvcore stops
            failed = error
        if isinstance(owner, type):
            _log.error("an error in %s", name, exc_info=failed)
            return neutral.make()
        given = _in_order(method, owner, args, kwargs)
        found = attempt(
            "the stop of kvcore", lambda: owner._failed(name, failed, given), None, passes
        )
        return neutral.make() if found is None else found

    setattr(call, _COVERED, True)
    return classmethod(call) if isinstance(part, classmethod) else call


def _in_order(
    method: Callable[..., Any], owner: Any, args: tuple[Any, ...], named: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Return a call's arguments in the order of the method's parameters."""
    try:
        return inspect.signature(method).bind(owner, *args, **named).args[1:]
    except TypeError:  # the call itself is wrong
        return args
