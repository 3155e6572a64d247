"""The oracle against Hugging Face itself, and against mistakes planted in it.

Every invariant is a function ``check_...(world)``: it passes on the reference, and `MISTAKES` lists
which of them each planted mistake must fail.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

transformers: Any = pytest.importorskip("transformers")

from benchmarks.controls import ChunkHeads, RandomRows  # noqa: E402
from kvcore.errors import ConfigError, UnsupportedError  # noqa: E402  # after the skip
from kvcore.fusion.plan import Cached, Fresh, LayerKV, Prefix, PromptPlan  # noqa: E402
from kvcore.fusion.reference import (  # noqa: E402
    Blended,
    Blender,
    Decoder,
    Projected,
    blend,
    precompute,
    prefill,
    question_mass,
)
from kvcore.fusion.select import (  # noqa: E402
    KeyDeviation,
    QuestionDeviation,
    Ratio,
    Threshold,
    keep_top,
)
from kvcore.harness.models import smollm2  # noqa: E402
from kvcore.harness.prompts import tokens  # noqa: E402
from kvcore_devtools.fusion import (  # noqa: E402
    ARCHITECTURES,
    VOCABULARY,
    Rotation,
    World,
    close,
    divergence,
    full,
    make_model,
    twin,
    words,
)

RATIOS = (0.0, 0.05, 0.1, 0.15, 0.3, 0.5, 1.0)


# --- the invariants ---------------------------------------------------------------------------


def check_prefill(world: World) -> None:
    plan = world.plan()
    context, hidden = prefill(world.decoder, plan.tokens.tolist())
    kv, logits = full(world, plan)
    close(world.decoder.logits(hidden), logits, 2e-3)
    for got, expected in zip(context.layers, kv, strict=True):
        close(got.keys, expected.keys, 2e-3)


def check_ratio_one_is_full_prefill(world: World) -> None:
    plan = world.plan()
    blended = world.blend(plan, 1.0)
    kv, logits = full(world, plan)
    close(world.decoder.logits(blended.hidden), logits[blended.rows], 2e-3)
    assert divergence(blended.logits, logits[-1]) <= 1e-6
    for got, expected in zip(blended.context.layers, kv, strict=True):
        close(got.keys, expected.keys, 2e-3)
        close(got.values, expected.values, 2e-3)


def check_layer_0_is_exact(world: World) -> None:
    """For two orders of the chunks."""
    for order in ((0, 1, 2), (2, 0, 1)):
        plan = world.plan(order)
        cached, placed = plan.rows(Cached), world.make(plan).placed[0]
        expected = full(world, plan)[0][0]
        close(placed.keys[cached], expected.keys[cached], 1e-4)
        close(placed.values[cached], expected.values[cached], 1e-5)


def check_any_rows_against_the_twin(world: World) -> None:
    plan = world.plan()
    for budget in (Ratio(0.0), Ratio(0.15), Ratio(0.3, spread=0.9), Ratio(0.2, full_layers=3)):
        blended = world.make(plan).blend(RandomRows(4), budget)
        cache, out = twin(world, plan, blended.computed)
        close(world.decoder.logits(blended.hidden), out.logits[0, blended.rows], 2e-3)
        for got, expected in zip(blended.context.layers, cache.merged, strict=True):
            close(got.keys, expected.keys, 2e-3)
            close(got.values, expected.values, 2e-3)


def check_question_mass_against_the_twin(world: World) -> None:
    plan = world.plan()
    blender = world.make(plan)
    _, out = twin(world, plan, [plan.rows(Fresh)] * world.decoder.layers)
    looks = torch.stack(out.attentions)[:, 0][:, :, plan.question]  # [layers, heads, rows, keys]
    close(question_mass(blender), looks.amax(2).sum((0, 1)), 1e-4)


def check_lone_chunk_is_full_prefill(world: World) -> None:
    """A chunk at position 0 is a prefix in all but name: nothing to repair at any ratio."""
    plan = PromptPlan([Cached(world.chunk(0)), Fresh(world.words(5, 21))])
    logits = full(world, plan)[1][-1]
    for ratio in RATIOS:
        close(world.blend(plan, ratio).logits, logits, 2e-3)


def check_chunk_behind_its_own_prefix_is_left_alone(world: World) -> None:
    prefix = world.prefix()
    behind = world.chunk(0, behind=prefix.tokens)
    plan = PromptPlan(
        [Prefix(prefix), Cached(behind), Cached(world.chunk(1)), Fresh(world.words(5, 21))]
    )
    rows = torch.arange(6, 26)
    for cached, exact in zip(world.make(plan).placed, full(world, plan)[0], strict=True):
        close(cached.keys[rows], exact.keys[rows], 1e-3)
    computed = world.blend(plan, 0.15).computed[2]
    assert not torch.isin(computed, rows).any()


def check_rows_are_the_ratio_rounded_up_and_all_fresh_ones(world: World) -> None:
    question = world.words(3, 21)
    short = PromptPlan([Prefix(world.prefix()), Cached(world.chunk(0, 3)), Fresh(question)])
    for plan, chunk_tokens, fresh in ((world.plan(), 60, 8), (short, 3, 3)):
        for ratio in RATIOS:
            computed = world.blend(plan, ratio).computed
            first = chunk_tokens if ratio else 0
            chosen = -(-int(ratio * 100) * chunk_tokens // 100)
            expected = [first] * 2 + [chosen] * (world.decoder.layers - 2)
            assert [len(rows) for rows in computed] == [n + fresh for n in expected]
            assert all(torch.isin(plan.rows(Fresh), rows).all() for rows in computed)
            assert not torch.isin(plan.rows(Prefix), torch.cat(computed)).any()


def check_rows_are_those_that_truly_deviate(world: World) -> None:
    """By K of layer 1 as a full prefill has it, against K that really was moved."""
    plan = world.plan()
    cached = plan.rows(Cached)
    sound = Blender(Decoder(world.decoder.model), plan, world.sound_ropes).placed[1]
    off = (full(world, plan)[0][1].keys - sound.keys)[cached].square().sum((1, 2))
    expected = torch.cat([keep_top(cached, off, 9), plan.rows(Fresh)]).sort().values
    assert torch.equal(world.blend(plan, 0.15).computed[2].sort().values, expected)


def check_decode_after_ratio_one_is_greedy(world: World) -> None:
    plan = world.plan()
    blended = world.blend(plan, 1.0)
    got = blended.context.greedy(blended.logits, 8)
    tokens = plan.tokens.tolist()
    for token in got:
        with torch.inference_mode():
            logits = world.decoder.model(torch.tensor([tokens])).logits[0, -1]
        assert token == int(logits.argmax())
        tokens.append(token)


def check_stored_chunks_stay_as_they_are(world: World) -> None:
    """One chunk at two places of a prompt, and again in the next one, the first time unmoved."""
    stored, other = world.chunk(0), world.chunk(1)
    before = [LayerKV(kv.keys.clone(), kv.values.clone()) for kv in stored.layers]
    for first in (stored, other):
        plan = PromptPlan([Cached(first), Cached(stored), Cached(other), Fresh(world.words(5, 21))])
        blended = world.blend(plan, 0.3)
        blended.context.append(world.words(2, 30))
        assert blended.exact_tokens == 0
        for kv, was in zip(stored.layers, before, strict=True):
            assert torch.equal(kv.keys, was.keys)
            assert torch.equal(kv.values, was.values)


def check_the_future_does_not_leak(world: World, position: int = 46) -> None:
    """A token changed at ``position`` changes nothing that was computed before it."""
    plan = world.plan()
    tokens = plan.tokens.tolist()
    tokens[position] = 3 + (tokens[position] + 1) % (VOCABULARY - 3)
    segments, start = [], 0
    for segment in plan.segments:  # the same segments with the token changed, KV and all
        mine = tokens[start : start + len(segment.tokens)]
        start += len(mine)
        if isinstance(segment, Fresh):
            segments.append(Fresh(tuple(mine)))
        else:
            segments.append(type(segment)(precompute(Decoder(world.decoder.model), mine)))
    one, two = (world.blend(p, 0.2, ChunkHeads()) for p in (plan, PromptPlan(segments)))
    earlier = one.rows < position
    close(one.hidden[earlier], two.hidden[earlier], 1e-4)
    for a, b in zip(one.context.layers, two.context.layers, strict=True):
        close(a.keys[:position], b.keys[:position], 1e-4)
        close(a.values[:position], b.values[:position], 1e-4)


def check_exact_tokens_are_exact(world: World) -> None:
    plan = PromptPlan(
        [Prefix(world.prefix()), Fresh(world.words(4, 5)), *world.plan().segments[1:]]
    )
    blended = world.blend(plan, 0.1)
    assert blended.exact_tokens == 10
    for got, expected in zip(blended.context.layers, full(world, plan)[0], strict=True):
        close(got.keys[:10], expected.keys[:10], 1e-4)
        close(got.values[:10], expected.values[:10], 1e-4)


CHECKS: dict[str, Callable[[World], None]] = {
    name.removeprefix("check_"): check
    for name, check in list(globals().items())
    if name.startswith("check_")
}


@pytest.fixture(scope="module")
def llama() -> World:
    return World(Decoder(make_model("llama")))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ARCHITECTURES)
@pytest.mark.parametrize("name", CHECKS)
def test_invariant(name: str, kind: str) -> None:
    settings = {"sliding_window": 16} if kind == "mistral" else {}
    CHECKS[name](World(Decoder(make_model(kind, **settings))))


@pytest.fixture(scope="module")
def real() -> World:
    """SmolLM2-135M over the sources of the standard library."""
    try:
        folder = smollm2()
    except UnsupportedError as missing:
        pytest.skip(str(missing))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(folder), dtype=torch.float32, attn_implementation="eager"
    )
    text = tokens(folder)
    return World(
        Decoder(model.eval()),
        theta=model.config.rope_parameters["rope_theta"],
        words=lambda count, seed: tuple(text[seed * 997 : seed * 997 + count]),
    )


DAILY = ("any_rows_against_the_twin",)
"""What the merge is on the real model. Small ones have every check of each kind."""


@pytest.mark.engine
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in DAILY else pytest.mark.exhaustive) for name in CHECKS],
)
def test_invariant_on_a_real_model(name: str, real: World) -> None:
    CHECKS[name](real)


@pytest.mark.exhaustive
@pytest.mark.engine
def test_more_rows_are_no_worse_on_a_real_model(real: World) -> None:
    """Mean KL over a few prompts by ratio."""
    means = []
    plans = [
        PromptPlan(
            [*(Cached(real.chunk(10 * i + j, 60)) for j in range(3)), Fresh(real.words(12, 70 + i))]
        )
        for i in range(3)
    ]
    expected = [full(real, plan)[1][-1] for plan in plans]
    for ratio in RATIOS:
        got = [real.blend(plan, ratio).logits for plan in plans]
        means.append(sum(map(divergence, got, expected)) / len(plans))
    assert means == sorted(means, reverse=True), dict(zip(RATIOS, means, strict=True))
    assert means[-1] <= 1e-6


def test_reuse_is_far_from_full_prefill(llama: World) -> None:
    """That there is something to repair in this world, or the other tests say little."""
    plan = llama.plan()
    assert divergence(llama.blend(plan, 0.0).logits, full(llama, plan)[1][-1]) > 0.05


@settings(max_examples=8)
@given(position=st.integers(7, 73))
def test_no_future_token_leaks(llama: World, position: int) -> None:
    check_the_future_does_not_leak(llama, position)


@settings(max_examples=10)
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5), data=st.data())
def test_any_segments_against_the_twin(llama: World, sizes: list[int], data: Any) -> None:
    """Whole, partial and repeated chunks between any fresh tokens, at any ratio."""
    segments: list[Any] = []
    for size in sizes:
        if data.draw(st.booleans()):
            segments.append(Fresh(words(size, size)))
        else:
            chunk = llama.chunk(data.draw(st.integers(0, 2)), size + 3)
            segments.append(Cached(chunk.part(start := data.draw(st.integers(0, 2)), start + size)))
    plan = PromptPlan([*segments, Fresh(words(2, 1))])
    ratio = data.draw(st.sampled_from(RATIOS))
    blended = llama.make(plan).blend(QuestionDeviation(), Ratio(ratio, spread=0.5))
    cache, out = twin(llama, plan, blended.computed)
    close(blended.logits, out.logits[0, -1], 2e-3)
    close(blended.context.layers[-1].values, cache.merged[-1].values, 2e-3)


def test_a_threshold_takes_what_is_above_it(llama: World) -> None:
    plan = llama.plan()
    cached, placed = plan.rows(Cached), llama.make(plan).placed[1]
    off = (full(llama, plan)[0][1].keys - placed.keys)[cached].square().sum((1, 2))
    bound = float(off.sort().values[29:31].mean())  # between two rows, not on one
    blended = llama.make(plan).blend(KeyDeviation(), Threshold(bound))
    expected = torch.cat([cached[off > bound], plan.rows(Fresh)]).sort().values
    assert torch.equal(blended.computed[2], expected)
    assert torch.equal(blended.computed[-1], expected)


def test_share_counts_rows_and_layers(llama: World) -> None:
    assert llama.blend(llama.plan(), 1.0).share == pytest.approx(68 / 74)
    assert llama.blend(llama.plan(), 0.0).share == pytest.approx(8 / 74)


def test_what_does_not_fit_is_refused(llama: World) -> None:
    gemma = transformers.Gemma2Config(num_hidden_layers=1, hidden_size=8, vocab_size=9)

    class Other:
        config = gemma

    with pytest.raises(UnsupportedError, match="the layers of 'gemma2'"):
        Decoder(Other())
    with pytest.raises(ConfigError, match="1 ropes for 5 layers"):
        blend(llama.decoder, llama.plan(), [Rotation()], KeyDeviation(), Ratio(0.1))
    shallow = replace(llama.chunk(0), layers=llama.chunk(0).layers[:2])
    with pytest.raises(ConfigError, match="KV of 2 layers"):
        llama.blend(PromptPlan([Cached(shallow), Fresh((3,))]), 0.1)


# --- mistakes ---------------------------------------------------------------------------------


class BottomRightMask(Decoder):
    """The last of n rows is taken to be the last of all tokens, and so on upwards."""

    def visible(self, layer: int, positions: Tensor, keys: Tensor) -> Tensor:
        last = torch.arange(len(keys) - len(positions), len(keys))
        return super().visible(layer, last, keys)


class PositionsNotGathered(Decoder):
    def project(self, layer: int, hidden: Tensor, positions: Tensor) -> Projected:
        first = int(positions[0]) if len(positions) else 0
        return super().project(layer, hidden, torch.arange(first, first + len(positions)))


class ResidualNotGathered(Decoder):
    """The residual of the rows that came in, cut to the number of rows that go on."""

    def project(self, layer: int, hidden: Tensor, positions: Tensor) -> Projected:
        self.came_in = hidden
        return super().project(layer, hidden, positions)

    def finish(self, layer: int, hidden: Tensor, attended: Tensor) -> Tensor:
        return super().finish(layer, self.came_in[: len(hidden)], attended)


class SortedMaskOverUnsortedRows(Blender):
    def first_rows(self, budget: Any) -> Tensor:
        return super().first_rows(budget).flip(0)


class MaskOfSortedRows(Decoder):
    def visible(self, layer: int, positions: Tensor, keys: Tensor) -> Tensor:
        return super().visible(layer, positions.sort().values, keys)


class NothingMerged(Blender):
    """The chunks' rows are computed and thrown away."""

    def merge(self, layer: int, cache: LayerKV, rows: Tensor, new: Projected) -> None:
        fresh = torch.isin(rows, self.fresh)
        cache.keys[rows[fresh]] = new.keys[fresh]
        cache.values[rows[fresh]] = new.values[fresh]


