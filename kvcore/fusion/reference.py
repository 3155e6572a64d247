"""Selective recomputation, written to be read: the oracle that the fast path must agree with.

A Hugging Face decoder is taken apart into its own submodules (`Decoder`), and `blend` walks its
layers with a shrinking set of rows:

    cache = the chunks' KV, K shifted to where the chunks now stand
    rows  = everything that is not an exact prefix
    for each layer:
        q, k, v of `rows`                           at their true positions
        choose which rows go on                     by k, v against the cache
        cache[rows] = k, v                          merged: later rows and decode read it
        attention of the rows that go on            the row at position p sees cache[0..p]
        MLP; hidden states shrink with the rows

Llama, Qwen2, Qwen3 (q/k norm) and Mistral. Meant for float32 on a CPU: a mask of rows x tokens is
built at every layer. One `Decoder` serves any number of threads; a `Blended` belongs to one owner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from kvcore.errors import ConfigError, UnsupportedError
from kvcore.fusion.gate import Gate, GateMonitor, Step, Verdict
from kvcore.fusion.plan import Cached, ChunkKV, Fresh, LayerKV, PromptPlan
from kvcore.fusion.select import Budget, Seen, Selector, attention_mass, narrow

__all__ = [
    "ARCHITECTURES",
    "Blended",
    "Blender",
    "Decoder",
    "Shift",
    "blend",
    "precompute",
    "prefill",
    "question_mass",
]

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
"""Values of ``config.model_type`` whose layers have the steps that `Decoder` takes."""


class Shift(Protocol):
    """Moves K that is stored after RoPE, as `kvcore.fusion.rope.Rope` does; ``keys`` stay as is."""

    def shift(self, keys: Tensor, distance: int) -> Tensor:
        """[..., tokens, head_dim] moved ``distance`` positions on, as a new tensor."""
        ...


class Projected(NamedTuple):
    """One layer's attention inputs of n rows: q [n, heads, dim], k and v [n, kv_heads, dim]."""

    queries: Tensor
    keys: Tensor
    values: Tensor


