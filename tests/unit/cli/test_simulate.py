"""The simulator: its hits are a real engine's, its times are the rates', its traces are checked."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.cli.simulate.media import Clock
from kvcore.cli.simulate.run import Scenario, Way, simulate
from kvcore.cli.simulate.trace import read_trace
from kvcore.config import load_config
from kvcore.errors import ConfigError, FormatError
from kvcore.manager import WritePolicy
from support.budget import examples
from support.simulate import BLOCK, FAR_APART, ROOMY, conversations, line, replay, run, write

# -- hits -----------------------------------------------------------------------------------------


def words(ids: Sequence[int], tail: int) -> list[int]:
    """Tokens of a prompt of these blocks, and a few more that fill none."""
    found: list[int] = []
    for number in ids:
        picks = random.Random(number)
        found += [picks.randrange(1, 512) for _ in range(BLOCK)]
    return found + list(range(1, tail + 1))


@pytest.mark.slow
@pytest.mark.parametrize("write_policy", ["write_through", "selective"])
def test_hits_are_those_of_a_real_engine(tmp_path: Path, write_policy: str) -> None:
    """The same prompts through the reference engine, in host memory and a disk too small for
    them, and through the simulator: tokens from each tier are equal, request by request."""
    pytest.importorskip("transformers")
    from kvcore.testing.engine import EngineArgs, ReferenceEngine, random_llama

    prompts, tails = conversations(5, 24), random.Random(6)
    asked = [(ids, tails.randrange(BLOCK)) for ids in prompts]
    config = load_config(
        None,
        {
            "host": {"capacity": "420KiB", "huge_pages": False},
            "disk": {"path": str(tmp_path / "kv"), "capacity": "2MiB", "write": write_policy},
        },
    )
    real: list[dict[str, int]] = []
    args = EngineArgs(num_pages=64, prefix_cache=False)
    with ReferenceEngine(random_llama(), args, config) as engine:
        assert engine.leader is not None
        manager = engine.leader.manager
        for ids, tail in asked:
            request = engine.submit(words(ids, tail), 1)
            engine.run()
            engine.settle()
            real.append(dict(request.reused))
        index, staging, batch = manager.index, len(manager.flights.staging), manager.flights.batch
        scenario = Scenario(
            host_blocks=index.num_slots("host"),
            disk_blocks=index.num_slots("disk"),
            block_tokens=BLOCK,
            block_bytes=1000,
            way=Way.ALWAYS,
            write=WritePolicy(write_policy),
            batch_blocks=batch,
            staging_blocks=staging,
        )
    lines = [
        line(n * FAR_APART, [*ids, 7] if tail else ids, len(ids) * BLOCK + tail)
        for n, (ids, tail) in enumerate(asked)
    ]
    trace = write(tmp_path / "trace.jsonl", lines)
    before: dict[str, int] = {}
    for n in range(len(asked)):
        found = simulate(scenario, read_trace(trace, BLOCK, n + 1)).found
        now = {tier: found[tier] - before.get(tier, 0) for tier in found}
        assert {tier: tokens for tier, tokens in now.items() if tokens} == real[n], n
        before = found
    assert before["host"] > 0
    assert before["disk"] > 0


@given(st.integers(0, 1000))
@settings(max_examples=examples(20, 1), deadline=None)
def test_with_room_for_all_every_shared_prefix_is_found(seed: int) -> None:
    prompts = conversations(seed, 30)
    seen: set[tuple[int, ...]] = set()
    expected = 0
    for ids in prompts:
        depth = max((n for n in range(len(ids) + 1) if tuple(ids[:n]) in seen or not n), default=0)
        expected += min(depth * BLOCK, len(ids) * BLOCK - 1)
        seen |= {tuple(ids[:n]) for n in range(1, len(ids) + 1)}
    outcome = replay(ROOMY, prompts)
    assert sum(outcome.found.values()) == expected
    assert outcome.tokens == sum(map(len, prompts)) * BLOCK
    assert outcome.requests == len(prompts) == len(outcome.first_token)


def test_a_number_behind_other_text_is_another_block() -> None:
    outcome = replay(ROOMY, [[1, 2, 3], [9, 2, 3], [1, 2, 4]])
    assert outcome.found == {"host": 2 * BLOCK}


# -- times ----------------------------------------------------------------------------------------


def test_nothing_is_loaded_where_the_plan_is_never() -> None:
    outcome = replay(replace(ROOMY, way=Way.NEVER), [[1, 2, 3]] * 4)
    assert outcome.found == {}
    assert outcome.misses == {"not_cached": 1, "planned": 3}
    assert outcome.saved == 0
    assert outcome.quantile(0.99) == pytest.approx(outcome.prefill_alone / 4)


def test_prompts_wait_for_each_other_and_hits_shorten_the_queue() -> None:
    prompts = [[*range(100, 160), n] for n in range(50)]
    slow = replace(ROOMY, compute=replace_rates(ROOMY, 1000.0))
    never = replay(replace(slow, way=Way.NEVER), prompts, gap=0.0)
    assert max(never.first_token) == pytest.approx(never.prefill, rel=1e-6)
    spread = replay(slow, prompts, gap=never.prefill_alone / 50)
    assert spread.quantile(0.5) < never.quantile(0.5) / 5
    assert spread.saved > 0.8 * never.prefill


def replace_rates(scenario: Scenario, factor: float) -> Any:
    return type(scenario.compute)(*(rate * factor for rate in scenario.compute))


@pytest.mark.parametrize("bandwidth", [1e6, 1e8, 1e12])
def test_the_planner_is_no_slower_than_the_better_of_both_ways(bandwidth: float) -> None:
    """Host memory holds one prompt; the others come from a disk, slow or fast."""
    disk = type(ROOMY.disk)(1e-4, 1 / bandwidth)
    prompts = [[1000 * (n % 6) + i for i in range(60)] for n in range(60)]
    scenario = replace(ROOMY, host_blocks=64, disk_blocks=4096, disk=disk)
    ways = {way: sum(replay(replace(scenario, way=way), prompts).first_token) for way in Way}
    better = min(ways[Way.ALWAYS], ways[Way.NEVER])
    assert ways[Way.PLANNER] <= 1.05 * better
    if bandwidth == 1e6:
        assert ways[Way.ALWAYS] > 2 * ways[Way.NEVER]
    if bandwidth == 1e12:
        assert ways[Way.NEVER] > 1.2 * ways[Way.ALWAYS]


def test_a_clock_lets_things_happen_in_order() -> None:
    clock, happened = Clock(), []
    for seconds, name in ((2.0, "late"), (1.0, "first"), (1.0, "second")):
        clock.after(seconds, lambda name=name: happened.append((clock.now, name)))  # type: ignore[misc]
    clock.run_until(1.5)
    assert happened == [(1.0, "first"), (1.0, "second")]
    assert clock.now == 1.5
    clock.run_out()
    assert happened[-1] == (2.0, "late")


# -- traces and the command -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("{}", "not a valid request"),
        ("[1, 2", "not a valid request"),
        ('"\\ud800"', "not a valid request"),
        (line(2, [1, 2, 3], 100), "3 hash_ids for 100 tokens.*block size"),
        (line(2, [], 1, input_length=-1), "input_length -1"),
        (line(0.5, [1]), "sort the trace"),
        (line(2, [1], timestamp=1e300), "timestamp"),
        (line(2, [1], hash_ids=["a"]), "not a valid request"),
    ],
)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, bad: str, says: str) -> None:
    trace = write(tmp_path / "t.jsonl", [line(1, [1, 2]), "\n", bad + "\n"])
    with pytest.raises(FormatError, match=rf"t\.jsonl, line 3: .*{says}"):
        list(read_trace(trace, BLOCK))


@given(st.binary(max_size=200))
@settings(max_examples=examples(50, 1), deadline=None)
def test_no_bytes_break_the_reader(tmp_path_factory: Any, junk: bytes) -> None:
    trace = tmp_path_factory.mktemp("junk") / "t.jsonl"
    trace.write_bytes(junk)
    with contextlib.suppress(FormatError):
        assert all(request.tokens > 0 for request in read_trace(trace, BLOCK))


def test_a_trace_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the trace"):
        list(read_trace(tmp_path / "none.jsonl"))


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"host_blocks": 0}, "given 0 host blocks"),
        ({"disk_blocks": -1}, "given -1 blocks on disk"),
        ({"layers": 0}, "and 0 layers; each must be at least 1"),
    ],
)
def test_a_machine_that_cannot_be_is_refused(wrong: dict[str, int], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        replace(ROOMY, **wrong)  # type: ignore[arg-type]


def test_the_command_sweeps(tmp_path: Path) -> None:
    lines = [line(n, [*range(8), 100 + n]) for n in range(6)]
    trace = str(write(tmp_path / "t.jsonl", lines))
    small = ["--block-tokens", "16", "--token-bytes", "1KiB"]
    sweep = ["--host", "1MiB", "--host", "160KiB", "--plan", "always", "--plan", "never"]
    told = json.loads(run(trace, *small, *sweep, "--disk", "1MiB", "--json"))
    assert [(row["host_bytes"], row["plan"]) for row in told["rows"]] == [
        (2**20, "always"),
        (2**20, "never"),
        (163_840, "always"),
        (163_840, "never"),
    ]
    assert told["rows"][0]["hit_rate"] == {"host": 5 * 8 / (6 * 9)}
    assert told["rows"][1]["misses"] == {"not_cached": 1, "planned": 5}
    assert set(told["rows"][0]["ttft_s"]) == {"p50", "p90", "p99"}
    table = run(trace, *small, *sweep)
    assert "74.1%" in table
    assert "160KiB" in table


@pytest.mark.slow
def test_the_command_draws(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    trace = write(tmp_path / "t.jsonl", [line(n, [1, 2, n + 3]) for n in range(4)])
    picture = tmp_path / "t.png"
    run(str(trace), "--block-tokens", "16", "--png", str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--policy", "best"], "given --policy 'best'; supported are arc"),
        (["--plan", "maybe"], "planner, always, never"),
        (["--host", "1KiB"], "given 0 host blocks"),
        (["--disk-bandwidth", "0"], "bandwidth"),
        (["--speed", "0"], "speed"),
        (["--layers", "0"], "--layers 0 --width"),
        (["--flops", "0"], "given --flops 0; it must be above 0"),
        (["--disk-latency-ms", "-1"], "given --disk-latency-ms -1; it must not be negative"),
    ],
)
def test_the_command_says_what_it_cannot_do(tmp_path: Path, args: list[str], says: str) -> None:
    trace = write(tmp_path / "t.jsonl", [line(0, [1, 2])])
    assert says in run(str(trace), "--block-tokens", "16", *args, code=2)


def test_the_command_names_the_line(tmp_path: Path) -> None:
    trace = write(tmp_path / "t.jsonl", [line(0, [1, 2]), "nonsense\n"])
    assert "t.jsonl, line 2" in run(str(trace), "--block-tokens", "16", code=2)
