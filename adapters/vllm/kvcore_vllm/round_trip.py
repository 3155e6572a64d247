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
from torch import Tensor

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
    inside its forward is not verified.
    """
    names = sorted({type(layer.impl).__name__ for layer in layers})
    if not all(map(_writes, layers)):
        _log.info("layout not verified: %s has no operation for it", ", ".join(names))
        return
    kind = _RoundTrip if shape.kv_factor == 2 else _LatentRoundTrip
    trip = kind(layers, view, shape, dtype, ops)
    with torch.inference_mode(), trip.restored():
        trip.run()
    _log.debug("layout verified: %s on %s", ", ".join(names), trip.device)


def _writes(layer: Any) -> bool:
    shared = getattr(layer, "kv_sharing_target_layer_name", None) is not None
    return hasattr(layer.impl, "do_kv_cache_update") and not shared


class _RoundTrip:
    """Writes the number of each element, one octal digit at a time, and reads it back.

    Elements are compared as bits. How a quantised cache keeps a digit is read from pages that hold
    nothing else.
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
            kv_factor=shape.kv_factor, v_head_dim=self._dims[-1],
        )  # fmt: skip
        self._count = len(layers) * shape.kv_heads * self._tokens * sum(self._dims)
        room = torch.zeros(self._count, dtype=_RAW[layout.itemsize], device=self.device)
        self._block = KVView(arena_layout(block, 1), [room])
        self._ops = select_ops(view, self._block, ops, "auto")
        self._digits = next(n for n in range(1, 64) if _BASE**n >= self._count)

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

    def run(self) -> None:
        """Raise LayoutError unless every element is read where it was written."""
        number = torch.arange(self._count, device=self.device)
        codes = self._codes()
        for place in range(self._digits):
            digits = number.div(_BASE**place, rounding_mode="floor") % _BASE
            self._compare(codes[digits], self._carry(digits))

    def _codes(self) -> Tensor:
        """Return the bits that the cache keeps for each digit."""
        dtype = getattr(torch, self._view.layout.dtype)
        if dtype.itemsize > 1:
            return torch.arange(_BASE, device=self.device).to(dtype).view(_RAW[dtype.itemsize])
        everywhere = torch.ones(self._count, dtype=torch.int64, device=self.device)
        return torch.stack([self._carry(everywhere * digit)[0] for digit in range(_BASE)])

    def _carry(self, digits: Tensor) -> Tensor:
        """Write digits to the page of every layer, and return what kvcore's copies read there."""
        self._write(digits.view(len(self._layers), self._heads, -1))
        page = np.array([self._page])
        self._ops.copy_blocks(self._view, page, self._block, np.array([0]))
        return self._block.tensors[0].clone()

    def _write(self, digits: Tensor) -> None:
        slots = self._page * self._tokens + torch.arange(self._tokens, device=self.device)
        for layer, tensor, one in zip(self._layers, self._view.tensors, digits, strict=True):
            self._write_layer(layer, one, tensor, slots)

    def _write_layer(self, layer: Any, digits: Tensor, cache: Tensor, slots: Tensor) -> None:
        try:
            self._update(layer, digits, cache, slots)
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            raise LayoutError(
                f"{type(layer.impl).__name__} did not write a page for kvcore: {error}; kvcore "
                "stores nothing on this build of vLLM"
            ) from error

    def _update(self, layer: Any, digits: Tensor, cache: Tensor, slots: Tensor) -> None:
        """Let a layer write digits [heads, K then V content] to the slots of its cache."""
        parts = torch.split(digits, [self._tokens * dim for dim in self._dims], dim=1)
        key, value = (
            self._rows(part.view(self._heads, self._tokens, -1).transpose(0, 1), scale)
            for part, scale in zip(parts, self._scales(layer), strict=True)
        )
        layer.impl.do_kv_cache_update(layer, key, value, cache, slots)

    def _rows(self, digits: Tensor, scale: float) -> Tensor:
        return (digits * scale).to(self._dtype).contiguous()

    def _scales(self, layer: Any) -> tuple[float, float]:
        """Return what a quantised cache divides K and V by."""
        if self._view.layout.itemsize > 1:
            return 1.0, 1.0
        return float(layer._k_scale_float), float(layer._v_scale_float)

    def _compare(self, written: Tensor, read: Tensor) -> None:
        wrong = (written != read).nonzero().flatten()
        if not len(wrong):
            return
        layer = int(wrong[0]) * len(self._layers) // self._count
        name = type(self._layers[layer].impl).__name__
        raise LayoutError(
            f"{name} writes a page on {self.device} in another order than kvcore reads it "
            f"(layer {layer}, {len(wrong)} of {self._count} elements): kvcore stores nothing on "
            "this build of vLLM"
        )


class _LatentRoundTrip(_RoundTrip):
    """The same for latents (MLA): attention writes a token's latent and its rotary key apart."""

    def _update(self, layer: Any, digits: Tensor, cache: Tensor, slots: Tensor) -> None:
        rows = self._rows(digits.view(self._tokens, -1), self._scales(layer)[0])
        widths = [layer.impl.kv_lora_rank, layer.impl.qk_rope_head_dim]
        latent, rope = torch.split(rows, widths, dim=1)
        layer.impl.do_kv_cache_update(
            latent.contiguous(),
            rope.unsqueeze(1).contiguous(),
            cache.squeeze(1),
            slots,
            layer.kv_cache_dtype,
            layer._k_scale,
        )

    def _scales(self, layer: Any) -> tuple[float, float]:
        if self._view.layout.itemsize > 1:
            return 1.0, 1.0
        return (float(layer._k_scale_float),) * 2
