"""A bounded memory of evicted keys, by which ARC, S3-FIFO and admission recognize blocks."""

from __future__ import annotations

from collections import OrderedDict

__all__ = ["Ghost"]


class Ghost:
    """The last ``capacity`` keys; the oldest is dropped first. About 200 bytes per key."""

    __slots__ = ("_keys", "capacity")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def put(self, key: bytes) -> None:
        """Remember a key as the newest; drops the oldest if there is no room."""
        self._keys[key] = None
        self._keys.move_to_end(key)
        if len(self._keys) > self.capacity:
            self._keys.popitem(last=False)

    def take(self, key: bytes) -> bool:
        """Forget a key; returns True if it was remembered."""
        return self._keys.pop(key, self) is None

    def drop_oldest(self) -> None:
        """Forget the oldest key."""
        self._keys.popitem(last=False)