class Decoder:
    """The steps of a Hugging Face causal language model's layers. Reads the model, never writes.

    Rows come without a batch dimension; ``positions`` are [rows] int64.
    """

    def __init__(self, model: Any) -> None:
        kind = model.config.model_type
        if kind not in ARCHITECTURES:
            raise UnsupportedError(
                f"the reference takes apart {', '.join(ARCHITECTURES)}, not {kind!r}: "
                "its layers may have other steps"
            )
        self.model = model
        self.config = model.config
        self.layers = int(model.config.num_hidden_layers)

    def embed(self, tokens: Tensor) -> Tensor:
        """[rows, hidden]."""
        hidden: Tensor = self.model.model.embed_tokens(tokens)
        return hidden

    def project(self, layer: int, hidden: Tensor, positions: Tensor) -> Projected:
        """Norm, q, k, v, the heads' own norms where the model has them, and RoPE on q and k."""
        block = self.model.model.layers[layer]
        attention = block.self_attn
        normed = block.input_layernorm(hidden)
        shape = (len(hidden), -1, attention.head_dim)
        queries = attention.q_proj(normed).view(shape)
        keys = attention.k_proj(normed).view(shape)
        values = attention.v_proj(normed).view(shape)
        if hasattr(attention, "q_norm"):
            queries, keys = attention.q_norm(queries), attention.k_norm(keys)
        cos, sin = self.model.model.rotary_emb(hidden[None], positions[None])
        cos, sin = cos[0, :, None], sin[0, :, None]  # [rows, 1, dim]
        return Projected(_rotated(queries, cos, sin), _rotated(keys, cos, sin), values)

    def visible(self, layer: int, positions: Tensor, tokens: int) -> Tensor:
        """[rows, tokens] bool: the row at position p sees keys 0..p, or those of its window."""
        keys = torch.arange(tokens)
        ago = positions[:, None] - keys[None, :]
        window = self._window(layer)
        return (ago >= 0) if window is None else (ago >= 0) & (ago < window)

    def attend(self, layer: int, queries: Tensor, positions: Tensor, kv: LayerKV) -> Tensor:
        """[rows, heads * dim]: rows at ``positions`` over K and V whose index is their position."""
        mask = self.visible(layer, positions, len(kv.keys))
        out = functional.scaled_dot_product_attention(
            queries.transpose(0, 1)[None],  # [1, heads, rows, dim]
            self._for_each_head(queries, kv.keys)[None],  # [1, heads, tokens, dim]
            self._for_each_head(queries, kv.values)[None],
            attn_mask=mask[None, None],
            scale=self.model.model.layers[layer].self_attn.scaling,
        )
        return out[0].transpose(0, 1).flatten(1)

    def probabilities(self, layer: int, queries: Tensor, positions: Tensor, keys: Tensor) -> Tensor:
        """[heads, rows, tokens]: what `attend` weighs the values by."""
        scale = self.model.model.layers[layer].self_attn.scaling
        logits = queries.transpose(0, 1) @ self._for_each_head(queries, keys).transpose(1, 2)
        hidden = ~self.visible(layer, positions, len(keys))
        weights: Tensor = (logits * scale).masked_fill(hidden, float("-inf")).softmax(dim=-1)
        return weights

    def finish(self, layer: int, hidden: Tensor, attended: Tensor) -> Tensor:
        """The layer's output: o_proj, residual, norm, MLP, residual."""
        block = self.model.model.layers[layer]
        hidden = hidden + block.self_attn.o_proj(attended)
        out: Tensor = hidden + block.mlp(block.post_attention_layernorm(hidden))
        return out

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocabulary], from the last layer's output."""
        out: Tensor = self.model.lm_head(self.model.model.norm(hidden))
        return out

    def _window(self, layer: int) -> int | None:
        kinds = getattr(self.config, "layer_types", None)
        if kinds is not None and kinds[layer] != "sliding_attention":
            return None
        window = getattr(self.config, "sliding_window", None)
        return None if window is None else int(window)

    @staticmethod
    def _for_each_head(queries: Tensor, kv: Tensor) -> Tensor:
        """[tokens, kv_heads, dim] -> [heads, tokens, dim]; neighbouring query heads share one."""
        return kv.repeat_interleave(queries.shape[1] // kv.shape[1], dim=1).transpose(0, 1)


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE with halves paired; [rows, heads, dim] with [rows, 1, dim]."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-second, first), dim=-1) * sin


# ---------------------------------------------------------------------------------------------
# plain prefill, and what it leaves behind


class BlendContext:
    """KV of positions 0 .. n - 1 of one prompt, to run further rows over. Grows; one owner."""

    def __init__(self, decoder: Decoder, layers: Sequence[LayerKV]) -> None:
        self.decoder = decoder
        self.layers = list(layers)

    @property
    def tokens(self) -> int:
        """How many positions have KV."""
        return len(self.layers[0].keys)

    @torch.inference_mode()
    def append(self, tokens: Iterable[int]) -> Tensor:
        """Run further tokens, keep their KV, and give their hidden states [tokens, hidden]."""
        given = torch.tensor(list(tokens))
        positions = torch.arange(self.tokens, self.tokens + len(given))
        hidden = self.decoder.embed(given)
        for layer, kv in enumerate(self.layers):
            new = self.decoder.project(layer, hidden, positions)
            kv = LayerKV(torch.cat([kv.keys, new.keys]), torch.cat([kv.values, new.values]))
            self.layers[layer] = kv
            hidden = self.decoder.finish(
                layer, hidden, self.decoder.attend(layer, new.queries, positions, kv)
            )
        return hidden

    def greedy(self, logits: Tensor, count: int, stop: int | None = None) -> list[int]:
        """Decode up to ``count`` tokens from ``logits`` [vocabulary] of the last row so far."""
        answer: list[int] = []
        while len(answer) < count and (not answer or answer[-1] != stop):
            answer.append(int(logits.argmax()))
            if len(answer) < count:
                logits = self.decoder.logits(self.append(answer[-1:]))[-1]
        return answer

    def copy(self) -> BlendContext:
        """A context that goes its own way from here."""
        return BlendContext(self.decoder, self.layers)


def _nothing(decoder: Decoder) -> BlendContext:
    attention = decoder.model.model.layers[0].self_attn
    empty = torch.empty(0, decoder.config.num_key_value_heads, attention.head_dim)
    return BlendContext(decoder, [LayerKV(empty, empty)] * decoder.layers)


def prefill(decoder: Decoder, tokens: Iterable[int]) -> tuple[BlendContext, Tensor]:
    """Every token computed: the context, and the last layer's output [tokens, hidden]."""
    context = _nothing(decoder)
    return context, context.append(tokens)


def precompute(decoder: Decoder, tokens: Sequence[int], behind: Sequence[int] = ()) -> ChunkKV:
    """KV of a chunk computed behind other tokens, or alone at position 0."""
    context, _ = prefill(decoder, [*behind, *tokens])
    start = len(behind)
    own = tuple(
        LayerKV(kv.keys[start:].clone(), kv.values[start:].clone()) for kv in context.layers
    )
    return ChunkKV(tuple(tokens), own, start, tuple(behind))


# ---------------------------------------------------------------------------------------------
# blending


@dataclass(frozen=True)
class Blended:
    """What a blend leaves: approximate KV from `exact_tokens` on, never to be stored as exact.

    Args:
        context: merged KV of the whole prompt; decoding goes on from here.
        rows: positions computed on the last layer, ascending.
        hidden: the last layer's output for them, [rows, hidden].
        computed: for each layer, the positions whose K and V were computed and merged there.
        exact_tokens: how many tokens from the start have the KV that a full prefill gives.
        verdicts: what a gate said, of walks that were given up and then of this one; the ratio used
            is that of the last. A walk that computes every row is not judged.
    """

    context: BlendContext
    rows: Tensor
    hidden: Tensor
    computed: tuple[Tensor, ...]
    exact_tokens: int
    verdicts: tuple[Verdict, ...] = ()

    @property
    def gave_up(self) -> bool:
        """Whether a gate made this a full prefill."""
        return bool(self.verdicts) and self.verdicts[-1].step is Step.FULL

    @property
    def logits(self) -> Tensor:
        """[vocabulary] of the prompt's last row."""
        return self.context.decoder.logits(self.hidden[-1:])[0]

    @property
    def share(self) -> float:
        """Rows computed, as a share of rows times layers: what the blend cost."""
        rows = sum(len(rows) for rows in self.computed)
        return rows / (len(self.computed) * self.context.tokens)


class Blender:
    """One prompt, ready to be blended in any number of ways. Its chunks are read, never written.

    The placed cache is made once, so comparing selectors costs each only its own blend.
    """

    def __init__(self, decoder: Decoder, plan: PromptPlan, ropes: Sequence[Shift | None]) -> None:
        if len(ropes) != decoder.layers:
            raise ConfigError(f"{len(ropes)} ropes for {decoder.layers} layers: give one a layer")
        self.decoder = decoder
        self.plan = plan
        self.fresh = plan.rows(Fresh)
        self.chunks = plan.rows(Cached)
        self.offsets = plan.offsets
        self.placed = [self.place(layer, rope) for layer, rope in enumerate(ropes)]

    def place(self, layer: int, rope: Shift | None) -> LayerKV:
        """The prompt's cache at one layer: K shifted to its place, NaN where there is none."""
        attention = self.decoder.model.model.layers[layer].self_attn
        shape = (len(self.plan), self.decoder.config.num_key_value_heads, attention.head_dim)
        cache = LayerKV(torch.full(shape, float("nan")), torch.full(shape, float("nan")))
        for position, segment in self.plan.placed():
            if isinstance(segment, Fresh):
                continue
            chunk, there = segment.kv, slice(position, position + len(segment.tokens))
            if len(chunk.layers) != self.decoder.layers:
                raise ConfigError(
                    f"a chunk has KV of {len(chunk.layers)} layers, the model {self.decoder.layers}"
                )
            cache.keys[there] = self.moved(rope, chunk.layers[layer].keys, position - chunk.start)
            cache.values[there] = chunk.layers[layer].values
        return cache

    def moved(self, rope: Shift | None, keys: Tensor, distance: int) -> Tensor:
        """[tokens, kv_heads, dim] at its new place; the same bits where that is the old one."""
        if rope is None or distance == 0:
            return keys
        return rope.shift(keys.transpose(0, 1), distance).transpose(0, 1)

    @torch.inference_mode()
    def blend(
        self,
        selector: Selector,
        budget: Budget,
        question: Tensor | None = None,
        gate: Gate | None = None,
    ) -> Blended:
        """Compute the fresh rows everywhere and the chosen rows of the chunks, layer by layer.

        ``question`` is `question_mass` of this plan where the caller has it already. A ``gate`` may
        have the walk start over with a larger ratio, or with all rows.
        """
        if question is None and selector.needs_question and not budget.is_reuse:
            question = question_mass(self, partial(attention_mass, sharpness=selector.sharpness))
        watch = GateMonitor(gate, budget, self.decoder.layers) if gate else None
        cache = self.start()
        rows, computed = self.first_rows(budget), []
        hidden = self.decoder.embed(self.plan.tokens[rows])
        for layer in range(self.decoder.layers):
            new = self.decoder.project(layer, hidden, rows)
            if watch and watch.see(self.seen(layer, rows, new, question)):
                again = self.blend(selector, watch.budget, question, watch.next_gate)
                return replace(again, verdicts=(*_said(watch), *again.verdicts))
            going = self.going(selector, budget, layer, rows, new, question)
            self.merge(layer, cache[layer], rows, new)
            computed.append(rows)
            queries, hidden, rows = new.queries[going], hidden[going], rows[going]
            attended = self.decoder.attend(layer, queries, rows, cache[layer])
            hidden = self.decoder.finish(layer, hidden, attended)
        context = BlendContext(self.decoder, cache)
        exact = self.plan.exact_tokens
        return Blended(context, rows, hidden, tuple(computed), exact, _said(watch))

    def start(self) -> list[LayerKV]:
        """The cache that a blend begins with and writes to: a copy of the one placed."""
        return [LayerKV(kv.keys.clone(), kv.values.clone()) for kv in self.placed]

    def first_rows(self, budget: Budget) -> Tensor:
        """Positions computed at layer 0: all but the prefix, or the fresh ones alone."""
        rows = self.fresh if budget.is_reuse else torch.cat([self.fresh, self.chunks])
        return rows.sort().values

    def going(
        self,
        selector: Selector,
        budget: Budget,
        layer: int,
        rows: Tensor,
        new: Projected,
        question: Tensor | None,
    ) -> Tensor:
        """[rows] bool: which of the rows computed at this layer the next one computes too."""
        seen = self.seen(layer, rows, new, question)
        kept = narrow(selector, budget, seen, self.decoder.layers, len(self.chunks))
        return torch.isin(rows, self.fresh) | torch.isin(rows, kept)

    def seen(self, layer: int, rows: Tensor, new: Projected, question: Tensor | None) -> Seen:
        """The chunks' rows of one layer, beside what the chunks hold."""
        candidate = torch.isin(rows, self.chunks)
        chunk_rows = rows[candidate]
        return Seen(
            layer,
            chunk_rows,
            new.keys[candidate],
            new.values[candidate],
            self.placed[layer].keys[chunk_rows],
            self.placed[layer].values[chunk_rows],
            self.offsets[chunk_rows],
            None if question is None else question[chunk_rows],
        )

    def merge(self, layer: int, cache: LayerKV, rows: Tensor, new: Projected) -> None:
        """Write fresh K and V of one layer over the cached ones, in place."""
        cache.keys[rows] = new.keys
        cache.values[rows] = new.values


def _said(watch: GateMonitor | None) -> tuple[Verdict, ...]:
    """The verdict on a walk, if there was one."""
    return (watch.verdict,) if watch and watch.verdict else ()


@torch.inference_mode()
def question_mass(blender: Blender, pool: Callable[[Tensor], Tensor] = attention_mass) -> Tensor:
    """Where the question looks when chunks are reused as they are: [tokens].

    All fresh rows run through all layers; the question's rows are those of the last segment.
    ``pool`` makes [tokens] of one layer's probabilities [heads, question rows, tokens], and the
    layers are added up.
    """
    decoder, rows = blender.decoder, blender.fresh
    asking = torch.isin(rows, blender.plan.question)
    mass, placed = torch.zeros(len(blender.plan)), blender.start()
    hidden = decoder.embed(blender.plan.tokens[rows])
    for layer in range(decoder.layers):
        new = decoder.project(layer, hidden, rows)
        cache = placed[layer]
        cache.keys[rows], cache.values[rows] = new.keys, new.values
        mass += pool(decoder.probabilities(layer, new.queries[asking], rows[asking], cache.keys))
        attended = decoder.attend(layer, new.queries, rows, cache)
        hidden = decoder.finish(layer, hidden, attended)
    return mass


def blend(
    decoder: Decoder,
    plan: PromptPlan,
    ropes: Sequence[Shift | None],
    selector: Selector,
    budget: Budget,
) -> Blended:
    """Assemble a prompt from its segments, recomputing what ``selector`` and ``budget`` choose.

    ``ropes`` has one `Shift` a layer, None for a layer without positions.
    """
    return Blender(decoder, plan, ropes).blend(selector, budget)
