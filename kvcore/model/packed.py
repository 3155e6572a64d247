"""Blocks of pages whose format only the engine knows.

Not every cache can be described by heads and dims: two caches of one layer (the latents and the
index of sparse attention), layers with unlike heads, scales beside the values, packed latents.
kvcore stores their pages as they are, each as one run of bytes:

    block   │ cache 0: page, page │ cache 1: page, page │ ... │ filler │

A block is a whole number of pages. Nobody but the same engine can read it, so everything that
decides the format must be part of the model's fingerprint.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import lcm

from kvcore.errors import LayoutError
from kvcore.model.shape import BlockShape

__all__ = ["PackedPages"]


@dataclass(frozen=True)
class PackedPages:
    """The pages of all caches of a model, on one rank.

    ``page_tokens`` is the size of a page in tokens, and ``page_nbytes`` the bytes of a page of each
    cache, in the order of the model's layers.
    """

    page_tokens: int
    page_nbytes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.page_nbytes or min(self.page_tokens, *self.page_nbytes) < 1:
            raise LayoutError(f"not the pages of a model: {self}")

    def block_tokens(self, wanted: int, windows: Iterable[int] = ()) -> int:
        """Return the tokens of a block: ``wanted``, raised to a whole number of pages.

        ``windows`` are the sizes of pages of windows, of which it is a whole number too.
        """
        unit = lcm(self.page_tokens, *windows)
        return -(-wanted // unit) * unit

    def offsets(self, block_tokens: int) -> tuple[int, ...]:
        """Return where the pages of each cache begin in a block, and where the last ones end."""
        pages = block_tokens // self.page_tokens
        return (0, *accumulate(pages * nbytes for nbytes in self.page_nbytes))

    def shape(
        self, block_tokens: int, shares: int, stages: Sequence[tuple[int, int]] = ()
    ) -> BlockShape:
        """Return the shape of a block that ``shares`` ranks hold, as bytes.

        It is nominal: each cache counts as a layer, and each rank's pages as a head of it. All
        layers are equal in it, so that a block ends with a few bytes of filler. ``stages`` are the
        caches [start, stop) of each pipeline stage, by default all on one. Each stage's part ends
        with filler, as much as the stage with the largest caches leaves to the others.
        """
        if block_tokens % self.page_tokens:
            raise LayoutError(
                f"blocks of {block_tokens} tokens with pages of {self.page_tokens}: a block must "
                "be a whole number of pages"
            )
        offsets = self.offsets(block_tokens)
        parts = stages or ((0, len(self.page_nbytes)),)
        width = max(
            -(-(offsets[stop] - offsets[start]) // ((stop - start) * block_tokens))
            for start, stop in parts
        )
        return BlockShape(
            layers=len(self.page_nbytes),
            kv_heads=shares,
            head_dim=width,
            block_tokens=block_tokens,
            dtype="uint8",
            kv_factor=1,
        )
