"""Test worlds for fusion: tiny random models, chunks, and twins to compare with.

    plan = world.plan()
    blended = world.blend(plan, 0.15)
    cache, out = twin(world, plan, blended.computed)      # Hugging Face's own forward

The twin of a blend is a full forward of Hugging Face's model. At every layer, its cache returns the
chunks' KV for all rows except those that the blend recomputed there. The hidden states of the other
rows are computed too, but nothing reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor

from kvcore.fusion.attend import Attention
from kvcore.fusion.decoder import Attend, DecoderLayers, HiddenState
from kvcore.fusion.fusor import BlendJob, Placed
from kvcore.fusion.plan import Cached, ChunkKV, Fresh, LayerKV, Prefix, PromptPlan
from kvcore.fusion.reference import Blended, Blender, Decoder, Shift, precompute
from kvcore.fusion.rows import LOOK_ROWS
from kvcore.fusion.select import KeyDeviation, Ratio, Selector
from kvcore.harness.architectures import spread

__all__ = [
    "ARCHITECTURES",
    "LAYERS",
    "VOCABULARY",
    "MergingCache",
    "ReferenceLayers",
    "ReferencePlaced",
    "Rotation",
    "World",
    "close",
    "divergence",
    "full",
    "job_of",
    "make_model",
    "twin",
    "words",
]

hf: Any = transformers  # its type stubs lack some classes

LAYERS, HEADS, KV_HEADS, DIM, VOCABULARY, THETA = 5, 4, 2, 16, 101, 50_000.0
ARCHITECTURES = {
    "llama": "LlamaConfig",
    "qwen2": "Qwen2Config",
    "qwen3": "Qwen3Config",
    "mistral": "MistralConfig",
}


class Rotation:
    """RoPE with halves paired, written independently with complex numbers, and its mistakes.

    The arguments from ``sign`` on plant mistakes.
    """

    def __init__(
        self,
        theta: float = THETA,
        sign: int = 1,
        off: int = 0,
        times: int = 1,
        neighbours: bool = False,
        in_place: bool = False,
    ) -> None:
        self.theta, self.sign, self.off, self.times = theta, sign, off, times
        self.neighbours, self.in_place = neighbours, in_place

    def shift(self, keys: Tensor, distance: int) -> Tensor:
        half = keys.shape[-1] // 2
        speed = self.theta ** -(torch.arange(half, dtype=torch.float64) / half)
        angle = (self.sign * self.times * distance + self.off) * speed
        turn = torch.polar(torch.ones_like(angle), angle)
        pairs = keys.double().reshape(*keys.shape[:-1], half, 2)
        if not self.neighbours:
            pairs = keys.double().reshape(*keys.shape[:-1], 2, half).transpose(-1, -2)
        turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
        if not self.neighbours:
            turned = turned.transpose(-1, -2)
        moved = turned.reshape(keys.shape).to(keys.dtype)
        return keys.copy_(moved) if self.in_place else moved


def make_model(kind: str, **settings: Any) -> Any:
    """Make a random model whose output depends on the whole prompt."""
    config = getattr(hf, ARCHITECTURES[kind])(
        vocab_size=VOCABULARY,
        hidden_size=HEADS * DIM,
        intermediate_size=2 * HEADS * DIM,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=DIM,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        tie_word_embeddings=False,
        attn_implementation="eager",
        **settings,
    )
    model = hf.AutoModelForCausalLM.from_config(config).eval()
    spread(model, torch.Generator().manual_seed(7))
    with (
        torch.no_grad()
    ):  # half of the spread of `_spread`, so that rounding errors do not grow from layer to layer
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and "embed_tokens" not in name:
                weight.mul_(0.5)
    return model


def words(count: int, seed: int) -> tuple[int, ...]:
    drawn = torch.randint(3, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed))
    return tuple(drawn.tolist())


@dataclass(frozen=True)
class World:
    """A model, some chunks, and the classes that blend them, which a test may replace.

    ``words(count, seed)`` returns equal tokens for equal arguments. ``theta`` is the model's.
    """

    decoder: Decoder
    theta: float = THETA
    rope: Shift | None = None
    blender: type[Blender] = Blender
    words: Callable[[int, int], tuple[int, ...]] = words

    @property
    def sound_ropes(self) -> list[Shift]:
        """Return the correct RoPE of each layer."""
        return [Rotation(self.theta)] * self.decoder.layers

    @property
    def ropes(self) -> list[Shift]:
        """Return the correct RoPE of each layer, or ``rope`` in place of each."""
        return [self.rope] * self.decoder.layers if self.rope else self.sound_ropes

    def chunk(self, seed: int, count: int = 20, behind: Sequence[int] = ()) -> ChunkKV:
        """Compute a chunk with the correct decoder. Mistakes are planted in the blend only."""
        return precompute(Decoder(self.decoder.model), self.words(count, seed), behind)

    def prefix(self) -> ChunkKV:
        return self.chunk(9, 6)

    def plan(self, order: Sequence[int] = (0, 1, 2)) -> PromptPlan:
        """Return a plan: prefix, chunk, fresh, chunk, chunk, question; 6 + 60 + 3 + 5 tokens."""
        first, second, third = (Cached(self.chunk(seed)) for seed in order)
        gap, question = Fresh(self.words(3, 20)), Fresh(self.words(5, 21))
        return PromptPlan([Prefix(self.prefix()), first, gap, second, third, question])

    def make(self, plan: PromptPlan) -> Blender:
        return self.blender(self.decoder, plan, self.ropes)

    def blend(self, plan: PromptPlan, ratio: float, selector: Selector | None = None) -> Blended:
        return self.make(plan).blend(selector or KeyDeviation(), Ratio(ratio))


def full(world: World, plan: PromptPlan) -> tuple[list[LayerKV], Tensor]:
    """Run Hugging Face's prefill: each layer's KV [tokens, kv_heads, dim], and all logits."""
    with torch.inference_mode():
        cache = hf.DynamicCache()  # the model's own cache would keep a window only
        out = world.decoder.model(plan.tokens[None], past_key_values=cache, use_cache=True)
    kv = [
        LayerKV(layer.keys[0].transpose(0, 1), layer.values[0].transpose(0, 1))
        for layer in cache.layers
    ]
    return kv, out.logits[0]


class MergingCache(hf.DynamicCache):  # type: ignore[misc]  # untyped base
    """A cache that returns the chunks' KV for every row except those computed at that layer."""

    def __init__(self, placed: Sequence[LayerKV], computed: Sequence[Tensor]) -> None:
        super().__init__()
        self.placed, self.computed = placed, computed
        self.merged: list[LayerKV] = []

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any) -> tuple[Tensor, Tensor]:
        cached, rows = self.placed[layer], self.computed[layer]
        merged = LayerKV(cached.keys.clone(), cached.values.clone())
        merged.keys[rows] = keys[0].transpose(0, 1)[rows]
        merged.values[rows] = values[0].transpose(0, 1)[rows]
        self.merged.append(merged)
        return merged.keys.transpose(0, 1)[None], merged.values.transpose(0, 1)[None]


