"""An attention backend for SGLang on a CPU that computes only the new rows, as GPU kernels do.

SGLang's ``torch_native`` backend pads a request's new rows with all earlier ones, and computes the
whole square. After a hit of 4096 tokens, the one token that is left costs as much attention as all
of them, and the benefit of any cache hardly shows. `register` adds the backend `ROWS` to SGLang's
own registry. It is for benchmarks, where attention must cost what it costs on a GPU.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ROWS", "attend_rows", "register"]

ROWS = "kvcore_rows"
"""The backend's name, for SGLang's ``attention_backend``."""


def register() -> None:
    """Register `ROWS` with SGLang in this process. Every process of an engine must call it.

    Imports SGLang's attention modules. Idempotent.
    """
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices

    ATTENTION_BACKENDS[ROWS] = _make
    if ROWS not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([ROWS])


def attend_rows(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """Return the causal attention of the last rows of a sequence, [rows, heads, value size].

    ``query`` is [rows, heads, size]; its last row is the sequence's last token. ``key`` and
    ``value`` are [tokens, kv_heads, size] with rows <= tokens.
    """
    rows, tokens = query.shape[0], key.shape[0]
    mask = None
    if rows < tokens:
        mask = torch.ones(rows, tokens, dtype=torch.bool, device=query.device).tril(tokens - rows)
    out = scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0),
        key.to(query.dtype).transpose(0, 1).unsqueeze(0),
        value.to(query.dtype).transpose(0, 1).unsqueeze(0),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.squeeze(0).transpose(0, 1)


@cache
def _backend() -> Callable[[Any], Any]:
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    class RowsBackend(TorchNativeAttnBackend):  # type: ignore[misc, unused-ignore]
        """``torch_native``, except for plain causal attention over a paged prefix."""

        def _run_sdpa_forward_extend(
            self,
            query: torch.Tensor,
            output: torch.Tensor,
            k_cache: torch.Tensor,
            v_cache: torch.Tensor,
            req_to_token: torch.Tensor,
            req_pool_indices: torch.Tensor,
            seq_lens: torch.Tensor,
            extend_prefix_lens: torch.Tensor,
            extend_seq_lens: torch.Tensor,
            encoder_lens: torch.Tensor | None = None,
            **options: Any,
        ) -> torch.Tensor:
            plain = options["causal"] and options.get("sliding_window_size") is None
            if not plain or encoder_lens is not None:
                return super()._run_sdpa_forward_extend(  # type: ignore[no-any-return, unused-ignore]
                    query,
                    output,
                    k_cache,
                    v_cache,
                    req_to_token,
                    req_pool_indices,
                    seq_lens,
                    extend_prefix_lens,
                    extend_seq_lens,
                    encoder_lens,
                    **options,
                )
            start = 0
            requests = zip(
                req_pool_indices.tolist(), seq_lens.tolist(), extend_seq_lens.tolist(), strict=True
            )
            for request, tokens, rows in requests:
                places = req_to_token[request, :tokens]
                output[start : start + rows] = attend_rows(
                    query[start : start + rows],
                    k_cache[places],
                    v_cache[places],
                    options["scaling"],
                )
                start += rows
            return output

    return RowsBackend


def _make(runner: Any) -> Any:
    return _backend()(runner)
