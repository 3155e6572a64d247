"""An eviction policy of your own: first in, first out.

    pip install ./examples      # its pyproject.toml names this module as a plugin of kvcore
    kvcore plugins              # lists the policy `fifo`

    [host]                      # in kvcore.toml
    policy = "fifo"

kvcore tells a policy which blocks may be evicted: published blocks that no request uses and that no
other block of the tier builds on. The policy names the next victim. It runs in the engine's
scheduling loop, so every call has to be fast.
"""

from collections.abc import Iterable

from kvcore.index.policy import EvictionPolicy, LeafHeap, Recency
from kvcore.plugins import PolicyPlugin, hookimpl


class Fifo(EvictionPolicy):
    """Evicts the block that was stored first, however often it was used since."""

    name = "fifo"
    watches_blocks = True  # call `stored` for every block, not only for the last one of a run

    def __init__(self, capacity: int, recency: Recency) -> None:
        super().__init__(capacity, recency)
        self._stored: dict[int, int] = {}  # when each block was stored, by the block's number
        self._now = 0
        self._leaves = LeafHeap(self._stored.__getitem__)  # pops the block with the lowest score

    def stored(self, node: int, key: bytes) -> None:
        self._now += 1
        self._stored[node] = self._now

    def add(self, node: int) -> None:
        self._leaves.add(node)

    def remove(self, node: int) -> None:
        self._leaves.discard(node)

    def victim(self) -> int | None:
        return self._leaves.pop()

    def forget(self, node: int, key: bytes, parent: int, *, evicted: bool) -> None:
        self._leaves.lowered(node)  # the number may be given to another block

    def evictable(self) -> Iterable[int]:
        return self._leaves.nodes()


@hookimpl
def kvcore_policies() -> list[PolicyPlugin]:
    return [PolicyPlugin("fifo", lambda: Fifo)]
