"""Log lines that repeat: the first is written, then one a minute with a count."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable

__all__ = ["LogLimit"]

EVERY_S = 60.0


class LogLimit:
    """Decides which repeats of a log line are written. Thread-safe.

    A line is identified by a key. The first line of a key is written at once. Repeats are counted,
    and one is written when ``every_s`` seconds have passed since the last.
    """

    def __init__(
        self, every_s: float = EVERY_S, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._every_s = every_s
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: dict[
            Hashable, tuple[float | None, int]
        ] = {}  # key -> (written at, left out since)

    def admit(self, key: Hashable) -> int | None:
        """Return how many lines of ``key`` were left out since the last, None to leave out this."""
        with self._lock:
            now = self._clock()
            written_at, left_out = self._seen.get(key, (None, 0))
            if written_at is not None and now - written_at < self._every_s:
                self._seen[key] = written_at, left_out + 1
                return None
            self._seen[key] = now, 0
            return left_out
