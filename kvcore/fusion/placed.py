"""The cached KV of a prompt, in the pages of the request that is blended.

    arena slots ──H2D, layer by layer──▶ pages ──K rotated, V as is──▶ LayerKV of the prompt
                                           ▲                                 │ rows computed
                                           └──────── merged, a layer ────────┘

The chunks of a prompt are loaded to where their tokens belong, by the same copies, in the same
layer steps and with the same reports as any load. There they stay as they were stored until the
blend writes the layer. So layer i + 1 is loaded while layer i is computed, a layer can be read more
than once, and no chunk takes memory that the engine has not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvcore.errors import LayoutError
from kvcore.fusion.fusor import Placed
from kvcore.fusion.ops import FusionOps, Place, TorchFusion
from kvcore.fusion.plan import LayerKV
from kvcore.fusion.rope import Rope
from kvcore.memory.copy.base import DeviceOps
from kvcore.memory.layout import KVLayout, KVView

__all__ = ["PlacedChunks", "in_slots"]


def in_slots(slots: npt.NDArray[np.int64], start: int, stop: int, distance: int = 0) -> list[Place]:
    """Return where positions [start, stop) of a prompt are in the engine's pages.

    ``slots`` has the engine's slot of each position. Their KV was computed ``distance`` positions
    earlier.
    """
    if start >= stop:
        return []
    jumps = np.flatnonzero(np.diff(slots[start:stop]) != 1) + 1 + start
    runs = pairwise([start, *jumps.tolist(), stop])
    return [Place(int(slots[a]), b - a, a, distance) for a, b in runs]


def _head_dim(layout: KVLayout) -> int:
    dims = {tuple(plane.head_dim for plane in planes) for planes in layout.planes}
    first = min(dims)
    if dims != {(first[0], first[0])}:
        raise LayoutError(f"a blend needs K and V with equal head sizes, got {sorted(dims)}")
    return first[0]


class PlacedChunks(Placed):
    """The cached KV of a prompt of ``tokens`` tokens, in ``places`` of the engine's pages.

    ``view`` covers the engine's pages of all layers. ``ropes`` has one rope for each layer; None
    for a layer that does not rotate. ``landed(layer)`` blocks until the pages hold a layer.
    ``sink(layer, kv)`` writes merged KV to them. ``ops`` places and rotates, and may copy by
    ``copies``. If layers are read ``again`` before they are written, the first read may write the
    rotated K back. If the walk may start ``over``, layers are read again after they were written.

    What the reads need on the device is allocated and sent there at construction.
    """

    def __init__(
        self,
        tokens: int,
        view: KVView,
        places: Sequence[Place],
        ropes: Sequence[Rope | None],
        landed: Callable[[int], None],
        sink: Callable[[int, LayerKV], None],
        copies: DeviceOps,
        ops: FusionOps | None = None,
        *,
        again: bool = False,
        over: bool = False,
    ) -> None:
        self._landed = landed
        self._sink = sink
        self._ops = ops or TorchFusion()
        size = (tokens, view.layout.kv_heads, _head_dim(view.layout))
        dtype, device = getattr(torch, view.layout.dtype), view.tensors[0].device
        # Zeros, because a NaN in a row that is not yet written would spread even through a mask.
        parts = (torch.zeros(size, dtype=dtype, device=device) for _ in range(2))
        self._kv = kv = LayerKV(*parts)
        self._stored = self._ops.placing(view, kv, places, ropes, copies, again=again)
        self._replaced: dict[int, tuple[Tensor, LayerKV]] = {}
        if over:
            moved = [place._replace(distance=0) for place in places]
            self._written = self._ops.placing(view, kv, moved, [None] * len(ropes), copies)

    def layer(self, layer: int) -> LayerKV:
        self._landed(layer)
        if layer in self._replaced:
            self._written.place(layer)
            self._ops.merge(self._kv, *self._replaced[layer])
        else:
            self._stored.place(layer)
        return self._kv

    def keep(self, layer: int, rows: Tensor) -> None:
        self._replaced[layer] = rows, LayerKV(*(kv.index_select(0, rows) for kv in self._kv))

    def write(self, layer: int, kv: LayerKV) -> None:
        self._sink(layer, kv)