class OnlyKeysMerged(Blender):
    def merge(self, layer: int, cache: LayerKV, rows: Tensor, new: Projected) -> None:
        before = cache.values.clone()
        super().merge(layer, cache, rows, new)
        chunks = rows[torch.isin(rows, self.chunks)]
        cache.values[chunks] = before[chunks]


class OnlyValuesMerged(Blender):
    def merge(self, layer: int, cache: LayerKV, rows: Tensor, new: Projected) -> None:
        before = cache.keys.clone()
        super().merge(layer, cache, rows, new)
        chunks = rows[torch.isin(rows, self.chunks)]
        cache.keys[chunks] = before[chunks]


class MergedBeforeTheShift(Blender):
    """Fresh K, right at its place, is moved along with the chunk."""

    def merge(self, layer: int, cache: LayerKV, rows: Tensor, new: Projected) -> None:
        super().merge(layer, cache, rows, new)
        for start, segment in self.plan.placed():
            mine = rows[(rows >= start) & (rows < start + len(segment.tokens))]
            if isinstance(segment, Cached) and len(mine):
                moved = Rotation().shift(cache.keys[mine].transpose(0, 1), start)
                cache.keys[mine] = moved.transpose(0, 1)


class DecodeReadsTheOldCache(Blender):
    """What was merged was a copy: decode goes on over the chunks as they were placed."""

    @torch.inference_mode()
    def blend(self, *arguments: Any) -> Blended:
        blended = super().blend(*arguments)
        for layer, kv in enumerate(self.placed):
            merged = blended.context.layers[layer]
            merged.keys[self.chunks] = kv.keys[self.chunks]
            merged.values[self.chunks] = kv.values[self.chunks]
        return blended


