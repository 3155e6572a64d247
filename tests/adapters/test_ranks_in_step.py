"""On every engine, a rank on which kvcore fails still meets the other ranks before each blend.

Two ranks, as threads, each with the adapter's own worker and guard. On one of them something of
kvcore raises, once. Neither may wait for the other for ever, and what was not made is not used.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

from kvcore.config import Config
from kvcore.connector.forward_timer import ForwardTimer
from kvcore.connector.fusion_messages import BlendOrder, ChunkLoad
from kvcore.connector.fusion_worker import (
    FusionWorker,
    PromisedFusionWorker,
    RefusingFusionWorker,
    _Meetings,
)
from kvcore.connector.worker import StepWorker
from kvcore.errors import TransferError
from kvcore.fusion.select import runs
from kvcore.memory.device import device_of
from kvcore.telemetry.metrics import Metrics
from kvcore.transfer.graph import OpReport, RowError, TransferGraph
from kvcore.worker.lifecycle import RankParts, refuse_tier
from support.fusion_ranks import (
    LAYERS,
    ORDER,
    PAGE,
    ROPE,
    Hit,
    Layers,
    Matcher,
    OutOfStep,
    Sites,
    Worker,
    together,
)
from support.worker import UNIT_TOKENS, ScriptedWorker, load_graph

pytestmark = pytest.mark.slow

RANKS, ILL = 2, 1


class Copies(ScriptedWorker, Worker):
    """A rank's worker whose copies end at once."""

    def __init__(self) -> None:
        ScriptedWorker.__init__(self)
        Worker.__init__(self, Sites())

    def submit(self, graph: TransferGraph, wave: Any = None, after: Any = None) -> list[OpReport]:
        if graph.units[0].unit_tokens == 1:  # a chunk
            Worker.submit(self, graph, wave, after)
        self.end_once(graph)
        return ScriptedWorker.submit(self, graph, wave, after)


class Step(NamedTuple):
    """What one step gives to every rank: a load for its forward, and two blends."""

    load: TransferGraph
    orders: list[BlendOrder]

    @staticmethod
    def numbered(number: int) -> Step:
        first = 10 * number
        return Step(load_graph(first), [_order(f"a{number}", first + 1), _order("b", first + 3)])


def _load_like(chunk: TransferGraph, graph_id: int) -> TransferGraph:
    slots = (0,) * chunk.num_rows
    return replace(chunk, graph_id=graph_id, host_slots=slots, ops=load_graph(graph_id).ops)


def _order(request_id: str, graph_id: int) -> BlendOrder:
    chunks = [
        ChunkLoad(_load_like(c.graph, graph_id + i), c.first, c.length, c.position, c.distance)
        for i, c in enumerate(ORDER.chunks)
    ]
    return BlendOrder(request_id, ORDER.tokens, 4, 4, 36, list(range(1, 11)), ORDER.ratio, chunks)


class Rank:
    """One rank of an engine: ``worker`` is the adapter's."""

    kind: type[FusionWorker] = FusionWorker
    worker: StepWorker[Any]

    def __init__(self, number: int, matcher: Matcher) -> None:
        self.number, self.matcher, self.copies = number, matcher, Copies()
        self.parts = RankParts(self.copies, Metrics(), refuse_tier)  # type: ignore[arg-type]
        config = Config.model_validate({"fusion": {"enabled": True, "adaptive": False}})
        layers, ropes = Layers(number, matcher, Sites()), [ROPE] * LAYERS
        copies: Any = self.copies
        self.blends = self.kind(
            config, copies, layers, ropes, runs(), PAGE, Hit(Sites())
        )  # fmt: skip
        self.start()

    def start(self) -> None:
        raise NotImplementedError

    def step(self, step: Step) -> list[bool]:
        """Run a step. Return True for each thing that is right: the load, and each blend."""
        raise NotImplementedError

    def forward(self) -> None:
        self.matcher.meet(self.number, "forward", None)

    def stopped(self) -> str:
        raise NotImplementedError

    def refused(self) -> bool:
        """Return True if the leader has learnt that this rank does no more work."""
        raise NotImplementedError


