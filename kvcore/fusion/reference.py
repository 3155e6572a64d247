"""Selective recomputation, written for readers: the oracle that the fast path must agree with.

`Decoder` takes a Hugging Face decoder apart into its submodules, and `blend` walks through its
layers with a shrinking set of rows:

    cache = the chunks' KV, K shifted to the chunks' positions in the prompt
    rows  = everything that is not an exact prefix
    for each layer:
        q, k, v of `rows`                           at their true positions
        choose the rows to keep                     by k, v against the cache
        cache[rows] = k, v                          merged: later rows and decode read it
        attention of the kept rows                  the row at position p sees cache[0..p]
        MLP; hidden states shrink with the rows

It supports Llama, Qwen2, Qwen3 (q/k norm) and Mistral, and is intended for float32 on a CPU: at
every layer it builds a mask of rows x tokens. A `Decoder` may be used by any number of threads. A
`Blended` has one owner.
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
from kvcore.fusion.gate import Gate, GateMonitor, Verdict
from kvcore.fusion.plan import Cached, ChunkKV, Fresh, LayerKV, PromptPlan
from kvcore.fusion.rows import LOOK_ROWS
from kvcore.fusion.select import Budget, Candidates, Selector, attention_mass, narrow

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
"""Values of ``config.model_type`` whose layers consist of the steps of `Decoder`."""


class Shift(Protocol):
    """Moves K that is stored after RoPE, as `kvcore.fusion.rope.Rope` does."""

    def shift(self, keys: Tensor, distance: int) -> Tensor:
        """Return [..., tokens, head_dim] moved by ``distance`` positions, as a new tensor."""
        ...


class Projected(NamedTuple):
    """Attention inputs of n rows at one layer: q [n, heads, dim], k and v [n, kv_heads, dim]."""

    queries: Tensor
    keys: Tensor
    values: Tensor


class Decoder:
    """The steps of the layers of a Hugging Face causal language model. The model is not changed.

    Rows have no batch dimension. ``positions`` is [rows] int64.
    """

    def __init__(self, model: Any) -> None:
        kind = model.config.model_type
        if kind not in ARCHITECTURES:
            raise UnsupportedError(
                f"the reference does not know the layers of {kind!r}; "
                f"supported are {', '.join(ARCHITECTURES)}"
            )
        self.model = model
        self.config = model.config
        self.layers = int(model.config.num_hidden_layers)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the input of layer 0: [rows, hidden]."""
        hidden: Tensor = self.model.model.embed_tokens(tokens)
        return hidden

    def project(self, layer: int, hidden: Tensor, positions: Tensor) -> Projected:
        """Apply the norm, q, k and v, the per-head norms if the model has them, and RoPE."""
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

    def visible(self, layer: int, positions: Tensor, keys: Tensor) -> Tensor:
        """Return [rows, keys] bool: a row at position p sees keys 0..p, or its window of them.

        ``keys`` has their positions.
        """
        ago = positions[:, None] - keys[None, :]
        window = self._window(layer)
        return (ago >= 0) if window is None else (ago >= 0) & (ago < window)

    def attend(
        self, layer: int, queries: Tensor, positions: Tensor, kv: LayerKV, at: Tensor | None = None
    ) -> Tensor:
        """Compute attention over K and V at the positions ``at``: [rows, heads * dim].

        Without ``at`` they are indexed by position.
        """
        mask = self.visible(layer, positions, torch.arange(len(kv.keys)) if at is None else at)
        out = functional.scaled_dot_product_attention(
            queries.transpose(0, 1)[None],  # [1, heads, rows, dim]
            self._for_each_head(queries, kv.keys)[None],  # [1, heads, tokens, dim]
            self._for_each_head(queries, kv.values)[None],
            attn_mask=mask[None, None],
            scale=self.model.model.layers[layer].self_attn.scaling,
        )
        return out[0].transpose(0, 1).flatten(1)

    def probabilities(
        self, layer: int, queries: Tensor, positions: Tensor, keys: Tensor, at: Tensor
    ) -> Tensor:
        """Return the weights that `attend` gives to the values: [heads, rows, keys]."""
        scale = self.model.model.layers[layer].self_attn.scaling
        logits = queries.transpose(0, 1) @ self._for_each_head(queries, keys).transpose(1, 2)
        hidden = ~self.visible(layer, positions, at)
        weights: Tensor = (logits * scale).masked_fill(hidden, float("-inf")).softmax(dim=-1)
        return weights

    def finish(self, layer: int, hidden: Tensor, attended: Tensor) -> Tensor:
        """Return the layer's output: o_proj, residual, norm, MLP, residual."""
        block = self.model.model.layers[layer]
        hidden = hidden + block.self_attn.o_proj(attended)
        out: Tensor = hidden + block.mlp(block.post_attention_layernorm(hidden))
        return out

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Return [rows, vocabulary] from the last layer's output."""
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
        """Map [tokens, kv_heads, dim] to [heads, tokens, dim]; adjacent query heads share one."""
        return kv.repeat_interleave(queries.shape[1] // kv.shape[1], dim=1).transpose(0, 1)


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE with paired halves to [rows, heads, dim], with cos and sin [rows, 1, dim]."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-second, first), dim=-1) * sin


# ---------------------------------------------------------------------------------------------
# plain prefill and its KV


class BlendContext:
    """KV of positions 0 .. n - 1 of one prompt, to which rows can be appended. One owner."""

    def __init__(self, decoder: Decoder, layers: Sequence[LayerKV]) -> None:
        self.decoder = decoder
        self.layers = list(layers)

    @property
    def tokens(self) -> int:
        """Number of positions that have KV."""
        return len(self.layers[0].keys)

    @torch.inference_mode()
    def append(self, tokens: Iterable[int]) -> Tensor:
        """Run further tokens and keep their KV. Return their hidden states [tokens, hidden]."""
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
        """Decode up to ``count`` tokens. ``logits`` [vocabulary] are those of the last row."""
        answer: list[int] = []
        while len(answer) < count and (not answer or answer[-1] != stop):
            answer.append(int(logits.argmax()))
            if len(answer) < count:
                logits = self.decoder.logits(self.append(answer[-1:]))[-1]
        return answer

    def copy(self) -> BlendContext:
        """Return a context that can grow independently of this one."""
        return BlendContext(self.decoder, self.layers)


def _empty_context(decoder: Decoder) -> BlendContext:
    attention = decoder.model.model.layers[0].self_attn
    empty = torch.empty(0, decoder.config.num_key_value_heads, attention.head_dim)
    return BlendContext(decoder, [LayerKV(empty, empty)] * decoder.layers)


def prefill(decoder: Decoder, tokens: Iterable[int]) -> tuple[BlendContext, Tensor]:
    """Compute every token. Return the context and the last layer's output [tokens, hidden]."""
    context = _empty_context(decoder)
    return context, context.append(tokens)


def precompute(decoder: Decoder, tokens: Sequence[int], behind: Sequence[int] = ()) -> ChunkKV:
    """Compute the KV of a chunk after the tokens of ``behind``, or alone at position 0."""
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
    """The result of a blend. KV from `exact_tokens` on is approximate: never store it as exact.

    Args:
        context: merged KV of the whole prompt, from which decoding continues.
        rows: positions computed on the last layer, ascending.
        hidden: the last layer's output for them, [rows, hidden].
        computed: for each layer, the positions whose K and V were computed and merged there.
        exact_tokens: how many tokens from the start have the KV of a full prefill.
        verdicts: a gate's verdicts on abandoned walks, and then on this one. The ratio of the last
            verdict was used. A walk that computes every row is not judged.
    """

    context: BlendContext
    rows: Tensor
    hidden: Tensor
    computed: tuple[Tensor, ...]
    exact_tokens: int
    verdicts: tuple[Verdict, ...] = ()

    @property
    def logits(self) -> Tensor:
        """Logits of the prompt's last row: [vocabulary]."""
        return self.context.decoder.logits(self.hidden[-1:])[0]

    @property
    def share(self) -> float:
        """The cost of the blend: rows computed, as a share of rows times layers."""
        rows = sum(len(rows) for rows in self.computed)
        return rows / (len(self.computed) * self.context.tokens)


class Blender:
    """One prompt, which can be blended any number of times. Its chunks are not changed.

    The placed cache is made once and shared by all blends, for example of different selectors.
    """

    def __init__(self, decoder: Decoder, plan: PromptPlan, ropes: Sequence[Shift | None]) -> None:
        if len(ropes) != decoder.layers:
            raise ConfigError(
                f"{len(ropes)} ropes for {decoder.layers} layers: give one for each layer"
            )
        self.decoder = decoder
        self.plan = plan
        self.fresh = plan.rows(Fresh)
        self.chunks = plan.rows(Cached)
        self.offsets = plan.offsets
        self.placed = [self.place(layer, rope) for layer, rope in enumerate(ropes)]

    def place(self, layer: int, rope: Shift | None) -> LayerKV:
        """Return the prompt's cache at one layer: K shifted to its position, NaN for fresh rows."""
        attention = self.decoder.model.model.layers[layer].self_attn
        shape = (len(self.plan), self.decoder.config.num_key_value_heads, attention.head_dim)
        cache = LayerKV(torch.full(shape, float("nan")), torch.full(shape, float("nan")))
        for position, segment in self.plan.placed():
            if isinstance(segment, Fresh):
                continue
            chunk, there = segment.kv, slice(position, position + len(segment.tokens))
            if len(chunk.layers) != self.decoder.layers:
                raise ConfigError(
                    f"a chunk has KV of {len(chunk.layers)} layers, and the model has "
                    f"{self.decoder.layers}: give chunks of this model"
                )
            cache.keys[there] = self.moved(rope, chunk.layers[layer].keys, position - chunk.start)
            cache.values[there] = chunk.layers[layer].values
        return cache

    def moved(self, rope: Shift | None, keys: Tensor, distance: int) -> Tensor:
        """Return [tokens, kv_heads, dim] at the new position; the same bits if it did not move."""
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
        """Compute all fresh rows and the chosen rows of the chunks, layer by layer.

        ``question`` is the `question_mass` of this plan, if the caller has it already. A ``gate``
        may start the walk over with a larger ratio, or with all rows.
        """
        if question is None and selector.needs_question and not budget.is_reuse:
            question = question_mass(self, partial(attention_mass, sharpness=selector.sharpness))
        watch = GateMonitor(gate, budget, self.decoder.layers) if gate else None
        cache = self.start()
        rows, computed = self.first_rows(budget), []
        hidden = self.decoder.embed(self.plan.tokens[rows])
        for layer in range(self.decoder.layers):
            new = self.decoder.project(layer, hidden, rows)
            if watch and watch.see(self.candidates(layer, rows, new, question)):
                again = self.blend(selector, watch.budget, question, watch.next_gate)
                return replace(again, verdicts=(*_verdicts(watch), *again.verdicts))
            going = self.going(selector, budget, layer, rows, new, question)
            self.merge(layer, cache[layer], rows, new)
            computed.append(rows)
            queries, hidden, rows = new.queries[going], hidden[going], rows[going]
            attended = self.decoder.attend(layer, queries, rows, cache[layer])
            hidden = self.decoder.finish(layer, hidden, attended)
        context = BlendContext(self.decoder, cache)
        exact = self.plan.exact_tokens
        return Blended(context, rows, hidden, tuple(computed), exact, _verdicts(watch))

    def start(self) -> list[LayerKV]:
        """Return a copy of the placed cache, which a blend starts with and writes to."""
        return [LayerKV(kv.keys.clone(), kv.values.clone()) for kv in self.placed]

    def first_rows(self, budget: Budget) -> Tensor:
        """Return the positions computed at layer 0: all but the prefix, or only the fresh ones."""
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
        """Return which rows of this layer the next one computes too: [rows] bool."""
        candidates = self.candidates(layer, rows, new, question)
        kept = narrow(selector, budget, candidates, self.decoder.layers, len(self.chunks))
        return torch.isin(rows, self.fresh) | torch.isin(rows, kept)

    def candidates(
        self, layer: int, rows: Tensor, new: Projected, question: Tensor | None
    ) -> Candidates:
        """Return the chunk rows computed at one layer together with their cached KV."""
        candidate = torch.isin(rows, self.chunks)
        chunk_rows = rows[candidate]
        return Candidates(
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


def _verdicts(watch: GateMonitor | None) -> tuple[Verdict, ...]:
    """Return the verdict on a walk, if there is one."""
    return (watch.verdict,) if watch and watch.verdict else ()


@torch.inference_mode()
def question_mass(
    blender: Blender, pool: Callable[[Tensor], Tensor] = attention_mass, most: int = LOOK_ROWS
) -> Tensor:
    """Return the question's attention to each token of the reused cache: [tokens].

    The question is the last segment. Its last rows, and the fresh ones before it, run through all
    layers: ``most`` at most, the prompt's first token among them if it is fresh. The others are
    left out, so nothing attends to them. ``pool`` reduces one layer's probabilities [heads,
    question rows, keys] to [keys], and the layers are summed.
    """
    decoder, fresh = blender.decoder, blender.fresh
    if len(fresh) > most:
        first = fresh[:1] if int(fresh[0]) == 0 and most > 1 else fresh[:0]
        rows = torch.cat([first, fresh[len(fresh) - most + len(first) :]])
    else:
        rows = fresh
    left_out = torch.isin(fresh, rows, invert=True)
    positions = torch.arange(len(blender.plan))
    at = positions[torch.isin(positions, fresh[left_out], invert=True)]
    asking = torch.isin(rows, blender.plan.question)
    mass, placed = torch.zeros(len(blender.plan)), blender.start()
    hidden = decoder.embed(blender.plan.tokens[rows])
    for layer in range(decoder.layers):
        new = decoder.project(layer, hidden, rows)
        cache = placed[layer]
        cache.keys[rows], cache.values[rows] = new.keys, new.values
        seen = LayerKV(cache.keys[at], cache.values[at])
        asked = decoder.probabilities(layer, new.queries[asking], rows[asking], seen.keys, at)
        mass[at] += pool(asked)
        attended = decoder.attend(layer, new.queries, rows, seen, at)
        hidden = decoder.finish(layer, hidden, attended)
    return mass


def blend(
    decoder: Decoder,
    plan: PromptPlan,
    ropes: Sequence[Shift | None],
    selector: Selector,
    budget: Budget,
) -> Blended:
    """Assemble a prompt from its segments and recompute what ``selector`` and ``budget`` choose.

    ``ropes`` has one `Shift` for each layer; None for a layer without positions.
    """
    return Blender(decoder, plan, ropes).blend(selector, budget)
