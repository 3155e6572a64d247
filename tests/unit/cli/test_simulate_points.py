"""Resume points in the simulator: hits are those of a twin by tokens, and rows count as blocks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.cli.simulate.agents import Agents
from kvcore.cli.simulate.points import Bytes, PointRule
from kvcore.cli.simulate.run import Scenario, simulate
from kvcore.cli.simulate.trace import TraceRequest, _keys
from kvcore.errors import ConfigError
from kvcore.plugins import PluginManager
from support.budget import examples
from support.simulate import BLOCK, FAR_APART, ROOMY, conversations, line, replay, run, write

SIZE = ROOMY.block_bytes
PLUGINS = PluginManager(entry_points=[])
RULES = ["ends", "junctions", "ends,junctions", "ends,junctions,every=48", "last", "all", "spaced"]


def hybrid(points: str = "ends,junctions", rows: int = 2, **fields: Any) -> Scenario:
    rule = PointRule.read(points, PLUGINS)
    return replace(ROOMY, point_bytes=rows * SIZE - 1, points=rule, **fields)


# -- hits -----------------------------------------------------------------------------------------


class Twin:
    """What is found with room for all, by token: a prompt's prefixes of any length are looked at.

    ``stored`` has the texts whose blocks are stored, and ``points`` those at whose end the model
    can go on.
    """

    def __init__(self, rule: str, step: int, rows: int) -> None:
        self.words, self.step, self.rows = rule.split(","), step, rows
        self.stored: set[tuple[int, ...]] = {()}
        self.points: set[tuple[int, ...]] = {()}

    def ask(self, text: tuple[int, ...]) -> int:
        """Return the tokens found of a prompt, and store what the rule keeps of it."""
        lengths = range(len(text))  # the last token is computed
        found = max(n for n in lengths if text[:n] in self.points)
        reached = max(n for n in lengths if text[:n] in self.stored)
        kept = found
        offered = [n for n in range(found + 1, len(text) + 1) if n % self.step == 0]
        chosen = []
        for n in offered:
            is_end = n + self.step > len(text) // BLOCK * BLOCK
            is_junction = found < reached and n <= reached < n + self.step
            if self._wants(is_end, is_junction, n - kept):
                chosen.append(n)
                kept = n
        for n in chosen:
            self.points.add(text[:n])
            self.stored |= {text[:m] for m in range(BLOCK, n + 1, BLOCK)}
        if self.words == ["last"] and chosen and found:
            self.points.discard(text[:found])
        return found

    def _wants(self, is_end: bool, is_junction: bool, behind: int) -> bool:
        every = [int(word[6:]) for word in self.words if word.startswith("every=")]
        if self.words == ["spaced"]:
            every = [8 * self.rows * BLOCK]
        ends = {"ends", "last", "spaced"} & set(self.words)
        junctions = {"junctions", "spaced"} & set(self.words)
        return bool(
            self.words == ["all"]
            or (ends and is_end)
            or (junctions and is_junction)
            or (every and behind >= every[0])
        )


def prompts(seed: int, count: int, tail: int) -> list[tuple[int, ...]]:
    """Texts of whole blocks and ``tail`` more tokens, many of which begin as an earlier one."""
    made = conversations(seed, count)
    return [
        (*(w for i in ids for w in range(i * 100, i * 100 + BLOCK)), *[-1] * tail) for ids in made
    ]


def asked(texts: Sequence[tuple[int, ...]]) -> list[TraceRequest]:
    found = []
    for n, text in enumerate(texts):
        whole = len(text) // BLOCK
        ids = [text[block * BLOCK] for block in range(whole)]
        found.append(TraceRequest(n * FAR_APART, len(text), 1, _keys(ids)))
    return found


@given(
    seed=st.integers(0, 10_000),
    count=st.integers(2, 20),
    rule=st.sampled_from(RULES),
    step=st.integers(1, 3),
    rows=st.integers(1, 3),
    tail=st.sampled_from([0, 5]),
)
@settings(max_examples=examples(60, 1), deadline=None)
def test_hits_are_those_of_a_twin_by_tokens(
    seed: int, count: int, rule: str, step: int, rows: int, tail: int
) -> None:
    texts = prompts(seed, count, tail)
    twin = Twin(rule, step * BLOCK, rows)
    found = simulate(hybrid(rule, rows, point_step=step), asked(texts)).found
    assert found.get("host", 0) == sum(map(twin.ask, texts))


@given(st.integers(0, 10_000), st.sampled_from(RULES), st.integers(4, 40))
@settings(max_examples=examples(40, 1), deadline=None)
def test_with_less_room_no_more_is_held_than_there_is_and_nothing_else_is_found(
    seed: int, rule: str, host: int
) -> None:
    texts = prompts(seed, 14, 5)
    scenario = hybrid(rule, 2, host_blocks=host)
    outcome = simulate(scenario, asked(texts))
    blocks, points = outcome.held["host"]
    assert blocks + points <= host * SIZE
    assert points <= outcome.written.points
    twin = Twin("all", BLOCK, 2)
    assert outcome.found.get("host", 0) <= sum(map(twin.ask, texts))


def test_a_hit_ends_at_a_point_and_its_rows_count() -> None:
    prompt = [[1, 2, 3, 4], [1, 2, 3, 9], [1, 2, 3, 9, 5]]
    told = replay(hybrid("ends", 3), prompt)
    assert told.found == {"host": 4 * BLOCK}, "the second found blocks, and no point"
    assert told.written == Bytes(6 * SIZE, 3 * 3 * SIZE)
    assert told.held == {"host": told.written}
    assert replay(ROOMY, prompt).found == {"host": 7 * BLOCK}


def test_the_last_token_is_computed() -> None:
    """A point at the end of a prompt is of use to a longer one only."""
    assert replay(hybrid("ends"), [[1, 2], [1, 2]]).found == {}
    assert replay(hybrid("ends"), [[1, 2], [1, 2, 3]]).found == {"host": 2 * BLOCK}


def test_the_second_branch_finds_where_the_first_parted() -> None:
    prompt = [[1, 2, 3, 4], [1, 2, 3, 9], [1, 2, 3, 8]]
    assert replay(hybrid("ends,junctions"), prompt).found == {"host": 3 * BLOCK}
    assert replay(hybrid("ends"), prompt).found == {}


def test_points_go_to_disk_and_come_back() -> None:
    long = [[n * 100 + i for i in range(8)] for n in range(1, 7)]
    told = replay(hybrid("ends", 2, host_blocks=12, disk_blocks=400), [*long, [*long[0], 7]])
    assert told.found == {"disk": 8 * BLOCK}
    assert told.held["disk"].points == 7 * 2 * SIZE
    assert sum(told.held["host"]) <= 12 * SIZE


def test_the_last_point_of_a_conversation_replaces_the_one_before() -> None:
    turns = [[1, 2], [1, 2, 3, 4], [1, 2, 3, 4, 5, 6]]
    told = replay(hybrid("last"), [*turns, [1, 2, 9]])
    assert told.found == {"host": 6 * BLOCK}
    assert told.held["host"].points == 2 * 2 * SIZE
    assert replay(hybrid("ends"), [*turns, [1, 2, 9]]).found == {"host": 8 * BLOCK}


# -- the agents -----------------------------------------------------------------------------------


def test_agents_come_back_and_part() -> None:
    made = list(Agents(sessions=12, live=4).requests(256))
    assert made == list(Agents(sessions=12, live=4).requests(256))
    assert made != list(Agents(sessions=12, live=4, seed=8).requests(256))
    assert made[:9] == list(Agents(sessions=12, live=4).requests(256, 9))
    times = [request.at for request in made]
    assert times == sorted(times)
    assert all(len(request.keys) == request.tokens // 256 for request in made)
    assert max(request.tokens for request in made) < 150_000
    children: dict[bytes, set[bytes]] = {}
    for request in made:
        for above, key in zip(request.keys, request.keys[1:], strict=False):
            children.setdefault(above, set()).add(key)
    assert len({request.keys[0] for request in made}) <= 8, "system prompts are shared"
    branches = sum(len(below) - 1 for below in children.values())
    assert branches > 12 + len(made) / 8, "edits of 8 in 100 turns, and several sub-agents of 10"


@pytest.mark.slow
def test_agents_gain_from_points_in_the_order_of_the_design() -> None:
    """Fewer points than the end of each prompt lose hits, and so do too many for the memory."""
    scenario = Scenario(
        host_blocks=500, block_tokens=512, block_bytes=512 * 24_576, point_bytes=39_500_000
    )
    made = list(Agents(sessions=16, live=10).requests(512, 300))
    found = {
        rule: sum(
            simulate(replace(scenario, points=PointRule.read(rule, PLUGINS)), made).found.values()
        )
        for rule in ("last", "ends", "ends,junctions", "all")
    }
    assert found["last"] < found["ends"] < found["ends,junctions"]
    assert found["all"] < found["ends,junctions"]


@pytest.mark.parametrize("wrong", [{"sessions": 0}, {"live": 0}, {"systems": 0}, {"gap_s": 0.0}])
def test_agents_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="each must be above 0"):
        Agents(**wrong)


# -- the command ----------------------------------------------------------------------------------

SMALL = ["--block-tokens", "16", "--token-bytes", "1KiB", "--host", "1MiB", "--plan", "always"]


def test_the_command_sweeps_points(tmp_path: Path) -> None:
    trace = str(write(tmp_path / "t.jsonl", [line(n, [*range(8), 100 + n]) for n in range(4)]))
    given = [*SMALL, "--point-bytes", "3 rows", "--points", "ends", "--points", "ends,junctions"]
    ends, both = json.loads(run(trace, *given, "--json"))["rows"]
    assert (ends["points"], both["points"]) == ("ends", "ends,junctions")
    assert ends["hit_rate"] == {}
    assert both["hit_rate"] == {"host": 2 * 8 / (4 * 9)}
    assert ends["written_bytes"] == {"blocks": 12 * 2**14, "points": 4 * 3 * 2**14}
    assert ends["held_bytes"]["host"] == ends["written_bytes"]
    table = run(trace, *given)
    assert "points held" in table
    assert "ends,junctions" in table
    assert "points held" not in run(trace, *SMALL)


def test_the_command_makes_up_agents() -> None:
    given = ["--generate", "agents", "--sessions", "2", "--limit", "20", "--host", "1GiB", "--json"]
    told = json.loads(run(*given, "--block-tokens", "256", "--point-bytes", "1MB"))
    assert told["trace"] == "agents"
    assert told["rows"][0]["requests"] == 20


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--points", "best"], "given --points 'best'; supported are ends, junctions, every="),
        (["--points", "best"], "and the policies spaced, all"),
        (["--points", "last,ends"], "given --points 'last,ends'"),
        (["--points", "every=0"], "give every= a number of tokens above 0"),
        (["--points", "ends,every=x"], "give every= a number of tokens above 0"),
        (["--point-step", "24"], "a multiple of --block-tokens 16"),
        (["--point-bytes", "some"], "some"),
        (["--generate", "agents"], "one of them"),
    ],
)
def test_the_command_says_what_points_it_cannot_keep(
    tmp_path: Path, args: list[str], says: str
) -> None:
    trace = write(tmp_path / "t.jsonl", [line(0, [1, 2])])
    told = run(str(trace), "--block-tokens", "16", *args, code=2)
    assert says in " ".join(told.split())


def test_the_command_needs_requests() -> None:
    assert "give the file of a trace, or --generate agents" in run(code=2)
    assert "supported is agents" in run("--generate", "users", code=2)


@pytest.mark.parametrize("wrong", [{"point_bytes": -1}, {"point_step": 0}])
def test_points_that_cannot_be_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="must not be negative, the second at least 1"):
        replace(ROOMY, **wrong)  # type: ignore[arg-type]
