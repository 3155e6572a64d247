"""Views of KV over memory of any stride, copies of units between them, and the oracle of a copy."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st

from kvcore.memory.copy import HeadRange
from kvcore.memory.copy.base import Units
from kvcore.memory.layout import Axis, KVLayout, KVView, Plane

__all__ = [
    "DTYPES", "Sizes", "StridedCopy", "clone", "contents", "copies", "fill", "memory", "one_by_one",
    "unit_pairs", "views", "whole",
]  # fmt: skip

DTYPES = {1: "float8_e4m3fn", 2: "bfloat16", 4: "float32"}
RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
Raw = npt.NDArray[np.integer[Any]]

COORDINATES = ("page", "head", "token outer", "token inner", "dim outer", "dim inner")
ORDERS = {
    "rows": (0, 1, 2, 3, 4, 5),
    "token-major": (0, 2, 3, 1, 4, 5),
    "columns": (0, 1, 4, 5, 2, 3),
    "heads first": (1, 0, 2, 3, 4, 5),
}


class Sizes:
    """What two layouts must share for a copy between them."""

    def __init__(self, itemsize: int, layers: int, dims: tuple[int, ...], unit: int) -> None:
        self.itemsize, self.layers, self.dims, self.unit = itemsize, layers, dims, unit


@st.composite
def views(draw: st.DrawFn, sizes: Sizes) -> KVView:
    """Planes of any order and padding, one after the other in one or two tensors, poisoned."""
    pages, heads = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    page_tokens = sizes.unit * draw(st.sampled_from([1, 2, 3, 8]))
    packed = draw(st.booleans())
    ends = [draw(st.integers(1, 40)) for _ in range(draw(st.integers(1, 2)))]
    layers = []
    for _ in range(sizes.layers):
        planes = []
        for dim in sizes.dims:
            inner = [2 if packed and n % 2 == 0 else 1 for n in (page_tokens, dim)]
            extent = (pages, heads, page_tokens // inner[0], inner[0], dim // inner[1], inner[1])
            order = draw(st.sampled_from(list(ORDERS.values())) | st.permutations(range(6)))
            tensor = draw(st.integers(0, len(ends) - 1))
            strides, stride = [0] * 6, 1
            for coordinate in reversed(order):
                strides[coordinate] = stride
                stride = stride * extent[coordinate] + draw(st.sampled_from([0, 0, 0, 1, 24]))
            token = Axis(strides[2], inner[0], strides[3] if inner[0] > 1 else 0)
            dims = Axis(strides[4], inner[1], strides[5] if inner[1] > 1 else 0)
            planes.append(Plane(tensor, ends[tensor], strides[0], strides[1], token, dims, dim))
            ends[tensor] += stride
        layers.append(tuple(planes))
    layout = KVLayout(DTYPES[sizes.itemsize], pages, page_tokens, heads, tuple(layers))
    skipped = draw(st.integers(0, 3))
    tensors = [memory(end + skipped, sizes.itemsize)[skipped:] for end in ends]
    return KVView(layout, tensors)


def memory(count: int, itemsize: int) -> torch.Tensor:
    """Return poisoned elements."""
    poison = np.full(count * itemsize, 0x5A, dtype=np.uint8)
    return torch.from_numpy(poison).view(getattr(torch, DTYPES[itemsize]))


def whole(tensor: torch.Tensor) -> Raw:
    """Everything in the storage behind a tensor, as integers; shares its memory."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    array: Raw = tensor.view(RAW[tensor.element_size()]).as_strided((count,), (1,), 0).numpy()
    return array