class OnVllm(Rank):
    def start(self) -> None:
        pytest.importorskip("vllm")
        from kvcore_vllm.worker import WorkerConnector
        from kvcore_vllm.worker_guard import WorkerGuard

        self.worker = WorkerConnector(
            self.parts,
            self.blends,
            layer_of={"0": 0},
            page_tokens=(UNIT_TOKENS,),
            clock=ForwardTimer(device_of(None)),
        )
        self.guard = WorkerGuard(self.worker)
        self.told: list[OpReport] = []

    def step(self, step: Step) -> list[bool]:
        from kvcore_vllm.messages import StepPlan
        from support.vllm_steps import begin

        plan = StepPlan(sync_loads=[step.load], blends=list(step.orders))
        begin(self.guard, plan, self.worker)
        self.guard.start((), layerwise=True)
        self.guard.wait_for_layer("0")
        self.forward()
        self.guard.end_forward()
        finished, failed = self.guard.finished_loads()
        assert {order.request_id for order in step.orders} <= finished, "it would wait for ever"
        loaded = not self.guard.take_bad_pages()
        report = self.guard.take_report()
        self.told += report.reports if report is not None else []
        return [loaded, *(order.request_id not in failed for order in step.orders)]

    def stopped(self) -> str:
        return self.guard.stopped

    def refused(self) -> bool:
        return any(RowError.REFUSED in op.failed.values() for op in self.told)


class OnSglang(Rank):
    def start(self) -> None:
        from kvcore_sglang.gate import LayerGate
        from kvcore_sglang.worker import WorkerConnector

        self.worker = WorkerConnector(self.parts, blends=self.blends)
        self.gate = LayerGate(self.worker, layers=LAYERS, layerwise=True)

    def step(self, step: Step) -> list[bool]:
        index = self.gate.start([step.load], step.orders)
        self.gate.set_consumer(index)
        self.gate.wait_until(0)
        self.forward()
        return [self.gate.finish(index)]  # of the batch as a whole

    def stopped(self) -> str:
        return self.gate.stopped

    def refused(self) -> bool:
        return any(RowError.REFUSED in op.failed.values() for op in self.worker.poll())


class OnTrtllm(Rank):
    kind = PromisedFusionWorker

    def start(self) -> None:
        from kvcore_trtllm.worker import Tally, WorkerConnector

        self.told: list[OpReport] = []
        self.worker = WorkerConnector(
            self.parts,
            Tally(RANKS, lambda own: self.matcher.meet(self.number, "reports", own)),
            layers=LAYERS,
            layerwise=True,
            blends=self.blends,
        )
        self.worker.listener = lambda news: self.told.extend(news.ended)

    def step(self, step: Step) -> list[bool]:
        from kvcore_trtllm.messages import StepPlan

        right = False
        parked, saved = load_graph(step.load.graph_id + 7), load_graph(step.load.graph_id + 8)
        plan = StepPlan(
            sync_loads=[step.load],
            blends=list(step.orders),
            async_loads=[(7, parked)],
            late_saves=[(8, saved)],
        )
        self.worker.begin(plan)
        with suppress(TransferError):  # an answer of the engine, which is in step
            for layer in range(LAYERS):
                self.worker.wait_for_layer(layer)
        self.forward()
        with suppress(TransferError):
            self.worker.end_forward()
            right = True
        saved, loaded = self.worker.finished([8], [7])
        more, later = self.worker.finished([], [])  # as in the next step, on all ranks alike
        assert (saved + more, loaded + later) == ([8], [7]), "they would wait for ever"
        return [right]

    def stopped(self) -> str:
        return self.worker._rank.stopped  # type: ignore[attr-defined]

    def refused(self) -> bool:
        return any(RowError.REFUSED in op.failed.values() for op in self.told)


ENGINES: dict[str, type[Rank]] = {"vllm": OnVllm, "sglang": OnSglang, "trtllm": OnTrtllm}

CALLS = [
    "tend_tiers", "_submit", "_mark", "_begin_blends", "_wait_layer", "_wait_loads",
    "_settle_failed", "_collect", "_lose", "_arrived", "take_blends",
]  # fmt: skip
"""What the adapters' workers call in a step, on one engine or another, but for their mere books."""


