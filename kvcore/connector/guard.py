"""The guard between an engine and kvcore: no error of kvcore ends the engine.

    engine ──▶ entry point ──▶ Guard.run ──▶ kvcore
                                 │ an exception: logged once, kvcore stands aside
                                 ▼
                               a neutral answer, or what `broken` returns

A neutral answer is right only where nothing was promised to the engine before. Where it counts on
KV, ``broken`` must fail the promise in the way from which the engine recovers.

A RankLostError passes: after it, this rank and others would meet in the wrong collectives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

from kvcore.errors import RankLostError

__all__ = ["Guard", "Stop", "guarded"]

_T = TypeVar("_T")
_F = TypeVar("_F", bound=Callable[..., Any])


class Stop(Protocol):
    """Stops kvcore for a reason until the engine restarts, and logs it once with the error."""

    def __call__(self, why: str, error: BaseException) -> object: ...


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
        substitute; what it raises reaches the engine, because nothing else would be correct.
        """
        try:
            return call()
        except RankLostError:  # other ranks may wait for this one: its process must end
            raise
        except Exception as error:  # noqa: BLE001 - logged with its trace, and kvcore stops
            self._stop(f"an error in {name}", error)
        return neutral if broken is None else broken()


def guarded(neutral: Any) -> Callable[[_F], _F]:
    """Decorate an entry point of an object that has a `Guard` as ``_guard``.

    On an error the method returns ``neutral``.
    """

    def decorate(method: _F) -> _F:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            guard: Guard = self._guard
            return guard.run(method.__name__, lambda: method(self, *args, **kwargs), neutral)

        return cast("_F", call)

    return decorate
