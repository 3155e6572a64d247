"""Tokens of stored blocks: against brute force, as chains branch and grow and are evicted."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.errors import ConfigError, FormatError
from kvcore.fusion import segments as segments_module
from kvcore.fusion.segments import Reusable, Segments
from support.segment_histories import (
    NO_BOUNDS,
    SPACE,
    SPACES,
    Step,
    Tier,
    everything,
    histories,
    keys_of,
    text,
)


@pytest.mark.slow
@settings(max_examples=400)
@given(histories(), st.integers(1, 5), st.integers(1, 9), st.data())
def test_finds_what_brute_force_finds(
    steps: list[Step], block_tokens: int, min_tokens: int, data: st.DataObject
) -> None:
    segments = Segments(block_tokens, min_tokens=min_tokens, **NO_BOUNDS)
    tier = Tier(block_tokens)
    again = [Step("find", step.space, step.prompt, 0) for step in steps if step.kind == "store"]
    for kind, number, prompt, choice in [*steps, *again]:
        space = SPACES[number]
        if kind == "store":
            tier.store(segments, space, prompt)
        elif kind == "evict":
            tier.evict(choice)
        else:
            start = data.draw(st.integers(0, min(len(prompt), 12)))
            stop = len(prompt) - data.draw(st.integers(0, min(len(prompt) - start, 9)))
            found = segments.find(space.digest, prompt, tier.blocks.__contains__, start, stop)
            tier.check(space.digest, prompt, found, (start, stop), min_tokens)
        segments.check_integrity()


# ---------------------------------------------------------------------------------------------
# branches and growth


@pytest.mark.parametrize("step", [1, 2, 3, 7])
def test_a_chain_that_grows_is_one_segment(step: int) -> None:
    """Also while it is shorter than what can be found."""
    rng = random.Random(1)
    prompt = text(rng, 40 * 16)
    keys = keys_of(prompt, 16)
    segments = Segments(16)
    for done in range(0, len(keys), step):
        segments.add(SPACE, keys[: done + step], done, prompt)
        segments.check_integrity()
    assert len(segments) == 1
    assert segments.num_tokens == len(prompt)
    asked = [*text(rng, 5), *prompt[40:], 7]
    found = segments.find(SPACE, asked, everything)
    assert found == [Reusable(5, 600, 40, keys[-1])]


@pytest.mark.parametrize("before", range(0, 64, 9))
@pytest.mark.parametrize("behind", [5, 16, 40, 59, 64, 100])
def test_a_run_over_a_branch_is_found_whole(before: int, behind: int) -> None:
    """However little of it lies on either side; the branch begins within a block."""
    rng = random.Random(2)
    trunk, branch = text(rng, 200), text(rng, 300)
    first, second = [*trunk, *text(rng, 200)], [*trunk, *branch]
    segments = Segments(16)
    segments.add(SPACE, keys_of(first, 16), 0, first)
    keys = keys_of(second, 16)
    segments.add(SPACE, keys, 200 // 16, second)
    assert len(segments) == 2
    start, stop = 200 - before, 200 + behind
    found = segments.find(SPACE, [9, *second[start:stop], 9], everything)
    if before + behind < 64:
        assert found == []
    else:
        last = keys[(stop - 1) // 16]
        assert found == [Reusable(1, before + behind, start, last)]


def test_a_run_over_many_branches_is_found_whole() -> None:
    """Each prompt goes along the one before it, all but 25 tokens, and then its own way."""
    rng = random.Random(3)
    segments, prompt = Segments(16), text(rng, 80)
    for _ in range(30):
        prompt = [*prompt[:-25], *text(rng, 60)]
        keys = keys_of(prompt, 16)
        segments.add(SPACE, keys, 0, prompt)
        segments.check_integrity()
    assert len(segments) == 30
    for start in range(0, 200, 7):
        found = segments.find(SPACE, [3, *prompt[start:]], everything)
        assert sum(run.length for run in found) == len(keys) * 16 - start
        assert all(run.source_start == run.prompt_start - 1 + start for run in found)
        assert found[-1].last_key == keys[-1]


def test_a_run_over_two_short_branches_is_found_whole() -> None:
    """Behind what the finder sees of it are fewer tokens than it would count, in two segments."""
    rng = random.Random(12)
    segments, prompt = Segments(16), text(rng, 160)
    for kept in (100, 120, 140):
        prompt = [*prompt[:kept], *text(rng, 64)]
        keys = keys_of(prompt, 16)
        segments.add(SPACE, keys, 0, prompt)
    assert len(segments) == 3
    for stop in range(141, 155):  # before that, blocks of either branch hold it
        found = segments.find(SPACE, [3, *prompt[10:stop], 3], everything)
        assert found == [Reusable(1, stop - 10, 10, keys[(stop - 1) // 16])]


def test_branches_that_were_evicted_are_not_followed() -> None:
    """The finder keeps no anchor that leads to the last of them: it is met by following alone."""
    rng = random.Random(13)
    trunk = text(rng, 160)
    prompts = [[*trunk, *text(rng, 64)] for _ in range(9)]
    chains = [keys_of(prompt, 16) for prompt in prompts]
    segments = Segments(16)
    for prompt, keys in zip(prompts, chains, strict=True):
        segments.add(SPACE, keys, 0, prompt)
    asked = prompts[8][:161]
    assert segments.find(SPACE, asked, everything) == [Reusable(0, 161, 0, chains[8][10])]
    alive = {key for keys in chains[:8] for key in keys}
    assert segments.find(SPACE, asked, alive.__contains__) == [Reusable(0, 160, 0, chains[0][9])]
    assert len(segments) == 8
    segments.check_integrity()


@pytest.mark.parametrize("other", [1, 255])
def test_a_run_may_end_in_the_first_block_of_a_branch(other: int) -> None:
    """Whether the branch stands before or behind what is asked for in the order of branches."""
    rng = random.Random(14)
    trunk = text(rng, 160)
    prompts = [[*trunk, *text(rng, 64)], [*trunk, 5, 6, 7, 128, *text(rng, 60)]]
    segments = Segments(16)
    for prompt in prompts:
        keys = keys_of(prompt, 16)
        segments.add(SPACE, keys, 0, prompt)
    asked = [*prompts[1][:163], other, *text(rng, 30)]
    assert segments.find(SPACE, asked, everything) == [Reusable(0, 163, 0, keys[10])]


def test_a_branch_is_found_among_very_many() -> None:
    rng = random.Random(4)
    trunk = text(rng, 160)
    segments = Segments(16)
    branches = [[*trunk, *text(rng, 32)] for _ in range(500)]
    for branch in branches:
        segments.add(SPACE, keys_of(branch, 16), 0, branch)
    segments.check_integrity()
    for branch in (branches[0], branches[123], branches[499]):
        asked = [3, *branch[60:], 3]
        assert segments.find(SPACE, asked, everything) == [
            Reusable(1, 132, 60, keys_of(branch, 16)[-1])
        ]


def test_what_is_known_costs_next_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(5)
    prompt = text(rng, 3200)
    keys = keys_of(prompt, 16)
    segments = Segments(16)
    segments.add(SPACE, keys[:100], 0, prompt)
    packed: list[int] = []
    as_array = segments_module.as_array

    def counted(tokens: Sequence[int]) -> object:
        packed.append(len(tokens))
        return as_array(tokens)

    monkeypatch.setattr(segments_module, "as_array", counted)
    segments.add(SPACE, keys[:100], 0, prompt)
    segments.add(SPACE, keys[:100], 60, prompt)
    assert packed == []
    segments.add(SPACE, keys[:101], 0, prompt)
    assert packed == [63 + 16]


# ---------------------------------------------------------------------------------------------
# eviction


def test_evicted_tails_are_not_returned_and_are_forgotten() -> None:
    rng = random.Random(6)
    prompt = text(rng, 640)
    keys = keys_of(prompt, 16)
    segments = Segments(16)
    segments.add(SPACE, keys, 0, prompt)
    assert segments.find(SPACE, [1, *prompt], set(keys[:25]).__contains__) == [
        Reusable(1, 400, 0, keys[24])
    ]
    assert segments.num_tokens == 400
    segments.check_integrity()
    assert segments.find(SPACE, [1, *prompt], everything) == [Reusable(1, 400, 0, keys[24])]
    segments.add(SPACE, keys, 25, prompt)  # stored again
    assert segments.find(SPACE, [1, *prompt], everything) == [Reusable(1, 640, 0, keys[-1])]
    assert len(segments) == 1
    assert segments.find(SPACE, [1, *prompt], set().__contains__) == []
    assert len(segments) == segments.num_tokens == 0
    segments.check_integrity()
    segments.add(SPACE, keys, 0, prompt)
    assert segments.find(SPACE, prompt, everything) == [Reusable(0, 640, 0, keys[-1])]


def test_another_copy_is_found_when_the_first_is_evicted() -> None:
    rng = random.Random(7)
    document = text(rng, 320)
    segments = Segments(16)
    copies = [[*text(rng, 10 + i), *document, *text(rng, 50)] for i in range(4)]
    keys = [keys_of(copy, 16) for copy in copies]
    for copy, chain in zip(copies, keys, strict=True):
        segments.add(SPACE, chain, 0, copy)
    asked = [*text(rng, 3), *document, 8]
    for i in range(4):
        alive = {key for chain in keys[i:] for key in chain}
        assert segments.find(SPACE, asked, alive.__contains__) == [
            Reusable(3, 320, 10 + i, keys[i][(10 + i + 319) // 16])
        ]
        assert len(segments) == 4 - i
    assert segments.find(SPACE, asked, set(keys[3][:5]).__contains__) == [
        Reusable(3, 80 - 13, 13, keys[3][4])
    ]


# ---------------------------------------------------------------------------------------------
# bounds and namespaces


def test_the_longest_unused_is_forgotten_first() -> None:
    rng = random.Random(8)
    segments = Segments(16, max_tokens=1000)
    prompts = [text(rng, 320) for _ in range(4)]

    def is_found(number: int) -> bool:
        return bool(segments.find(SPACE, prompts[number], everything))

    for prompt in prompts[:3]:
        segments.add(SPACE, keys_of(prompt, 16), 0, prompt)
    assert is_found(0)  # and so used after 1 and 2
    segments.add(SPACE, keys_of(prompts[3], 16), 0, prompts[3])
    segments.check_integrity()
    assert [is_found(i) for i in range(4)] == [True, False, True, True]
    assert segments.num_tokens == 960


def test_a_run_that_ends_in_a_branch_uses_the_branch_too() -> None:
    """The finder keeps no anchor that leads to the last branch: it is met by following alone."""
    rng = random.Random(15)
    trunk = text(rng, 160)
    prompts = [[*trunk, *text(rng, 64)] for _ in range(9)]
    segments = Segments(16)
    for prompt in prompts:
        segments.add(SPACE, keys_of(prompt, 16), 0, prompt)
    asked, whole = prompts[8][:161], Reusable(0, 161, 0, keys_of(prompts[8], 16)[10])
    for prompt in prompts[:8]:
        segments.find(SPACE, prompt, everything)
    assert segments.find(SPACE, asked, everything) == [whole]
    segments.max_tokens = segments.num_tokens
    other = text(rng, 64)
    segments.add(SPACE, keys_of(other, 16), 0, other)
    assert len(segments) == 9, "one is forgotten for it"
    assert segments.find(SPACE, asked, everything) == [whole]
    segments.check_integrity()


def test_tokens_are_bounded_over_all_namespaces() -> None:
    rng = random.Random(9)
    segments = Segments(16, max_tokens=2000)
    before = None
    for i in range(100):
        prompt = text(rng, rng.randrange(16, 900))
        space = SPACES[i % 2]
        segments.add(space.digest, keys_of(prompt, 16, space), 0, prompt)
        assert segments.num_tokens <= 2000
        segments.check_integrity()
        before = before or (segments.nbytes if i == 30 else None)
    assert before is not None
    assert segments.nbytes < 2 * before
    big = text(rng, 2016)
    segments.add(SPACE, keys_of(big, 16), 0, big)
    assert len(segments) == 0


def test_namespaces_see_nothing_of_each_other() -> None:
    rng = random.Random(10)
    prompt = text(rng, 320)
    one, other = (space.digest for space in SPACES)
    segments = Segments(16)
    segments.add(one, keys_of(prompt, 16, SPACES[0]), 0, prompt)
    assert segments.find(other, prompt, everything) == []
    segments.add(other, keys_of(prompt, 16, SPACES[1]), 0, prompt)
    (found,) = segments.find(other, prompt, everything)
    assert found.last_key == keys_of(prompt, 16, SPACES[1])[-1]
    segments.clear(one)
    segments.check_integrity()
    assert segments.find(one, prompt, everything) == []
    assert segments.find(other, prompt, everything) == [found]
    segments.clear(b"never seen")
    segments.clear()
    assert segments.find(other, prompt, everything) == []
    assert len(segments) == segments.num_tokens == segments.nbytes == 0


# ---------------------------------------------------------------------------------------------
# the calls


def test_only_what_lies_within_the_span_is_found() -> None:
    rng = random.Random(11)
    prompt = text(rng, 320)
    keys = keys_of(prompt, 16)
    segments = Segments(16)
    segments.add(SPACE, keys, 0, prompt)
    assert segments.find(SPACE, prompt, everything, 100, 230) == [
        Reusable(100, 130, 100, keys[229 // 16])
    ]
    assert segments.find(SPACE, prompt, everything, 100, 163) == []
    assert segments.find(SPACE, prompt, everything, 300) == []
    assert segments.find(SPACE, prompt, everything, 0, 10_000)[0].length == 320


def test_mistakes_are_refused_and_change_nothing() -> None:
    prompt = list(range(64))
    keys = keys_of(prompt, 16)
    segments = Segments(16)
    for start, tokens in ((5, prompt), (-1, prompt), (0, prompt[:-1])):
        with pytest.raises(ConfigError, match="give a start within the keys"):
            segments.add(SPACE, keys, start, tokens)
    with pytest.raises(FormatError, match="16 bytes long"):
        segments.add(SPACE, [*keys[:3], b"short"], 0, prompt)
    with pytest.raises(ConfigError, match="token ids"):
        segments.add(SPACE, keys, 0, [-1, *prompt[1:]])
    with pytest.raises(ConfigError, match="0 or more"):
        segments.find(SPACE, prompt, everything, -1)
    assert len(segments) == 0
    segments.check_integrity()


@pytest.mark.parametrize("name", ["block_tokens", "min_tokens", "max_tokens", "max_twins"])
def test_settings_out_of_range_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        Segments(**{"block_tokens": 16, name: 0})
