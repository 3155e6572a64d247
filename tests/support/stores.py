"""A store that fails on demand, and the shards and keys of a model whose blocks it holds."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence

from kvcore.errors import TierError, TierUnavailable
from kvcore.model.shape import BlockShape
from kvcore.tiers.disk import Geometry
from kvcore.tiers.remote import Item, Shard
from kvcore.tiers.remote.memory import MemoryStore

SHAPE = BlockShape(layers=3, kv_heads=2, head_dim=8, block_tokens=16, dtype="bfloat16")
GEOMETRY = Geometry(SHAPE, b"model", ((0, 1), (1, 2)))
SHARD = Shard.of(GEOMETRY, 0, "kvcore")
SPACE = b"namespace".ljust(16, b"\0")


class Flaky(MemoryStore):
    """A store that fails on demand: each call raises the next of the ``planned`` errors, if any."""

    def __init__(self) -> None:
        super().__init__()
        self.planned: list[TierError] = []
        self.calls = 0
        self.down = False
        self.gate = threading.Event()
        self.gate.set()
        self.hang_at = 0

    def put(self, items: Sequence[Item]) -> list[TierError | None]:
        self._obey()
        return super().put(items)

    def get(self, items: Sequence[Item]) -> list[TierError | None]:
        self._obey()
        return super().get(items)

    def exists(self, names: Sequence[str]) -> list[bool]:
        self._obey()
        return super().exists(names)

    def _obey(self) -> None:
        self.calls += 1
        if self.calls == self.hang_at:
            self.gate.clear()
        self.gate.wait(30)
        if self.down:
            raise TierUnavailable("the test took the store down")
        if self.planned:
            raise self.planned.pop()


def key_of(seed: int) -> bytes:
    return random.Random(seed).randbytes(16)
