"""Waiting in tests, with patience for a busy machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

__all__ = ["PATIENCE_S", "until"]

PATIENCE_S = 60.0
"""Seconds to wait for something that takes milliseconds on an idle machine."""


def until(
    true: Callable[[], Any],
    what: str = "it did not happen in time",
    *,
    seconds: float = 3 * PATIENCE_S,
    hopeless: Callable[[], object] = lambda: False,
) -> Any:
    """Return the first true value of ``true()``, which is called every 10 ms. Blocks.

    Raises AssertionError with ``what`` after ``seconds``, or once ``hopeless()`` is true.
    """
    limit = time.monotonic() + seconds
    while not (value := true()):
        assert not hopeless(), f"{what}, and will not be"
        assert time.monotonic() < limit, what
        time.sleep(0.01)
    return value