class ComparedBeforeTheShift(Blender):
    """Deviation against K where the chunk was computed."""

    def going(self, *arguments: Any) -> Tensor:
        right, ropes = self.placed, [Rotation(times=0)] * len(self.placed)
        self.placed = [self.place(layer, rope) for layer, rope in enumerate(ropes)]
        try:
            return super().going(*arguments)
        finally:
            self.placed = right


class MergedInTheStore(Blender):
    """Blended KV under the chunk's own key: the rows are written where the chunk is kept."""

    def blend(self, *arguments: Any) -> Blended:
        blended = super().blend(*arguments)
        for start, segment in self.plan.placed():
            if isinstance(segment, Cached):
                for kv, merged in zip(segment.kv.layers, blended.context.layers, strict=True):
                    kv.values.copy_(merged.values[start : start + len(segment.tokens)])
        return blended


class QuestionInTheBudget(Blender):
    def going(self, *arguments: Any) -> Tensor:
        going, rows = super().going(*arguments), arguments[3]
        candidate = torch.isin(rows, self.chunks)
        kept = (going & candidate).nonzero().flatten()
        if len(kept) < int(candidate.sum()):
            going[kept[: len(self.fresh)]] = False
        return going


class RoundedDown(Ratio):
    def rows_at(self, *arguments: Any) -> int:
        return int(self.share(*arguments[:2]) * arguments[2])


