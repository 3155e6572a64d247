"""One test of many cases, which reports every case that fails."""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import pytest

Case = TypeVar("Case")


def for_every(
    cases: Mapping[str, Case] | Iterable[Case],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make one test of a check whose first parameter is a case.

    The other parameters are fixtures, which all cases share. The test runs every case, and fails
    with the names and the tracebacks of all that failed. The names of ``cases`` are its keys, or
    the cases themselves.

    With `pytest.mark.parametrize` each case is a test of its own, with fixtures and reports of its
    own: prefer that where a case takes longer than those.
    """
    named = _named(cases)

    def made(check: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(check)
        first, *fixtures = signature.parameters.values()

        @functools.wraps(check)
        def test(**given: Any) -> None:
            assert named, "there are no cases"
            traces = {
                name: _trace(check, {first.name: case, **given}) for name, case in named.items()
            }
            failed = {name: trace for name, trace in traces.items() if trace}
            if failed:
                told = [f"{name}:\n{trace}" for name, trace in failed.items()]
                pytest.fail(
                    "\n".join([f"{len(failed)} of {len(named)}: {', '.join(failed)}", *told]),
                    pytrace=False,
                )

        test.__signature__ = signature.replace(parameters=fixtures)  # type: ignore[attr-defined]
        return test

    return made


def _named(cases: Mapping[str, Case] | Iterable[Case]) -> Mapping[str, Case]:
    if isinstance(cases, Mapping):
        return cases
    each = list(cases)
    named = {str(case): case for case in each}
    if len(named) < len(each):
        raise ValueError("cases share a name: give them names of their own")
    return named


def _trace(check: Callable[..., None], arguments: Mapping[str, Any]) -> str:
    """Return the traceback of a check that fails, else an empty string."""
    try:
        check(**arguments)
    except Exception:  # noqa: BLE001 - whatever a check raises is reported, as pytest does
        return traceback.format_exc()
    return ""
