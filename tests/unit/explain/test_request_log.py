"""Why a request was served as it was: each cause named, little kept."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from kvcore.config import load_config
from kvcore.explain import Cause, RequestLog
from kvcore.explain.recorder import RequestRecorder  # after the skip
from kvcore.explain.request_log import Miss
from kvcore.manager.base import Event, Hit, Source
from kvcore.manager.load_policy import PlanRequest
from kvcore.model.keys import Namespace
from kvcore.telemetry.metrics import Metrics
from kvcore.telemetry.rates import ForwardPart
from kvcore.testing.engine import EngineArgs, ReferenceEngine, Request, random_llama

BLOCK = 16
PROMPT = [random.Random(3).randrange(1, 512) for _ in range(150)]
SPACE = Namespace(b"model")
EXPECTED = "kvcore_expected_ttft_seconds_total"


class Moments:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def keys(count: int) -> list[bytes]:
    return [bytes([n]) * 16 for n in range(1, count + 1)]


def hit(depth: int, count: int = 4, tier: str = "host") -> Hit:
    return Hit(keys(count), SPACE.digest, (Source(tier, 0, depth),) if depth else ())


def look(journal: RequestLog, found: Hit, name: str = "r", space: Namespace = SPACE) -> Any:
    return journal.looked_up(name, PROMPT, 0, found, space, BLOCK)


# -- causes ---------------------------------------------------------------------------------------


def test_a_block_that_left_says_from_where_and_when() -> None:
    clock = Moments()
    journal = RequestLog(clock=clock)
    assert [miss.cause for miss in look(journal, hit(0)).misses] == [Cause.NEVER_SEEN]
    journal.note(Event(False, "disk", tuple(keys(4)[2:]), b""))
    clock.now = 7.5
    assert look(journal, hit(2)).misses == [Miss(Cause.EVICTED, "disk", 7.5)]
    journal.note(Event(True, "host", (keys(4)[2],), b""))
    assert look(journal, hit(2)).misses[0].cause is Cause.NEVER_SEEN
    assert look(journal, hit(4)).misses == []


def test_a_missing_resume_point_says_how_far_blocks_are_held() -> None:
    whole = hit(4)
    no_point = Hit(whole.keys, SPACE.digest, (), beside=whole)
    [miss] = look(RequestLog(), no_point).misses
    assert miss == Miss(Cause.NO_POINT, held=4 * BLOCK)
    rows = (b"p" * 16, b"q" * 16)
    early = Hit((*keys(2), *rows), SPACE.digest, (Source("disk", 0, 4),), point=2, beside=whole)
    record = look(RequestLog(), early)
    assert record.matched == [("disk", 0, 2 * BLOCK)], "rows of the point are no tokens"
    assert record.misses == [Miss(Cause.NO_POINT, held=4 * BLOCK)]
    there = Hit((*keys(4), *rows), SPACE.digest, (Source("host", 0, 6),), point=2, beside=whole)
    assert look(RequestLog(), there).misses == []
    beyond = replace(early, beside=hit(2))
    assert look(RequestLog(), beyond).misses == [Miss(Cause.NEVER_SEEN)]


def test_another_namespace_names_the_field_and_not_its_value() -> None:
    journal = RequestLog()
    look(journal, hit(0))
    mine = Namespace(b"model", lora="poems", cache_salt="tenant")
    record = look(journal, hit(0), "other", mine)
    [miss] = record.misses
    assert miss.cause is Cause.OTHER_NAMESPACE
    assert set(miss.differed) == {"lora", "cache_salt"}
    assert "poems" not in json.dumps(record.as_dict())
    assert look(journal, hit(0), "again", mine).misses[0].cause is Cause.NEVER_SEEN


def test_a_prompt_without_a_whole_block_is_too_short() -> None:
    assert look(RequestLog(), Hit([], SPACE.digest, ())).misses[0].cause is Cause.TOO_SHORT


def test_only_the_last_ones_are_kept() -> None:
    journal = RequestLog(capacity=5, blocks=7)
    for n in range(100):
        tokens = [n, *PROMPT]
        journal.looked_up(str(n), tokens, 0, hit(0), SPACE, BLOCK)
        journal.note(Event(False, "host", (n.to_bytes(16, "big"),), b""))
    assert len(journal) == 5
    assert journal.get("94") is None
    assert journal.get("99") is not None
    assert len(journal._gone) == len(journal._first) == 7
    journal.ended("gone")
    journal.failed("gone")


def test_seconds_by_step_add_up() -> None:
    clock = Moments()
    journal = RequestLog(clock=clock)
    record = look(journal, hit(4))
    for seconds, step in ((1.0, "load"), (2.5, "prefill"), (3.0, "prefill")):
        clock.now = seconds
        journal.step("r", step)
    clock.now = 4.0
    journal.ended("r")
    assert record.steps == {"load": 1.0, "prefill": 2.0, "rest": 1.0}
    assert sum(record.as_dict()["ms"].values()) == 4000


def test_a_second_lookup_keeps_the_failures() -> None:
    journal = RequestLog()
    look(journal, hit(4))
    journal.loaded("r", {"host": 64})
    journal.failed("r")
    record = look(journal, hit(0))
    assert record.failures == 1
    assert record.loaded == {}


def test_what_failed_stays_through_the_lookup_after_it() -> None:
    journal = RequestLog()
    look(journal, hit(4))
    journal.failed("r")
    record = look(journal, hit(2))
    assert [miss.cause for miss in record.misses] == [Cause.FAILED, Cause.NEVER_SEEN]
    journal.missed("r", Cause.TOO_SHORT)
    journal.missed("r", Cause.TOO_SHORT)
    assert [miss.cause for miss in record.misses][2:] == [Cause.TOO_SHORT], "said once"


def test_a_request_that_ended_is_over_and_its_name_may_come_again() -> None:
    clock = Moments()
    journal = RequestLog(clock=clock)
    record = look(journal, hit(4))
    journal.failed("r")
    clock.now = 2.0
    journal.ended("r", "stop")
    clock.now = 5.0
    journal.ended("r", "abort")
    journal.step("r", "load")
    assert record.outcome == "stop"
    assert record.steps == {"rest": 2.0}
    again = look(journal, hit(4))
    assert (again.began, again.failures, again.misses) == (5.0, 0, [])


# -- in an engine ---------------------------------------------------------------------------------


@pytest.fixture
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ReferenceEngine]:
    """With a planner, unless the parameter says otherwise."""
    config = load_config(
        None,
        {
            "host": {"capacity": "2MiB", "huge_pages": False},
            "disk": {"path": str(tmp_path), "capacity": "8MiB"},
            "planner": {"enabled": getattr(request, "param", True)},
        },
    )
    args = EngineArgs(num_pages=64, prefix_cache=False)
    with ReferenceEngine(random_llama(), args, config) as made:
        yield made


def serve(engine: ReferenceEngine, salt: str = "") -> dict[str, Any]:
    request: Request = engine.submit(PROMPT, 2, salt=salt)
    engine.run()
    engine.settle()
    return engine.explain(request)


def test_an_engine_tells_what_it_did(engine: ReferenceEngine) -> None:
    first = serve(engine)
    assert first["misses"] == [{"cause": "never seen"}]
    assert first["outcome"] == "done"
    assert {"prefill", "rest"} <= set(first["ms"])
    second = serve(engine)
    assert second["matched"] == [{"tier": "host", "tokens": [0, 144]}]
    assert second["loaded"] == {"host": 144}
    assert second["plan"]["why"] == "not all of its rates are measured yet"
    assert second["misses"] == []
    assert serve(engine, salt="tenant")["misses"] == [
        {"cause": "other namespace", "differed": ["cache_salt"]}
    ]
    json.dumps(second)


def test_an_engine_tells_of_a_plan_against_loading(engine: ReferenceEngine) -> None:
    serve(engine)
    assert engine.rates is not None
    for n in (1, 2, 3, 4):
        engine.rates.prefilled([ForwardPart(100 * n, 0)], n * 1e-3)
        for tier in ("host", "disk"):
            engine.rates.loaded(tier, n * 1_000_000, n * 50.0)
    told = serve(engine)
    assert told["misses"] == [{"cause": "plan said recompute"}]
    assert told["loaded"] == {}
    assert told["plan"]["load_all_ms"] > told["plan"]["recompute_ms"]
    assert told["plan"]["rates"]["host"]["byte_s"] > 1e-6


@pytest.mark.parametrize("engine", [False], indirect=True)
def test_what_else_it_would_have_taken_is_told_without_a_planner(engine: ReferenceEngine) -> None:
    """By measured rates alone: what was not measured is named, never guessed."""
    first = serve(engine)
    assert "plan" not in first
    assert first["otherwise"] == {
        "estimate": True,
        "load_all_ms": None,
        "recompute_ms": None,
        "loading_ms": None,
        "unknown": ["prefill was not measured often enough yet", "nothing was found to load"],
    }
    assert engine.rates is not None
    assert not engine.rates.tier("host").is_learnt
    for n in (1, 2, 3, 4):
        engine.rates.prefilled([ForwardPart(100 * n, 0)], n * 1.0)
    half = serve(engine)["otherwise"]
    assert half["recompute_ms"] > 0
    assert (half["load_all_ms"], half["loading_ms"]) == (None, None)
    assert half["unknown"] == ["loads from host were not measured often enough yet"]
    leader = engine.leader
    assert leader is not None
    assert EXPECTED not in leader.metrics.snapshot(), "nothing is counted of a guess"
    for n in (1, 2, 3, 4):
        engine.rates.loaded("host", n * 1_000_000, n * 1.0)
    told = serve(engine)
    assert told["loaded"] == {"host": 144}, "an estimate decides nothing"
    otherwise = told["otherwise"]
    assert otherwise["unknown"] == []
    assert otherwise["load_all_ms"] >= otherwise["loading_ms"] > 0
    assert otherwise["recompute_ms"] > otherwise["load_all_ms"] - otherwise["loading_ms"]
    counted = leader.metrics.snapshot()[EXPECTED]
    assert counted["load"] == pytest.approx(otherwise["load_all_ms"] / 1e3, rel=1e-3)
    assert counted["recompute"] == pytest.approx(otherwise["recompute_ms"] / 1e3, rel=1e-3)


class Weigher:
    """Stands for `LoadAdvisor`. A load takes 1 s; computing takes 10 ms a token."""

    def ask(self, hit: Hit, tokens: int, computed: int) -> PlanRequest:
        return PlanRequest(tokens, computed, (), {})

    def expected(self, ask: PlanRequest, stop: int) -> tuple[float, float]:
        return 1.0, 0.01 * (stop - ask.computed)


def test_what_loads_save_is_counted_without_records_too() -> None:
    metrics, recorder = Metrics("leader"), RequestRecorder()
    weigher: Any = Weigher()
    recorder.count_in(metrics)
    recorder.weigh_with(weigher)
    assert not recorder.records

    def asked(name: str, depth: int, *, fails: bool = False, ends: bool = True) -> None:
        recorder.looked_up(name, PROMPT, 16, hit(depth), SPACE, BLOCK)
        if depth:
            recorder.loaded(name, {"host": 16, "disk": 32}, 16)
        if fails:
            recorder.failed(name, 48)
        if ends:
            assert recorder.ended(name, "done") is None
            assert recorder.ended(name, "done") is None, "once"

    asked("missed", 0)
    asked("failed", 4, fails=True)
    recorder.looked_up("unused", PROMPT, 16, hit(4), SPACE, BLOCK)
    recorder.ended("unused", "done")
    recorder.looked_up("blended", PROMPT, 16, hit(4), SPACE, BLOCK)
    recorder.loaded("blended", {"host": 16, "blend": 64}, 0)
    recorder.ended("blended", "done")
    assert EXPECTED not in metrics.snapshot()
    asked("loaded", 4)
    assert metrics.snapshot()[EXPECTED] == pytest.approx({"load": 1.0, "recompute": 0.48})
    asked("again", 4, fails=True, ends=False)
    asked("again", 4)
    assert metrics.snapshot()[EXPECTED]["load"] == 2.0
    for number in range(10_000):
        asked(f"lost {number}", 4, ends=False)
    assert len(recorder._savings._asks) == len(recorder._savings._loaded) < 5000, "nothing grows"
