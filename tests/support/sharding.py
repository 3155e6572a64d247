"""Blocks that ranks share in any way.

The naive twin is a numpy array of the whole block, [layers, heads, bytes]: a part is a slice of it.
"""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

import numpy as np
from hypothesis import strategies as st

from kvcore.model.parts import Part
from kvcore.model.shape import BlockShape
from kvcore.testing.tier_contract import NAMESPACE
from kvcore.tiers.base import BlockWrite
from kvcore.tiers.disk import Geometry

SHAPE = BlockShape(layers=5, kv_heads=4, head_dim=6, block_tokens=4, dtype="bfloat16")
HEAD = SHAPE.head_nbytes
WHOLE = Part.whole(SHAPE)
Block = np.ndarray[Any, np.dtype[np.uint8]]


def block_of(seed: int) -> Block:
    """Return random bytes, [layers, heads, bytes]."""
    size = (SHAPE.layers, SHAPE.kv_heads, HEAD)
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def taken(block: Block, part: Part) -> bytes:
    """Take a part of a block, the naive way."""
    return block[slice(*part.layers), slice(*part.heads)].tobytes()


def key_of(seed: int) -> bytes:
    return bytes([seed]) * 16


def spans(size: int) -> st.SearchStrategy[tuple[tuple[int, int], ...]]:
    """Draw a division of [0, size) into spans."""
    inner = st.sets(st.integers(1, size - 1))
    return inner.map(lambda cuts: tuple(pairwise([0, *sorted(cuts), size])))


def anywhere(size: int) -> st.SearchStrategy[tuple[int, int]]:
    edges = st.tuples(st.integers(0, size), st.integers(0, size))
    return edges.filter(lambda pair: pair[0] != pair[1]).map(lambda pair: (min(pair), max(pair)))


PARTS = st.builds(Part, anywhere(SHAPE.kv_heads), anywhere(SHAPE.layers))


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    """Draw ranks that divide heads and layers in any way, some of them holding the same part."""
    cut = draw(spans(SHAPE.kv_heads)), draw(spans(SHAPE.layers))
    places = [(heads, layers) for layers, heads in product(cut[1], cut[0])]
    copies = draw(st.integers(1, 2))
    ranks = [place for place in places for _ in range(copies)]
    return Geometry(SHAPE, b"model", tuple(h for h, _ in ranks), layers=tuple(n for _, n in ranks))


def to_write(slot: int, seed: int, part: Part) -> BlockWrite:
    data = memoryview(taken(block_of(seed), part))
    return BlockWrite(slot, key_of(seed), bytes(16), NAMESPACE, [data])
