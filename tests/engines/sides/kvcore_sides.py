"""A second attention in each layer of vLLM's Llama, with a cache of its own that is smaller.

Put this folder on PYTHONPATH, and vLLM finds it by its entry point. So a layer has two caches with
unlike heads, as the sparse attention of DeepSeek V3.2 has, whose kernels need a GPU. An answer
depends on both: the second attends with a part of the first head, and its output is added.

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
    """Give every layer of Llama that is made from now on a second attention."""
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

    right = LlamaAttention.__init__

    def made(self: Any, *args: Any, **named: Any) -> None:
        right(self, *args, **named)
        prefix = named.get("prefix", "")
        side = Attention(
            1,
            DIM,
            self.scaling,
            num_kv_heads=1,
            cache_config=named.get("cache_config"),
            quant_config=named.get("quant_config"),
            prefix=f"{prefix}.side",
        )
        self.attn = Both(self.attn, side)

    LlamaAttention.__init__ = made
