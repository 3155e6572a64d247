"""A second attention in each layer of vLLM's Llama and LFM2, with a cache of its own.

Put this folder on PYTHONPATH, and vLLM finds it by its entry point. So a layer has two caches with
unlike heads, as the sparse attention of DeepSeek V3.2 has, whose kernels need a GPU. An answer
depends on both: the second attends with a part of the first head, and its output is added. In LFM2,
which has states beside its attention, both caches have pages of one size, as vLLM demands there.

While the file exists that the environment variable ``KVCORE_SIDES`` names, kvcore's loads leave the
second caches out.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

DIM = 32
MISTAKE = os.environ.get("KVCORE_SIDES", "")


def install() -> None:
    """Give every layer with attention that is made from now on a second one."""
    _add_sides()
    if MISTAKE:
        _leave_sides_out()


def _leave_sides_out() -> None:
    from kvcore.worker.executors import DeviceCopy

    right = DeviceCopy._copy

    def wrong(self: Any, *args: Any) -> None:
        *before, layers, unit = args
        if self._to_device and Path(MISTAKE).exists():
            layers = layers[::2]
        right(self, *before, layers, unit)

    DeviceCopy._copy = wrong  # type: ignore[method-assign]


def _add_sides() -> None:
    from torch import nn
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.models.lfm2 import Lfm2Attention
    from vllm.model_executor.models.llama import LlamaAttention

    class Both(nn.Module):
        def __init__(self, first: Any, side: Any) -> None:
            super().__init__()
            self.first, self.side = first, side

        def forward(self, q: Any, k: Any, v: Any) -> Any:
            out = self.first(q, k, v)
            parts = (part[..., :DIM].contiguous() for part in (q, k, v))
            out[..., :DIM] += 2 * self.side(*parts)
            return out

    class Alike(Both):
        def forward(self, q: Any, k: Any, v: Any) -> Any:
            return self.first(q, k, v) + 2 * self.side(q, k, v.roll(1, -1))

    def add_to(layer: Any, kind: Any, *heads: int) -> None:
        right = layer.__init__

        def made(self: Any, *args: Any, **named: Any) -> None:
            right(self, *args, **named)
            count, dim, kept = heads or (self.num_heads, self.head_dim, self.num_kv_heads)
            side = Attention(
                count,
                dim,
                self.scaling,
                num_kv_heads=kept,
                cache_config=named.get("cache_config"),
                quant_config=named.get("quant_config"),
                prefix=f"{named.get('prefix', '')}.side",
            )
            self.attn = kind(self.attn, side)

        layer.__init__ = made

    add_to(LlamaAttention, Both, 1, DIM, 1)
    add_to(Lfm2Attention, Alike)
