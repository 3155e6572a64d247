"""Waiting in tests: until something is true, with patience for a busy machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

__all__ = ["PATIENCE_S", "until"]

PATIENCE_S = 60.0
"""For what ends in milliseconds on a machine that is not held."""


def until(what: Callable[[], Any], seconds: float = PATIENCE_S) -> Any:
    """The first true value of ``what``; fails when there is none in time."""
    limit = time.monotonic() + seconds
    while not (value := what()):
        assert time.monotonic() < limit, "it did not happen in time"
        time.sleep(0.01)
    return value
