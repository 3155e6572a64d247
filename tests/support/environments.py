"""The environments of other versions of vLLM (`make env-compat`), for engine tests."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pytest

__all__ = ["kinds_of", "python_of"]

_ENVIRONMENTS = Path(__file__).parents[2] / ".venvs"


def python_of(environment: str) -> Path:
    """Return the Python of an environment, such as "vllm-0.30". Skips the test if it is missing."""
    python = _ENVIRONMENTS / environment / "bin" / "python"
    if not python.exists():
        pytest.skip(f"there is no {python}: make env-compat makes it")
    return python


def kinds_of(kinds: Mapping[str, Any], daily: Collection[str]) -> Any:
    """Return a fixture of a module that runs its tests with each of ``kinds``.

    All but the ``daily`` ones are exhaustive. A kind is a NamedTuple: its ``python`` names an
    environment, and is the path of that environment's Python in the fixture. Empty is the Python of
    the tests.
    """
    names = [*daily, *(name for name in kinds if name not in daily)]

    @pytest.fixture(
        scope="module",
        params=[
            name if name in daily else pytest.param(name, marks=pytest.mark.exhaustive)
            for name in names
        ],
    )
    def kind(request: pytest.FixtureRequest) -> Any:
        found = kinds[request.param]
        return found._replace(python=str(python_of(found.python))) if found.python else found

    return kind
