"""The hooks of `kvcore.plugins.attention` in vLLM's layers.

    layer(positions, hidden, residual)
      └▶ Attention.forward(q, k, v) ───────── replaced for a blend (`lent`), for one call
           └▶ custom op ▶ impl.forward(...)── wrapped by hooks of plugins (`install`), until the end

A blend runs layers outside of any forward of vLLM. There is no batch and no page table then, so the
attention module itself is replaced. Plugins see vLLM's own forwards: the custom op looks up the
implementation at every call, also in a compiled model. Both are set on the instances. Classes stay
as they are, and nothing is set if there is no hook.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from kvcore.errors import UnsupportedError
from kvcore.plugins.attention import AttentionBatch, AttentionCall, AttentionHook, Hooks

_log = logging.getLogger("kvcore.vllm.attention")

_IMPL_ARGUMENTS = ["layer", "query", "key", "value", "kv_cache", "attn_metadata", "output"]
_METADATA = ("num_actual_tokens", "query_start_loc", "seq_lens", "block_table")


def check_writes(layer: Any) -> None:
    """Raise UnsupportedError if the model writes the layer's KV itself: it passes no K and V."""
    if getattr(layer, "kv_cache_update_bypass", False):  # since 0.33
        raise UnsupportedError("a model that writes KV itself (kv_cache_update_bypass)")


@contextmanager
def lent(attention: Any, layer: int, hook: AttentionHook, batch: AttentionBatch) -> Iterator[None]:
    """In this block, replace the forward of one attention module by ``hook.before``."""

    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output_shape: torch.Size | None = None,
        output_dtype: torch.dtype | None = None,
    ) -> Tensor:
        call = AttentionCall(
            layer,
            query.view(-1, attention.num_heads, attention.head_size),
            key.view(-1, attention.num_kv_heads, attention.head_size),
            value.view(-1, attention.num_kv_heads, attention.head_size_v),
            batch,
        )
        answer = hook.before(call)
        assert answer is not None, "outside a forward of vLLM there is nothing else to answer"
        return answer.reshape(len(answer), -1)

    attention.forward = forward  # on the instance: hides the class's method
    try:
        yield
    finally:
        del attention.forward


class Batches:
    """Converts vLLM's metadata of a step to a `AttentionBatch`, once for each step and layer group.

    ``request_ids`` returns the ids of the step's requests in order, none in a dummy forward.
    """

    def __init__(self, request_ids: Callable[[], Sequence[str]], page_tokens: int) -> None:
        self._request_ids = request_ids
        self._page_tokens = page_tokens
        self._metadata: Any = None
        self._batch: AttentionBatch | None = None

    def of(self, metadata: Any, layer: int) -> AttentionBatch | None:
        """Return the batch of this step, or None if it has no requests.

        Made again at layer 0: vLLM may reuse the metadata.
        """
        if self._batch is None or layer == 0 or metadata is not self._metadata:
            self._metadata, self._batch = metadata, self._make(metadata)
        return self._batch

    def _make(self, metadata: Any) -> AttentionBatch | None:
        requests = tuple(self._request_ids())
        if not requests:
            return None
        starts = metadata.query_start_loc[: len(requests) + 1]
        rows = metadata.num_actual_tokens
        counts = starts.diff()
        behind = metadata.seq_lens[: len(requests)] - counts - starts[:-1]
        positions = torch.arange(rows, device=starts.device)
        positions += behind.repeat_interleave(counts, output_size=rows)
        pages = metadata.block_table[: len(requests)]
        return AttentionBatch(requests, starts, positions, pages, self._page_tokens)


def install(
    layers: Sequence[Any],
    hooks: Sequence[AttentionHook],
    request_ids: Callable[[], Sequence[str]],
    page_tokens: int,
) -> Hooks:
    """Call ``hooks`` around every forward of these attention layers, in canonical order.

    Raises UnsupportedError, and sets nothing, if one layer's attention takes other arguments.
    """
    for layer in layers:
        _check_impl(layer)
    all_of_them = Hooks(hooks)
    batches = Batches(request_ids, page_tokens)
    for index, layer in enumerate(layers):
        layer.impl.forward = _around(layer.impl.forward, index, all_of_them, batches)
    names = ", ".join(hook.name for hook in hooks)
    _log.info("attention hooks around %d layers: %s", len(layers), names)
    return all_of_them


def _check_impl(layer: Any) -> None:
    taken = list(inspect.signature(layer.impl.forward).parameters)[: len(_IMPL_ARGUMENTS)]
    if taken != _IMPL_ARGUMENTS:
        raise UnsupportedError(f"{type(layer.impl).__name__}.forward takes {taken}")
    check_writes(layer)


def _around(
    plain: Callable[..., Any], index: int, hooks: Hooks, batches: Batches
) -> Callable[..., Any]:
    def forward(
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        *args: Any,
        **options: Any,
    ) -> Any:
        engine = (layer, query, key, value, kv_cache, attn_metadata, output, *args)
        if not hooks.active or not all(hasattr(attn_metadata, name) for name in _METADATA):
            return plain(*engine, **options)  # vLLM's warm-up has no metadata
        try:
            batch = batches.of(attn_metadata, index)
        except Exception:  # noqa: BLE001 - vLLM's metadata has changed: it goes on without hooks
            hooks.give_up("the step's requests could not be read")
            return plain(*engine, **options)
        if batch is None:
            return plain(*engine, **options)
        rows = len(batch.positions)
        call = AttentionCall(index, query[:rows], key[:rows], value[:rows], batch)
        made = output[:rows].view(rows, *query.shape[1:-1], -1)
        answer = hooks.before(call)
        result = output
        if answer is None:
            result = plain(*engine, **options)
        else:
            made.copy_(answer)
        changed = hooks.after(call, made)
        if changed is not made:
            made.copy_(changed)
        return result

    return forward
