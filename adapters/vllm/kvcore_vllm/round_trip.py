"""The round trip at start: one page that vLLM's attention writes, read through kvcore's copies.

    pattern ──impl.do_kv_cache_update──▶ the last page ──copy_blocks──▶ a block: the same pattern?

It runs on the device, in the engine's own memory and with its own backend, so it also holds for a
version and a kernel that nobody has tried. The page is restored afterwards.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from kvcore.errors import LayoutError
from kvcore.memory.copy import DeviceOps, select_ops
from kvcore.memory.layout import KVView, arena_layout
from kvcore.model.shape import BlockShape

_log = logging.getLogger("kvcore.vllm")

_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_BASE = 8
"""Digits 0 to 7 are exact in every float type, in FP8 too."""


def verify(
    layers: Sequence[Any],
    view: KVView,
    shape: BlockShape,
    dtype: torch.dtype,
    ops: Sequence[DeviceOps],
) -> None:
    """Verify that kvcore reads each element of a page where the layers' attention wrote it.

    ``layers`` are vLLM's attention modules, in the order of ``view``. ``shape`` is this rank's
    block, and ``dtype`` the type of the keys and values that attention writes. Raises LayoutError
    if an element is in another place. Nothing may be stored then. A backend that writes pages only
    inside its forward is not verified, and neither are latents (MLA).
    """
    names = sorted({type(layer.impl).__name__ for layer in layers})
    if shape.kv_factor != 2 or not all(map(_writes, layers)):
        _log.info("layout not verified: %s has no operation for it", ", ".join(names))
        return
    trip = _RoundTrip(layers, view, shape, dtype, ops)
    with torch.inference_mode(), trip.restored():
        for digit in range(trip.digits):
            trip.run(digit)
    _log.debug("layout verified: %s on %s", ", ".join(names), trip.device)


def _writes(layer: Any) -> bool:
    shared = getattr(layer, "kv_sharing_target_layer_name", None) is not None
    return hasattr(layer.impl, "do_kv_cache_update") and not shared


class _RoundTrip:
    """Writes the number of each element, one octal digit at a time, and reads it back.

    Elements are compared as bits. Equal digits must give equal bits, and other digits other bits,
    so the encoding of a quantised cache need not be known.
    """

    def __init__(
        self,
        layers: Sequence[Any],
        view: KVView,
        shape: BlockShape,
        dtype: torch.dtype,
        ops: Sequence[DeviceOps],
    ) -> None:
        self._layers, self._view, self._dtype = layers, view, dtype
        self.device = view.tensors[0].device
        layout = view.layout
        self._page, self._tokens = layout.num_pages - 1, layout.page_tokens
        self._heads, self._dims = shape.kv_heads, shape.dims()
        block = BlockShape(
            len(layers), shape.kv_heads, self._dims[0], self._tokens, shape.dtype,
            v_head_dim=self._dims[1],
        )  # fmt: skip
        self._count = len(layers) * shape.kv_heads * self._tokens * sum(self._dims)
        room = torch.zeros(self._count, dtype=_RAW[layout.itemsize], device=self.device)
        self._block = KVView(arena_layout(block, 1), [room])
        self._ops = select_ops(view, self._block, ops, "auto")
        self.digits = next(n for n in range(1, 64) if _BASE**n >= self._count)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the page of every layer at the end of this block."""
        page = self._page
        before = [tensor[page].clone() for tensor in self._view.tensors]
        try:
            yield
        finally:
            for tensor, kept in zip(self._view.tensors, before, strict=True):
                tensor[page].copy_(kept)

    def run(self, digit: int) -> None:
        """Write one digit of each element's number. Raises LayoutError if it reads otherwise."""
        number = torch.arange(self._count, device=self.device)
        written = number.div(_BASE**digit, rounding_mode="floor") % _BASE
        self._write(written.view(len(self._layers), self._heads, -1))
        unit = np.array([self._page])
        self._ops.copy_blocks(self._view, unit, self._block, np.array([0]))
        self._compare(written, self._block.tensors[0])

    def _write(self, digits: torch.Tensor) -> None:
        slots = self._page * self._tokens + torch.arange(self._tokens, device=self.device)
        parts = [self._tokens * dim for dim in self._dims]
        for layer, tensor, one in zip(self._layers, self._view.tensors, digits, strict=True):
            key, value = (
                (part.view(self._heads, self._tokens, -1).transpose(0, 1) * scale)
                .to(self._dtype)
                .contiguous()
                for part, scale in zip(one.split(parts, dim=1), self._scales(layer), strict=True)
            )
            try:
                layer.impl.do_kv_cache_update(layer, key, value, tensor, slots)
            except (RuntimeError, TypeError, ValueError) as error:
                raise LayoutError(
                    f"{type(layer.impl).__name__} did not write a page for kvcore: {error}; kvcore "
                    "stores nothing on this build of vLLM"
                ) from error

    def _scales(self, layer: Any) -> tuple[float, float]:
        """Return what a quantised cache divides K and V by."""
        if self._view.layout.itemsize > 1:
            return 1.0, 1.0
        return float(layer._k_scale_float), float(layer._v_scale_float)

    def _compare(self, digits: torch.Tensor, read: torch.Tensor) -> None:
        first = torch.stack([(digits == digit).to(torch.uint8).argmax() for digit in range(_BASE)])
        known = read[first]
        wrong = (known[digits] != read).nonzero().flatten()
        used = int(digits.max()) + 1
        if not len(wrong) and len(known[:used].unique()) == used:
            return
        per_layer = self._count // len(self._layers)
        name = type(self._layers[0].impl).__name__
        where = f"layer {int(wrong[0]) // per_layer}" if len(wrong) else "every layer"
        raise LayoutError(
            f"{name} writes a page on {self.device} in another order than kvcore reads it "
            f"({where}, {len(wrong)} of {self._count} elements): kvcore stores nothing on this "
            "build of vLLM"
        )
