"""Copies in host memory, in C: ``_copy.c`` through ctypes, which releases the GIL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from kvcore.memory.copy.base import Copy, DeviceOps, plane_rows
from kvcore.memory.layout import KVView
from kvcore.memory.native_lib import load_library

if TYPE_CHECKING:
    import torch

_STREAM_BYTES = 1 << 20
"""Copies of at least this many bytes bypass the cache. The destination of a smaller copy may still
be in a core's L2 (0.5 to 2 MiB) when it is read."""


class NativeOps(DeviceOps):
    """Tiles of tokens x dim, with SIMD transposes and streaming stores. Host memory only."""

    name: ClassVar[str] = "native"
    priority: ClassVar[int] = 10

    def __init__(self) -> None:
        self._library = load_library()

    def supports(self, src: KVView, dst: KVView) -> bool:
        return all(t.device.type == "cpu" for view in (src, dst) for t in view.tensors)

    def copy(self, copy: Copy) -> None:
        src, src_units, dst, dst_units, layers, unit_tokens, heads = copy
        layout = src.layout
        sources = plane_rows(src, layers, heads.src)
        targets = plane_rows(dst, layers, heads.dst)
        width = sum(plane.head_dim for plane in layout.planes[layers[0]])
        tile = unit_tokens * heads.size * width * layout.itemsize
        nbytes = len(src_units) * len(layers) * tile
        request = np.array(
            [
                sources.ctypes.data,
                targets.ctypes.data,
                len(layers),
                layout.kv_factor,
                src_units.ctypes.data,
                dst_units.ctypes.data,
                len(src_units),
                unit_tokens,
                layout.page_tokens // unit_tokens,
                dst.layout.page_tokens // unit_tokens,
                heads.size,
                layout.itemsize,
                nbytes >= _STREAM_BYTES,
            ],
            dtype=np.int64,
        )
        self._library.kvcore_copy(request.ctypes.data)

    def sums(self, data: torch.Tensor, offsets: Sequence[int], nbytes: int) -> list[int]:
        if data.device.type != "cpu":
            return super().sums(data, offsets, nbytes)
        return [self._library.kvcore_sum(data.data_ptr() + offset, nbytes, 0) for offset in offsets]
