"""The reference implementation of every copy, in torch, on a CPU or a GPU."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch

from kvcore.memory.copy.base import Copy, DeviceOps, Units
from kvcore.memory.layout import KVLayout, KVView, Plane

_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class ReferenceOps(DeviceOps):
    """Index operations on strided views of each plane. Byte-exact: elements move as integers."""

    name: ClassVar[str] = "reference"
    priority: ClassVar[int] = 0

    def supports(self, src: KVView, dst: KVView) -> bool:
        return True

    def copy(self, copy: Copy) -> None:
        src, a, dst, b, layers, unit_tokens, heads = copy.wanted()
        for layer in layers:
            planes = zip(src.layout.planes[layer], dst.layout.planes[layer], strict=True)
            for source, target in planes:
                from_view, to_view = _plane_view(src, source), _plane_view(dst, target)
                rows = from_view[_places(src.layout, source, a, unit_tokens, from_view.device)]
                rows = rows[:, heads.src : heads.src + heads.size].flatten(2)
                places = _places(dst.layout, target, b, unit_tokens, to_view.device)
                part = to_view[:, :, :, heads.dst : heads.dst + heads.size]
                part[places] = rows.view(*rows.shape[:2], *part.shape[-2:]).to(to_view.device)


def zero_tokens(view: KVView, start: int, stop: int) -> None:
    """Set tokens [start, stop), counted across all pages, to zero in every layer of ``view``.

    On a GPU it is queued on the current stream.
    """
    units = np.arange(start, stop, dtype=np.int64)
    for plane in (plane for planes in view.layout.planes for plane in planes):
        part = _plane_view(view, plane)
        part[_places(view.layout, plane, units, 1, part.device)] = 0


def _plane_view(view: KVView, plane: Plane) -> torch.Tensor:
    """Return a plane as ``[pages, token outer, token inner, heads, dim outer, dim inner]``."""
    layout, tensor = view.layout, view.tensors[plane.tensor]
    raw = _RAW[layout.itemsize]
    flat = tensor if tensor.dtype == raw else tensor.view(raw)
    token, dim = plane.token, plane.dim
    size = (
        layout.num_pages,
        layout.page_tokens // token.inner,
        token.inner,
        layout.kv_heads,
        plane.head_dim // dim.inner,
        dim.inner,
    )
    stride = (
        plane.page,
        token.stride,
        token.inner_stride,
        plane.head,
        dim.stride,
        dim.inner_stride,
    )
    return flat.as_strided(size, stride, tensor.storage_offset() + plane.offset)


def _places(
    layout: KVLayout, plane: Plane, units: Units, unit_tokens: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the indices (page, token outer, token inner) of every token of ``units``."""
    tokens = (units[:, None] * unit_tokens + np.arange(unit_tokens)).ravel()
    page, token = np.divmod(tokens, layout.page_tokens)
    outer, inner = np.divmod(token, plane.token.inner)
    return tuple(torch.from_numpy(i).to(device) for i in (page, outer, inner))  # type: ignore[return-value]
