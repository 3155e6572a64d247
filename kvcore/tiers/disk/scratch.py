"""Memory that blocks are encrypted into on their way to disk."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvcore.memory.hugepages import Pages

__all__ = ["AT_ONCE", "Scratch"]

AT_ONCE = 8
"""Blocks of a write that are encrypted ahead and under way together."""


class Scratch:
    """Memory for encrypted blocks, because encryption must not change the host arena. Thread-safe.

    Each writer leases memory of ``AT_ONCE`` slots.
    """

    def __init__(self, slot_nbytes: int) -> None:
        self._slot_nbytes = slot_nbytes
        self._lock = threading.Lock()
        self._idle: list[Pages] = []

    @contextmanager
    def lease(self) -> Iterator[Sequence[memoryview]]:
        """Lend ``AT_ONCE`` slots. No write from them may be under way when the context ends."""
        with self._lock:
            pages = self._idle.pop() if self._idle else None
        if pages is None:
            pages = Pages(AT_ONCE * self._slot_nbytes)
        size = self._slot_nbytes
        try:
            yield [pages.view[i * size : (i + 1) * size] for i in range(AT_ONCE)]
        finally:
            with self._lock:
                self._idle.append(pages)

    def close(self) -> None:
        with self._lock:
            for pages in self._idle:
                pages.close()
            self._idle.clear()
