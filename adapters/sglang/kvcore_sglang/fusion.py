"""Fusion on SGLang: which models it serves, and their decoder layers, run for a blend.

    State ─▶ from_pp ─▶ layer(positions, hidden, forward_batch) ─▶ to_pp ─▶ State
                              └▶ RadixAttention.forward(q, k, v) ─ replaced, for one call

A layer of SGLang 0.5.23 keeps its residual in the forward batch, together with sums that the next
layer completes. Between two layers of a blend both are taken out as a pipeline stage would pass
them on, so that rows can be dropped. RadixAttention gets q, k and v after RoPE. Its forward is
replaced on the instance during a call, and nothing is patched outside one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from kvcore.connector.engine_layers import (
    PREFIXES_ONLY,
    TensorParallelLayers,
    check_architecture,
    check_arguments,
    check_count,
    refuse_unlike,
)
from kvcore.connector.fusion_worker import ServedRequest
from kvcore.errors import UnsupportedError
from kvcore.fusion.attend import Attention
from kvcore.fusion.decoder import Attend, HiddenState
from kvcore.fusion.plan import LayerKV
from kvcore.fusion.rope import Rope, rope_of
from kvcore_sglang.describe import Served as ServedModel

ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
"""Models of SGLang 0.5.23 whose forward is the embedding and then every layer, with nothing in
between, and whose layers pass on their output through their boundaries."""

_KNOWN = "SGLang 0.5.23"
_LAYER_ARGUMENTS = ["positions", "hidden_states", "forward_batch"]
_ATTENTION_ARGUMENTS = ["q", "k", "v", "forward_batch", "save_kv_cache"]


def ropes_of(served: ServedModel, server_args: Any) -> tuple[Rope | None, ...]:
    """Return the rope of every layer. Raises UnsupportedError if the model cannot be blended."""
    shape, checkpoint = served.model.shape, served.checkpoint
    check_architecture([checkpoint.architecture], ARCHITECTURES)
    if shape.kv_factor != 2 or shape.dims() != (shape.head_dim, shape.head_dim):
        raise UnsupportedError(
            "latent attention (MLA) is not supported by fusion, which needs K and V of one head "
            f"size; {PREFIXES_ONLY}"
        )
    if (getattr(server_args, "json_model_override_args", None) or "{}").strip() != "{}":
        raise UnsupportedError(
            "--json-model-override-args is not supported by fusion: edit the checkpoint's "
            f"config.json instead, or {PREFIXES_ONLY}"
        )
    if getattr(server_args, "enable_lora", False) or getattr(server_args, "lora_paths", None):
        raise UnsupportedError(
            f"LoRA adapters are not supported by fusion on SGLang; {PREFIXES_ONLY}"
        )
    return tuple(rope_of(checkpoint.text, layer) for layer in range(shape.layers))


class SglangLayers(TensorParallelLayers):
    """The decoder of a loaded model on one rank. Used from the scheduler's thread only.

    ``buffers`` are the pool's: K [slots, heads, dim] of every layer, then V. ``max_rows`` is the
    most rows of one call; None for no limit.
    """

    def __init__(
        self, model: Any, buffers: Sequence[Tensor], max_rows: int | None, ranks: int
    ) -> None:
        from sglang.srt import distributed
        from sglang.srt.model_executor.forward_batch_info import PPProxyTensors

        super().__init__(distributed if ranks > 1 else None)
        self._proxy = PPProxyTensors
        self._embed = model.model.embed_tokens
        self._modules: list[Any] = list(model.model.layers)
        self.layers = len(buffers) // 2
        self._keys, self._values = buffers[: self.layers], buffers[self.layers :]
        check_count(self._modules, self.layers)
        for module in self._modules:
            _check_layer(module)
        self._attention = [module.self_attn.attn for module in self._modules]
        self.attention = tuple(_attention(attention) for attention in self._attention)
        self.max_rows = max_rows

    @contextmanager
    def serving(self, served: ServedRequest) -> Iterator[None]:
        """Do nothing: no layer of SGLang depends on which request its rows belong to."""
        yield

    def embed(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self._embed(tokens)
        return embedded

    def run(self, layer: int, positions: Tensor, state: HiddenState, attend: Attend) -> HiddenState:
        from sglang.srt.layers.layer_boundary.residual import batch as residuals

        module, batch = self._modules[layer], _forward_batch(positions)
        if state.residual is None:
            residuals.start(batch)
            hidden = state.hidden
        else:
            handed_on = {"hidden_states": state.hidden, "residual": state.residual}
            hidden = module.attn_boundary.from_pp(self._proxy(handed_on), batch)
        with lent(self._attention[layer], attend):
            hidden = module(positions, hidden, batch)
        made = residuals.to_pp(hidden, batch)
        return HiddenState(made["hidden_states"], made["residual"])

    def write(self, layer: int, kv: LayerKV, slots: Tensor) -> None:
        self._keys[layer][slots] = kv.keys
        self._values[layer][slots] = kv.values


def _forward_batch(positions: Tensor) -> Any:
    """Return one request's rows as a batch for SGLang's layers. SGLang's attention does not run."""
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

    nothing = positions.new_zeros(1)
    return ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=1,
        input_ids=positions,  # layers read only how many there are
        req_pool_indices=nothing,
        seq_lens=nothing,
        out_cache_loc=positions,
        seq_lens_sum=0,
        positions=positions,
    )


@contextmanager
def lent(attention: Any, attend: Attend) -> Iterator[None]:
    """In this block, replace the forward of one RadixAttention by ``attend``."""

    def forward(
        q: Tensor, k: Tensor, v: Tensor, forward_batch: Any, save_kv_cache: bool = True
    ) -> Tensor:
        answer = attend(
            q.view(-1, attention.tp_q_head_num, attention.qk_head_dim),
            k.view(-1, attention.tp_k_head_num, attention.qk_head_dim),
            v.view(-1, attention.tp_v_head_num, attention.v_head_dim),
        )
        return answer.reshape(len(answer), -1)

    attention.forward = forward  # on the instance: hides the class's method
    try:
        yield
    finally:
        del attention.forward


def _check_layer(module: Any) -> None:
    """Raise UnsupportedError if a layer is not called as in 0.5.23."""
    check_arguments(type(module).forward, _LAYER_ARGUMENTS, _KNOWN)
    if not hasattr(getattr(module, "attn_boundary", None), "from_pp"):
        raise UnsupportedError(f"{type(module).__name__} does not pass its residual on")


def _attention(layer: Any) -> Attention:
    """Return what a layer's attention computes. Raises UnsupportedError if kvcore's would not."""
    from sglang.srt.layers.radix_attention import AttentionType, RadixAttention

    if not isinstance(layer, RadixAttention):
        raise UnsupportedError(f"attention of type {type(layer).__name__}, not RadixAttention")
    check_arguments(type(layer).forward, _ATTENTION_ARGUMENTS, _KNOWN)
    unlike = {
        "cross attention": layer.is_cross_attention,
        "a window": layer.sliding_window_size not in (None, -1),
        "chunks of positions (irope)": layer.use_irope,
        "a temperature by length": layer.xai_temperature_len not in (None, -1),
        "scales of K": layer.k_scale is not None,
        "no causal mask": layer.attn_type != AttentionType.DECODER,
        f"positions encoded as {layer.pos_encoding_mode}": layer.pos_encoding_mode != "NONE",
        "a cap other than tanh": bool(layer.logit_cap) and layer.logit_capping_method != "tanh",
    }
    refuse_unlike(unlike)
    return Attention(float(layer.scaling), None, float(layer.logit_cap or 0))
