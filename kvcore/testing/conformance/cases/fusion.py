"""Fusion: blends equal a full prefill or the oracle, and are never stored as exact KV."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcore.testing.conformance.driver import Ask, Capability
from kvcore.testing.conformance.kit import BLOCK, Kit, case

FUSED = {"enabled": True, "min_tokens": 32}
CHUNKS = (96, 112, 128)
"""Length of each chunk in tokens. All are whole blocks, so that a chunk is stored completely."""


@dataclass(frozen=True)
class Mixed:
    """A prompt of chunks separated by its own tokens. ``spans`` are the chunks' token ranges."""

    tokens: list[int]
    spans: list[tuple[int, int]]

    def ask(self, ratio: float) -> Ask:
        """Return the request for this prompt that recomputes ``ratio`` of the chunks' tokens."""
        return Ask(self.tokens, fusion={"ratio": ratio, "chunks": self.spans})


def chunks_of(kit: Kit, seed: int) -> list[list[int]]:
    """Return random chunks of the lengths `CHUNKS`."""
    assert all(count % BLOCK == 0 for count in CHUNKS)
    return [kit.tokens(seed + i, count) for i, count in enumerate(CHUNKS)]


def mixed(kit: Kit, chunks: Sequence[Sequence[int]], seed: int) -> list[Mixed]:
    """Return one prompt for every ordered pair of chunks."""
    made = []
    pairs = [(a, b) for a in range(len(chunks)) for b in range(len(chunks)) if a != b]
    for number, pair in enumerate(pairs):
        tokens, spans = kit.tokens(seed + 10 * number, 9 + number), []
        for place, chunk in enumerate(pair):
            spans.append((len(tokens), len(tokens) + len(chunks[chunk])))
            tokens = [*tokens, *chunks[chunk], *kit.tokens(seed + 10 * number + 1 + place, 7)]
        made.append(Mixed(tokens, spans))
    return made


