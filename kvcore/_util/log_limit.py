"""Log lines that repeat: the first is written, then one a minute with a count."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Hashable

__all__ = ["LogLimit"]

EVERY_S = 60.0
MAX_KEYS = 100
"""The most keys told apart at a time. Else a client that chooses the text of lines fills memory."""
_OTHERS = object()


class LogLimit:
    """Decides which repeats of a log line are written. Thread-safe.

    A line is identified by a key. The first line of a key is written at once. Repeats are counted,
    and one is written when ``every_s`` seconds have passed since the last. If more than `MAX_KEYS`
    keys come in that time, all further ones count as one.
    """

    def __init__(
        self, every_s: float = EVERY_S, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._every_s = every_s
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: dict[Hashable, tuple[float, int]] = {}  # key -> (written at, left out since)

    def admit(self, key: Hashable) -> int | None:
        """Return how many lines of ``key`` were left out since the last, None to leave out this."""
        with self._lock:
            now = self._clock()
            if key not in self._seen and len(self._seen) >= MAX_KEYS:
                self._forget(now)
                key = key if len(self._seen) < MAX_KEYS else _OTHERS
            written_at, left_out = self._seen.get(key, (-math.inf, 0))
            if now - written_at < self._every_s:
                self._seen[key] = written_at, left_out + 1
                return None
            self._seen[key] = now, 0
            return left_out

    def _forget(self, now: float) -> None:
        """Forget the keys whose next line would be written, and what was counted of them."""
        for key, (written_at, _) in list(self._seen.items()):
            if now - written_at >= self._every_s:
                del self._seen[key]
