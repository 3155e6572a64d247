"""Fusion on vLLM: which models it serves, and their decoder layers, run for a blend.

A vLLM decoder layer is called as ``layer(positions, hidden_states, residual)``, and its `Attention`
gets q, k and v after RoPE. A blend therefore needs no copy of a model's code. During a blend's call
kvcore replaces the attention of one layer; the rest of the layer is vLLM's own. Nothing is patched
outside such a call (`kvcore_vllm.attention`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvcore.connector.engine_layers import (
    PREFIXES_ONLY,
    TensorParallelLayers,
    check_architecture,
    check_arguments,
    check_count,
    live_objects,
    refuse_unlike,
)
from kvcore.connector.fusion_worker import ServedRequest
from kvcore.errors import UnsupportedError
from kvcore.fusion.attend import Attention
from kvcore.fusion.decoder import Attend, HiddenState
from kvcore.fusion.plan import LayerKV
from kvcore.fusion.rope import Rope, rope_of
from kvcore.plugins.attention import AttentionBatch, AttentionCall, AttentionHook
from kvcore_vllm.attention import check_writes, lent
from kvcore_vllm.engine import TRIED, verdict
from kvcore_vllm.identity import draft_of
from kvcore_vllm.probes import FUSION, LORA

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from kvcore.model.spec import ModelDescription

ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "GemmaForCausalLM",
    "Phi3ForCausalLM",
)
"""Models of vLLM whose forward is the embedding and then every layer, and nothing else."""

_LAYER_ARGUMENTS = ["positions", "hidden_states", "residual"]
_NO_WINDOW = (None, -1, (-1, -1))


def ropes_of(vllm_config: VllmConfig, model: ModelDescription) -> tuple[Rope | None, ...]:
    """Return the rope of every layer. Raises UnsupportedError if the model cannot be blended."""
    config = vllm_config.model_config
    check_architecture([config.architecture], ARCHITECTURES)
    if not model.single_group or model.shape.kv_factor != 2:
        raise UnsupportedError(
            "latent attention (MLA), pages of vLLM's own format, and models that drop pages behind "
            "a window, are not supported by fusion, which needs K and V of every token in every "
            "layer; "
            f"{PREFIXES_ONLY}"
        )
    if len(model.stages) > 1:
        raise UnsupportedError(
            "pipeline stages are not supported by fusion, which needs all layers on a rank: set "
            f"pipeline_parallel_size to 1, or {PREFIXES_ONLY}"
        )
    if draft_of(vllm_config) is not None:
        raise UnsupportedError(
            "a draft model is not supported by fusion, which would leave the draft's layers empty; "
            f"draft by 'ngram' or 'suffix', or {PREFIXES_ONLY}"
        )
    if config.get_sliding_window() is not None:
        raise UnsupportedError(f"sliding windows are not supported by fusion; {PREFIXES_ONLY}")
    if model.shape.itemsize == 1:
        raise UnsupportedError(
            f"K in {model.shape.dtype} is not supported by fusion, which rotates K of 16 or 32 "
            f"bits; set kv_cache_dtype to auto, or {PREFIXES_ONLY}"
        )
    text = config.hf_text_config.to_dict()
    return tuple(rope_of(text, layer) for layer in range(model.shape.layers))


def find_worker(vllm_config: VllmConfig) -> Any:
    """Return this process's worker, which has loaded its model.

    Raises UnsupportedError if there is none.
    """
    from vllm.v1.worker.worker_base import WorkerBase

    for found in live_objects(WorkerBase):
        if found.vllm_config is vllm_config:
            return found
    raise UnsupportedError("the worker of this process was not found: fusion needs its model")


class _Answering(AttentionHook):
    """A blend's attention, in place of a layer's own."""

    name = "fusion"

    def __init__(self, attend: Attend) -> None:
        self._attend = attend

    def before(self, call: AttentionCall) -> Tensor:
        """Return the output of the call: the layer's own attention does not run."""
        return self._attend(call.query, call.key, call.value)


def collectives(vllm_config: VllmConfig) -> Any:
    """Return vLLM's module of collectives, or None if there is one tensor-parallel rank."""
    from vllm import distributed

    return distributed if vllm_config.parallel_config.tensor_parallel_size > 1 else None


