"""Where KV is in memory: strides that describe an engine's pages, an arena, or a buffer.

One element of KV has six coordinates: layer, k/v, page, head, token in the page, dim. A layout maps
them to a tensor and an offset in it, in elements:

    plane  = planes[layer][kv]
    offset = plane.offset + page * plane.page + head * plane.head
             + plane.token(token) + plane.dim(dim)

``plane.token`` and ``plane.dim`` are axes that may be split once, as packed caches need: ``axis(i)
= (i // inner) * stride + (i % inner) * inner_stride``. A host arena of canonical blocks is a layout
too, whose pages are its slots. Every copy of KV is therefore from layout to layout:
``kvcore.memory.copy``.

Canonical block: layer, head, k/v, token, dim, row-major. One layer is one run of bytes, and within
it a range of heads is one run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from math import gcd
from typing import TYPE_CHECKING

import numpy as np

from kvcore.errors import LayoutError
from kvcore.model.shape import BlockShape, item_bytes

if TYPE_CHECKING:
    import torch

__all__ = [
    "Arrangement",
    "Axis",
    "KVLayout",
    "KVView",
    "Plane",
    "arena_layout",
    "from_strides",
    "sglang_layout",
    "trtllm_layout",
    "unit_tokens",
    "vllm_cpu_layout",
]


@dataclass(frozen=True)
class Axis:
    """Strides of one coordinate, in elements; packed memory splits it into runs of ``inner``."""

    stride: int
    inner: int = 1
    inner_stride: int = 0

    def __call__(self, index: int) -> int:
        return index // self.inner * self.stride + index % self.inner * self.inner_stride

    def last(self, size: int) -> int:
        """Return the largest offset of any index below ``size``. Strides are not negative."""
        inner = min(size, self.inner)
        return (size - 1) // self.inner * self.stride + (inner - 1) * self.inner_stride


@dataclass(frozen=True)
class Plane:
    """Where K (or V) of one layer is: ``tensor`` is an index into the view's tensors."""

    tensor: int
    offset: int
    page: int
    head: int
    token: Axis
    dim: Axis
    head_dim: int


@dataclass(frozen=True)
class KVLayout:
    """Strides of ``num_pages`` pages of ``page_tokens`` tokens: ``planes[layer][kv]``."""

    dtype: str
    num_pages: int
    page_tokens: int
    kv_heads: int
    planes: tuple[tuple[Plane, ...], ...]

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return item_bytes(self.dtype)

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.planes)

    @property
    def kv_factor(self) -> int:
        """2 for K and V, 1 for a latent."""
        return len(self.planes[0])

    def select_layers(self, layers: Sequence[int]) -> KVLayout:
        """Return the layout of some layers, in the order given."""
        return replace(self, planes=tuple(self.planes[layer] for layer in layers))

    def select_heads(self, start: int, stop: int) -> KVLayout:
        """Return the layout of heads [start, stop), as a rank holds them."""
        if not 0 <= start < stop <= self.kv_heads:
            raise LayoutError(f"heads {start}..{stop} are out of range: there are {self.kv_heads}")
        planes = tuple(
            tuple(replace(plane, offset=plane.offset + start * plane.head) for plane in planes)
            for planes in self.planes
        )
        return replace(self, kv_heads=stop - start, planes=planes)

    def offset(self, layer: int, kv: int, page: int, head: int, token: int, dim: int) -> int:
        """Return the element offset in the tensor: the definition that all else must agree with."""
        plane = self.planes[layer][kv]
        base = plane.offset + page * plane.page + head * plane.head
        return base + plane.token(token) + plane.dim(dim)

    def last_offset(self, plane: Plane) -> int:
        """Return the largest element offset that ``plane`` reaches."""
        return (
            plane.offset
            + (self.num_pages - 1) * plane.page
            + (self.kv_heads - 1) * plane.head
            + plane.token.last(self.page_tokens)
            + plane.dim.last(plane.head_dim)
        )