def fill(view: KVView, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for tensor in view.tensors:
        raw = whole(tensor).view(np.uint8)
        raw[:] = rng.integers(0, 256, len(raw), dtype=np.uint8)


def clone(view: KVView) -> KVView:
    """Return the same layout over a copy of all its memory."""
    tensors = []
    for tensor in view.tensors:
        storage = tensor.as_strided((whole(tensor).size,), (1,), 0).clone()
        tensors.append(storage[tensor.storage_offset() :])
    return KVView(view.layout, tensors)


def contents(view: KVView) -> list[bytes]:
    return [whole(tensor).tobytes() for tensor in view.tensors]


def one_by_one(
    src: KVView,
    src_units: Units,
    dst: KVView,
    dst_units: Units,
    layers: list[int],
    unit: int,
    heads: HeadRange,
) -> None:
    """Copy by `KVLayout.offset` alone, an element at a time: the oracle of every copy."""
    pairs = [(a, b) for a, b in zip(src_units, dst_units, strict=True) if a >= 0 and b >= 0]
    of, to = [whole(t) for t in src.tensors], [whole(t) for t in dst.tensors]
    for layer, head, (a, b), t in itertools.product(layers, range(heads.size), pairs, range(unit)):
        from_page, from_token = divmod(a * unit + t, src.layout.page_tokens)
        to_page, to_token = divmod(b * unit + t, dst.layout.page_tokens)
        for kv, plane in enumerate(src.layout.planes[layer]):
            target = dst.layout.planes[layer][kv]
            for d in range(plane.head_dim):
                i = src.layout.offset(layer, kv, from_page, heads.src + head, from_token, d)
                j = dst.layout.offset(layer, kv, to_page, heads.dst + head, to_token, d)
                i += src.tensors[plane.tensor].storage_offset()
                j += dst.tensors[target.tensor].storage_offset()
                to[target.tensor][j] = of[plane.tensor][i]


def unit_count(view: KVView, unit: int) -> int:
    return view.layout.num_pages * (view.layout.page_tokens // unit)


@st.composite
def unit_pairs(draw: st.DrawFn, src: KVView, dst: KVView, unit: int) -> tuple[Units, Units]:
    """Units to copy: in order or not, some left out on either side, none written twice."""
    most = unit_count(dst, unit)
    targets = list(range(most))
    if draw(st.booleans()):
        targets = draw(st.permutations(targets))
    targets = targets[: draw(st.integers(0, most))]
    first = draw(st.integers(0, 5))
    sources = [(first + i) % unit_count(src, unit) for i in range(len(targets))]
    if draw(st.booleans()):
        sources = draw(st.permutations(sources))
    pairs = []
    for a, b in zip(sources, targets, strict=True):
        out = draw(st.sampled_from(["", "", "", "a", "b", "ab"]))
        pairs.append((-1 if "a" in out else a, -7 if "b" in out else b))
    rows = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return rows[:, 0], rows[:, 1]


class StridedCopy(NamedTuple):
    """The arguments of `DeviceOps.copy_blocks`, in their order."""

    src: KVView
    src_units: Units
    dst: KVView
    dst_units: Units
    layers: list[int]
    unit: int
    heads: HeadRange

    def expected(self) -> list[bytes]:
        """Return what `contents` of the target must be after the copy."""
        copied = self._replace(dst=clone(self.dst))
        one_by_one(*copied)
        return contents(copied.dst)


@st.composite
def copies(draw: st.DrawFn, dims: Sequence[int], units: Sequence[int]) -> StridedCopy:
    """Draw a copy between memories of any stride, with heads of one of ``dims`` or of two."""
    dim = st.sampled_from(dims)
    sizes = Sizes(
        draw(st.sampled_from([1, 2, 4])),
        draw(st.integers(1, 3)),
        draw(st.tuples(dim) | st.tuples(dim, dim)),
        draw(st.sampled_from(units)),
    )
    src, dst = draw(views(sizes)), draw(views(sizes))
    src.check()
    dst.check()
    fill(src, draw(st.integers(0, 9)))
    a, b = draw(unit_pairs(src, dst, sizes.unit))
    size = draw(st.integers(0, min(src.layout.kv_heads, dst.layout.kv_heads)))
    heads = HeadRange(
        draw(st.integers(0, src.layout.kv_heads - size)),
        draw(st.integers(0, dst.layout.kv_heads - size)),
        size,
    )
    layers = draw(st.lists(st.integers(0, sizes.layers - 1), unique=True))
    return StridedCopy(src, a, dst, b, layers, sizes.unit, heads)
