"""A tiny DeepSeek V4 with random weights, under the names of DeepSeek's own checkpoints.

vLLM's kernels fix what is not tiny here: the widths of a head and of an index, and the number of
tokens that an index chooses. Experts are chosen by softmax, because the kernels for V4's own way
take hundreds of experts.

    layer   attention
    0       the last 128 tokens only
    1, 3    these, and of the others what an index chooses, four tokens in a latent each
    2       these, and all others, 128 tokens in a latent each
"""

from __future__ import annotations

from typing import Any

__all__ = ["CONFIG", "weights"]

HEAD, ROPE, INDEX, INDEX_HEADS = 512, 64, 128, 4
"""Widths of a head, of its rotary part and of a head of the index, which has so many heads."""
HIDDEN, HEADS, GROUPS, RANK, EXPERTS, STREAMS = 256, 4, 2, 64, 4, 2
"""``RANK`` is the width of all projections in two steps, and of an expert.

``STREAMS`` are the copies of the residual, which every layer mixes.
"""

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "torch_dtype": "bfloat16",
    "expert_dtype": "bf16",
    "vocab_size": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "max_position_embeddings": 8192,
    "hidden_size": HIDDEN,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "num_hidden_layers": 4,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 1,
    "head_dim": HEAD,
    "qk_rope_head_dim": ROPE,
    "q_lora_rank": RANK,
    "o_lora_rank": RANK,
    "o_groups": GROUPS,
    "sliding_window": 128,
    "compress_ratios": [0, 4, 128, 4],
    "index_topk": 512,
    "index_n_heads": INDEX_HEADS,
    "index_head_dim": INDEX,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "num_hash_layers": 0,
    "moe_intermediate_size": RANK,
    "scoring_func": "softmax",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "hc_mult": STREAMS,
    "hc_sinkhorn_iters": 4,
    "hc_eps": 1e-6,
}


def weights(seed: int) -> dict[str, Any]:
    """Return the tensors of a checkpoint by name. See `kvcore.harness.architectures.spread`."""
    return _Weights(seed).found


class _Weights:
    """Draws the tensors of a checkpoint into ``found``."""

    def __init__(self, seed: int) -> None:
        import torch

        self._torch, self._generator = torch, torch.Generator().manual_seed(seed)
        self.found: dict[str, Any] = {}
        self.found["embed.weight"] = self._drawn(CONFIG["vocab_size"], HIDDEN).bfloat16()
        self._linear("head", CONFIG["vocab_size"], HIDDEN)
        self._norm("norm", HIDDEN)
        self._mixing("hc_head", STREAMS, 1)
        for layer, ratio in enumerate(CONFIG["compress_ratios"]):
            self._attention(f"layers.{layer}.attn", ratio)
            self._experts(f"layers.{layer}.ffn")
            for part in ("attn", "ffn"):
                self._norm(f"layers.{layer}.{part}_norm", HIDDEN)
                self._mixing(f"layers.{layer}.hc_{part}", (2 + STREAMS) * STREAMS, 3)

    def _attention(self, name: str, ratio: int) -> None:
        self._linear(f"{name}.wq_a", RANK, HIDDEN)
        self._linear(f"{name}.wq_b", HEADS * HEAD, RANK)
        self._linear(f"{name}.wkv", HEAD, HIDDEN)
        self._linear(f"{name}.wo_a", GROUPS * RANK, HEADS * HEAD // GROUPS, 4.0)
        self._linear(f"{name}.wo_b", HIDDEN, GROUPS * RANK, 4.0)
        self._norm(f"{name}.q_norm", RANK)
        self._norm(f"{name}.kv_norm", HEAD)
        self.found[f"{name}.attn_sink"] = self._drawn(HEADS)
        if ratio:
            self._compressor(f"{name}.compressor", ratio, HEAD)
        if ratio == 4:
            self._linear(f"{name}.indexer.wq_b", INDEX_HEADS * INDEX, RANK)
            self._linear(f"{name}.indexer.weights_proj", INDEX_HEADS, HIDDEN)
            self._compressor(f"{name}.indexer.compressor", ratio, INDEX)

    def _compressor(self, name: str, ratio: int, head: int) -> None:
        width = head * (2 if ratio == 4 else 1)  # of four tokens, the four before are seen too
        self._linear(f"{name}.wkv", width, HIDDEN)
        self._linear(f"{name}.wgate", width, HIDDEN)
        self._norm(f"{name}.norm", head)
        self.found[f"{name}.ape"] = self._drawn(ratio, width)

    def _experts(self, name: str) -> None:
        self._linear(f"{name}.gate", EXPERTS, HIDDEN)
        for expert in (*(f"experts.{n}" for n in range(EXPERTS)), "shared_experts"):
            self._linear(f"{name}.{expert}.w1", RANK, HIDDEN)
            self._linear(f"{name}.{expert}.w3", RANK, HIDDEN)
            self._linear(f"{name}.{expert}.w2", HIDDEN, RANK)

    def _drawn(self, *shape: int) -> Any:
        return self._torch.randn(*shape, generator=self._generator)

    def _linear(self, name: str, width: int, fan_in: int, gain: float = 2.0) -> None:
        drawn = self._drawn(width, fan_in) * gain / float(fan_in**0.5)
        self.found[f"{name}.weight"] = drawn.bfloat16()

    def _norm(self, name: str, width: int) -> None:
        self.found[f"{name}.weight"] = self._torch.ones(width, dtype=self._torch.bfloat16)

    def _mixing(self, name: str, width: int, scales: int) -> None:
        self.found[f"{name}_fn"] = self._drawn(width, STREAMS * HIDDEN) * 0.02
        self.found[f"{name}_base"] = self._drawn(width) * 0.1
        self.found[f"{name}_scale"] = self._torch.ones(scales)
