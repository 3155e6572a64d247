"""A model as kvcore sees it: the same description in the leader and in every worker.

Both derive it from the engine's own settings, so that they agree on the order of layers, the shape
of blocks and the number of slots without a handshake.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcore.layout import BlockShape

__all__ = ["LayerGroup", "ModelDescription", "head_range"]


def head_range(kv_heads: int, ranks: int, rank: int) -> tuple[int, int]:
    """KV heads [start, stop) that tensor-parallel ``rank`` holds of ``kv_heads``.

    With more ranks than heads, consecutive ranks hold the same one.
    """
    start = rank * kv_heads // ranks
    if kv_heads < ranks:
        return start, start + 1
    return start, (rank + 1) * kv_heads // ranks


@dataclass(frozen=True)
class LayerGroup:
    """Layers that share one page table in the engine.

    ``layers`` are canonical layer indices in memory order and ``names`` the engine's names in the
    same order, where it has any. ``page_tokens`` is the size of a page of the table, in tokens.
    """

    index: int
    page_tokens: int
    layers: tuple[int, ...]
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModelDescription:
    """One model. ``shape`` is its whole canonical block; a rank holds ``head_range(rank)`` of it.

    ``fingerprint`` is `kvcore.block.model_fingerprint`'s; ``world_size`` counts the ranks.
    """

    shape: BlockShape
    groups: tuple[LayerGroup, ...]
    fingerprint: bytes
    world_size: int

    @property
    def single_group(self) -> bool:
        return len(self.groups) == 1

    def head_range(self, rank: int) -> tuple[int, int]:
        """KV heads [start, stop) of ``rank``."""
        return head_range(self.shape.kv_heads, self.world_size, rank)

    def rank_shape(self, rank: int) -> BlockShape:
        """The canonical block of one rank's heads."""
        start, stop = self.head_range(rank)
        return self.shape.with_heads(stop - start)
