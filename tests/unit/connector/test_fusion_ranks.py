"""Ranks that blend together stay in step, whatever fails on one of them.

Ranks are threads. Every collective has to be called by all of them, with the same kind and shape,
and none may wait for a rank that has ended. After the blend each rank runs the forward, which is a
collective too: so a rank that left the blend alone is found there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvcore.config import Config
from kvcore.connector.blend_clock import BlendClock
from kvcore.connector.fusion_messages import BlendOrder
from kvcore.connector.fusion_worker import PROFILED_ROWS, FusionWorker, PromisedFusionWorker
from kvcore.connector.guard import Guard
from kvcore.errors import RankLostError, TransferError
from kvcore.fusion.ops import TorchFusion
from kvcore.fusion.plan import LayerKV
from kvcore.fusion.select import (
    Candidates,
    KeyValueDeviation,
    RelativeDeviation,
    Selector,
    runs,
)
from support.fusion_ranks import (
    LAYERS,
    ORDER,
    PAGE,
    ROPE,
    Died,
    Hit,
    Layers,
    Matcher,
    OutOfStep,
    Sites,
    TorchCalls,
    Worker,
    together,
)

pytestmark = pytest.mark.slow

RANKS, ILL = 2, 1


class Undeclared(Selector):
    """A plugin's: it sums over the ranks on its own, and may fail in between."""

    name = "undeclared"
    sites = Sites()

    def score(self, candidates: Candidates) -> Tensor:
        off = candidates.key_deviation
        self.sites.hit("an undeclared sum")
        return off + candidates.reduce(candidates.values.sum(dim=(1, 2)))


SELECTORS: dict[str, Callable[[], Selector]] = {
    "runs": runs,
    "key+value": KeyValueDeviation,
    "relative": RelativeDeviation,
    "undeclared": Undeclared,
}


def blend(
    rank: int, matcher: Matcher, sites: Sites, selector: str, *, deep: bool, promised: bool
) -> bool:
    """Carry out one order, and then the forward. Returns True if the blend was made."""
    config = Config.model_validate({"fusion": {"enabled": True, "adaptive": False, "gate": 0.01}})
    layers, worker = Layers(rank, matcher, Sites()), Worker(Sites())
    kind = PromisedFusionWorker if promised else FusionWorker
    chosen = SELECTORS[selector]()
    made: Any = kind(
        config, worker, layers, [ROPE] * LAYERS, chosen, PAGE, Hit(Sites()),
    )  # type: ignore[arg-type]  # fmt: skip
    layers._sites = worker._sites = made._ops._sites = sites
    if isinstance(chosen, Undeclared):
        chosen.sites = sites
    guard = Guard(lambda why, error: None)

    def step() -> bool:
        made.begin([ORDER], worker.mark)
        if promised:
            made.carry_out(lambda order: True)
        else:
            made.run(lambda layer: None)
        return all(report.ok for report in made.take_reports())

    if deep:
        with TorchCalls(sites):
            done = guard.run("start", step, False)
    else:
        done = guard.run("start", step, False)
    matcher.meet(rank, "forward", None)
    return done


def outcomes(
    selector: str, fails_at: int | None, *, deep: bool = False, promised: bool = False
) -> tuple[list[Any], Sites]:
    """Return what each rank's blend returned or raised, and the sites of the failing rank."""
    sites = [Sites(fails_at if n == ILL else None) for n in range(RANKS)]

    def run(n: int, matcher: Matcher) -> bool:
        return blend(n, matcher, sites[n], selector, deep=deep and n == ILL, promised=promised)

    return together(RANKS, run), sites[ILL]


def check(found: list[Any]) -> None:
    """All ranks failed alike and went on, or the failing one ended the engine."""
    well, ill = found
    assert not any(isinstance(one, OutOfStep) for one in found), found
    if isinstance(ill, RankLostError):
        assert isinstance(well, Died) or well is False
        assert "no memory on this rank" in str(ill)
    else:
        assert well is ill, found


@pytest.mark.parametrize("promised", [False, True])
@pytest.mark.parametrize("selector", sorted(SELECTORS))
def test_whatever_fails_on_one_rank_no_rank_waits_for_ever(selector: str, promised: bool) -> None:
    """At each site in turn."""
    well, sites = outcomes(selector, None, promised=promised)
    assert well == [True, True]
    fatal = set()
    for site, name in enumerate(sites.passed):
        found, _ = outcomes(selector, site, promised=promised)
        check(found)
        assert promised or found[ILL] is not True
        if isinstance(found[ILL], RankLostError):
            fatal.add(name)
    own = {"embed", "before attention", "after attention", "in the MLP", "reduce", "agree"}
    assert fatal == own | ({"an undeclared sum"} if selector == "undeclared" else set())


