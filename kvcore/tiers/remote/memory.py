"""A store in a dictionary: the oracle of the contract suite, and a store for tests."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvcore.errors import BlockMissing, TierError
from kvcore.tiers.remote.base import BlockStore, Item, fill, wrong_size
from kvcore.tiers.remote.options import StoreOptions
from kvcore.tiers.remote.tier import StoreKind


class MemoryStore(BlockStore):
    """Values in the process's own memory, without a size limit."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def put(self, items: Sequence[Item]) -> list[TierError | None]:
        made = {item.name: b"".join(item.parts) for item in items}
        with self._lock:
            self.values.update(made)
        return [None] * len(items)

    def get(self, items: Sequence[Item]) -> list[TierError | None]:
        return [self._get(item) for item in items]

    def exists(self, names: Sequence[str]) -> list[bool]:
        with self._lock:
            return [name in self.values for name in names]

    def delete(self, names: Sequence[str]) -> None:
        with self._lock:
            for name in names:
                self.values.pop(name, None)

    def _get(self, item: Item) -> TierError | None:
        with self._lock:
            value = self.values.get(item.name)
        if value is None:
            return BlockMissing(f"no value {item.name}")
        if not fill(item, memoryview(value)):
            return wrong_size(item, len(value))
        return None


class MemoryStoreOptions(StoreOptions):
    """Options of the in-process store. Engines that give the same ``name`` share one store."""

    name: str = "default"


_stores: dict[str, MemoryStore] = {}


def shared_store(name: str) -> MemoryStore:
    """Return the process's store of that name. It lives as long as the process."""
    return _stores.setdefault(name, MemoryStore())  # atomic


KIND = StoreKind(MemoryStoreOptions, lambda options, rank: shared_store(options.name))
