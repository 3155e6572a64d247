"""Device memory that holds chunks as they were stored, until a blend reads them layer by layer.

    arena slots ──H2D, layer by layer──▶ ChunkStaging ──K rotated, V as is──▶ LayerKV of the prompt
    engine pages ────────────── exact prefix, one layer at a time ──────────▶

A transfer graph uses staging like the engine's pages: it is a `DeviceGroup` whose pages are the
rows of the chunks' graphs. So chunks are loaded by the same copies, in the same layer steps and
with the same reports as any load, and layer i + 1 is loaded while layer i is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from kvcore.errors import LayoutError
from kvcore.fusion.fusor import Placed
from kvcore.fusion.ops import FusionOps, Place, TorchFusion
from kvcore.fusion.plan import LayerKV
from kvcore.fusion.rope import Rope
from kvcore.memory.copy.base import DeviceOps
from kvcore.memory.device_group import DeviceGroup
from kvcore.memory.layout import Axis, KVLayout, KVView, Plane
from kvcore.model.shape import BlockShape

__all__ = ["ChunkStaging", "PagedPrefix", "Place", "PlacedChunks"]


def _token_major(shape: BlockShape, layers: int, pages: int, page_tokens: int) -> KVLayout:
    """Return the layout of one tensor [layers, k/v, pages * page_tokens, kv_heads, dim]."""
    row = shape.kv_heads * shape.head_dim
    part = pages * page_tokens * row
    planes = tuple(
        tuple(
            Plane(
                tensor=0,
                offset=(2 * layer + kv) * part,
                page=page_tokens * row,
                head=shape.head_dim,
                token=Axis(row),
                dim=Axis(1),
                head_dim=shape.head_dim,
            )
            for kv in range(2)
        )
        for layer in range(layers)
    )
    return KVLayout(shape.dtype, pages, page_tokens, shape.kv_heads, planes)


def _check_shape(shape: BlockShape) -> None:
    if shape.kv_factor != 2 or shape.dims() != (shape.head_dim, shape.head_dim):
        raise LayoutError(f"a blend needs K and V with equal head sizes, got {shape}")


class ChunkStaging:
    """Memory for ``blocks`` canonical blocks of ``shape``, all layers, on ``device``.

    ``tensor`` is [layers, k/v, blocks * block_tokens, kv_heads, dim].
    """

    def __init__(self, shape: BlockShape, blocks: int, device: torch.device) -> None:
        _check_shape(shape)
        tokens = blocks * shape.block_tokens
        size = (shape.layers, 2, tokens, shape.kv_heads, shape.head_dim)
        self.tensor = torch.empty(size, dtype=getattr(torch, shape.dtype), device=device)
        layout = _token_major(shape, shape.layers, blocks, shape.block_tokens)
        self.groups = [DeviceGroup(tuple(range(shape.layers)), KVView(layout, [self.tensor]))]

    @staticmethod
    def nbytes(shape: BlockShape, blocks: int) -> int:
        """Return the size in bytes of a staging for ``blocks`` blocks."""
        return blocks * shape.nbytes


class PagedPrefix(NamedTuple):
    """The exact prefix of a prompt: its first ``tokens`` tokens, in the engine's ``pages``.

    ``view`` covers the engine's pages of all layers. ``pages`` are in order.
    """

    view: KVView
    pages: Sequence[int]
    tokens: int

    @property
    def places(self) -> list[Place]:
        """The prefix page by page."""
        size = self.view.layout.page_tokens
        return [
            Place(page * size, min(size, self.tokens - start), start, 0)
            for page, start in zip(self.pages, range(0, self.tokens, size), strict=False)
        ]


class PlacedChunks(Placed):
    """The cached KV of a prompt of ``tokens`` tokens, from a staging and an exact prefix.

    ``ropes`` has one rope for each layer; None for a layer that does not rotate. ``landed(layer)``
    blocks until the staging holds a layer. ``sink(layer, kv)`` receives merged KV. ``ops`` places
    and rotates, and may copy by ``copies``. If layers are read ``again``, the first read may write
    the rotated K back to the staging.

    All that the blend needs on the device is allocated and sent there at construction.
    """

    def __init__(
        self,
        tokens: int,
        staging: ChunkStaging,
        places: Sequence[Place],
        ropes: Sequence[Rope | None],
        prefix: PagedPrefix,
        landed: Callable[[int], None],
        sink: Callable[[int, LayerKV], None],
        copies: DeviceOps,
        ops: FusionOps | None = None,
        again: bool = False,
    ) -> None:
        self._landed = landed
        self._sink = sink
        ops = ops or TorchFusion()
        staged = staging.tensor
        size = (tokens, *staged.shape[3:])
        # Zeros, because a NaN in a row that is not yet written would spread even through a mask.
        self._kv = kv = LayerKV(staged.new_zeros(size), staged.new_zeros(size))
        still = [None] * len(ropes)
        self._sources = [
            ops.placing(prefix.view, kv, prefix.places, still, copies),
            ops.placing(staging.groups[0].view, kv, places, ropes, copies, again=again),
        ]

    def layer(self, layer: int) -> LayerKV:
        self._landed(layer)
        for source in self._sources:
            source.place(layer)
        return self._kv

    def write(self, layer: int, kv: LayerKV) -> None:
        self._sink(layer, kv)