class QuestionSkippedAtZero(Blender):
    def first_rows(self, budget: Any) -> Tensor:
        return super().first_rows(budget)[-1:] if budget.is_reuse else super().first_rows(budget)


def moved_by(**wrong: Any) -> Callable[[World], World]:
    return lambda world: replace(world, rope=Rotation(**wrong))


def decoded_by(kind: type[Decoder]) -> Callable[[World], World]:
    return lambda world: replace(world, decoder=kind(world.decoder.model))


def blended_by(kind: type[Blender]) -> Callable[[World], World]:
    return lambda world: replace(world, blender=kind)


def unsorted(world: World) -> World:
    return blended_by(SortedMaskOverUnsortedRows)(decoded_by(MaskOfSortedRows)(world))


ROPE = ("layer_0_is_exact",)
TWIN = ("any_rows_against_the_twin",)
FULL = ("ratio_one_is_full_prefill",)
MISTAKES: dict[str, tuple[Callable[[World], World], tuple[str, ...]]] = {
    "shifted one too far": (moved_by(off=1), ROPE),
    "shifted backwards": (moved_by(sign=-1), ROPE),
    "neighbours paired": (moved_by(neighbours=True), ROPE),
    "default theta": (moved_by(theta=10_000.0), ROPE),
    "shifted at store and at load": (moved_by(times=2), ROPE),
    "shifted in the store": (moved_by(in_place=True), ("stored_chunks_stay_as_they_are",)),
    "bottom-right mask": (decoded_by(BottomRightMask), (*TWIN, "the_future_does_not_leak")),
    "positions not gathered": (decoded_by(PositionsNotGathered), TWIN),
    "residual not gathered": (decoded_by(ResidualNotGathered), TWIN),
    "sorted mask, unsorted rows": (unsorted, TWIN),
    "nothing merged": (blended_by(NothingMerged), (*TWIN, *FULL)),
    "V not merged": (blended_by(OnlyKeysMerged), (*TWIN, *FULL)),
    "K not merged": (blended_by(OnlyValuesMerged), (*TWIN, *FULL)),
    "merged before the shift": (blended_by(MergedBeforeTheShift), (*TWIN, *FULL)),
    "decode reads the old cache": (
        blended_by(DecodeReadsTheOldCache),
        (*TWIN, "decode_after_ratio_one_is_greedy"),
    ),
    "compared before the shift": (
        blended_by(ComparedBeforeTheShift),
        ("rows_are_those_that_truly_deviate",),
    ),
    "blended KV in the store": (
        blended_by(MergedInTheStore),
        ("stored_chunks_stay_as_they_are",),
    ),
    "question in the budget": (
        blended_by(QuestionInTheBudget),
        ("rows_are_the_ratio_rounded_up_and_all_fresh_ones",),
    ),
    "question skipped at ratio 0": (
        blended_by(QuestionSkippedAtZero),
        ("rows_are_the_ratio_rounded_up_and_all_fresh_ones", *TWIN),
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_caught(name: str, llama: World) -> None:
    plant, caught_by = MISTAKES[name]
    for check in caught_by:
        with pytest.raises(AssertionError):
            CHECKS[check](plant(llama))


def test_rounding_down_is_caught(llama: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcore_devtools.fusion.Ratio", RoundedDown)
    with pytest.raises(AssertionError):
        check_rows_are_the_ratio_rounded_up_and_all_fresh_ones(llama)