class VllmLayers(TensorParallelLayers):
    """The decoder of a loaded model on one rank. Used from the model runner's thread only.

    ``names`` are the attention layers in canonical order.
    """

    def __init__(self, vllm_config: VllmConfig, worker: Any, names: Sequence[str]) -> None:
        super().__init__(collectives(vllm_config))
        verdict().holds(FUSION)
        context = vllm_config.compilation_config.static_forward_context
        self._attention: list[Any] = [context[name] for name in names]
        decoder: Any = worker.get_model().model
        self._decoder = decoder
        self._modules: list[Any] = list(decoder.layers)
        self.layers = len(names)
        self.attention = tuple(_attention(layer) for layer in self._attention)
        self._loras = _lora_manager(vllm_config, worker)
        # vLLM has measured its memory for so many rows, and its LoRA layers have room for them.
        self.max_rows = vllm_config.scheduler_config.max_num_batched_tokens
        self._served: ServedRequest | None = None
        check_count(self._modules, self.layers)
        check_arguments(type(self._modules[0]).forward, _LAYER_ARGUMENTS, f"vLLM {TRIED[-1]}")

    @contextmanager
    def serving(self, served: ServedRequest) -> Iterator[None]:
        """Run layers for one request in this block. Its LoRA adapter must be active."""
        steps = None if self._loras is None else self._loras._last_mapping
        self._served = served
        try:
            yield
        finally:
            self._served = None
            if steps is not None:
                self._loras.set_adapter_mapping(steps)

    def _adapt(self, rows: int) -> None:
        """Tell vLLM's LoRA layers how many rows the next call has."""
        if self._loras is None or self._served is None:
            return
        from vllm.lora.layers import LoRAMapping

        lora = self._served.lora
        mapping = LoRAMapping((lora,) * rows, (lora,), is_prefill=True)
        self._loras.set_adapter_mapping(mapping)

    def _batch(self, positions: Tensor) -> AttentionBatch:
        """Return rows of the request that is served as a batch. There is at least one row."""
        assert self._served is not None
        rows = len(positions)
        starts = torch.arange(0, rows + 1, rows, device=positions.device)
        served = self._served
        return AttentionBatch(
            (served.request_id,), starts, positions, served.pages, served.page_tokens
        )

    def embed(self, tokens: Tensor) -> Tensor:
        self._adapt(len(tokens))
        embedded: Tensor = self._decoder.embed_input_ids(tokens)
        return embedded

    def run(self, layer: int, positions: Tensor, state: HiddenState, attend: Attend) -> HiddenState:
        self._adapt(len(positions))
        with lent(self._attention[layer], layer, _Answering(attend), self._batch(positions)):
            hidden, residual = self._modules[layer](positions, state.hidden, state.residual)
        return HiddenState(hidden, residual)

    def write(self, layer: int, kv: LayerKV, slots: Tensor) -> None:
        attention = self._attention[layer]
        attention.impl.do_kv_cache_update(attention, kv.keys, kv.values, attention.kv_cache, slots)


def _lora_manager(vllm_config: VllmConfig, worker: Any) -> Any:
    """Return what maps rows to adapters in vLLM's layers; None in an engine without LoRA."""
    if vllm_config.lora_config is None:
        return None
    verdict().holds(LORA)
    return worker.model_runner.lora_manager._adapter_manager


def _attention(layer: Any) -> Attention:
    """Return what a layer's attention computes. Raises UnsupportedError if kvcore's would not."""
    impl = layer.impl
    unlike = {
        "alibi_slopes": getattr(impl, "alibi_slopes", None),
        "attention sinks": getattr(impl, "sinks", None),
        "a shared KV cache": getattr(layer, "kv_sharing_target_layer_name", None),
        "a quantised query": getattr(layer, "query_quant", None),
    }
    refuse_unlike({what: value is not None for what, value in unlike.items()})
    if getattr(impl, "sliding_window", None) not in _NO_WINDOW:
        raise UnsupportedError(
            f"a window of {impl.sliding_window} is not supported by fusion; {PREFIXES_ONLY}"
        )
    check_writes(layer)
    if getattr(layer.attn_backend, "forward_includes_kv_cache_update", True):
        raise UnsupportedError(
            f"the backend {type(impl).__name__} writes KV inside its forward only"
        )
    return Attention(float(impl.scale), None, float(getattr(impl, "logits_soft_cap", 0) or 0))