def run(engine: str, number: int, matcher: Matcher, sites: Sites) -> Any:
    """Run four steps. In the second, the ill rank fails at one of ``sites``."""
    rank = ENGINES[engine](number, matcher)
    first, second, third, fourth = (Step.numbered(n) for n in range(4))
    assert all(rank.step(first)), "nothing has failed"
    if number == ILL:
        with pytest.MonkeyPatch.context() as patch:
            for name in CALLS:
                if call := getattr(rank.worker, name, None):
                    patch.setattr(rank.worker, name, site(sites, name, call))
            made = rank.step(second)
    else:
        made = rank.step(second)
    later = [rank.step(third), rank.step(fourth)]
    return [made, *later], rank.stopped(), rank.refused()


def site(sites: Sites, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def passed(*args: Any, **named: Any) -> Any:
        sites.hit(name)
        return call(*args, **named)

    return passed


def ran(engine: str, sites: Sites) -> list[Any]:
    return together(RANKS, lambda number, matcher: run(engine, number, matcher, sites))


@pytest.fixture(scope="module", params=list(ENGINES))
def engine(request: pytest.FixtureRequest) -> str:
    if request.param == "vllm":
        pytest.importorskip("vllm")
    return str(request.param)


@pytest.fixture(scope="module")
def passed(engine: str) -> list[str]:
    """The sites of a step in which nothing fails."""
    sites = Sites()
    for made, stopped, refused in ran(engine, sites):
        assert all(map(all, made))
        assert not stopped
        assert not refused
    return sites.passed


def check(engine: str, fails_at: int) -> str:
    """Check what both ranks come to if one fails at a site; return why it stopped, if it did."""
    found = ran(engine, Sites(fails_at))
    for one in found:
        if isinstance(one, BaseException):
            raise one
    (well, *_), (ill, stopped, refused) = found
    stopped = str(stopped)
    if (
        not stopped
    ):  # the error was in a blend, which fails on all ranks; a promised one is computed
        assert well == ill
        assert engine == "trtllm" or not all(ill[0]), "what has failed is not used"
        assert all(map(all, ill[1:]))
        return ""
    for step in (1, 2):
        assert not any(ill[step]), "the rank has stopped"
        assert not any(well[step][-2:]), "and so no rank blends"
    assert refused, "the leader goes on to plan"
    return str(stopped)


@pytest.mark.parametrize("name", CALLS)
def test_a_rank_on_which_kvcore_fails_is_not_waited_for(
    engine: str, passed: list[str], name: str
) -> None:
    """At the first and the last call of each kind."""
    if name in passed:
        last = len(passed) - 1 - passed[::-1].index(name)
        for place in {passed.index(name), last}:
            check(engine, place)


def test_sites_are_found(engine: str, passed: list[str]) -> None:
    assert {"_submit", "_begin_blends", "_wait_layer"} <= set(passed)
    assert check(engine, passed.index("_begin_blends")), "an error there is no blend's"


@pytest.mark.parametrize("kind", [FusionWorker, PromisedFusionWorker, RefusingFusionWorker])
def test_a_step_is_declined_once(kind: type[Any]) -> None:
    """A rank may stop after it has declined, and then declines again."""
    said: list[bool] = []
    if kind is RefusingFusionWorker:
        blends: Any = RefusingFusionWorker(1, lambda well: bool(said.append(well)))
    else:
        blends = kind.__new__(kind)
        blends._layers = SimpleNamespace(agree=lambda well: bool(said.append(well)))
        blends._meetings = _Meetings(blends._layers.agree, collective=True)
    first, second = Step.numbered(0).orders, Step.numbered(1).orders
    blends.decline(first)
    met = len(said)
    assert met == 2
    blends.decline(first)
    assert len(said) == met
    blends.decline(second)
    assert len(said) == 2 * met


def test_the_matcher_notices_a_rank_that_does_not_come() -> None:
    def run(number: int, matcher: Matcher) -> None:
        if number != ILL:
            matcher.meet(number, "agree", None)

    well, _ = together(RANKS, run)
    assert isinstance(well, OutOfStep)
