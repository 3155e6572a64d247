"""The quality gate: what it measures, what it says of it, and what a blend then does."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvcore.errors import ConfigError
from kvcore.fusion.gate import Gate, GateAction, GateMonitor, Observed, values_off
from kvcore.fusion.select import Candidates, KeyDeviation, QuestionDeviation, Ratio, Threshold

wrong = st.floats(0, 10)
ratios = st.floats(0.01, 0.99)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def candidates(rows: int = 12, heads: int = 4, layer: int = 5, error: float = 1.0) -> Candidates:
    """Rows whose cached V is off by ``error`` squared, more or less, and their K by much more."""
    keys, values, keys_off, values_off = drawn(4, rows, heads, 8)
    return Candidates(
        layer=layer,
        rows=torch.arange(rows) * 3 + 5,
        keys=keys,
        values=values,
        cached_keys=keys + 9 * keys_off,
        cached_values=values + error * values_off,
        offsets=torch.arange(rows),
    )


# --- verdicts ---------------------------------------------------------------------------------


@given(wrong, wrong, ratios, st.lists(ratios, max_size=4))
def test_the_least_ratio_that_keeps_the_bound(
    off: float, bound: float, ratio: float, larger: list[float]
) -> None:
    verdict = Gate(bound, larger=tuple(larger)).judge(Observed(5, ratio, off))
    tried = [ratio, *(more for more in larger if more > ratio)]
    keeping = [one for one in tried if off * (1 - one) <= bound]
    assert verdict.ratio == min(keeping, default=1.0)
    expected = {ratio: GateAction.GO_ON, 1.0: GateAction.FULL}.get(verdict.ratio, GateAction.LARGER)
    assert verdict.action is expected
    assert verdict.expected == off * (1 - verdict.ratio) <= bound


@given(st.tuples(wrong, wrong), st.tuples(wrong, wrong), ratios)
def test_rows_further_off_or_less_allowed_never_lower_the_ratio(
    offs: tuple[float, float], bounds: tuple[float, float], ratio: float
) -> None:
    mild = Gate(max(bounds)).judge(Observed(5, ratio, min(offs)))
    harsh = Gate(min(bounds)).judge(Observed(5, ratio, max(offs)))
    assert harsh.ratio >= mild.ratio


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_what_is_no_number_is_past_the_bound(broken: float) -> None:
    assert Gate(9.0).judge(Observed(5, 0.15, broken)).action is GateAction.FULL


def test_a_verdict_says_why() -> None:
    assert Gate(0.3).judge(Observed(5, 0.15, 0.4)).reason == (
        "rows are off by 0.4 at layer 5: 0.28 expected at 0.30, allowed 0.3"
    )
    assert "past 0.01 at every ratio" in Gate(0.01).judge(Observed(5, 0.15, 1.0)).reason


@pytest.mark.parametrize(
    "wanted",
    [
        {"bound": -1.0},
        {"bound": math.nan},
        {"larger": (0.0,)},
        {"larger": (1.0,)},
        {"larger": (math.nan,)},
        {"depth": 0.0},
        {"depth": 1.0},
    ],
)
def test_settings_out_of_range_are_refused(wanted: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Gate(**{"bound": 1.0, **wanted})


# --- what is measured -------------------------------------------------------------------------


def naive_off(what: Candidates) -> float:
    """Element by element."""
    fresh, cached = what.values.flatten().tolist(), what.cached_values.flatten().tolist()
    off = sum((a - b) ** 2 for a, b in zip(fresh, cached, strict=True))
    return float(off / sum(a**2 for a in fresh))


@given(st.integers(1, 20), st.floats(0, 4))
def test_off_by_is_a_share_of_the_square(rows: int, error: float) -> None:
    what = candidates(rows, error=error)
    assert values_off(what) == pytest.approx(naive_off(what), rel=1e-5, abs=1e-12)


def test_right_values_are_off_by_nothing_and_none_by_all() -> None:
    what = candidates(error=0.0)
    nothing = torch.zeros_like(what.values)
    assert values_off(what) == 0
    assert values_off(replace(what, cached_values=nothing)) == pytest.approx(1.0)
    assert values_off(replace(what, values=nothing, cached_values=nothing)) == 0


def test_ranks_together_measure_what_one_would() -> None:
    what = candidates()
    halves = [
        replace(what, values=what.values[:, part], cached_values=what.cached_values[:, part])
        for part in (slice(0, 1), slice(1, 4))
    ]
    asked: list[list[Tensor]] = [[], []]
    for half, said in zip(halves, asked, strict=True):
        values_off(replace(half, reduce=lambda part, said=said: said.append(part) or part))
    sums = [one + other for one, other in zip(*asked, strict=True)]
    together = values_off(replace(halves[0], reduce=lambda _: sums.pop(0)))
    assert together == pytest.approx(values_off(what))
    assert together != pytest.approx(values_off(halves[0]), rel=1e-3)


# --- following a walk -------------------------------------------------------------------------

LAYERS = 10


@pytest.mark.parametrize(("depth", "layer"), [(0.5, 5), (0.45, 4), (0.01, 2), (0.99, 9)])
def test_a_gate_is_asked_once_at_its_depth(depth: float, layer: int) -> None:
    watch = GateMonitor(Gate(0.0, depth=depth), Ratio(0.25), LAYERS)
    assert [one for one in range(LAYERS) if watch.see(candidates(layer=one))] == [layer]
    assert watch.verdict is not None
    assert f"layer {layer}" in watch.verdict.reason


def test_the_next_walk_has_the_larger_ratio_and_the_gate_unless_it_is_full() -> None:
    budget = Ratio(0.25, spread=0.5, full_layers=3)
    off = values_off(candidates())
    for bound, ratio, gated in ((off, 0.25, True), (0.6 * off, 0.5, True), (0.0, 1.0, False)):
        watch = GateMonitor(Gate(bound, depth=0.5), budget, LAYERS)
        assert watch.see(candidates()) == (ratio != 0.25)
        assert watch.budget == replace(budget, ratio=ratio)
        assert watch.next_gate is (watch.gate if gated else None)


def test_nothing_is_said_where_no_row_was_recomputed() -> None:
    watch = GateMonitor(Gate(0.0), Ratio(0.25), LAYERS)
    assert not any(watch.see(candidates(0, layer=layer)) for layer in range(LAYERS))
    assert watch.verdict is None
    assert watch.next_gate is watch.gate


@pytest.mark.parametrize("budget", [Threshold(0.1), Ratio(0.0)])
def test_a_gate_needs_a_ratio_to_enlarge(budget: Any) -> None:
    with pytest.raises(ConfigError, match="needs a Ratio above 0"):
        GateMonitor(Gate(1.0), budget, LAYERS)


# --- the reference's blend --------------------------------------------------------------------


@pytest.fixture(scope="module")
def world() -> Any:
    pytest.importorskip("transformers")
    from kvcore.fusion.reference import Decoder
    from kvcore_devtools.fusion import World, make_model

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
    assert [verdict.action for verdict in gated.verdicts] == [GateAction.GO_ON]
    assert plain.verdicts == ()


def test_a_bound_of_nothing_is_a_full_prefill(world: Any) -> None:
    from kvcore_devtools.fusion import close, full

    plan = world.plan()
    blended = world.make(plan).blend(ASKING, BUDGET, None, Gate(0.0))
    assert blended.verdicts[-1].action is GateAction.FULL
    assert blended.verdicts[-1].ratio == 1.0
    assert all(len(rows) == 68 for rows in blended.computed)
    close(blended.logits, full(world, plan)[1][-1], 2e-3)


def test_past_its_bound_a_blend_is_one_with_a_larger_ratio(world: Any) -> None:
    blender = world.make(world.plan())
    (said,) = blender.blend(ASKING, BUDGET, None, Gate(math.inf)).verdicts
    gate = Gate(said.expected * 0.99, larger=(0.3, 0.5, 0.9))
    blended = blender.blend(ASKING, BUDGET, None, gate)
    assert [verdict.action for verdict in blended.verdicts] == [GateAction.LARGER, GateAction.GO_ON]
    used = blended.verdicts[-1].ratio
    assert used == 0.3
    again = blender.blend(ASKING, replace(BUDGET, ratio=used))
    assert torch.equal(blended.hidden, again.hidden)


def test_chunks_that_are_exact_where_they_stand_keep_any_bound(world: Any) -> None:
    from kvcore.fusion.plan import Cached, Fresh, Prefix, PromptPlan

    prefix = world.prefix()
    behind = Cached(world.chunk(0, behind=prefix.tokens))
    plan = PromptPlan([Prefix(prefix), behind, Fresh(world.words(5, 21))])
    blended = world.make(plan).blend(KeyDeviation(), BUDGET, None, Gate(1e-6))
    assert [verdict.action for verdict in blended.verdicts] == [GateAction.GO_ON]
