"""KV in the memory layouts of engines, filled with noise, for tests and benchmarks of kernels.

This imports torch but not Triton.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch

from kvcore.memory.layout import (
    KVView,
    arena_layout,
    from_strides,
    sglang_layout,
    trtllm_layout,
    vllm_cpu_layout,
)
from kvcore.model.shape import BlockShape

__all__ = [
    "ENGINES",
    "ORDERS",
    "arena_view",
    "assert_same",
    "noise",
    "normal",
    "packed_view",
    "raw",
    "slot_view",
    "twin",
    "vllm_view",
]

ORDERS = [(0, 1, 2, 3, 4), (0, 1, 3, 2, 4), (1, 0, 2, 3, 4), (1, 2, 0, 3, 4)]
RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32}

Maker = Callable[[BlockShape, int, int], KVView]


def noise(count: int, dtype: str, seed: int = 0) -> torch.Tensor:
    """Return random bits, including NaNs and infinities."""
    size = torch.empty(0, dtype=getattr(torch, dtype)).element_size()
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 256, (count * size,), generator=generator, dtype=torch.uint8)
    return bits.view(getattr(torch, dtype))


def vllm_view(shape: BlockShape, pages: int, page: int, order: tuple[int, ...]) -> KVView:
    """Return one tensor per layer, whose five axes are in memory in ``order``, one of `ORDERS`."""
    logical = (shape.layers, pages, shape.kv_heads, page, sum(shape.dims()))
    physical = [logical[axis] for axis in order]
    whole = noise(math.prod(physical), shape.dtype).view(physical)
    tensors = list(whole.permute(sorted(range(5), key=order.__getitem__)).unbind(0))
    return KVView(from_strides(tensors, shape), tensors)


def slot_view(shape: BlockShape, pages: int, page: int) -> KVView:
    """Return one tensor per layer for K and one for V, addressed by token."""
    parts = [
        [noise(pages * page * shape.kv_heads * dim, shape.dtype, n).view(-1, shape.kv_heads, dim)
         for n in range(shape.layers)]
        for dim in shape.dims()
    ]  # fmt: skip
    values = parts[1] if len(parts) == 2 else None
    return KVView(
        sglang_layout(parts[0], values, page, shape.dtype), [t for part in parts for t in part]
    )


def one_tensor_view(shape: BlockShape, pages: int, page: int, order: str) -> KVView:
    """Return all layers in one tensor; ``order`` is "HND" or "NHD"."""
    count = pages * shape.layers * shape.kv_factor * shape.kv_heads * page * shape.head_dim
    layout = trtllm_layout(shape, pages, page, order)
    return KVView(layout, [noise(count, shape.dtype)])


def packed_view(shape: BlockShape, pages: int, page: int) -> KVView:
    """Return K column-major: its axes are not contiguous, and with "amx" they are cut into runs."""
    isa = "amx" if page % 32 == 0 and shape.itemsize == 2 and shape.head_dim % 16 == 0 else "vec"
    layout = vllm_cpu_layout(
        isa, layers=shape.layers, num_pages=pages, page_tokens=page,
        kv_heads=shape.kv_heads, head_dim=shape.head_dim, dtype=shape.dtype,
    )  # fmt: skip
    count = pages * shape.kv_heads * page * 2 * shape.head_dim
    return KVView(layout, [noise(count, shape.dtype, n) for n in range(shape.layers)])


def arena_view(shape: BlockShape, slots: int, arrangement: str = "blockwise") -> KVView:
    """Return canonical blocks."""
    count = slots * shape.nbytes // shape.itemsize
    return KVView(arena_layout(shape, slots, arrangement), [noise(count, shape.dtype, 9)])


ENGINES: dict[str, Maker] = {
    **{f"vllm-{order}": partial(vllm_view, order=order) for order in ORDERS},
    "slots": slot_view,
    "one-HND": partial(one_tensor_view, order="HND"),
    "one-NHD": partial(one_tensor_view, order="NHD"),
    "packed": packed_view,
}
"""Functions that make a view filled with `noise`, given shape, pages and tokens per page."""


def normal(view: KVView, seed: int = 0) -> KVView:
    """Fill all memory of the view with normal numbers in place, and return the view."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in view.tensors:
        whole = raw(tensor).view(tensor.dtype)
        whole.copy_(torch.randn(whole.shape, generator=generator))
    return view


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's whole storage as integers."""
    kind = RAW[tensor.element_size()]
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.view(kind).as_strided((count,), (1,), 0)


def twin(view: KVView) -> KVView:
    """Return the same view over a copy of its memory, with storages shared as before."""
    copies: dict[int, torch.Tensor] = {}
    tensors = []
    for tensor in view.tensors:
        key = tensor.untyped_storage().data_ptr()
        if key not in copies:
            copies[key] = raw(tensor).clone().view(tensor.dtype)
        tensors.append(
            copies[key].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        )
    return KVView(view.layout, tensors)


def assert_same(a: KVView, b: KVView, *, any_nan: bool = False) -> None:
    """Assert that every byte of both memories is equal.

    With ``any_nan`` a NaN equals every other: arithmetic on a GPU gives another one than a CPU's.
    """
    for x, y in zip(a.tensors, b.tensors, strict=True):
        ours, right = raw(x), raw(y)
        same = ours == right
        if any_nan:
            same |= ours.view(x.dtype).isnan() & right.view(y.dtype).isnan()
        assert bool(same.all())