@settings(max_examples=40, deadline=None)
@given(selector=st.sampled_from(sorted(SELECTORS)), where=st.floats(0, 1), promised=st.booleans())
def test_whatever_call_of_torch_fails_on_one_rank(
    selector: str, where: float, promised: bool
) -> None:
    """In the layers of the engine, too."""
    _, sites = outcomes(selector, None, deep=True, promised=promised)
    site = int(where * (len(sites.passed) - 1))
    found, _ = outcomes(selector, site, deep=True, promised=promised)
    check(found)


@pytest.mark.parametrize("promised", [False, True])
def test_a_clock_that_fails_on_one_rank_fails_no_blend(
    promised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others have made the blend by then: they would not join in computing it instead."""
    stop, calls = BlendClock.stop, itertools.count()

    def first_fails(clock: BlendClock) -> None:
        if next(calls) == 0:
            raise RuntimeError("an error of the device")
        stop(clock)

    monkeypatch.setattr(BlendClock, "stop", first_fails)
    found, _ = outcomes("runs", None, promised=promised)
    assert found == [True] * RANKS


def test_a_single_rank_fails_alone() -> None:
    """Nobody waits for it, so the engine computes."""
    matcher, sites = Matcher(1), Sites()
    layers = Layers(0, matcher, sites)
    layers.collective = False
    config = Config.model_validate({"fusion": {"enabled": True, "adaptive": False}})
    worker: Any = Worker(Sites())
    made = FusionWorker(config, worker, layers, [ROPE] * LAYERS, runs(), PAGE, TorchFusion())
    made.begin([ORDER], worker.mark)
    sites._fails_at = 5
    assert made.run(lambda layer: None) == ORDER.pages[1:9]
    assert [report.ok for report in made.take_reports()] == [False]
    assert made.take_times() == [], "a blend that failed says nothing of others"
    sites._fails_at = None
    made.begin([ORDER], worker.mark)
    assert made.run(lambda layer: None) == []
    [report], [time] = made.take_reports(), made.take_times()
    assert (time.rows, time.kept, time.exact) == (report.rows, report.kept, ORDER.exact)
    assert time.seconds > 0
    assert made.take_times() == []


@pytest.mark.parametrize("known", [True, False])
def test_what_is_computed_instead_is_written_after_all_copies(known: bool) -> None:
    """A copy that comes later would put stored KV over computed KV."""
    done: list[str] = []

    class Followed(Worker):
        def follow(self, graph_id: int) -> None:
            if not known:
                raise RuntimeError("an error of the device")
            done.append(f"follow {graph_id}")

    class Writes(Layers):
        def write(self, layer: int, kv: LayerKV, slots: Tensor) -> None:
            done.append("write")

    layers, worker = Writes(0, Matcher(1), Sites()), Followed(Sites())
    config = Config.model_validate({"fusion": {"enabled": True, "adaptive": False}})
    given: Any = config, worker, layers, [ROPE] * LAYERS, runs(), PAGE, TorchFusion()
    made = PromisedFusionWorker(*given)
    made.begin([ORDER], worker.mark)

    def arrived(order: BlendOrder) -> bool:
        raise RuntimeError("an error of the reports")

    with nullcontext() if known else pytest.raises((TransferError, RuntimeError)):
        made.carry_out(arrived)
    assert done[: 2 + LAYERS] == (["follow 1", "follow 2", *["write"] * LAYERS] if known else [])


@pytest.mark.parametrize("timed", [False, True])
def test_a_rank_is_built_without_the_others(timed: bool) -> None:
    """One that cannot be built would be waited for, so they warm up once all of them are."""

    class Compiled(TorchFusion):
        compiles = True

        def prepare(self, sample: Any, copies: Any) -> None:
            prepared.append(sample)

    prepared: list[Any] = []
    matcher = Matcher(1)
    config = Config.model_validate({"fusion": {"enabled": True}})
    worker: Any = Worker(Sites())
    layers = Layers(0, matcher, Sites())
    made = FusionWorker(config, worker, layers, [ROPE] * LAYERS, runs(), PAGE, Compiled())
    assert not matcher._calls
    made.warm_up(timed=timed)
    assert matcher._calls
    assert len(prepared) == 1
    assert [rows for rows, _ in made.take_profile()] == (list(PROFILED_ROWS) if timed else [])


def test_a_guard_lets_a_lost_rank_through() -> None:
    stopped: list[str] = []
    guard = Guard(lambda why, error: stopped.append(why))

    def lost() -> None:
        raise RankLostError("out of step")

    with pytest.raises(RankLostError):
        guard.run("start", lost, None, broken=lambda: None)
    assert not stopped
    assert issubclass(RankLostError, TransferError)