@dataclass(frozen=True, eq=False)
class KVView:
    """A layout over real memory. The tensors are not copied and must outlive the view."""

    layout: KVLayout
    tensors: Sequence[torch.Tensor]

    def check(self) -> None:
        """Raise LayoutError unless every element is inside its tensor and no two share a place.

        Shared places are searched within one page of one layer, by listing its offsets.
        """
        layout = self.layout
        if layout.num_pages < 1 or layout.page_tokens < 1 or layout.kv_heads < 1:
            raise LayoutError(f"a layout without pages, tokens or heads: {layout}")
        for layer, planes in enumerate(layout.planes):
            for plane in planes:
                self._check_plane(layer, plane)
            _check_overlap(layout, layer, planes)

    def _check_plane(self, layer: int, plane: Plane) -> None:
        if not 0 <= plane.tensor < len(self.tensors):
            raise LayoutError(f"layer {layer} names tensor {plane.tensor} of {len(self.tensors)}")
        strides = (
            plane.page,
            plane.head,
            plane.token.stride,
            plane.token.inner_stride,
            plane.dim.stride,
            plane.dim.inner_stride,
            plane.offset,
        )
        if min(strides) < 0:
            raise LayoutError(f"layer {layer} has a negative stride or offset: {plane}")
        if self.layout.page_tokens % plane.token.inner or plane.head_dim % plane.dim.inner:
            raise LayoutError(f"layer {layer}: packed runs do not divide the page or head: {plane}")
        tensor = self.tensors[plane.tensor]
        if tensor.element_size() != self.layout.itemsize:
            raise LayoutError(
                f"layer {layer}: a tensor of {tensor.dtype} for a layout of {self.layout.dtype}"
            )
        room = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
        last = self.layout.last_offset(plane)
        if last >= room:
            raise LayoutError(
                f"layer {layer} reaches element {last} of a tensor with {room}: "
                "its strides, page count or page size are not those of the memory"
            )

    def select_layers(self, layers: Sequence[int]) -> KVView:
        """Return the view of some layers, in the order given."""
        return KVView(self.layout.select_layers(layers), self.tensors)


def _check_overlap(layout: KVLayout, layer: int, planes: Sequence[Plane]) -> None:

    places = []
    for plane in planes:
        tokens = np.array([plane.token(t) for t in range(layout.page_tokens)])
        dims = np.array([plane.dim(d) for d in range(plane.head_dim)])
        heads = np.arange(layout.kv_heads) * plane.head
        offsets = heads[:, None, None] + tokens[:, None] + dims + plane.offset
        places.append(offsets.ravel() + (plane.tensor << 48))
    flat = np.concatenate(places)
    if len(np.unique(flat)) != len(flat):
        raise LayoutError(f"layer {layer}: two elements of a page share a place: {planes}")


class Arrangement(str, Enum):
    """Order of an arena's bytes: all layers of a block together, or all blocks of a layer."""

    BLOCKWISE = "blockwise"
    LAYERWISE = "layerwise"


def arena_layout(
    shape: BlockShape,
    num_slots: int,
    arrangement: Arrangement | str = Arrangement.BLOCKWISE,
    slot_nbytes: int | None = None,
) -> KVLayout:
    """Return the layout of canonical blocks in one flat buffer, one slot each.

    A page is a slot, and page_tokens equals block_tokens. ``slot_nbytes`` is the distance between
    blockwise slots (default: the block's size). If it is larger than the block, the rest is padding
    for direct I/O.
    """
    per_layer = shape.layer_nbytes // shape.itemsize
    distance = (slot_nbytes or shape.nbytes) // shape.itemsize
    if distance < shape.nbytes // shape.itemsize or (slot_nbytes or 0) % shape.itemsize:
        raise LayoutError(f"slots of {slot_nbytes} bytes for blocks of {shape.nbytes}")
    if Arrangement(arrangement) is Arrangement.BLOCKWISE:
        layer_stride, page = per_layer, distance
    else:
        layer_stride, page = per_layer * num_slots, per_layer
    per_head = shape.head_nbytes // shape.itemsize
    layers = []
    for layer in range(shape.layers):
        offset, parts = layer * layer_stride, []
        for dim in shape.dims():
            parts.append(Plane(0, offset, page, per_head, Axis(dim), Axis(1), dim))
            offset += dim * shape.block_tokens
        layers.append(tuple(parts))
    return KVLayout(shape.dtype, num_slots, shape.block_tokens, shape.kv_heads, tuple(layers))


def from_strides(tensors: Sequence[torch.Tensor], shape: BlockShape) -> KVLayout:
    """Return the layout of vLLM's paged cache: ``[pages, heads, tokens, content]`` per layer.

    The content is K then V of one token and head (or a latent). The strides give the physical order
    of the axes, so all of LBHNC, LBNHC, LHBNC, BLHNC, BLNHC and BHLNC are supported.
    """
    pages, heads, tokens, content = tensors[0].shape
    if content != sum(shape.dims()) or heads != shape.kv_heads:
        raise LayoutError(
            f"a cache of {tuple(tensors[0].shape)} for {shape.kv_heads} heads of {shape.dims()}"
        )
    layers = []
    for index, tensor in enumerate(tensors):
        page, head, token, element = tensor.stride()
        offset, parts = 0, []
        for dim in shape.dims():
            parts.append(Plane(index, offset, page, head, Axis(token), Axis(element), dim))
            offset += dim * element
        layers.append(tuple(parts))
    return KVLayout(shape.dtype, pages, tokens, heads, tuple(layers))


