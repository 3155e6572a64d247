"""How many examples a property is tried on that takes seconds: in CI fewer than elsewhere."""

from __future__ import annotations

from hypothesis import settings

__all__ = ["examples"]


def examples(count: int, part: int = 2) -> int:
    """Return ``count``, or a ``part``-th of it under the profile "ci", rounded up.

    That profile is the one of `make test` of a change; "quick", of `make test-unit`, has as much
    less as its other properties have. These two have the same examples each time
    (tests/conftest.py). A larger ``part`` is for a property of which another test tries as much on
    something that differs little; 1 leaves all in CI.
    """
    chosen = settings()
    if not chosen.derandomize:
        return count
    return -(-count * chosen.max_examples // (part * settings.get_profile("ci").max_examples))
