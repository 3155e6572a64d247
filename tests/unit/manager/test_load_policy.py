"""The planner chooses the fastest of all cuts, and is never far from the better fixed way."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvcore.errors import ConfigError
from kvcore.fusion.controller import BlendCandidate, Controller, ControllerSettings
from kvcore.manager.load_policy import (
    PREFILL,
    Action,
    Ahead,
    Plan,
    Planner,
    PlannerSettings,
    PlanRequest,
    TokenSource,
    Why,
)
from kvcore.telemetry.rates import ComputeRates, ForwardPart, Rates, TierRates, pairs
from support.budget import examples

LAYERS = 24
BLOCK = 16
BLOCK_BYTES = 16 * 40_000
COMPUTE = ComputeRates(once=3e-3, row=1e-6, pair=2e-10)
HOST, DISK = TierRates(2e-5, 1 / 2e10), TierRates(5e-4, 1 / 2e9)
TIERS = {"host": HOST, "disk": DISK}
KNOWN = PlannerSettings(BLOCK, BLOCK_BYTES, trusts_priors=True)
IN_STEP = replace(KNOWN, step_bytes=BLOCK_BYTES * 1000, step_operations=5)


def scaled(rates: TierRates, factor: float) -> TierRates:
    return TierRates(*(rate * factor for rate in rates))


def planner(
    made: PlannerSettings = KNOWN, compute: ComputeRates = COMPUTE, tiers: Any = None
) -> Planner:
    return Planner(made, Rates(LAYERS, compute, tiers or TIERS))


def ask(
    tokens: int = 4000,
    host: int = 0,
    disk: int = 0,
    computed: int = 0,
    ahead: float = 0.0,
    busy: float = 0.0,
) -> PlanRequest:
    """Return a prompt with blocks up to ``host`` in host memory and up to ``disk`` on disk."""
    sources = [TokenSource("host", host)] if host > computed else []
    sources += [TokenSource("disk", disk)] if disk > max(host, computed) else []
    queued = {"disk": Ahead(ahead / 1e7, ahead), "host": Ahead(1, ahead / 10)} if ahead else {}
    return PlanRequest(tokens, computed, tuple(sources), queued, busy)


@st.composite
def asks(draw: st.DrawFn) -> PlanRequest:
    tokens = draw(st.integers(2, 6000))
    blocks = tokens // BLOCK
    marks = sorted(draw(st.tuples(*[st.integers(0, blocks)] * 3)))
    computed, host, disk = (mark * BLOCK for mark in marks)
    ahead = draw(st.sampled_from([0.0, 1e6, 1e9]))
    return ask(tokens, host, disk, computed, ahead, draw(st.sampled_from([0.0, 0.01, 0.3])))


speeds = st.sampled_from([0.01, 0.1, 0.5, 1.0, 3.0, 30.0])


SMALL_S = 5e-4
"""Fewer seconds are not worth another cut: a prompt of a few hundred tokens has few cuts."""


def exhaustive(made: Planner, about: PlanRequest) -> float:
    """The naive reference: the fewest seconds over every block boundary."""
    held = min(about.sources[-1].stop, about.tokens - 1) if about.sources else about.computed
    stops = {about.computed, max(held, about.computed)}
    stops |= set(range(-(-about.computed // BLOCK) * BLOCK, held, BLOCK))
    return min(made.weigh(about, stop).seconds for stop in stops)


# -- both ends ----------------------------------------------------------------------------------


@given(asks(), speeds, speeds)
@settings(max_examples=examples(100), deadline=None)
def test_ways_are_what_the_ends_weigh_and_decide_nothing(
    about: PlanRequest, disk: float, compute: float
) -> None:
    tiers = {"host": HOST, "disk": scaled(DISK, disk)}
    rates = ComputeRates(*(rate * compute for rate in COMPUTE))
    made, other = planner(KNOWN, rates, tiers), planner(KNOWN, rates, tiers)
    found = made.ways(about)
    assert found.recompute == made.weigh(about, about.computed)
    held = min(about.sources[-1].stop, about.tokens - 1) if about.sources else about.computed
    assert (found.load is None) is (held <= about.computed)
    if found.load is not None:
        assert found.load == made.weigh(about, held)
    assert made.plan(about) == other.plan(about), "asking for ways changed a decision"


def test_ways_name_what_was_not_measured() -> None:
    made, about = planner(), ask(4000, 800, 1600)
    assert made.ways(about).unmeasured == {PREFILL, "host", "disk"}
    assert made.ways(ask(4000)).unmeasured == {PREFILL}
    teach(made.rates, times=4)
    assert made.ways(about).unmeasured == set()
    made.rates.forget("disk")
    assert made.ways(about).unmeasured == {"disk"}
    assert made.ways(ask(4000, 800)).unmeasured == set()


# -- one plan -----------------------------------------------------------------------------------


@given(asks(), speeds, speeds, st.sampled_from([KNOWN, IN_STEP]))
@settings(max_examples=examples(150), deadline=None)
@example(ask(4000, 0, 3856), 1.0, 1.0, KNOWN)
@example(ask(160, 112, 160, ahead=1e6, busy=0.01), 0.01, 30.0, IN_STEP)  # best past host's end
@example(ask(592, 544, 592), 3.0, 3.0, KNOWN)  # best where disk becomes slower than host
def test_a_plan_is_as_good_as_every_cut(
    about: PlanRequest, disk: float, host: float, how: PlannerSettings
) -> None:
    tiers = {"host": scaled(HOST, host), "disk": scaled(DISK, disk)}
    made = planner(how, tiers=tiers)
    plan = made.plan(about)
    best = exhaustive(made, about)
    assert plan.chosen.seconds <= best + max(0.03 * best, SMALL_S)
    assert plan.chosen.seconds <= min(plan.load_all.seconds, plan.recompute.seconds) + 1e-12
    assert about.computed <= plan.stop < about.tokens or plan.stop == about.computed
    assert plan.chosen == made.weigh(about, plan.stop)


@given(asks(), speeds, st.floats(1, 100), st.sampled_from([KNOWN, IN_STEP]))
@settings(max_examples=examples(100), deadline=None)
def test_seconds_do_not_fall_as_a_tier_gets_slower_or_busier(
    about: PlanRequest, disk: float, slower: float, how: PlannerSettings
) -> None:
    def seconds(factor: float, about: PlanRequest = about) -> float:
        tiers = {"host": HOST, "disk": scaled(DISK, factor)}
        return planner(how, tiers=tiers).plan(about).load_all.seconds

    assert seconds(disk) <= seconds(disk * slower) + 1e-12
    queued = replace(about, ahead={"disk": Ahead(10, 1e8), "host": Ahead(10, 1e8)})
    assert seconds(disk, replace(about, ahead={})) <= seconds(disk, queued) + 1e-12


@given(asks(), speeds, st.floats(1, 100))
@settings(max_examples=examples(100), deadline=None)
def test_no_more_is_loaded_from_a_slower_disk(
    about: PlanRequest, disk: float, slower: float
) -> None:
    about = replace(about, busy=0.0)

    def stop(factor: float) -> int:
        return planner(tiers={"host": HOST, "disk": scaled(DISK, factor)}).plan(about).stop

    assert stop(disk) >= stop(disk * slower)


def test_a_fast_disk_is_read_and_a_slow_one_is_not() -> None:
    about = ask(4000, 0, 3984)
    assert planner().plan(about).action is Action.LOAD
    slow = planner(tiers={"host": HOST, "disk": scaled(DISK, 1000)}).plan(about)
    assert slow.action is Action.RECOMPUTE
    assert slow.stop == 0
    assert slow.saved == 0
    assert "recompute: the fewest seconds" in slow.reason


def test_what_is_in_host_memory_is_loaded_and_the_slow_rest_computed() -> None:
    plan = planner(tiers={"host": HOST, "disk": scaled(DISK, 300)}).plan(ask(4000, 1600, 3984))
    assert (plan.action, plan.stop) == (Action.MIX, 1600)


def test_in_a_step_as_much_is_loaded_as_computing_hides() -> None:
    """Loading a token takes about as long as computing it, so the cut is in the middle."""
    tiers = {"host": scaled(HOST, 30), "disk": DISK}
    plan = planner(IN_STEP, tiers=tiers).plan(ask(4000, 3984))
    assert plan.action is Action.MIX
    assert 0.2 < plan.stop / 4000 < 0.9
    assert plan.chosen.load == pytest.approx(plan.chosen.compute, rel=0.05)


def test_a_long_queue_turns_a_load_into_computing() -> None:
    assert planner().plan(ask(2000, 0, 1984)).action is Action.LOAD
    assert planner().plan(ask(2000, 0, 1984, ahead=5e9)).action is Action.RECOMPUTE


def test_a_busy_engine_hides_a_load() -> None:
    tiers = {"host": HOST, "disk": scaled(DISK, 10)}
    assert planner(tiers=tiers).plan(ask(1000, 0, 992)).action is Action.RECOMPUTE
    assert planner(tiers=tiers).plan(ask(1000, 0, 992, busy=10.0)).action is Action.LOAD


@pytest.mark.parametrize("about", [ask(), ask(1, 0, 16), ask(100, 32, computed=32)])
def test_nothing_held_is_nothing_to_load(about: PlanRequest) -> None:
    plan = planner().plan(about)
    assert (plan.action, plan.why, plan.stop) == (
        Action.RECOMPUTE,
        Why.NOTHING_HELD,
        about.computed,
    )
    assert plan.deadline_s is None


def test_fewer_than_the_least_are_not_loaded() -> None:
    made = planner(replace(KNOWN, least=65))
    assert made.plan(ask(4000, 64)).why is Why.NOTHING_HELD
    assert made.plan(ask(4000, 80)).action is Action.LOAD


def test_a_tier_without_rates_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no rates for tier 'tape'.*disk, host"):
        planner().plan(PlanRequest(100, 0, (TokenSource("tape", 64),)))


def test_a_tier_that_is_met_later_is_weighed_as_others_are_expected_to_be() -> None:
    """A server's client learns its tiers when it joins, which may be long after the start."""
    later = Rates(LAYERS, COMPUTE, {}, otherwise=TierRates(1e-3, 1e-9))
    assert later.load_seconds("tape", 1e6, 2) == pytest.approx(3e-3)
    for _ in range(8):
        assert later.loaded("tape", 1_000_000, 0.5)
    assert later.load_seconds("tape", 1e6, 1) > 0.1, "and measured"
    assert later.tiers == {"tape"}


