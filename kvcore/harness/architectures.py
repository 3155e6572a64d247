"""Architectures of the tiny models: their configs, and weights that show the KV.

A config is small, and has what engines need beside what transformers does. Weights are drawn so
that greedy output depends on the whole prompt.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

__all__ = ["ARCHITECTURES", "CONFIGS", "Shape", "spread"]


class Shape:
    """The arguments of a tiny model, and the folder name that they give."""

    def __init__(
        self,
        arch: str,
        layers: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        max_positions: int,
        sliding_window: int,
        seed: int,
        vocabulary: int | None = None,
        latent: tuple[int, int] | None = None,
        mlp_width: int | None = None,
    ) -> None:
        self.arch = arch
        self.seed = seed
        self.sliding_window = sliding_window
        self.common: dict[str, Any] = {
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "hidden_size": heads * head_dim,
            "intermediate_size": mlp_width or heads * head_dim // 2,
            "max_position_embeddings": max_positions,
            "tie_word_embeddings": False,
        }
        if vocabulary is not None:
            self.common["vocab_size"] = vocabulary
        if latent is not None:
            self.common["latent"] = latent

    @property
    def digest(self) -> str:
        text = json.dumps([self.arch, self.seed, self.sliding_window, self.common], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def _llama_config(shape: Shape, **common: Any) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**common)


def _qwen2_config(shape: Shape, **common: Any) -> Any:
    from transformers import Qwen2Config

    return Qwen2Config(**common)


def _mistral_config(shape: Shape, **common: Any) -> Any:
    from transformers import MistralConfig

    return MistralConfig(sliding_window=shape.sliding_window or None, **common)


def _qwen3_config(shape: Shape, **common: Any) -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(**common)


def _gemma_config(shape: Shape, **common: Any) -> Any:
    from transformers import GemmaConfig

    return GemmaConfig(**{**common, "tie_word_embeddings": True})


def _phi3_config(shape: Shape, **common: Any) -> Any:
    from transformers import Phi3Config

    return Phi3Config(**{**common, "pad_token_id": 0})


def _gemma4_config(shape: Shape, **common: Any) -> Any:
    """Layers without a window have heads twice as wide, and half as many of K and V."""
    import transformers

    hf: Any = transformers  # its type stubs lack the heads of full attention
    layers = common["num_hidden_layers"]
    kinds = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)]
    return hf.Gemma4TextConfig(
        sliding_window=shape.sliding_window,
        layer_types=kinds,
        global_head_dim=2 * common["head_dim"],
        num_global_key_value_heads=max(common["num_key_value_heads"] // 2, 1),
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=common["vocab_size"],
        num_kv_shared_layers=0,
        **common,
    )


def _gemma3_config(shape: Shape, **common: Any) -> Any:
    from transformers import Gemma3TextConfig

    layers = common["num_hidden_layers"]
    kinds = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)]
    return Gemma3TextConfig(
        sliding_window=shape.sliding_window,
        layer_types=kinds,
        query_pre_attn_scalar=common["head_dim"],
        **common,
    )


def _lfm2_config(shape: Shape, **common: Any) -> Any:
    """Short convolutions, which keep a state instead of KV, and attention in every third layer."""
    from transformers import Lfm2Config

    del common["head_dim"]
    layers = common["num_hidden_layers"]
    kinds = ["full_attention" if layer % 3 == 2 else "conv" for layer in range(layers)]
    config = Lfm2Config(layer_types=kinds, block_auto_adjust_ff_dim=False, **common)
    # Published checkpoints have these fields and vLLM needs them, but transformers does not.
    config.conv_dim = config.conv_dim_out = config.block_dim = common["hidden_size"]
    config.block_ff_dim = common["intermediate_size"]
    return config


def _gpt_oss_config(shape: Shape, **common: Any) -> Any:
    from transformers import GptOssConfig

    layers = common["num_hidden_layers"]
    kinds = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)]
    return GptOssConfig(
        sliding_window=shape.sliding_window,
        layer_types=kinds,
        num_local_experts=2,
        num_experts_per_tok=1,
        **common,
    )


def _qwen3_next_config(shape: Shape, **common: Any) -> Any:
    """Gated delta nets, which keep a state, and attention in every fourth layer."""
    from transformers import Qwen3NextConfig

    layers, width = common["num_hidden_layers"], 2 * common["head_dim"]
    kinds = ["linear_attention" if layer % 4 < 3 else "full_attention" for layer in range(layers)]
    return Qwen3NextConfig(
        layer_types=kinds,
        linear_key_head_dim=width,
        linear_value_head_dim=width,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        mlp_only_layers=[],  # vLLM needs a layer with experts
        num_experts=4,
        num_experts_per_tok=1,
        moe_intermediate_size=width // 2,
        **common,
    )


def _mamba2(heads: int, dim: int) -> dict[str, Any]:
    """Arguments of layers with Mamba 2."""
    shape = {"n_heads": heads, "d_head": dim, "n_groups": 1, "d_state": 32, "d_conv": 4}
    return {f"mamba_{name}": value for name, value in shape.items()} | {"mamba_chunk_size": 64}


def _granite4_config(shape: Shape, **common: Any) -> Any:
    """Mamba 2, and attention in every fourth layer. No experts."""
    from transformers import GraniteMoeHybridConfig

    layers, width = common["num_hidden_layers"], common["hidden_size"]
    dim = common.pop("head_dim")
    return GraniteMoeHybridConfig(
        layer_types=["mamba" if layer % 4 < 3 else "attention" for layer in range(layers)],
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=common["intermediate_size"],
        position_embedding_type="rope",
        mamba_expand=2,
        **_mamba2(2 * width // dim, dim),
        **common,
    )


def _falcon_h1_config(shape: Shape, **common: Any) -> Any:
    """Mamba 2 beside attention, in every layer."""
    from transformers import FalconH1Config

    width, dim = common["hidden_size"], common["head_dim"]
    return FalconH1Config(mamba_d_ssm=width, mamba_expand=1, **_mamba2(width // dim, dim), **common)


def _deepseek_v2_config(shape: Shape, **common: Any) -> Any:
    """Multi-head latent attention without experts.

    A token's latent is twice a head wide, and its rotary part half a head, unless they are told.
    """
    from transformers import DeepseekV2Config

    dim, positions = common.pop("head_dim"), common["max_position_embeddings"]
    rank, rope = common.pop("latent", (2 * dim, dim // 2))
    yarn = {  # as in published checkpoints; SGLang on a CPU supports no other
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 2.0,
        "original_max_position_embeddings": positions // 2,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    config = DeepseekV2Config(
        rope_parameters=yarn,
        q_lora_rank=None,
        kv_lora_rank=rank,
        qk_nope_head_dim=dim,
        qk_rope_head_dim=rope,
        v_head_dim=dim,
        first_k_dense_replace=common["num_hidden_layers"],
        n_routed_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=dim,
        **{**common, "num_key_value_heads": common["num_attention_heads"]},
    )
    config.moe_layer_freq = 1  # published checkpoints have it and engines need it
    return config


CONFIGS: dict[str, Callable[..., Any]] = {
    "llama": _llama_config,
    "mistral": _mistral_config,
    "qwen2": _qwen2_config,
    "qwen3": _qwen3_config,
    "gemma": _gemma_config,
    "phi3": _phi3_config,
    "gemma3": _gemma3_config,
    "gemma4": _gemma4_config,
    "gpt_oss": _gpt_oss_config,
    "lfm2": _lfm2_config,
    "qwen3_next": _qwen3_next_config,
    "granite4": _granite4_config,
    "falcon_h1": _falcon_h1_config,
    "deepseek_v2": _deepseek_v2_config,
}
ARCHITECTURES = tuple(CONFIGS)


def spread(model: Any, generator: Any) -> None:
    """Redraw every matrix so that each layer adds as much as the residual already holds.

    Linear weights are N(0, (2 / sqrt(fan_in))^2): the gain of 2 makes attention peaked instead of
    an average over the prompt. Embeddings are N(0, 1), or less if the model multiplies them by the
    root of their width. Norms keep their ones, and biases are small. States of Mamba 2 decay
    slowly, and nothing goes past them.
    """
    import torch

    scaled = model.config.model_type == "gemma"
    mamba2 = hasattr(model.config, "mamba_d_state")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "embed_tokens" in name:
                std = float(weight.shape[1]) ** -0.5 if scaled else 1.0
            elif weight.dim() == 2 or ("experts" in name and weight.dim() == 3):
                std = 2.0 / float(weight.shape[1]) ** 0.5
            elif name.endswith("bias"):
                std = 0.1
            elif mamba2 and name.endswith(("A_log", ".D")):
                weight.fill_(-8.0 if name.endswith("A_log") else 0.0)
                continue
            else:
                continue
            weight.copy_(torch.randn(weight.shape, generator=generator) * std)
