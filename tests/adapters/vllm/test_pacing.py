"""The fusion controller beside vLLM's scheduler: what it is told, and what follows from it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvcore.config.schema_fusion import FusionConfig
from kvcore.connector.forward_timer import ForwardTimer
from kvcore.connector.fusion_messages import BlendTime
from kvcore.connector.fusion_policy import (
    TIMED_TOKENS,
    FusionPolicy,
    is_prefill,
    make_fusion_policy,
)
from kvcore.fusion.controller import ForwardPart, Mode
from kvcore.memory.device import device_of
from kvcore.telemetry.metrics import Metrics
from kvcore_vllm.pacing import parts_of

LAYERS = 30
PATHS = {"host": "h2d", "disk": "disk2h"}
ROW = 2e-5
"""Seconds of a row and layer of the engine that is played here."""


def pace(ranks: int = 1, looks: bool = False, **settings: Any) -> FusionPolicy:
    return make_fusion_policy(
        FusionConfig(**settings),
        hidden=576,
        device="cpu",
        layers=LAYERS,
        ranks=ranks,
        paths=PATHS,
        looks=looks,
    )


def blended(made: FusionPolicy, rows: int, kept: int, seconds: float) -> None:
    made.learn(blends=[BlendTime("r", rows, kept, 0, seconds)])


def prefill(made: FusionPolicy, tokens: int, seconds_of_row: float = ROW) -> None:
    step = made.time([ForwardPart(tokens, 0)])
    made.learn(forwards=[(step, tokens * LAYERS * seconds_of_row)])


def moved(path: str, nbytes: int, seconds: float) -> dict[str, Any]:
    metrics = Metrics("rank0")
    metrics.transferred(path, nbytes, seconds)
    return {"counted": metrics.delta()}


def ask(made: FusionPolicy, tier: str = "host", nbytes: int = 50_000_000) -> Any:
    return made.decide(4000, 100, 3800, {}, {tier: nbytes})


def test_a_blend_that_saves_nothing_is_declined() -> None:
    """Blends are learnt apart from prefill: as slow as it for all their rows, they are not worth
    it; as fast for each row, they are."""
    for slow, mode in ((8.0, Mode.PREFIX), (1.0, Mode.BLEND)):
        made = pace()
        for tokens in (500, 2000, 3000, 4000, 1000, 3500):
            prefill(made, tokens)
            kept = tokens // 5
            walked = (2 * tokens + 28 * kept) * ROW * slow
            blended(made, tokens, kept, walked)
        decision = ask(made)
        assert decision.mode is mode, decision.reason
        assert decision.prefix_seconds == pytest.approx(3900 * LAYERS * ROW, rel=0.2)


def test_a_profile_alone_sets_the_level() -> None:
    made = pace()
    made.learn(profile=[(rows, rows * LAYERS * 1e-3) for rows in (16, 64, 256)])
    assert ask(made).prefix_seconds == pytest.approx(3900 * LAYERS * 1e-3, rel=0.7)
    assert ask(pace()).prefix_seconds < 30


def test_a_slow_tier_is_learnt_from_the_workers_counters() -> None:
    made = pace()
    for tokens in (500, 2000, 3000, 4000):
        prefill(made, tokens)
    assert ask(made, "disk").mode is Mode.BLEND
    for _ in range(30):
        made.learn(**moved("disk2h", 1_000_000, 1.0))
    assert ask(made, "disk").mode is Mode.PREFIX
    assert ask(made, "host").mode is Mode.BLEND


def test_more_is_recomputed_where_it_hides_behind_loading_and_never_less_than_the_floor() -> None:
    fast, slow = pace(ratio=0.1, ratio_max=0.4), pace(ratio=0.1, ratio_max=0.4)
    for made, rate in ((fast, 1e10), (slow, 2.5e8)):
        for tokens in (500, 2000, 3000, 4000):
            prefill(made, tokens)
        for _ in range(30):
            made.learn(**moved("h2d", 10_000_000, 10_000_000 / rate))
    assert ask(fast, nbytes=200_000_000).ratio == 0.1
    assert 0.1 < ask(slow, nbytes=200_000_000).ratio <= 0.4
    looking = pace(ratio=0.1, ratio_max=0.4, looks=True)
    assert ask(looking, nbytes=200_000_000).ratio == 0.1
    assert pace(ratio=0.9).decide(4000, 0, 3900, {}, {"host": 1}).ratio == 0.9


def test_ranks_share_the_load() -> None:
    one, four = pace(ranks=1), pace(ranks=4)
    loads = [
        made.decide(4000, 0, 3900, {}, {"disk": 4_000_000_000}).load_seconds for made in (one, four)
    ]
    assert loads[0] == pytest.approx(4 * loads[1], rel=0.1)


def test_a_slow_blend_is_learnt() -> None:
    made = pace()
    for tokens in (500, 2000, 3000, 4000):
        prefill(made, tokens)
    before = ask(made).blend_seconds
    for _ in range(20):
        blended(made, 1000, 200, 100.0)
    assert ask(made).blend_seconds > 2 * before


def test_only_steps_that_prefill_are_timed_and_what_never_comes_is_forgotten() -> None:
    made = pace()
    assert made.time([ForwardPart(1, 100)] * (TIMED_TOKENS - 1)) == 0
    numbers = [made.time([ForwardPart(TIMED_TOKENS, 0)]) for _ in range(500)]
    assert len(set(numbers)) == 500
    assert 0 not in numbers
    assert len(made._parts) <= 100
    made.learn(forwards=[(numbers[0], 1e6), (numbers[-1], 0.01)])  # the first is forgotten
    assert numbers[-1] not in made._parts


def test_parts_of_a_step() -> None:
    request = SimpleNamespace(num_computed_tokens=7)
    assert parts_of([(3, request)]) == [ForwardPart(3, 7)]


def test_a_clock_tells_each_forward_once() -> None:
    clock = ForwardTimer[int](device_of(None))
    clock.stop()
    assert clock.take() == []
    clock.start(4)
    clock.start(5)
    clock.stop()
    [(number, seconds)] = clock.take()
    assert number == 5
    assert 0 <= seconds < 60
    assert clock.take() == []


def test_steps_that_only_decode_are_not_timed() -> None:
    assert not is_prefill([1] * 300)
    assert not is_prefill([1] * 300 + [TIMED_TOKENS])
    assert is_prefill([1] * 300 + [TIMED_TOKENS + 1])
    assert is_prefill([20, 20])