@pytest.mark.parametrize(
    "wrong",
    [{"block_tokens": 0}, {"retry": 0}, {"slack": 0.5}, {"explore": 1.0}, {"deadline_least": 0}],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"planner|share|deadline"):
        replace(KNOWN, **wrong)


# -- before and after measuring -----------------------------------------------------------------


def teach(rates: Rates, disk: float = 1.0, times: int = 4) -> None:
    for n in range(times):
        rows = 500 * (n + 1)
        rates.prefilled([ForwardPart(rows, 0)], true_prefill(rows, 0))
        for tier, true in (("host", HOST), ("disk", scaled(DISK, disk))):
            nbytes = (n + 1) * 4_000_000
            rates.loaded(tier, nbytes, true.latency + true.byte * nbytes)


def true_prefill(rows: int, context: int) -> float:
    return COMPUTE.once + LAYERS * (COMPUTE.row * rows + COMPUTE.pair * pairs(rows, context))


def test_until_all_is_measured_everything_held_is_loaded() -> None:
    made = planner(replace(KNOWN, trusts_priors=False), tiers={"host": HOST, "disk": DISK})
    about = ask(4000, 0, 3984)
    plan = made.plan(about)
    assert (plan.action, plan.why, plan.stop) == (Action.LOAD, Why.UNMEASURED, 3984)
    assert plan.deadline_s is None
    teach(made.rates, disk=1000, times=2)
    assert made.plan(about).why is Why.UNMEASURED
    teach(made.rates, disk=1000)
    assert made.plan(about).action is Action.RECOMPUTE


