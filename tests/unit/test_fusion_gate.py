"""The quality gate: what it measures, what it says of it, and what a blend then does."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvcore.errors import ConfigError
from kvcore.fusion.gate import Gate, Observed, Step, Verdict, Watch, left_behind, measure
from kvcore.fusion.select import KeyDeviation, QuestionDeviation, Ratio, Seen, Threshold, keep_top

RATIOS = (0.15, 0.3, 0.5)
wrong = st.floats(0, 10)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def seen(rows: int = 12, heads: int = 4, layer: int = 1, seed: int = 0, error: float = 1.0) -> Seen:
    """Rows whose cached KV is off by ``error`` squared, more or less."""
    keys, values, keys_off, values_off = drawn(4, rows, heads, 8, seed=seed)
    return Seen(
        layer=layer,
        rows=torch.arange(rows) * 3 + 5,
        keys=keys,
        values=values,
        cached_keys=keys + error * keys_off,
        cached_values=values + error * values_off,
        offsets=torch.arange(rows),
    )


def observed(*left: float, growth: float | None = None) -> Observed:
    return Observed(1, RATIOS[0], dict(zip(RATIOS, left, strict=True)), growth)


# --- verdicts ---------------------------------------------------------------------------------


@given(st.tuples(wrong, wrong, wrong), wrong, st.none() | wrong, wrong)
def test_the_least_ratio_that_keeps_the_bound(
    left: tuple[float, float, float], bound: float, growth: float | None, usual: float
) -> None:
    verdict = Gate(bound, usual=usual).judge(observed(*left, growth=growth))
    factor = usual if growth is None else growth
    keeping = [ratio for ratio, some in zip(RATIOS, left, strict=True) if some * factor <= bound]
    assert verdict.ratio == min(keeping, default=1.0)
    expected = {RATIOS[0]: Step.GO_ON, 1.0: Step.FULL}.get(verdict.ratio, Step.LARGER)
    assert verdict.step is expected
    assert verdict.expected <= bound


@given(st.tuples(wrong, wrong, wrong), st.tuples(wrong, wrong), st.tuples(wrong, wrong))
def test_more_left_or_less_allowed_never_lowers_the_ratio(
    left: tuple[float, float, float], bounds: tuple[float, float], growths: tuple[float, float]
) -> None:
    mild = Gate(max(bounds)).judge(observed(*left, growth=min(growths)))
    harsh = Gate(min(bounds)).judge(observed(*left, growth=max(growths)))
    assert harsh.ratio >= mild.ratio


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_what_is_no_number_is_past_the_bound(broken: float) -> None:
    assert Gate(9.0).judge(observed(broken, broken, broken)).step is Step.FULL
    assert Gate(9.0).judge(observed(0.1, 0.1, 0.1, growth=broken)).step is Step.FULL
    assert Gate(9.0).judge(observed(broken, 0.1, broken)).ratio == 0.3


def test_a_verdict_says_why() -> None:
    verdict = Gate(0.25).judge(observed(0.5, 0.125, 0.0625))
    assert verdict.reason == "expected to be off by 0.5 at layer 1, allowed 0.25: 0.125 at 0.3"
    assert "past it at every ratio" in Gate(0.01).judge(observed(1, 1, 1)).reason


def test_ratios_are_the_given_and_those_above() -> None:
    gate = Gate(1.0, larger=(0.5, 0.2, 0.2))
    assert gate.ratios(0.15) == [0.15, 0.2, 0.5]
    assert gate.ratios(0.3) == [0.3, 0.5]
    assert gate.ratios(0.7) == [0.7]


@pytest.mark.parametrize(
    "wanted",
    [
        {"bound": -1.0},
        {"bound": math.nan},
        {"usual": -0.1},
        {"usual": math.inf},
        {"larger": (0.0,)},
        {"larger": (1.0,)},
        {"depth": 0.0},
        {"depth": 1.0},
    ],
)
def test_settings_out_of_range_are_refused(wanted: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Gate(**{"bound": 1.0, **wanted})


def test_an_observation_says_what_its_own_ratio_leaves() -> None:
    with pytest.raises(ConfigError, match=r"0\.4.*\[0\.3\]"):
        Observed(1, 0.4, {0.3: 1.0})


# --- what is measured -------------------------------------------------------------------------


def off_by(what: Seen) -> list[float]:
    """Row by row, element by element."""

    def squares(one: Tensor, other: Tensor) -> list[float]:
        return [
            sum(
                (a - b) ** 2
                for a, b in zip(x.flatten().tolist(), y.flatten().tolist(), strict=True)
            )
            for x, y in zip(one, other, strict=True)
        ]

    key, value = (
        squares(what.keys, what.cached_keys),
        squares(what.values, what.cached_values),
    )
    nothing = torch.zeros_like(what.keys)
    key_size = sum(squares(what.keys, nothing))
    value_size = sum(squares(what.values, nothing))
    return [k / key_size / 2 + v / value_size / 2 for k, v in zip(key, value, strict=True)]


def test_off_by_is_a_share_of_the_squares() -> None:
    what = seen()
    assert measure(what).off.tolist() == pytest.approx(off_by(what), rel=1e-5)
    some = torch.arange(12) % 3 == 0
    part = replace(
        what,
        rows=what.rows[some],
        keys=what.keys[some],
        values=what.values[some],
        cached_keys=what.cached_keys[some],
        cached_values=what.cached_values[some],
    )
    assert measure(what).among(some).total == pytest.approx(sum(off_by(part)), rel=1e-5)


def test_right_rows_are_off_by_nothing_and_empty_ones_by_all() -> None:
    assert measure(seen(error=0.0)).total == 0
    what = seen()
    nothing = torch.zeros_like(what.keys)
    empty = replace(what, cached_keys=nothing, cached_values=nothing)
    assert measure(empty).total == pytest.approx(1.0)
    still = replace(empty, keys=nothing, values=nothing)
    assert measure(still).total == 0  # and no division by zero


def test_ranks_add_up_to_what_one_would_measure() -> None:
    what = seen()
    halves = [
        replace(
            what,
            keys=what.keys[:, heads],
            values=what.values[:, heads],
            cached_keys=what.cached_keys[:, heads],
            cached_values=what.cached_values[:, heads],
        )
        for heads in (slice(0, 2), slice(2, 4))
    ]
    asked: list[list[Tensor]] = [[], []]
    for half, said in zip(halves, asked, strict=True):
        measure(replace(half, reduce=lambda part, said=said: said.append(part) or part))
    sums = [one + other for one, other in zip(*asked, strict=True)]
    together = measure(replace(halves[0], reduce=lambda _: sums.pop(0)))
    assert together.off.tolist() == pytest.approx(measure(what).off.tolist())


@given(st.integers(0, 12), st.integers(0, 99))
def test_left_behind_are_all_but_the_kept(count: int, seed: int) -> None:
    what = seen(seed=seed)
    scores = drawn(12, seed=seed + 1)
    kept = set(keep_top(what.rows, scores, count).tolist())
    rows = zip(what.rows.tolist(), off_by(what), strict=True)
    naive = sum(off for row, off in rows if row not in kept)
    got = left_behind(measure(what), scores, {0.5: count, 1.0: 12})
    assert got[0.5] == pytest.approx(naive, rel=1e-4, abs=1e-9)
    assert got[1.0] == 0


# --- following a walk -------------------------------------------------------------------------

LAYERS = 10


def follow(gate: Gate, error: Mapping[int, float], ratio: float = 0.25) -> Watch:
    """A walk over 40 rows that keeps the first quarter; ``error`` by layer."""
    watch = Watch(gate, KeyDeviation(), Ratio(ratio), LAYERS, tokens=40)
    for layer in range(LAYERS):
        what = seen(40 if layer < 2 else 10, layer=layer, error=error.get(layer, 1.0))
        if watch.see(what):
            break
    return watch


def test_a_gate_is_asked_at_the_choice_and_at_its_depth() -> None:
    asked: list[Observed] = []

    class Asked(Gate):
        def judge(self, observed: Observed) -> Verdict:
            asked.append(observed)
            return super().judge(observed)

    watch = follow(Asked(math.inf, depth=0.45), {})
    assert [(one.layer, one.growth is None) for one in asked] == [(1, True), (4, False)]
    assert [one.step for one in watch.verdicts] == [Step.GO_ON] * 2
    assert list(asked[0].left) == [0.25, 0.3, 0.5]
    assert asked[0].left == asked[1].left


def test_growth_is_how_much_further_off_the_same_rows_are() -> None:
    first, deep = seen(40, layer=1, error=0.1), seen(10, layer=5, error=0.3)
    first = replace(first, rows=torch.arange(40) * 3 + 5)
    was = measure(first).among(torch.arange(40) < 10).total
    growth = measure(deep).total / was
    watch = Watch(Gate(math.inf, usual=0.0), KeyDeviation(), Ratio(0.25), LAYERS, tokens=40)
    watch.see(first)
    watch.see(deep)
    left = measure(first).off.sort().values[:30].sum()  # KeyDeviation keeps nearly the same ten
    assert watch.verdicts[1].expected == pytest.approx(float(left) * growth, rel=0.2)
    assert 5 < growth < 15
    assert watch.verdicts[0].expected == 0


def test_the_next_walk_has_the_larger_ratio_and_the_gate_unless_it_is_full() -> None:
    at_choice = follow(Gate(math.inf), {}).verdicts[0].expected
    larger = follow(Gate(at_choice * 0.97, usual=1.0, larger=(0.5,)), {})
    assert larger.verdicts[-1].step is Step.LARGER
    assert larger.budget == Ratio(0.5)
    assert larger.next_gate is larger.gate
    full = follow(Gate(0.0), {})
    assert full.budget == Ratio(1.0)
    assert full.next_gate is None


def test_what_grows_past_the_bound_is_seen_further_down() -> None:
    calm = follow(Gate(math.inf), {1: 0.1, 5: 0.1}).verdicts
    bound = 3 * max(verdict.expected for verdict in calm)
    assert [v.step for v in follow(Gate(bound), {1: 0.1, 5: 0.1}).verdicts] == [Step.GO_ON] * 2
    wild = follow(Gate(bound), {1: 0.1, 5: 3.0}).verdicts
    assert [v.step for v in wild] == [Step.GO_ON, Step.FULL]


def test_rounding_noise_does_not_grow() -> None:
    verdicts = follow(Gate(1e-3), {1: 1e-7, 5: 1e-4}).verdicts
    assert [verdict.step for verdict in verdicts] == [Step.GO_ON] * 2


def test_nothing_is_said_where_nothing_is_left() -> None:
    watch = Watch(Gate(0.0), KeyDeviation(), Ratio(0.25), 2, tokens=40)  # both layers are full
    assert not any(watch.see(seen(40, layer=layer)) for layer in range(2))
    none = Watch(Gate(0.0), KeyDeviation(), Ratio(0.25), LAYERS, tokens=0)
    assert not any(none.see(seen(0, layer=layer)) for layer in range(LAYERS))
    assert watch.verdicts == none.verdicts == []


@pytest.mark.parametrize("budget", [Threshold(0.1), Ratio(0.0)])
def test_a_gate_needs_a_ratio_to_enlarge(budget: Any) -> None:
    with pytest.raises(ConfigError, match="ratio above 0"):
        Watch(Gate(1.0), KeyDeviation(), budget, LAYERS, tokens=40)


# --- the reference's blend --------------------------------------------------------------------


@pytest.fixture(scope="module")
def world() -> Any:
    pytest.importorskip("transformers")
    from kvcore.fusion.reference import Decoder
    from kvcore.testing.fusion import World, make_model

    return World(Decoder(make_model("llama")))


BUDGET = Ratio(0.15, spread=0.5)
ASKING = QuestionDeviation()


def test_a_gate_with_nothing_to_say_changes_nothing(world: Any) -> None:
    blender = world.make(world.plan())
    gated, plain = (
        blender.blend(ASKING, BUDGET, None, Gate(math.inf)),
        blender.blend(ASKING, BUDGET),
    )
    assert torch.equal(gated.hidden, plain.hidden)
    assert [verdict.step for verdict in gated.verdicts] == [Step.GO_ON] * 2
    assert not gated.gave_up
    assert plain.verdicts == ()


def test_a_bound_of_nothing_is_a_full_prefill(world: Any) -> None:
    from kvcore.testing.fusion import close, full

    plan = world.plan()
    blended = world.make(plan).blend(ASKING, BUDGET, None, Gate(0.0))
    assert blended.gave_up
    assert blended.verdicts[-1].ratio == 1.0
    assert all(len(rows) == 68 for rows in blended.computed)
    close(blended.logits, full(world, plan)[1][-1], 2e-3)


@pytest.mark.parametrize("usual", [1.0, 0.0])
def test_past_its_bound_a_blend_is_one_with_a_larger_ratio(world: Any, usual: float) -> None:
    blender = world.make(world.plan())
    said = blender.blend(ASKING, BUDGET, None, Gate(math.inf, usual=usual)).verdicts
    bound = said[0 if usual else 1].expected * 0.99
    gate = Gate(bound, larger=(0.3, 0.5, 0.9), usual=usual)
    blended = blender.blend(ASKING, BUDGET, None, gate)
    assert blended.verdicts[0 if usual else 1].step is Step.LARGER
    used = blended.verdicts[-1].ratio
    assert BUDGET.ratio < used
    again = blender.blend(ASKING, replace(BUDGET, ratio=used))
    assert torch.equal(blended.hidden, again.hidden)


def test_chunks_that_are_exact_where_they_stand_keep_any_bound(world: Any) -> None:
    from kvcore.fusion.plan import Cached, Fresh, Plan, Prefix

    prefix = world.prefix()
    behind = Cached(world.chunk(0, behind=prefix.tokens))
    plan = Plan([Prefix(prefix), behind, Fresh(world.words(5, 21))])
    blended = world.make(plan).blend(KeyDeviation(), BUDGET, None, Gate(1e-6))
    assert [verdict.step for verdict in blended.verdicts] == [Step.GO_ON] * 2
