"""Device memory that holds chunks as they were stored, until a blend reads them layer by layer.

    arena slots ──H2D, layer by layer──▶ ChunkStaging ──K rotated, V as is──▶ LayerKV of the prompt
    engine pages ────────────── exact prefix, one layer at a time ──────────▶

A transfer graph uses staging like the engine's pages: it is a `DeviceGroup` whose pages are the
rows of the chunks' graphs. So chunks are loaded by the same copies, in the same layer steps and
with the same reports as any load, and layer i + 1 is loaded while layer i is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from kvcore.errors import LayoutError
from kvcore.fusion.fusor import Placed
from kvcore.fusion.ops import FusionOps, Place, TorchFusion
from kvcore.fusion.plan import LayerKV
from kvcore.fusion.rope import Rope
from kvcore.memory.copy.base import DeviceOps
from kvcore.memory.layout import Axis, DeviceGroup, KVLayout, KVView, Plane
from kvcore.model.shape import BlockShape

__all__ = ["ChunkStaging", "Place", "PlacedChunks", "PrefixReader"]


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


class PrefixReader:
    """Reads the exact prefix of a prompt from the engine's pages, one layer at a time.

    ``view`` covers the engine's pages of all layers. ``pages`` are the prefix's pages in order.
    """

    def __init__(
        self, ops: DeviceOps, view: KVView, shape: BlockShape, pages: Sequence[int], tokens: int
    ) -> None:
        _check_shape(shape)
        page_tokens = view.layout.page_tokens
        self._ops = ops
        self._view = view
        self._tokens = tokens
        self._pages = np.asarray(pages, dtype=np.int64)[: -(-tokens // page_tokens)]
        count = len(self._pages)
        size = (2, count * page_tokens, shape.kv_heads, shape.head_dim)
        device = view.tensors[0].device
        self._scratch = torch.empty(size, dtype=getattr(torch, shape.dtype), device=device)
        layout = _token_major(shape, 1, max(count, 1), page_tokens)
        self._into = KVView(layout, [self._scratch])

    def read(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write the prefix to the first rows of ``keys`` and ``values`` [tokens, kv_heads, dim]."""
        if not len(self._pages):
            return
        everything = np.arange(len(self._pages), dtype=np.int64)
        one = self._view.select_layers([layer])
        self._ops.copy_blocks(one, self._pages, self._into, everything)
        keys[: self._tokens] = self._scratch[0, : self._tokens]
        values[: self._tokens] = self._scratch[1, : self._tokens]


class PlacedChunks(Placed):
    """The cached KV of a prompt of ``tokens`` tokens, from a staging and an exact prefix.

    ``ropes`` has one rope for each layer; None for a layer that does not rotate. ``landed(layer)``
    blocks until the staging holds a layer. ``sink(layer, kv)`` receives merged KV. ``ops`` rotates
    and places. If layers are read ``again``, the first read writes the rotated K back to the
    staging.
    """

    def __init__(
        self,
        tokens: int,
        staging: ChunkStaging,
        places: Sequence[Place],
        ropes: Sequence[Rope | None],
        prefix: PrefixReader,
        landed: Callable[[int], None],
        sink: Callable[[int, LayerKV], None],
        ops: FusionOps | None = None,
        again: bool = False,
    ) -> None:
        self._tokens = tokens
        self._staging = staging
        self._places = places
        self._ropes = ropes
        self._prefix = prefix
        self._landed = landed
        self._sink = sink
        self._ops = ops or TorchFusion()
        self._again = again
        self._turned: set[int] = set()
        staged = staging.tensor
        size = (tokens, *staged.shape[3:])
        # Zeros, because a NaN in a row that is not yet written would spread even through a mask.
        self._kv = LayerKV(staged.new_zeros(size), staged.new_zeros(size))

    def layer(self, layer: int) -> LayerKV:
        self._landed(layer)
        kv = self._kv
        self._prefix.read(layer, kv.keys, kv.values)
        staged = LayerKV(*self._staging.tensor[layer])
        turned = layer in self._turned
        self._ops.place(staged, kv, self._places, None if turned else self._ropes[layer])
        if self._again and not turned:
            self._keep(staged, kv)
            self._turned.add(layer)
        return kv

    def _keep(self, staged: LayerKV, kv: LayerKV) -> None:
        for place in self._places:
            if place.distance:
                here = slice(place.first, place.first + place.length)
                staged.keys[here] = kv.keys[place.position : place.position + place.length]

    def write(self, layer: int, kv: LayerKV) -> None:
        self._sink(layer, kv)