def twin(world: World, plan: PromptPlan, computed: Sequence[Tensor]) -> tuple[MergingCache, Any]:
    """Recompute the same rows with Hugging Face's forward over the whole prompt."""
    placed = Blender(Decoder(world.decoder.model), plan, world.sound_ropes).placed
    cache = MergingCache(placed, computed)
    with torch.inference_mode():
        out = world.decoder.model(
            plan.tokens[None], past_key_values=cache, use_cache=True, output_attentions=True
        )
    return cache, out


class ReferenceLayers(DecoderLayers):
    """The layers of the reference decoder as engine layers, for the fast blend."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.layers = decoder.layers
        self.attention = tuple(
            Attention(decoder.model.model.layers[i].self_attn.scaling, decoder._window(i))
            for i in range(decoder.layers)
        )

    def embed(self, tokens: Tensor) -> Tensor:
        return self.decoder.embed(tokens)

    def run(self, layer: int, positions: Tensor, state: HiddenState, attend: Attend) -> HiddenState:
        new = self.decoder.project(layer, state.hidden, positions)
        attended = attend(new.queries, new.keys, new.values).flatten(1)
        return HiddenState(self.decoder.finish(layer, state.hidden, attended), None)


class ReferencePlaced(Placed):
    """The placed cache of the reference. ``written`` has what a blend wrote to it, by layer."""

    def __init__(self, blender: Blender) -> None:
        self.blender = blender
        self.written: dict[int, LayerKV] = {}

    def layer(self, layer: int) -> LayerKV:
        placed = self.blender.placed[layer]
        return LayerKV(placed.keys.clone(), placed.values.clone())

    def write(self, layer: int, kv: LayerKV) -> None:
        self.written[layer] = LayerKV(kv.keys.clone(), kv.values.clone())


def job_of(plan: PromptPlan, look_rows: int = LOOK_ROWS) -> BlendJob:
    """Return a plan as the job of a fast blend. The engine computes the last segment."""
    exact = len(plan.segments[0].tokens) if isinstance(plan.segments[0], Prefix) else 0
    chunks = plan.rows(Cached)
    stop = len(plan) - len(plan.question)
    return BlendJob(plan.tokens, exact, stop, chunks, plan.offsets[chunks], look_rows=look_rows)


def close(got: Tensor, expected: Tensor, bar: float) -> None:
    """Assert that no element differs by more than ``bar``, and that none is NaN."""
    assert got.shape == expected.shape
    worst = float((got - expected).abs().max()) if got.numel() else 0.0
    assert worst <= bar, f"off by {worst:.2e}, allowed {bar:.0e}"


def divergence(got: Tensor, expected: Tensor) -> float:
    """Return the KL divergence of next-token distributions from ``expected``, in nats."""
    p, q = expected.double().log_softmax(-1), got.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())
