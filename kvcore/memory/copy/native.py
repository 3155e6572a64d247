"""Copies in host memory, in C: ``_copy.c`` behind ctypes, which releases the GIL meanwhile."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from kvcore.errors import UnsupportedError
from kvcore.memory.copy.base import DeviceOps, HeadRange, Units, plane_rows
from kvcore.memory.layout import KVView

if TYPE_CHECKING:
    import torch

LIBRARY = Path(__file__).with_name("_copy.so")
_ABI = 3
"""Version of the structures that ``_copy.c`` reads."""
_STREAM_BYTES = 1 << 20
"""Copies of at least this many bytes write around the cache. Below it the destination may still be
in a core's L2 (0.5 to 2 MiB) when it is read."""


@functools.cache
def load_library() -> ctypes.CDLL:
    """The compiled library; UnsupportedError when it was not built or is of another version."""
    return prepare_library(LIBRARY)


def prepare_library(path: Path) -> ctypes.CDLL:
    """Load the library at ``path`` and check its version. Raises as ``load_library`` does."""
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise UnsupportedError(
            f"the native copies are not built ({error}): install a C compiler and run "
            "`python -m kvcore.memory.copy.build_native`; "
            "torch copies in their place, several times slower"
        ) from error
    if not hasattr(library, "kvcore_copy_abi") or library.kvcore_copy_abi() != _ABI:
        raise UnsupportedError(
            f"{path.name} is of another version: run `python -m kvcore.memory.copy.build_native`"
        )
    library.kvcore_copy.argtypes = [ctypes.c_void_p]
    library.kvcore_copy.restype = None
    library.kvcore_sum.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    library.kvcore_sum.restype = ctypes.c_uint64
    return library


class NativeOps(DeviceOps):
    """Tiles of tokens x dim, with SIMD transposes and streaming stores. Host memory only."""

    name: ClassVar[str] = "native"
    priority: ClassVar[int] = 10

    def __init__(self) -> None:
        self._library = load_library()

    def supports(self, src: KVView, dst: KVView) -> bool:
        return all(t.device.type == "cpu" for view in (src, dst) for t in view.tensors)

    def copy(
        self,
        src: KVView,
        src_units: Units,
        dst: KVView,
        dst_units: Units,
        layers: Sequence[int],
        unit_tokens: int,
        heads: HeadRange,
    ) -> None:
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
