"""How many examples a property is tried on that takes seconds: in CI half as many as elsewhere."""

from __future__ import annotations

from hypothesis import settings

__all__ = ["examples"]


def examples(count: int) -> int:
    """Return ``count``, or half of it under the profile "ci" (`make test` of a change).

    That profile is the only one with the same examples each time (tests/conftest.py).
    """
    return (count + 1) // 2 if settings().derandomize else count