def test_deadlines_come_from_the_plan() -> None:
    plan = planner().plan(ask(4000, 0, 3984))
    assert plan.deadline_s is not None
    assert plan.chosen.load < plan.deadline_s <= 4 * plan.chosen.load + plan.recompute.compute
    tight = replace(KNOWN, deadline_least=1e-3, deadline_most=2e-3)
    assert planner(tight).plan(ask(4000, 0, 3984)).deadline_s == 2e-3
    assert planner(replace(KNOWN, deadline_least=20)).plan(ask(400, 0, 384)).deadline_s == 20


def test_a_way_is_kept_until_another_saves_enough() -> None:
    """The disk is now slower, now faster: without a margin the plan would alternate."""
    about = ask(2000, 0, 1984)
    rates = Rates(LAYERS, COMPUTE, TIERS)
    made = Planner(replace(KNOWN, keep=0.1), rates)
    nothing = made.weigh(about, 0).seconds

    class Even(Rates):
        level = 1.0

        def load_seconds(self, tier: str, nbytes: float, operations: float) -> float:
            whole = made.settings.block_bytes * 124
            rest = Even.prefill_seconds(self, 16, 1984)
            return self.level * (nothing - rest) * nbytes / whole if tier == "disk" else 0.0

    made.rates = Even(LAYERS, COMPUTE, TIERS)
    ways = []
    for level in (0.5, 1.02, 0.98, 1.02, 1.3, 1.02, 0.98, 0.5):
        made.rates.level = level
        ways.append(made.plan(about).action)
    load, compute = Action.LOAD, Action.RECOMPUTE
    assert ways == [load, load, load, load, compute, compute, compute, load]


