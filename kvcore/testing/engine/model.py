"""A Llama in plain torch over paged KV, split by heads and layers over the ranks of one process.

    rows of a step ──▶ norm ─▶ q k v of the rank's heads ─▶ rope ─▶ k, v into pages
                         │                                            │
                         │        attention of each request over its own pages
                         ▼                                            │
                    hidden + sum over ranks of o_proj ◀───────────────┘ ─▶ + MLP ─▶ next layer

The pages of a rank are one tensor per layer, [pages, page tokens, heads of the rank, 2 * dim], with
K beside V. They are filled with NaN at the start, so that a read of unwritten KV shows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kvcore.errors import ConfigError, UnsupportedError
from kvcore.fusion.attend import Attention
from kvcore.fusion.plan import LayerKV
from kvcore.fusion.rope import Rope, rope_of
from kvcore.memory.layout import KVView, from_strides
from kvcore.model.identity import weights_identity
from kvcore.model.ingredients import ModelIdentity, split_config
from kvcore.model.shape import BlockShape
from kvcore.testing.engine.lora import Adapter, Delta, adapt, read_lora

__all__ = ["Llama", "RankModel", "Rows", "Spec", "attend_last", "load", "random_llama"]

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention: q [rows, heads, dim], k and v [rows, kv_heads, dim], after RoPE -> [rows, heads, dim].
"""

Adapted = Sequence[tuple[slice, Adapter]]
"""Runs of rows with the LoRA weights for each. Rows without LoRA are in no run."""

