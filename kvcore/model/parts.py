"""Parts of a block: the KV heads and layers that one rank holds."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from kvcore.model.shape import BlockShape

__all__ = ["Part", "evenly"]


class Part(NamedTuple):
    """KV heads [start, stop) of layers [start, stop) of a block."""

    heads: tuple[int, int]
    layers: tuple[int, int]

    @classmethod
    def whole(cls, shape: BlockShape) -> Part:
        """Return the part that is all of a block of ``shape``."""
        return cls((0, shape.kv_heads), (0, shape.layers))

    @property
    def size(self) -> int:
        """Number of heads times number of layers."""
        (a, b), (c, d) = self
        return (b - a) * (d - c)

    def shape(self, whole: BlockShape) -> BlockShape:
        """Return the part as a block of its own; ``whole`` is the model's."""
        (a, b), (c, d) = self
        return whole.with_heads(b - a).with_layers(d - c)

    def within(self, whole: BlockShape) -> bool:
        """Return True if this is a non-empty part of a block of ``whole``."""
        (a, b), (c, d) = self
        return 0 <= a < b <= whole.kv_heads and 0 <= c < d <= whole.layers

    def seen_from(self, outer: Part) -> Part:
        """Return the same heads and layers, counted from where ``outer`` begins."""
        (a, b), (c, d) = self
        head, layer = outer.heads[0], outer.layers[0]
        return Part((a - head, b - head), (c - layer, d - layer))

    def overlap(self, other: Part) -> Part | None:
        """Return the intersection of two parts, or None if it is empty."""
        heads = max(self.heads[0], other.heads[0]), min(self.heads[1], other.heads[1])
        layers = max(self.layers[0], other.layers[0]), min(self.layers[1], other.layers[1])
        return Part(heads, layers) if heads[0] < heads[1] and layers[0] < layers[1] else None


def evenly(size: int, shares: int) -> tuple[tuple[int, int], ...]:
    """Split [0, size) into nearly equal pieces: heads among ranks, layers among stages."""
    return tuple(pairwise(share * size // shares for share in range(shares + 1)))