def vllm_cpu_layout(
    isa: str,
    *,
    layers: int,
    num_pages: int,
    page_tokens: int,
    kv_heads: int,
    head_dim: int,
    dtype: str,
) -> KVLayout:
    """Return the layout of vLLM's CPU attention.

    Each layer is contiguous ``[pages, heads, 2 * tokens, dim]``, K then V. "vec" and "vec16" keep K
    column-major and V row-major. "amx" keeps both in tiles: K with pairs of dims together in groups
    of 16 tokens, V with pairs of tokens together in groups of 16 dims.
    """
    half = page_tokens * head_dim
    if isa in ("vec", "vec16"):
        k_axes = Axis(1), Axis(page_tokens)
        v_axes = Axis(head_dim), Axis(1)
    elif isa == "amx":
        if item_bytes(dtype) != 2 or page_tokens % 32 or head_dim % 16:
            raise LayoutError(f"amx packs 2-byte elements in pages of 32n tokens, got {dtype}")
        k_axes = Axis(16 * head_dim, 16, 2), Axis(32, 2, 1)
        v_axes = Axis(32, 2, 1), Axis(16 * page_tokens, 16, 2)
    else:
        raise LayoutError(
            f"given vLLM's CPU cache for isa {isa!r}; supported are vec, vec16 and amx"
        )
    page, head = 2 * half * kv_heads, 2 * half
    planes = tuple(
        (
            Plane(layer, 0, page, head, *k_axes, head_dim),
            Plane(layer, half, page, head, *v_axes, head_dim),
        )
        for layer in range(layers)
    )
    return KVLayout(dtype, num_pages, page_tokens, kv_heads, planes)


def sglang_layout(
    k_buffers: Sequence[torch.Tensor],
    v_buffers: Sequence[torch.Tensor] | None,
    page_tokens: int,
    dtype: str,
) -> KVLayout:
    """Return the layout of SGLang's token-slot pools, ``[slots, heads, dim]`` for each layer.

    The view's tensors are all K buffers, then all V buffers. MLA has no V buffers and one head.
    """
    slots, heads, _ = k_buffers[0].shape
    layers = []
    for index, k in enumerate(k_buffers):
        parts = [(index, k)]
        if v_buffers is not None:
            parts.append((len(k_buffers) + index, v_buffers[index]))
        layers.append(
            tuple(
                Plane(
                    i,
                    0,
                    t.stride(0) * page_tokens,
                    t.stride(1),
                    Axis(t.stride(0)),
                    Axis(t.stride(2)),
                    t.shape[2],
                )
                for i, t in parts
            )
        )
    return KVLayout(dtype, slots // page_tokens, page_tokens, heads, tuple(layers))


def trtllm_layout(shape: BlockShape, num_pages: int, page_tokens: int, order: str) -> KVLayout:
    """Return the layout of TensorRT-LLM's one tensor.

    It is contiguous ``[pages, layers, kv, heads * tokens * dim]``. ``order`` is "HND" (heads
    outermost in a page) or "NHD" (tokens outermost).
    """
    if order not in ("HND", "NHD"):
        raise LayoutError(f"given order {order!r}; supported are HND and NHD")
    if len(set(shape.dims())) != 1:
        raise LayoutError(f"K and V of different dims {shape.dims()} do not fit one tensor")
    heads, dim = shape.kv_heads, shape.head_dim
    part = heads * page_tokens * dim
    head, token = (page_tokens * dim, dim) if order == "HND" else (dim, heads * dim)
    planes = tuple(
        tuple(
            Plane(
                0,
                (layer * shape.kv_factor + kv) * part,
                shape.layers * shape.kv_factor * part,
                head,
                Axis(token),
                Axis(1),
                dim,
            )
            for kv in range(shape.kv_factor)
        )
        for layer in range(shape.layers)
    )
    return KVLayout(shape.dtype, num_pages, page_tokens, heads, planes)


def unit_tokens(page_tokens: int, block_tokens: int) -> int:
    """Return the tokens of the largest run that neither a page nor a token block splits."""
    return gcd(page_tokens, block_tokens)