def test_a_refused_tier_is_tried_again_at_a_small_cost() -> None:
    made = planner(tiers={"host": HOST, "disk": scaled(DISK, 200)})
    plans = [made.plan(ask(4000, 0, 3984)) for _ in range(500)]
    tries = [plan for plan in plans if plan.why is Why.TRIED]
    best = sum(plan.recompute.seconds for plan in plans)
    assert 1 <= len(tries) <= 500 // made.settings.retry
    assert all(0 < plan.stop <= 16 * BLOCK for plan in tries)
    assert sum(plan.chosen.seconds for plan in plans) <= (1 + made.settings.explore) * best


def test_a_disk_that_recovers_is_found_out_by_tries() -> None:
    made = planner(replace(KNOWN, trusts_priors=False))
    teach(made.rates, disk=100)
    decisions = 0
    while decisions < 2000:
        decisions += 1
        plan = made.plan(ask(4000, 0, 3984))
        if plan.why is Why.TRIED:
            nbytes = -(-plan.stop // BLOCK) * BLOCK_BYTES
            made.rates.loaded("disk", nbytes, DISK.latency + DISK.byte * nbytes)
        if plan.action is Action.LOAD:
            break
    assert 64 <= decisions < 1000


def test_blends_are_the_controllers_decision() -> None:
    controller = Controller(ControllerSettings(LAYERS), COMPUTE, TIERS)
    made = Planner(KNOWN, controller.rates, controller)
    chunks = BlendCandidate(4000, 0, 3900, {}, {"host": 3900 // BLOCK * BLOCK_BYTES})
    plan = made.plan(replace(ask(4000), blend=chunks))
    assert plan.decision is not None
    assert plan.action is Action.BLEND
    assert plan.reason == plan.decision.reason
    unasked = made.plan(ask(4000))
    assert unasked.decision is None
    assert (
        made.plan(replace(ask(4000), blend=BlendCandidate(4000, 0, 0))).action is Action.RECOMPUTE
    )


# -- traces with a known truth ------------------------------------------------------------------


class World(NamedTuple):
    """The speed of the disk at the n-th request, as a multiple of the expected speed."""

    disk: Callable[[int], float]
    lengths: tuple[int, int]
    gap: float
    """Mean seconds between requests; if it is short, loads queue behind each other."""


WORLDS = {
    "fast": World(lambda n: 1.0, (500, 6000), 10.0),
    "slow": World(lambda n: 25.0, (500, 6000), 10.0),
    "near": World(lambda n: 4.0, (500, 6000), 10.0),
    "becomes slow": World(lambda n: 1.0 if n < 300 else 25.0, (500, 6000), 10.0),
    "comes back": World(lambda n: 25.0 if n < 300 else 1.0, (500, 6000), 10.0),
    "short": World(lambda n: 1.0, (64, 300), 1.0),
    "long": World(lambda n: 4.0, (8000, 30_000), 60.0),
    "queueing": World(lambda n: 4.0, (500, 6000), 0.05),
}
REQUESTS = 600


class Truth:
    """The simulated truth: a disk that serves one load after another, and a noisy machine."""

    def __init__(self, world: World, seed: int) -> None:
        self._world = world
        self._noise = random.Random(seed)
        self._free_at = 0.0
        self.ahead: list[tuple[float, Ahead]] = []  # loads under way, by when they end

    def noisy(self, seconds: float) -> float:
        slip = 8.0 if self._noise.random() < 0.01 else 1.0
        return seconds * slip * self._noise.lognormvariate(0, 0.15)

    def load(self, n: int, now: float, nbytes: int) -> tuple[float, float]:
        """Return the seconds until a load has ended, and the seconds that the disk worked."""
        operations = -(-nbytes // (16 * BLOCK_BYTES))
        factor = self._world.disk(n)
        works = self.noisy(factor * (DISK.latency * operations + DISK.byte * nbytes))
        self._free_at = max(self._free_at, now) + works
        self.ahead.append((self._free_at, Ahead(operations, nbytes)))
        return self._free_at - now + HOST.byte * 16 * BLOCK_BYTES, works

    def queue(self, now: float) -> dict[str, Ahead]:
        self.ahead = [(end, load) for end, load in self.ahead if end > now]
        loads = [load for _, load in self.ahead]
        return {"disk": Ahead(sum(a for a, _ in loads), sum(b for _, b in loads))} if loads else {}


Decide = Callable[[PlanRequest], tuple[int, float]]


def seconds_of(world: World, seed: int, decide: Decide, rates: Rates | None = None) -> list[float]:
    """Return the seconds to the first token of each request; all blocks are on disk.

    ``decide`` returns how much is loaded, and how long the request waits for it.
    """
    truth, picks, now, took = Truth(world, seed), random.Random(seed), 0.0, []
    for n in range(REQUESTS):
        now += picks.expovariate(1 / world.gap)
        tokens = picks.randint(*world.lengths)
        held = int(tokens * picks.uniform(0.5, 1.0)) // BLOCK * BLOCK
        stop, deadline = decide(replace(ask(tokens, 0, held), ahead=truth.queue(now)))
        total = 0.0
        if stop:
            nbytes = -(-stop // BLOCK) * BLOCK_BYTES
            total, works = truth.load(n, now, nbytes)
            if rates is not None:
                rates.loaded("disk", nbytes, works, -(-stop // (16 * BLOCK)))
                rates.loaded("host", nbytes, truth.noisy(HOST.latency + HOST.byte * nbytes))
            if total > deadline:
                total, stop = deadline, 0
        computing = truth.noisy(true_prefill(tokens - stop, stop))
        if rates is not None:
            rates.prefilled([ForwardPart(tokens - stop, stop)], computing)
        took.append(total + computing)
    return took


@pytest.mark.parametrize("name", WORLDS)
def test_never_far_from_the_better_of_always_and_never(name: str) -> None:
    world = WORLDS[name]
    for seed in range(examples(3)):
        guess = ComputeRates(*(3 * rate for rate in COMPUTE))
        rates = Rates(LAYERS, guess, {"host": scaled(HOST, 3), "disk": scaled(DISK, 2)})
        made = Planner(PlannerSettings(BLOCK, BLOCK_BYTES), rates)

        def by_plan(about: PlanRequest, made: Planner = made) -> tuple[int, float]:
            plan: Plan = made.plan(about)
            return plan.stop, 30.0 if plan.deadline_s is None else plan.deadline_s

        planned = seconds_of(world, seed, by_plan, rates)
        always = seconds_of(world, seed, lambda about: (about.sources[-1].stop, 1e9))
        never = seconds_of(world, seed, lambda about: (0, 0.0))
        first = sum(planned[:3])  # before anything was measured
        assert sum(planned) <= 1.05 * min(sum(always), sum(never)) + first, (name, seed)