Hook = Callable[[int], None]
Reduce = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Spec:
    """The sizes of a Llama. ``config`` is the checkpoint's config in Hugging Face's format."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    config: Mapping[str, Any]
    epsilon: float = 1e-5

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Spec:
        """Read the sizes from a config. Raises UnsupportedError for another architecture."""
        odd = [name for name in ("attention_bias", "mlp_bias") if config.get(name)]
        if config.get("model_type") != "llama" or odd or config.get("hidden_act") != "silu":
            raise UnsupportedError(
                f"given a {config.get('model_type')!r} with {odd or config.get('hidden_act')}; "
                "the reference engine runs Llama without biases only"
            )
        heads = int(config["num_attention_heads"])
        return cls(
            layers=int(config["num_hidden_layers"]),
            hidden=int(config["hidden_size"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
            intermediate=int(config["intermediate_size"]),
            vocabulary=int(config["vocab_size"]),
            config=config,
            epsilon=float(config["rms_norm_eps"]),
        )

    @cached_property
    def ropes(self) -> tuple[Rope, ...]:
        """RoPE of each layer. Raises UnsupportedError if it is not a fixed rotation."""
        found = [rope_of(self.config, layer) for layer in range(self.layers)]
        return tuple(rope for rope in found if rope is not None)

    @property
    def attention(self) -> Attention:
        """The attention that every layer computes."""
        return Attention(self.head_dim**-0.5)


class LayerWeights(NamedTuple):
    """The matrices of one layer, [out, in] each, and the weights of its norms."""

    norm: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    mlp_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


_NAMES = (
    "input_layernorm",
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    "post_attention_layernorm",
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)
"""Names of the fields of `LayerWeights` in a checkpoint, in the same order."""


@dataclass(frozen=True)
class Llama:
    """The weights of a model on one device. Equal values of ``identity`` mean equal weights."""

    spec: Spec
    layers: tuple[LayerWeights, ...]
    embedding: Tensor
    norm: Tensor
    head: Tensor
    identity: bytes

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    def block_shape(self, block_tokens: int) -> BlockShape:
        """Return the canonical block shape, with all heads."""
        spec = self.spec
        dtype = str(self.dtype).removeprefix("torch.")
        return BlockShape(spec.layers, spec.kv_heads, spec.head_dim, block_tokens, dtype)

    @property
    def fingerprint(self) -> bytes:
        """The fingerprint that every adapter computes for this checkpoint and dtype."""
        config, _ = split_config(self.spec.config, self.spec.config)
        identity = ModelIdentity(
            config=config,
            weights=self.identity,
            load=None,
            code=None,
            compute_dtype=str(self.dtype),
            quantization=None,
            kv_dtype=str(self.dtype),
            kv_scales=None,
            rope=None,
            windows=None,
            attention=None,
            lora=None,
            draft=None,
            states=None,
            own=None,
            alone=(),
        )
        return identity.fingerprint


def load(folder: Path, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Llama:
    """Load the checkpoint in ``folder``. Raises UnsupportedError unless it is a Llama."""
    from safetensors.torch import load_file
    from transformers import AutoConfig

    # Other engines derive the fingerprint from the config as transformers reads it, with defaults.
    spec = Spec.of(AutoConfig.from_pretrained(str(folder)).to_dict())
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file, device=device)

    def take(name: str) -> Tensor:
        return found[f"{name}.weight"].to(dtype)

    layers = tuple(
        LayerWeights(*(take(f"model.layers.{i}.{name}") for name in _NAMES))
        for i in range(spec.layers)
    )
    embedding = take("model.embed_tokens")
    tied = "lm_head.weight" not in found
    head = embedding if tied else take("lm_head")
    identity = weights_identity(str(folder), None, None).digest
    return Llama(spec, layers, embedding, take("model.norm"), head, identity)


def random_llama(
    *,
    layers: int = 2,
    hidden: int = 128,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    intermediate: int = 256,
    vocabulary: int = 512,
    theta: float = 10000.0,
    max_positions: int = 131072,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Llama:
    """Make a Llama with random weights on ``device``. Equal arguments give equal weights there.

    The weights have the spread of `kvcore.harness.models`, so that greedy output depends on the
    whole prompt.
    """
    config: dict[str, Any] = {
        "model_type": "llama",
        "hidden_act": "silu",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": intermediate,
        "vocab_size": vocabulary,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": max_positions,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
    }
    generator = torch.Generator(device).manual_seed(seed)

    def draw(out: int, into: int, gain: float = 2.0) -> Tensor:
        drawn = torch.empty(out, into, device=device, dtype=dtype)
        return drawn.normal_(0.0, gain / into**0.5, generator=generator)

    ones = torch.ones(hidden, device=device, dtype=dtype)
    drawn = tuple(
        LayerWeights(
            norm=ones,
            q=draw(heads * head_dim, hidden),
            k=draw(kv_heads * head_dim, hidden),
            v=draw(kv_heads * head_dim, hidden),
            o=draw(hidden, heads * head_dim),
            mlp_norm=ones,
            gate=draw(intermediate, hidden),
            up=draw(intermediate, hidden),
            down=draw(hidden, intermediate),
        )
        for _ in range(layers)
    )
    embedding = draw(vocabulary, hidden, hidden**0.5)
    identity = f"random {seed} on {torch.device(device).type}".encode()
    return Llama(Spec.of(config), drawn, embedding, ones, draw(vocabulary, hidden), identity)


@dataclass(frozen=True)
class Rows:
    """The tokens of one request to compute in a step, at positions ``start``, ``start + 1``, ...

    ``lora`` is the folder of their LoRA weights.
    """

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    lora: Path | None = None

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)


class RankModel:
    """One rank's heads and layers of ``model``, and its pages. Use it from the rank's own thread.

    ``reduce`` sums a tensor over the ranks of a stage. It is a collective.
    """

    def __init__(
        self,
        model: Llama,
        num_pages: int,
        page_tokens: int,
        heads: range,
        reduce: Reduce,
        layers: range | None = None,
    ) -> None:
        self.model = model
        self.layers = range(model.spec.layers) if layers is None else layers
        self.page_tokens = page_tokens
        self.kv_heads = len(heads)
        self.reduce = reduce
        spec = model.spec
        if spec.heads % spec.kv_heads:
            raise ConfigError(
                f"given {spec.heads} query heads for {spec.kv_heads} KV heads; give a multiple"
            )
        dim, group = spec.head_dim, spec.heads // spec.kv_heads
        q = slice(heads.start * group * dim, heads.stop * group * dim)
        kv = slice(heads.start * dim, heads.stop * dim)
        self._own = {"q": q, "k": kv, "v": kv, "o": q}
        self._adapters: dict[Path, Adapter] = {}
        self._layers = [
            layer._replace(q=layer.q[q], k=layer.k[kv], v=layer.v[kv], o=layer.o[:, q])
            for layer in model.layers[self.layers.start : self.layers.stop]
        ]
        size = (num_pages, page_tokens, self.kv_heads, 2 * dim)
        self._pages = [
            torch.full(size, torch.nan, dtype=model.dtype, device=model.device) for _ in self.layers
        ]

    # -- memory -----------------------------------------------------------------------------

    def view(self) -> KVView:
        """Return the pages as kvcore copies them."""
        shape = self.model.block_shape(self.page_tokens).with_heads(self.kv_heads)
        tensors = [pages.transpose(1, 2) for pages in self._pages]  # [pages, heads, tokens, 2 dim]
        return KVView(from_strides(tensors, shape), tensors)

    def slots(self, pages: Sequence[int], positions: Tensor) -> Tensor:
        """Return the slots, [positions], of tokens at ``positions`` of a request's pages."""
        table = torch.tensor(pages, device=positions.device)
        return table[positions // self.page_tokens] * self.page_tokens + (
            positions % self.page_tokens
        )

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write K and V, [rows, kv_heads, dim] each, to ``slots`` of a layer."""
        pages = self._pages[layer - self.layers.start]
        pages.flatten(0, 1)[slots] = torch.cat([keys, values], dim=-1)

    def read(self, layer: int, slots: Tensor) -> LayerKV:
        """Return K and V in ``slots`` of a layer, [slots, kv_heads, dim] each."""
        pages = self._pages[layer - self.layers.start]
        return LayerKV(*pages.flatten(0, 1)[slots].chunk(2, dim=-1))

    # -- LoRA -------------------------------------------------------------------------------

    def adapter(self, folder: Path) -> Adapter:
        """Return this rank's part of the LoRA weights in ``folder``, which is read once."""
        found = self._adapters.get(folder)
        if found is None:
            whole = read_lora(folder, self.model.dtype, self.model.device)
            found = self._adapters[folder] = whole.shared(self._part)
        return found

    def _part(self, name: str, delta: Delta) -> Delta:
        own = self._own[name]
        if name == "o":
            return delta._replace(down=delta.down[:, own])
        return delta._replace(up=delta.up[own])

    def adapted(self, batch: Sequence[tuple[int, Path | None]]) -> Adapted:
        """Return the LoRA runs of a batch of requests, given as (rows, folder of the weights)."""
        runs, start = [], 0
        for rows, folder in batch:
            if folder is not None:
                runs.append((slice(start, start + rows), self.adapter(folder)))
            start += rows
        return runs

    # -- computing --------------------------------------------------------------------------

    @torch.inference_mode()
    def forward(self, batch: Sequence[Rows], before: Hook, hidden: Tensor | None = None) -> Tensor:
        """Run the rank's layers and return hidden states, [rows, hidden].

        ``hidden`` is the previous stage's result, and None for the first stage. ``before`` is
        called before each layer.
        """
        device = self.model.device
        tokens = torch.tensor([token for rows in batch for token in rows.tokens], device=device)
        parts = [torch.arange(rows.start, rows.stop, device=device) for rows in batch]
        own = [self.slots(rows.pages, part) for rows, part in zip(batch, parts, strict=True)]
        seen = [self.slots(r.pages, torch.arange(r.stop, device=device)) for r in batch]
        positions, slots = torch.cat(parts), torch.cat(own)
        attention = self.model.spec.attention
        hidden = self.embed(tokens) if hidden is None else hidden
        adapted = self.adapted([(len(rows.tokens), rows.lora) for rows in batch])
        for layer in self.layers:
            before(layer)

            def attend(q: Tensor, k: Tensor, v: Tensor, layer: int = layer) -> Tensor:
                self.write(layer, slots, k, v)
                queries = torch.split(q, [len(rows.tokens) for rows in batch])
                own_rows = zip(queries, seen, strict=True)
                return torch.cat(
                    [
                        attend_last(part, self.read(layer, there), attention)
                        for part, there in own_rows
                    ]
                )

            hidden = self.layer(layer, positions, hidden, attend, adapted)
        return hidden

    @torch.inference_mode()
    def choose(self, batch: Sequence[Rows], hidden: Tensor) -> list[int]:
        """Return each request's greedy next token, from the last layer's output."""
        device = hidden.device
        last = torch.tensor([len(rows.tokens) for rows in batch], device=device).cumsum(0) - 1
        chosen: list[int] = self.logits(hidden[last]).argmax(dim=-1).tolist()
        return chosen

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed tokens: [rows] int64 -> [rows, hidden]."""
        return functional.embedding(tokens, self.model.embedding)

    def layer(
        self,
        layer: int,
        positions: Tensor,
        hidden: Tensor,
        attend: Attend,
        adapted: Adapted = (),
    ) -> Tensor:
        """Run one decoder layer over rows at ``positions``. Hidden states are [rows, hidden]."""
        w, spec = self._layers[layer - self.layers.start], self.model.spec

        def project(name: str, given: Tensor) -> Tensor:
            made = functional.linear(given, getattr(w, name))
            return adapt(made, given, (layer, name), adapted)

        x = self._norm(hidden, w.norm)
        heads = (len(x), -1, spec.head_dim)
        rope = spec.ropes[layer]
        cos, sin = rope.cos_sin(positions)
        q = _rotated(project("q", x).view(heads), cos, sin, rope)
        k = _rotated(project("k", x).view(heads), cos, sin, rope)
        attended = attend(q, k, project("v", x).view(heads))
        hidden = hidden + self.reduce(project("o", attended.flatten(1)))
        x = self._norm(hidden, w.mlp_norm)
        gated = functional.silu(functional.linear(x, w.gate)) * functional.linear(x, w.up)
        return hidden + functional.linear(gated, w.down)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits, [rows, vocabulary], for the last layer's output."""
        return functional.linear(self._norm(hidden, self.model.norm), self.model.head)

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        wide = hidden.float()
        scale = (wide.square().mean(dim=-1, keepdim=True) + self.model.spec.epsilon).rsqrt()
        return (wide * scale).to(hidden.dtype) * weight


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor, rope: Rope) -> Tensor:
    """Apply RoPE to [rows, heads, dim]. cos and sin are [rows, dim / 2], with halves paired."""
    cos, sin = cos[:, None] * rope.scaling.magnitude, sin[:, None] * rope.scaling.magnitude
    x, y = heads.float().chunk(2, dim=-1)
    return torch.cat((x * cos - y * sin, y * cos + x * sin), dim=-1).to(heads.dtype)


def attend_last(queries: Tensor, kv: LayerKV, attention: Attention) -> Tensor:
    """Causal attention of queries that are the last rows of ``kv``, over all keys up to their own.

    On a GPU in half precision this is FlashAttention with its built-in causal mask. Elsewhere there
    is a mask of rows by keys, so that the rows of a step bound the memory.
    """
    q, k, v = (heads.transpose(0, 1)[None] for heads in (queries, *kv))
    mask = _up_to_their_own(len(queries), len(kv.keys), queries.device)
    out: Tensor = functional.scaled_dot_product_attention(
        q, k, v, mask, is_causal=mask is None, scale=attention.scale, enable_gqa=True
    )
    return out[0].transpose(0, 1)


def _up_to_their_own(rows: int, keys: int, device: torch.device) -> Any:
    """Return the mask of the last ``rows`` of ``keys``. None stands for torch's own causal mask."""
    if rows == keys:
        return None
    if device.type == "cpu":
        return torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
    # Imports torch's compiler, for which a process takes 2 s of a core.
    from torch.nn.attention.bias import causal_lower_right

    return causal_lower_right(rows, keys)