@functools.lru_cache(maxsize=2)
def _decoder(model: Path, ahead: int = 0) -> Any:
    """Return the reference decoder, whose rows also attend to ``ahead`` later tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    from kvcore.fusion.reference import Decoder

    class Leaking(Decoder):
        def visible(self, layer: int, positions: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
            return super().visible(layer, positions + ahead, keys)

    hf: Any = AutoModelForCausalLM
    return Leaking(hf.from_pretrained(str(model), dtype=torch.float32).eval())


def oracle(kit: Kit, prompt: Mixed, ratio: float, ahead: int = 0) -> list[int]:
    """Return the answer of the oracle, `kvcore.fusion.reference`.

    It computes each chunk alone and selects rows as configured. With ``ahead``, each row of the
    blend also attends to that many later tokens, to imitate a leak.
    """
    import torch

    from kvcore.config.schema_fusion import FusionConfig
    from kvcore.fusion.plan import Cached, Fresh, PromptPlan, PromptSegment
    from kvcore.fusion.reference import blend, precompute
    from kvcore.fusion.rope import rope_of
    from kvcore.fusion.select import BUILTIN_SELECTORS, Ratio

    decoder, settings = _decoder(kit.model), FusionConfig()
    blending = _decoder(kit.model, ahead)
    segments: list[PromptSegment] = []
    last = 0
    for start, stop in prompt.spans:
        segments.append(Fresh(tuple(prompt.tokens[last:start])))
        segments.append(Cached(precompute(decoder, prompt.tokens[start:stop])))
        last = stop
    segments.append(Fresh(tuple(prompt.tokens[last:])))
    config = decoder.config.to_dict()
    ropes = [rope_of(config, layer) for layer in range(decoder.layers)]
    with torch.inference_mode():
        made = blend(
            blending,
            PromptPlan(segments),
            ropes,
            BUILTIN_SELECTORS[settings.selector](),
            Ratio(ratio, settings.spread),
        )
        return made.context.greedy(made.logits, 8)


@case("fusion", Capability.FUSION)
def everything_recomputed(kit: Kit) -> None:
    """At ratio 1 a blend equals a full prefill: alone or batched, chunks marked or found."""
    chunks = chunks_of(kit, 5000)
    asked = mixed(kit, chunks, 5100)
    with kit.engine(kit.config(fusion=FUSED)) as engine:
        kit.stored(engine, [Ask(chunk, 1) for chunk in chunks])
        asks = [prompt.ask(1.0) for prompt in asked]
        alone = [engine.ask([ask])[0] for ask in asks[:3]]
        engine.forget()
        found = engine.ask([Ask(prompt.tokens, fusion={"ratio": 1.0}) for prompt in asked[3:]])
        kit.assert_same([*alone, *found], asks)
        blended = [answer.reused.get("blend", 0) for answer in (*alone, *found)]
        assert min(blended) >= 192, blended


@case("fusion", Capability.FUSION)
def as_the_oracle(kit: Kit) -> None:
    """At 15% and 50%, answers equal those of an oracle with exact causal attention."""
    chunks = chunks_of(kit, 5200)
    asked = mixed(kit, chunks, 5300)
    for ratio in (0.15, 0.5):
        with kit.engine(kit.config(fusion=FUSED)) as engine:
            kit.stored(engine, [Ask(chunk, 1) for chunk in chunks])
            got = engine.ask([prompt.ask(ratio) for prompt in asked])
        assert all(answer.reused.get("blend", 0) >= 192 for answer in got), got
        expected = [oracle(kit, prompt, ratio) for prompt in asked]
        wrong = [i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if a.tokens != b]
        assert not wrong, (
            f"at ratio {ratio}, answers {wrong} of {len(asked)} differ from the oracle's"
        )


@case("fusion", Capability.FUSION)
def no_row_sees_the_future(kit: Kit) -> None:
    """At 30%, no row attends to a later token; a leak would change the answers."""
    chunks = chunks_of(kit, 5900)
    asked = mixed(kit, chunks, 6000)
    right = [oracle(kit, prompt, 0.3) for prompt in asked]
    leaked = [oracle(kit, prompt, 0.3, ahead=1) for prompt in asked]
    telling = [i for i, (a, b) in enumerate(zip(right, leaked, strict=True)) if a != b]
    assert telling, "a leak changes no answer, so the case proves nothing"
    with kit.engine(kit.config(fusion=FUSED)) as engine:
        kit.stored(engine, [Ask(chunk, 1) for chunk in chunks])
        got = engine.ask([asked[i].ask(0.3) for i in telling])
    assert all(answer.reused.get("blend", 0) >= 192 for answer in got), got
    assert [a.tokens for a in got] == [right[i] for i in telling], (
        "answers differ from the oracle's"
    )


@case("fusion", Capability.FUSION)
def approximate_is_never_exact(kit: Kit) -> None:
    """A request that wants exact KV never finds blended KV, now or later."""
    chunks = chunks_of(kit, 5400)
    asked = mixed(kit, chunks, 5500)
    exact = [Ask(prompt.tokens) for prompt in asked]
    with kit.engine(kit.config(fusion=FUSED)) as engine:
        kit.stored(engine, [Ask(chunk, 1) for chunk in chunks])
        rough = engine.ask([prompt.ask(0.0) for prompt in asked])
        right = kit.expected(exact)
        differ = sum(a.tokens != b for a, b in zip(rough, right, strict=True))
        assert differ >= len(asked) // 2, (
            "reuse without recomputation changes no answer, so the case proves nothing"
        )
        kit.assert_same(engine.ask(exact[:3]), exact[:3])
        engine.settle()
        engine.forget()
        kit.assert_same(engine.ask(exact), exact)
        turns = [
            Ask([*ask.tokens, *answer.tokens, *kit.tokens(5600, 9)])
            for ask, answer in zip(exact, rough, strict=True)
        ]
        kit.assert_same(engine.ask(turns), turns)


@case("fusion", Capability.FUSION, Capability.RANKS)
def two_ranks_blend(kit: Kit) -> None:
    """Ranks with different heads select the same rows to recompute."""
    chunks = chunks_of(kit, 5700)
    asked = mixed(kit, chunks, 5800)
    with kit.engine(kit.config(fusion=FUSED), ranks=2) as engine:
        kit.stored(engine, [Ask(chunk, 1) for chunk in chunks])
        got = engine.ask([prompt.ask(0.15) for prompt in asked])
    assert [a.tokens for a in got] == [oracle(kit, prompt, 0.15) for prompt in asked]
