"""The loading controller: its bounds, its monotony, and that it learns what is there."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvcore.errors import ConfigError
from kvcore.fusion.controller import (
    BlendCandidate,
    ComputeRates,
    Controller,
    ControllerSettings,
    ForwardPart,
    Mode,
    TierRates,
    hidden_ratio,
    pipelined,
)
from kvcore.telemetry.fit import Fit
from support.budget import examples

LAYERS = 30
SETTINGS = ControllerSettings(layers=LAYERS)
COMPUTE = ComputeRates(once=3e-3, row=1e-5, pair=2e-9)
TIERS = {"host": TierRates(1e-5, 1e-10), "disk": TierRates(1e-4, 1e-9)}
TOKEN_BYTES = 23_040
"""Of KV in all layers: SmolLM2-135M in 16 bits."""

rates = st.floats(1e-9, 1e-2)
speeds = st.floats(0.01, 100)


def controller(
    compute: ComputeRates = COMPUTE, settings: ControllerSettings = SETTINGS, tiers: Any = None
) -> Controller:
    return Controller(settings, compute, TIERS if tiers is None else tiers)


def request(
    chunks: int = 3000, fresh: int = 40, prefix: int = 0, tier: str = "disk"
) -> BlendCandidate:
    return BlendCandidate(
        tokens=prefix + chunks + fresh,
        prefix=prefix,
        chunks=chunks,
        prefix_bytes={tier: prefix * TOKEN_BYTES},
        chunk_bytes={tier: chunks * TOKEN_BYTES},
    )


requests = st.builds(
    request,
    chunks=st.integers(1, 50_000),
    fresh=st.integers(1, 2000),
    prefix=st.integers(0, 20_000),
    tier=st.sampled_from(sorted(TIERS)),
)


def slower(tiers: dict[str, TierRates], factor: float) -> dict[str, TierRates]:
    return {name: TierRates(*(rate * factor for rate in tier)) for name, tier in tiers.items()}


# --- a fit ------------------------------------------------------------------------------------


PRIOR = (2e-3, 1e-5, 1e-9)


def sizes(seed: int, count: int) -> list[tuple[float, float, float]]:
    """Once, rows, pairs: prefills of 16 to 8000 tokens behind 0 to 8000."""
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        rows, context = int(2 ** draw.uniform(4, 13)), draw.choice([0, draw.randrange(8000)])
        found.append((1.0, float(rows), rows * context + rows * rows / 2))
    return found


def cost(planted: Sequence[float], amounts: Sequence[float]) -> float:
    return sum(rate * amount for rate, amount in zip(planted, amounts, strict=True))


@settings(max_examples=examples(30))  # of 300 runs each
@given(st.tuples(speeds, speeds, speeds), st.integers(0, 99))
@example((0.01, 1.0, 100.0), 0)
@example((100.0, 1.0, 0.01), 0)
@example((0.25, 0.25, 48.0), 15)
@example((0.03125, 0.03125, 37.0), 8)
def test_a_fit_finds_what_was_planted(factors: tuple[float, float, float], seed: int) -> None:
    planted = [rate * factor for rate, factor in zip(PRIOR, factors, strict=True)]
    fit, noise = Fit(PRIOR), random.Random(seed)
    for amounts in sizes(seed, 300):
        assert fit.observe(amounts, cost(planted, amounts) * noise.lognormvariate(0, 0.05))
    errors = [fit.predict(some) / cost(planted, some) - 1 for some in sizes(seed + 1, 50)]
    # Of 5% noise; three times that where one part is a thousand times dearer beside the others than
    # the prior has it.
    assert math.sqrt(sum(error**2 for error in errors) / 50) < 0.2


def test_the_prior_answers_until_enough_was_seen() -> None:
    fit = Fit(PRIOR, enough=3)
    for _ in range(2):
        assert not fit.is_learnt
        assert fit.rates == PRIOR
        fit.observe((1, 100, 5000), 1.0)
    fit.observe((1, 100, 5000), 1.0)
    assert fit.is_learnt
    assert fit.predict((1, 100, 5000)) == pytest.approx(1.0)
    fit.forget()
    assert not fit.is_learnt
    assert fit.rates == PRIOR


def test_a_first_run_that_compiled_something_is_outvoted() -> None:
    fit = Fit(PRIOR)
    for seconds in (60.0, 0.01, 0.01):
        fit.observe((1, 100, 5000), seconds)
    assert fit.predict((1, 100, 5000)) < 0.015


@settings(max_examples=examples(40))
@given(st.sampled_from([1e-3, 0.1, 10.0, 1e6]), st.integers(0, 99))
def test_one_outlier_moves_little(factor: float, seed: int) -> None:
    fit = Fit(PRIOR)
    for amounts in sizes(seed, 100):
        fit.observe(amounts, cost(PRIOR, amounts))
    strange = sizes(seed + 1, 1)[0]
    fit.observe(strange, cost(PRIOR, strange) * factor)
    for amounts in sizes(seed + 2, 20):
        assert fit.predict(amounts) == pytest.approx(cost(PRIOR, amounts), rel=0.25)


@pytest.mark.parametrize("factor", [0.2, 5.0])
def test_a_change_that_lasts_is_followed(factor: float) -> None:
    fit = Fit(PRIOR)
    for amounts in sizes(0, 100):
        fit.observe(amounts, cost(PRIOR, amounts))
    for amounts in sizes(1, 120):
        fit.observe(amounts, factor * cost(PRIOR, amounts))
    for amounts in sizes(2, 20):
        off = fit.predict(amounts) / (factor * cost(PRIOR, amounts))
        assert 1 / 1.35 < off < 1.35


def test_observations_of_one_size_leave_the_proportions() -> None:
    fit = Fit(PRIOR)
    amounts = (1.0, 200.0, 2e6)  # each rate is a half or a quarter of the whole
    for _ in range(50):
        fit.observe(amounts, 7 * cost(PRIOR, amounts))
    assert fit.rates == pytest.approx([7 * rate for rate in PRIOR])


@given(
    st.lists(
        st.tuples(st.floats(0, 1e9), st.floats(0, 1e9), st.floats(0, 1e15), st.floats(1e-6, 1e6)),
        min_size=1,
        max_size=40,
    )
)
def test_rates_are_finite_and_never_below_zero(
    runs: list[tuple[float, float, float, float]],
) -> None:
    fit = Fit(PRIOR)
    for *amounts, seconds in runs:
        fit.observe(amounts, seconds)
        assert all(0 <= rate < math.inf for rate in fit.rates)
    assert any(fit.rates)


@settings(max_examples=examples(40))
@given(st.floats(1e-3, 1e3))
def test_a_machine_slower_by_a_factor_has_rates_that_are_larger_by_it(factor: float) -> None:
    fit, slow = Fit(PRIOR), Fit(PRIOR)
    draw = random.Random(0)
    for amounts in sizes(0, 60):
        seconds = cost((1e-3, 3e-5, 5e-9), amounts) * draw.lognormvariate(0, 0.3)
        fit.observe(amounts, seconds)
        slow.observe(amounts, seconds * factor)
    assert slow.rates == pytest.approx([rate * factor for rate in fit.rates], rel=1e-6)


@pytest.mark.parametrize(
    ("amounts", "seconds"),
    [
        ((1, 10, 10), 0.0),
        ((1, 10, 10), -1.0),
        ((1, 10, 10), math.nan),
        ((1, 10, 10), math.inf),
        ((0, 0, 0), 1.0),
        ((1, -10, 10), 1.0),
        ((1, math.nan, 10), 1.0),
        ((1, math.inf, 10), 1.0),
        ((1, 10**400, 10), 1.0),
    ],
)
def test_what_cannot_be_a_run_is_left_out(amounts: tuple[float, ...], seconds: float) -> None:
    fit = Fit(PRIOR, enough=1)
    fit.observe((1, 10, 10), 0.5)
    before = fit.rates
    assert not fit.observe(amounts, seconds)
    assert fit.rates == before


@pytest.mark.parametrize("prior", [(), (0.0, 1.0), (math.nan,), (-1.0,), (math.inf,)])
def test_a_prior_that_is_none_is_refused(prior: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="prior"):
        Fit(prior)


@pytest.mark.parametrize("wanted", [{"memory": 0}, {"enough": 0}])
def test_a_fit_that_remembers_nothing_is_refused(wanted: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="at least one"):
        Fit(PRIOR, **wanted)


# --- arithmetic -------------------------------------------------------------------------------


def counted_ratio(load: float, once: float, row: float, chunks: int, fresh: int) -> float:
    """Row by row."""
    rows = 0
    while rows < chunks and once + row * (fresh + rows + 1) <= load:
        rows += 1
    return rows / chunks


@given(
    st.floats(0, 1),
    st.floats(0, 0.1),
    st.floats(1e-3, 1),
    st.integers(1, 500),
    st.integers(0, 100),
)
def test_the_hidden_ratio_is_the_one_found_by_counting(
    load: float, once: float, row: float, chunks: int, fresh: int
) -> None:
    got = hidden_ratio(load, once, row, chunks, fresh)
    counted = counted_ratio(load, once, row, chunks, fresh)
    assert abs(got - counted) * chunks <= 1 + 1e-9  # a row on the border, by rounding
    assert once + row * (fresh + got * chunks) <= load * (1 + 1e-9) or got == 0


def test_the_hidden_ratio_at_its_edges() -> None:
    assert hidden_ratio(1.0, 0.0, 0.0, 10, 5) == 1
    assert hidden_ratio(1.0, 0.0, 0.1, 5, 5) == 1
    assert hidden_ratio(1.0, 0.0, 0.125, 10, 5) == 0.3
    assert hidden_ratio(1.0, 2.0, 0.1, 10, 5) == 0
    assert hidden_ratio(1.0, 0.0, 0.1, 0, 5) == 0


def walked(load: float, stages: Sequence[tuple[int, float]]) -> float:
    """Layer by layer."""
    now, arrived = 0.0, 0.0
    for count, seconds in stages:
        for _ in range(count):
            arrived += load
            now = max(now, arrived) + seconds
    return now


@given(
    st.floats(0, 10),
    st.lists(st.tuples(st.integers(0, 12), st.floats(0, 10)), max_size=4),
)
def test_a_pipeline_takes_as_long_as_walking_it(
    load: float, stages: list[tuple[int, float]]
) -> None:
    assert pipelined(load, *stages) == pytest.approx(walked(load, stages))


# --- a decision -------------------------------------------------------------------------------


@given(requests, speeds, speeds, st.floats(0, 1), st.floats(0, 1))
def test_the_ratio_keeps_its_bounds(
    wanted: BlendCandidate, compute: float, loading: float, one: float, other: float
) -> None:
    settings = replace(SETTINGS, floor=min(one, other), ceiling=max(one, other))
    rates = ComputeRates(*(rate * compute for rate in COMPUTE))
    decision = controller(rates, settings, slower(TIERS, loading)).decide(wanted)
    assert settings.floor <= decision.ratio <= settings.ceiling


@given(requests, st.lists(speeds, min_size=2, max_size=5))
def test_a_slower_tier_never_lowers_the_ratio(wanted: BlendCandidate, factors: list[float]) -> None:
    found = [controller(tiers=slower(TIERS, one)).decide(wanted) for one in sorted(factors)]
    for fast, slow in pairwise(found):
        assert slow.ratio >= fast.ratio
        assert slow.blend_seconds >= fast.blend_seconds


@given(requests, st.lists(speeds, min_size=2, max_size=5))
def test_faster_computing_never_lowers_the_ratio(
    wanted: BlendCandidate, factors: list[float]
) -> None:
    found = [
        controller(ComputeRates(*(rate * one for rate in COMPUTE))).decide(wanted)
        for one in sorted(factors, reverse=True)
    ]
    for slow, fast in pairwise(found):
        assert fast.ratio >= slow.ratio


@given(requests, speeds, speeds)
def test_the_rows_hide_unless_the_floor_asks_for_more(
    wanted: BlendCandidate, compute: float, loading: float
) -> None:
    rates = ComputeRates(*(rate * compute for rate in COMPUTE))
    decision = controller(rates, tiers=slower(TIERS, loading)).decide(wanted)
    hidden = decision.row_seconds <= decision.load_seconds * (1 + 1e-9)
    assert hidden or decision.ratio == SETTINGS.floor


@given(st.lists(st.tuples(requests, speeds, speeds), min_size=1, max_size=20))
def test_a_blend_is_chosen_only_where_it_is_faster(
    steps: list[tuple[BlendCandidate, float, float]],
) -> None:
    asked = controller(settings=replace(SETTINGS, enough=1))
    for wanted, compute, loading in steps:
        asked.prefilled([ForwardPart(500, 0)], compute)
        asked.loaded("disk", 1_000_000, 1e-3 * loading)
        asked.blended(wanted.behind, wanted.fresh, wanted.prefix, compute)
        decision = asked.decide(wanted)
        saved = 1 - decision.blend_seconds / decision.prefix_seconds
        if decision.mode is Mode.BLEND:
            assert saved >= SETTINGS.leave - 1e-9
        else:
            assert saved <= SETTINGS.enter + 1e-9


def between(low: float, high: float) -> BlendCandidate:
    """A request whose blend saves a share of time between these, under the priors."""
    for nbytes in range(0, 2 * 10**10, 5 * 10**7):
        asked = replace(request(), chunk_bytes={"host": nbytes})
        decision = controller().decide(asked)
        if low < 1 - decision.blend_seconds / decision.prefix_seconds < high:
            return asked
    raise AssertionError("no such request")


def test_ways_do_not_change_in_turns() -> None:
    asked = controller()
    clear, close, worse = between(0.3, 0.5), between(0.08, 0.15), between(-1, 0.01)
    modes = [asked.decide(one).mode.name for one in (close, clear, close, worse, close)]
    assert modes == ["PREFIX", "BLEND", "BLEND", "PREFIX", "PREFIX"]
    small = request(chunks=40)
    assert asked.decide(small).mode is controller().decide(small).mode  # a size of its own


def test_a_fast_tier_leaves_the_floor_and_a_slow_one_the_ceiling() -> None:
    fast = controller(tiers=slower(TIERS, 1e-3)).decide(request())
    slow = controller(tiers=slower(TIERS, 1e3)).decide(request())
    assert (fast.ratio, fast.mode) == (SETTINGS.floor, Mode.BLEND)
    assert (slow.ratio, slow.mode) == (SETTINGS.ceiling, Mode.PREFIX)
    assert "0.15" in fast.reason


def test_tiers_load_beside_each_other_and_add_up_within_one() -> None:
    asked = controller()
    mixed = replace(request(prefix=1000), prefix_bytes={"host": 10**6})
    assert asked.decide(mixed).load_seconds == asked.decide(request()).load_seconds
    both = request(prefix=3000)
    twice = asked.decide(both).load_seconds - TIERS["disk"].latency
    assert twice == pytest.approx(2 * (asked.decide(request()).load_seconds - 1e-4))


def test_a_look_at_the_question_leaves_nothing_to_hide_behind() -> None:
    slow = slower(TIERS, 100)
    looking = controller(settings=replace(SETTINGS, look_rows=128), tiers=slow).decide(request())
    walking = controller(tiers=slow).decide(request())
    assert looking.ratio == SETTINGS.floor < walking.ratio
    assert looking.blend_seconds > LAYERS * looking.load_seconds


@given(
    chunks=st.integers(1, 20_000),
    fresh=st.integers(1, 5000),
    prefix=st.integers(0, 5000),
    most=st.sampled_from([1, 128, 5000]),
)
def test_a_look_computes_the_last_fresh_rows_once_more(
    chunks: int, fresh: int, prefix: int, most: int
) -> None:
    """It costs what the same machine takes for these rows, on each layer."""
    compute = ComputeRates(once=3e-3, row=1e-5, pair=1e-18)  # all rows alike
    wanted = BlendCandidate(tokens=prefix + chunks + fresh, prefix=prefix, chunks=chunks)
    looking = controller(compute, replace(SETTINGS, look_rows=most)).decide(wanted)
    walking = controller(compute).decide(wanted)
    assert looking.ratio == walking.ratio == SETTINGS.floor, "nothing to load"
    more = compute.once + LAYERS * compute.row * min(fresh, most)
    assert looking.blend_seconds == pytest.approx(walking.blend_seconds + more)


@pytest.mark.parametrize(("most", "mode"), [(1200, Mode.PREFIX), (128, Mode.BLEND)])
def test_a_blend_with_a_long_question_is_not_worth_a_long_look(most: int, mode: Mode) -> None:
    """A prompt has 1900 tokens. 700 are cached, and the other 1200 may be computed twice."""
    asked = controller(settings=replace(SETTINGS, look_rows=most))
    assert asked.decide(request(700, 1200, tier="host")).mode is mode
    assert asked.decide(request(1830, 70, tier="host")).mode is Mode.BLEND


def test_long_looks_say_nothing_against_blends_with_short_ones() -> None:
    """Measured are blends of few cached tokens, which a client has asked for, on this machine."""
    asked = controller(settings=replace(SETTINGS, look_rows=1200, enough=1))
    for _ in range(20):
        rows, kept, looked = 720, 431, 1216
        later = (LAYERS - 2) * kept + LAYERS * looked
        mean_row = (rows + 1) / 2
        work = (2, 2 * rows + later, (2 * rows + later) * mean_row)
        assert asked.blended(rows, kept, 0, cost((3e-3, 1e-5, 2e-9), work), looked)
    assert asked.decide(request(1830, 70, tier="host")).mode is Mode.BLEND
    assert asked.decide(request(700, 1200, tier="host")).mode is Mode.PREFIX


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        (BlendCandidate(tokens=50, prefix=10, chunks=0), "no chunk"),
        (BlendCandidate(tokens=50, prefix=10, chunks=40), "no fresh"),
        (BlendCandidate(tokens=0, prefix=0, chunks=0), "no chunk"),
        (BlendCandidate(tokens=50, prefix=-1, chunks=10), "no prompt's"),
        (BlendCandidate(tokens=50, prefix=40, chunks=20), "no prompt's"),
        (BlendCandidate(tokens=50, prefix=0, chunks=20, chunk_bytes={"disk": -1}), "no prompt's"),
    ],
)
def test_requests_without_a_blend_take_the_prefix(wanted: BlendCandidate, why: str) -> None:
    decision = controller().decide(wanted)
    assert decision.mode is Mode.PREFIX
    assert why in decision.reason
    assert SETTINGS.floor <= decision.ratio <= SETTINGS.ceiling


# --- learning ---------------------------------------------------------------------------------

TRUE_PREFILL = ComputeRates(8e-3, 4e-5, 3e-8)
TRUE_BLEND = ComputeRates(2e-2, 6e-5, 2e-8)
TRUE_TIERS = {"host": TierRates(5e-5, 3e-10), "disk": TierRates(2e-3, 8e-10)}


def teach(asked: Controller, runs: int = 300, seed: int = 0, noise: float = 0.05) -> None:
    """Measure a machine that is none of the priors, with noise."""
    draw = random.Random(seed)
    deep = LAYERS - 2
    for _ in range(runs):
        rows, context = draw.randrange(20, 6000), draw.choice([0, draw.randrange(4000)])
        pairs = rows * context + rows * (rows + 1) / 2
        seconds = cost(TRUE_PREFILL, (1, rows * LAYERS, pairs * LAYERS))
        asked.prefilled([ForwardPart(rows, context)], seconds * draw.lognormvariate(0, noise))
        kept = max(1, int(rows * draw.uniform(0.15, 0.5)))
        mean_row = pairs / rows
        work = 2 * rows + deep * kept, 2 * pairs + deep * kept * mean_row
        asked.blended(
            rows, kept, context, cost(TRUE_BLEND, (1, *work)) * draw.lognormvariate(0, noise)
        )
        for tier, true in TRUE_TIERS.items():
            nbytes, layers = draw.randrange(10**4, 10**8), draw.choice([1, LAYERS])
            seconds = cost(true, (layers, nbytes)) * draw.lognormvariate(0, noise)
            asked.loaded(tier, nbytes, seconds, layers)


@pytest.mark.parametrize("seed", range(3))
def test_a_controller_decides_as_one_that_knows_the_machine(seed: int) -> None:
    taught = controller()
    teach(taught, seed=seed)
    knowing = controller(TRUE_PREFILL, tiers=TRUE_TIERS)
    blending = Controller(SETTINGS, TRUE_BLEND, TRUE_TIERS)
    for wanted in (request(), request(800, 200), request(5000, 40, 2000, "host")):
        got = taught.decide(wanted)
        assert got.prefix_seconds == pytest.approx(knowing.decide(wanted).prefix_seconds, rel=0.1)
        expected = blending.decide(wanted)
        assert got.row_seconds == pytest.approx(expected.row_seconds, rel=0.1)
        assert got.load_seconds == pytest.approx(expected.load_seconds, rel=0.1)
        assert got.ratio == pytest.approx(expected.ratio, abs=0.04)


def test_blends_are_taken_to_cost_what_prefill_does_until_measured() -> None:
    asked = controller(settings=replace(SETTINGS, enough=1))
    before = asked.decide(request())
    for _ in range(20):
        asked.prefilled([ForwardPart(3040, 0)], 50.0)
    after = asked.decide(request())
    assert after.blend_seconds > 2 * before.blend_seconds
    asked.blended(3040, 500, 0, 0.1)
    assert asked.decide(request()).row_seconds < after.row_seconds / 10


def test_a_step_over_several_requests_adds_up() -> None:
    one, other = controller(settings=replace(SETTINGS, enough=1)), controller()
    one.prefilled([ForwardPart(300, 0), ForwardPart(1, 900), ForwardPart(1, 40)], 0.5)
    for _ in range(3):
        other.prefilled([ForwardPart(300, 0), ForwardPart(1, 900), ForwardPart(1, 40)], 0.5)
    assert one.decide(request()).prefix_seconds == pytest.approx(
        other.decide(request()).prefix_seconds
    )


def test_a_bad_hour_does_not_rule_blends_out_for_ever() -> None:
    asked = controller(settings=replace(SETTINGS, enough=1, retry=20))
    asked.blended(3040, 500, 0, 1e4)
    modes = [asked.decide(request(tier="host")).mode for _ in range(22)]
    assert modes[:20] == [Mode.PREFIX] * 20
    assert modes[20] is Mode.BLEND


def test_a_tier_that_loads_is_not_forgotten_and_a_silent_one_is() -> None:
    asked = controller(settings=replace(SETTINGS, enough=1, retry=20))
    for tier in TIERS:
        asked.loaded(tier, 10**6, 50.0)
    for _ in range(20):  # both have been measured since blends were
        assert asked.decide(request()).load_seconds > 10
    asked.loaded("host", 10**6, 50.0)
    for _ in range(20):
        assert asked.decide(request()).load_seconds > 10
    assert asked.decide(request(tier="disk")).load_seconds < 1
    assert asked.decide(request(tier="host")).load_seconds > 10


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0, 0.0])
def test_nonsense_is_left_out(bad: float) -> None:
    asked, untouched = controller(settings=replace(SETTINGS, enough=1)), controller()
    assert not asked.prefilled([ForwardPart(100, 0)], bad)
    assert not asked.blended(100, 20, 0, bad)
    assert not asked.loaded("disk", 1000, bad)
    assert not asked.loaded("disk", 1000, 1.0, layers=0)
    assert not asked.prefilled([], 1.0)
    assert not asked.prefilled([ForwardPart(0, 0)], 1.0)
    assert not asked.prefilled([ForwardPart(-5, 0), ForwardPart(10, 0)], 1.0)
    assert not asked.blended(0, 0, 0, 1.0)
    assert not asked.blended(10, 20, 0, 1.0)
    assert asked.decide(request()) == untouched.decide(request())


# --- what is refused --------------------------------------------------------------------------


def test_a_tier_nobody_named_is_refused() -> None:
    asked = controller()
    for call in (
        lambda: asked.decide(request(tier="tape")),
        lambda: asked.loaded("tape", 10, 1.0),
    ):
        with pytest.raises(ConfigError, match=r"'tape'.*disk, host"):
            call()


@pytest.mark.parametrize(
    "wanted",
    [
        {"layers": 0},
        {"full_layers": 31},
        {"full_layers": 0},
        {"floor": -0.1},
        {"floor": 0.6},
        {"ceiling": 1.1},
        {"floor": math.nan},
        {"leave": 0.3},
        {"enter": 1.0},
        {"leave": -0.1},
        {"retry": 0},
        {"memory": 0},
    ],
)
def test_settings_out_of_range_are_refused(wanted: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        controller(settings=ControllerSettings(**{"layers": LAYERS, **wanted}))


def test_a_guess_grows_with_the_model_and_falls_with_its_speed() -> None:
    guess = ComputeRates.guess(parameters=10**9, hidden=2048, layers=16, flops=1e12)
    assert guess.row * 16 == pytest.approx(2e-3)
    assert guess.pair == pytest.approx(8192e-12)
    assert ComputeRates.guess(10**9, 2048, 16, 2e12).row == pytest.approx(guess.row / 2)
