"""A bounded memory of what was computed for views."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from kvcore.memory.layout import KVView

__all__ = ["ViewCache"]

_T = TypeVar("_T")

MOST = 256
"""Entries kept. A worker has two views for each group of layers, and copies a few layer ranges of
them: tens of entries, each of a few KiB."""


class ViewCache:
    """Values computed for views, by view and key. It does not keep views alive. Thread-safe.

    What goes in must depend on the layouts, the addresses of the tensors and the key alone, and
    must not refer to the views or their tensors. If it is full, the entry that was unused for
    longest goes.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._found: OrderedDict[Hashable, tuple[tuple[weakref.ref[KVView], ...], Any]] = (
            OrderedDict()
        )

    def get(self, views: tuple[KVView, ...], key: Hashable, make: Callable[[], _T]) -> _T:
        """Return the value of these views and ``key``, made by ``make`` if there is none."""
        place = (*map(id, views), key)
        with self._lock:
            found = self._found.get(place)
            if found is not None and all(
                ref() is view for ref, view in zip(found[0], views, strict=True)
            ):
                self._found.move_to_end(place)
                value: _T = found[1]
                return value
        value = make()
        with self._lock:
            self._forget_dead()
            self._found[place] = tuple(map(weakref.ref, views)), value
            while len(self._found) > self._most:
                self._found.popitem(last=False)
        return value

    def __len__(self) -> int:
        return len(self._found)

    def _forget_dead(self) -> None:
        dead = [
            place for place, (refs, _) in self._found.items() if any(ref() is None for ref in refs)
        ]
        for place in dead:
            del self._found[place]
