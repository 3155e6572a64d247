"""Stand-ins for the modules of a TensorRT-LLM model, for adapters that run its layers themselves.

    PyTorchModelEngine.model.model.layers[i]      one rank's heads, over a Hugging Face model
        forward(position_ids, hidden_states, attn_metadata, residual)
        self_attn.forward ─▶ qkv ─▶ apply_rope ─▶ convert_qkv ─▶ forward_impl ─▶ o_proj, all ranks

The names, the arguments and the order of steps are the engine's, as read in 1.2 and 1.3. A layer
ends with the next layer's norm. q, k and v are passed as one tensor. With a fused RoPE the module
does not apply it. The engine's kernel is missing, so ``forward_impl`` must be replaced. The hooks
around a layer are the connector's own, and must not run inside a blend.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from kvcore.errors import UnsupportedError
from kvcore.model.spec import head_range
from kvcore_trtllm.testing.ranks import allgather

__all__ = ["PyTorchModelEngine", "RotaryEmbedding", "model_of_rank"]


class RotaryEmbedding(nn.Module):
    """Applies RoPE to q and k. ``rope_params`` carries Hugging Face's own module."""

    def __init__(self, rope_params: Any, *, head_dim: int, is_neox: bool = True) -> None:
        super().__init__()
        assert is_neox, "halves are paired"
        self.head_dim = head_dim
        self._cos_sin = rope_params.rotary

    def forward(self, position_ids: Tensor, targets: list[Tensor]) -> list[Tensor]:
        """Return the rotated ``targets``, each [rows, heads * dim]; ``position_ids`` [1, rows]."""
        cos, sin = self._cos_sin(targets[0][None], position_ids)
        return [self._rotated(target, cos[0, :, None], sin[0, :, None]) for target in targets]

    def _rotated(self, rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = rows.reshape(len(rows), -1, self.head_dim)
        first, second = heads.chunk(2, dim=-1)
        return (heads * cos + torch.cat((-second, first), dim=-1) * sin).flatten(1)


class Attention(nn.Module):
    """One rank's heads of a Hugging Face attention."""

    def __init__(self, attention: Any, rotary: Any, rank: int, ranks: int, fused: bool) -> None:
        super().__init__()
        config = attention.config
        self.head_dim = attention.head_dim
        start, stop = head_range(config.num_key_value_heads, ranks, rank)
        group = config.num_attention_heads // config.num_key_value_heads
        self._kv = slice(start * self.head_dim, stop * self.head_dim)
        self._q = slice(self._kv.start * group, self._kv.stop * group)
        self.kv_size = self._kv.stop - self._kv.start
        self.q_size = self.kv_size * group
        self.q_scaling = 1.0
        self.attention_chunk_size = None
        self.pos_embd_params = SimpleNamespace(rope=SimpleNamespace(rotary=rotary), is_neox=True)
        self._norms = [attention.q_norm, attention.k_norm] if hasattr(attention, "q_norm") else None
        self.rope_fusion = fused and self._norms is None
        self.rotary_emb: Any = None
        if not self.rope_fusion:
            rope = self.pos_embd_params.rope
            self.rotary_emb = RotaryEmbedding(rope, head_dim=self.head_dim)
        self._from = [attention]  # in a list: not a module of this one

    def forward(
        self, position_ids: Tensor, hidden_states: Tensor, attn_metadata: Any, **kwargs: Any
    ) -> Tensor:
        assert attn_metadata.num_tokens == len(hidden_states)
        [given] = self._from
        parts = zip(
            (given.q_proj, given.k_proj, given.v_proj), (self._q, self._kv, self._kv), strict=True
        )
        qkv = torch.cat([_linear(hidden_states, p, own) for p, own in parts], dim=-1)
        q, k, v = self.convert_qkv(*self.apply_rope(qkv, None, None, position_ids))
        out = self.forward_impl(q, k, v, attn_metadata, "causal", None, None, mrope_config=None)
        total: Tensor = sum(allgather(functional.linear(out, given.o_proj.weight[:, self._q])))  # type: ignore[assignment]
        return total

    def split_qkv(
        self, q: Tensor, k: Tensor | None = None, v: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        if k is None or v is None:
            q, k, v = torch.split(q, [self.q_size, self.kv_size, self.kv_size], dim=-1)
        return q, k, v

    def apply_rope(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, position_ids: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        if self._norms is not None:
            q, k, v = self.split_qkv(q, k, v)
            q, k = (
                norm(part.reshape(len(part), -1, self.head_dim)).flatten(1)
                for norm, part in zip(self._norms, (q, k), strict=True)
            )
        if not self.rope_fusion:
            q, k, v = self.split_qkv(q, k, v)
            q, k = self.rotary_emb(position_ids, [q, k])
        return q, k, v

    def convert_qkv(
        self, q: Tensor, k: Tensor | None, v: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        if k is None or v is None:
            return q, k, v
        return torch.cat([q, k, v], dim=-1), None, None

    def forward_impl(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        attn_metadata: Any,
        attention_mask: Any,
        attention_window_size: Any,
        attention_mask_data: Any,
        mrope_config: Any,
        attention_sinks: Any = None,
    ) -> Tensor:
        raise UnsupportedError("TensorRT-LLM's attention kernel was called, and is not here")


def _linear(rows: Tensor, projection: Any, own: slice) -> Tensor:
    """Return the rank's outputs of a projection."""
    bias = None if projection.bias is None else projection.bias[own]
    return functional.linear(rows, projection.weight[own], bias)


class DecoderLayer(nn.Module):
    """One decoder layer. Its output is normalised for the next layer."""

    def __init__(self, layer: Any, attention: Attention) -> None:
        super().__init__()
        self.self_attn = attention
        self.input_layernorm = layer.input_layernorm
        self.post_attention_layernorm = layer.post_attention_layernorm
        self.mlp = layer.mlp
        self._next_norm: list[Any] = []
        self.register_forward_pre_hook(_refuse)

    def forward(
        self,
        position_ids: Tensor,
        hidden_states: Tensor,
        attn_metadata: Any,
        residual: Tensor | None,
        spec_metadata: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        if residual is None:
            residual = hidden_states
            hidden_states = self.input_layernorm(hidden_states)
        hidden_states = self.self_attn(position_ids, hidden_states, attn_metadata)
        residual = hidden_states + residual
        hidden_states = self.mlp(self.post_attention_layernorm(residual))
        residual = hidden_states + residual
        [norm] = self._next_norm
        return norm(residual), residual


def _refuse(module: nn.Module, args: Any) -> None:
    raise AssertionError("a layer was called inside a blend, and with it the connector's own hooks")


@dataclass(eq=False)
class PyTorchModelEngine:
    """The object that holds a rank's model in the engine."""

    llm_args: Any
    mapping: Any
    model: Any
    is_draft_model: bool = False


def model_of_rank(llm_args: Any, model: Any, rank: int, ranks: int) -> PyTorchModelEngine:
    """Return a model engine over the Hugging Face ``model``, for one of ``ranks``."""
    fused = llm_args.attn_backend == "TRTLLM"
    inner = model.model
    layers = [
        DecoderLayer(each, Attention(each.self_attn, inner.rotary_emb, rank, ranks, fused))
        for each in inner.layers
    ]
    for layer, after in zip(layers, [*layers[1:], None], strict=True):
        layer._next_norm.append(inner.norm if after is None else after.input_layernorm)
    decoder = SimpleNamespace(embed_tokens=inner.embed_tokens, layers=layers, norm=inner.norm)
    return PyTorchModelEngine(
        llm_args, SimpleNamespace(rank=rank), SimpleNamespace(model=decoder, config=model.config)
    )
