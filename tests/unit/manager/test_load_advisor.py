"""The planner in an engine: its input, that its plans are followed, and that answers are equal."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from kvcore.config import load_config
from kvcore.manager.load_advisor import PlanMemo  # after the skip
from kvcore.manager.load_policy import Action
from kvcore.telemetry.metrics import MissReason
from kvcore.telemetry.rates import ComputeRates, ForwardPart, Rates
from kvcore.testing.engine import EngineArgs, Llama, ReferenceEngine, Request

BLOCK = 16
PROMPT = [random.Random(7).randrange(1, 512) for _ in range(200)]
OTHERS = [[random.Random(n).randrange(1, 512) for _ in range(200)] for n in range(8, 16)]
ARGS = EngineArgs(num_pages=64, prefix_cache=False)


@pytest.fixture(scope="module")
def answer(model: Llama) -> list[int]:
    with ReferenceEngine(model, ARGS) as engine:
        return engine.generate([PROMPT], 4)[0]


@pytest.fixture
def engine(model: Llama, tmp_path: Path) -> Iterator[ReferenceEngine]:
    """An engine with a planner, and ``PROMPT`` on disk only."""
    config = load_config(
        None,
        {
            "host": {"capacity": "400KiB", "huge_pages": False},
            "disk": {"path": str(tmp_path), "capacity": "16MiB"},
            "planner": {"enabled": True},
        },
    )
    with ReferenceEngine(model, ARGS, config) as made:
        made.generate([PROMPT], 4)
        made.settle()
        manager = leader(made).manager
        manager.index.evictions.evict("host", 10_000)
        made.rates = fresh = Rates(made.model.spec.layers, ComputeRates(1, 1, 1), made.priors)
        planning(made).planner.rates = fresh
        yield made
        made.settle()
        made.check_integrity()
        assert manager.reads_before() == {}


def leader(engine: ReferenceEngine) -> Any:
    assert engine.leader is not None
    return engine.leader


def planning(engine: ReferenceEngine) -> Any:
    return leader(engine)._planning


def teach(engine: ReferenceEngine, load: float, prefill: float) -> None:
    """Teach the engine that a megabyte takes ``load`` seconds, and 100 tokens ``prefill``."""
    assert engine.rates is not None
    for n in (1, 2, 3, 4):
        engine.rates.prefilled([ForwardPart(100 * n, 0)], n * prefill)
        for tier in ("host", "disk"):
            engine.rates.loaded(tier, n * 1_000_000, n * load)


def ask(engine: ReferenceEngine) -> Request:
    request = engine.submit(PROMPT, 4)
    engine.run()
    return request


def misses(engine: ReferenceEngine) -> dict[str, int]:
    found: dict[str, int] = leader(engine).metrics.snapshot().get("kvcore_misses_total", {})
    return found


def test_before_anything_is_measured_what_is_held_is_loaded(
    engine: ReferenceEngine, answer: list[int]
) -> None:
    request = ask(engine)
    assert request.reused == {"disk": 192}
    assert request.answer == answer


def test_a_slow_disk_is_left_alone(engine: ReferenceEngine, answer: list[int]) -> None:
    before = misses(engine).get(MissReason.PLANNED.value, 0)
    teach(engine, load=100.0, prefill=0.01)
    request = ask(engine)
    assert request.reused == {}
    assert request.answer == answer
    assert misses(engine)[MissReason.PLANNED.value] == before + 1


def test_a_fast_disk_is_read_within_its_deadline(
    engine: ReferenceEngine, answer: list[int]
) -> None:
    teach(engine, load=0.01, prefill=10.0)
    found = leader(engine).lookup(engine.submit(PROMPT, 4), 0)
    assert found is not None
    planned = planning(engine).plan(PlanMemo(), found.hit, 200, 0)
    assert found.deadline_s == planned.deadline_s
    assert 10 < found.deadline_s < 30
    engine.run()
    assert ask(engine).reused
    assert ask(engine).answer == answer


def test_a_plan_is_made_once_for_a_hit(engine: ReferenceEngine) -> None:
    """An engine asks repeatedly while it has no room. That must count as one decision."""
    teach(engine, load=100.0, prefill=0.01)
    made = planning(engine)
    request = engine.submit(PROMPT, 4)
    for _ in range(200):
        assert leader(engine).lookup(request, 0) is None
    assert made.planner._refused == {"disk": 1}
    engine.abort(request)


def test_a_plan_is_made_anew_for_another_hit(engine: ReferenceEngine) -> None:
    """And for another number of tokens that the engine holds itself."""
    teach(engine, load=0.01, prefill=10.0)
    advisor, memo = planning(engine), PlanMemo()
    hit = leader(engine).lookup(engine.submit(PROMPT, 4), 0).hit
    shorter = replace(hit, sources=(hit.sources[0]._replace(stop=4),))
    first = advisor.plan(memo, hit, 200, 0)
    assert advisor.plan(memo, hit, 200, 0) is first
    assert [advisor.plan(memo, *given).stop for given in ((hit, 200, 192), (shorter, 200, 0))] == [
        192,
        64,
    ]
    assert memo.deadline_s(otherwise=99.0) != 99.0
    assert PlanMemo().deadline_s(otherwise=99.0) == 99.0
    engine.run()


def test_what_is_in_flight_is_counted_and_comes_back_to_nothing(
    engine: ReferenceEngine,
) -> None:
    manager = leader(engine).manager
    request = engine.submit(PROMPT, 4)
    found = leader(engine).lookup(request, 0)
    request.pages = engine.table.allocate(13)
    leader(engine).start(request, found)
    reads = manager.reads_before()
    operations = reads["disk"][0]
    assert operations >= 1
    assert reads == {"disk": (operations, 12), "host": (operations, 12)}
    assert manager.reads_before(12) == reads
    before = manager.reads_before(3)
    assert {tier: blocks for tier, (_, blocks) in before.items()} == {"disk": 3, "host": 3}
    assert all(1 <= least <= operations for least, _ in before.values())
    engine._queue.remove(request)
    engine._running.append(request)
    engine.run()


def test_an_engine_learns_its_own_rates(engine: ReferenceEngine) -> None:
    assert engine.rates is not None
    assert not engine.rates.are_learnt(["disk", "host"])
    for prompt in OTHERS:
        for _ in range(2):
            engine.generate([prompt], 1)
            engine.settle()
            leader(engine).manager.index.evictions.evict("host", 10_000)
    assert engine.rates.prefill.is_learnt
    plan = planning(engine).plan(PlanMemo(), leader(engine).manager.get_match([], b""), 100, 0)
    assert plan.action is Action.RECOMPUTE
    assert engine.rates.tier("disk").is_learnt
