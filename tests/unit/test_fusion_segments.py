"""Tokens of stored blocks: against brute force, as chains branch and grow and are evicted."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.block import KeyChain, Namespace
from kvcore.errors import ConfigError, FormatError
from kvcore.fusion import segments as segments_module
from kvcore.fusion.segments import Reusable, Segments

NO_BOUNDS = {"max_twins": 1 << 30, "max_checks": 1 << 30}
SPACES = [Namespace("model"), Namespace("model", cache_salt="another tenant")]
SPACE = SPACES[0].digest
VOCABULARY = 150_000


def text(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(count)]


def keys_of(tokens: Sequence[int], block_tokens: int, space: Namespace = SPACES[0]) -> list[bytes]:
    return list(KeyChain(space, block_tokens).extend(tokens))


def everything(_: bytes) -> bool:
    return True


# ---------------------------------------------------------------------------------------------
# against brute force


class Stored(NamedTuple):
    """A block that a tier holds: all tokens of its chain up to its end."""

    namespace: bytes
    parent: bytes
    tokens: tuple[int, ...]


class Tier:
    """Blocks by key, prefix-closed; what `Segments` is told of, and asked against."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.blocks: dict[bytes, Stored] = {}

    def store(self, segments: Segments, space: Namespace, prompt: list[int]) -> None:
        keys = keys_of(prompt, self.block_tokens, space)
        start = sum(key in self.blocks for key in keys)
        for i in range(start, len(keys)):
            tokens = tuple(prompt[: (i + 1) * self.block_tokens])
            self.blocks[keys[i]] = Stored(space.digest, keys[i - 1] if i else b"", tokens)
        segments.add(space.digest, keys, start, prompt)

    def evict(self, choice: int) -> None:
        """A block goes, and all that stand on it."""
        if not self.blocks:
            return
        gone = {sorted(self.blocks)[choice % len(self.blocks)]}
        for key, block in sorted(self.blocks.items(), key=lambda item: len(item[1].tokens)):
            if block.parent in gone:
                gone.add(key)
        for key in gone:
            del self.blocks[key]

    def check(
        self,
        namespace: bytes,
        prompt: list[int],
        found: list[Reusable],
        span: tuple[int, int],
        min_tokens: int,
    ) -> None:
        """What was found is so; what was not found is not there."""
        chains = [block.tokens for block in self.blocks.values() if block.namespace == namespace]
        windows = {
            chain[i : i + min_tokens]
            for chain in chains
            for i in range(len(chain) - min_tokens + 1)
        }
        done, stop = span
        starts = [*(run.prompt_start for run in found), stop][1:]
        for run, room in zip(found, starts, strict=True):
            self.check_run(namespace, prompt, run, done, min_tokens)
            self.check_gap(prompt[done:stop], run.prompt_start - done, windows, min_tokens)
            done = run.prompt_start + run.length
            assert done <= room
            if done < room:
                self.check_end(chains, prompt, run)
        self.check_gap(prompt[done:stop], stop - done, windows, min_tokens)

    def check_run(
        self, namespace: bytes, prompt: list[int], run: Reusable, done: int, min_tokens: int
    ) -> None:
        start, length, source, last_key = run
        assert start >= done
        assert length >= min_tokens
        block = self.blocks[last_key]
        assert block.namespace == namespace
        size = self.block_tokens
        assert len(block.tokens) == ((source + length - 1) // size + 1) * size
        assert list(block.tokens[source : source + length]) == prompt[start : start + length]

    @staticmethod
    def check_gap(
        rest: list[int], gap: int, windows: set[tuple[int, ...]], min_tokens: int
    ) -> None:
        """No run begins in the gap with which ``rest`` begins."""
        for i in range(gap):
            assert tuple(rest[i : i + min_tokens]) not in windows

    def check_end(self, chains: list[tuple[int, ...]], prompt: list[int], run: Reusable) -> None:
        """No chain of the same full blocks has the token that follows, too."""
        start, length, source, last_key = run
        shared = (source + length) // self.block_tokens * self.block_tokens
        ours = self.blocks[last_key].tokens[:shared]
        wanted = tuple(prompt[start : start + length + 1])
        if source > shared:
            return
        for chain in chains:
            if chain[:shared] == ours:
                assert chain[source : source + length + 1] != wanted


class Step(NamedTuple):
    kind: str
    space: int
    prompt: list[int]
    number: int


@st.composite
def prompts(draw: st.DrawFn) -> Callable[[list[list[int]]], list[int]]:
    """How to make a prompt of the beginning of an earlier one, parts of others, and new text."""
    parts = st.tuples(st.integers(0, 50), st.integers(0, 40), st.integers(0, 14))
    base = draw(parts)
    pieces = draw(st.lists(st.one_of(parts, st.lists(st.integers(0, 3), max_size=9)), max_size=4))

    def make(earlier: list[list[int]]) -> list[int]:
        def part(number: int, start: int, length: int) -> list[int]:
            return earlier[number % len(earlier)][start : start + length] if earlier else []

        made = part(base[0], 0, base[1])
        for piece in pieces:
            made = made + (piece if isinstance(piece, list) else part(*piece))
        return made

    return make


@st.composite
def histories(draw: st.DrawFn) -> list[Step]:
    steps: list[Step] = []
    earlier: list[list[int]] = []
    for _ in range(draw(st.integers(1, 12))):
        kind = draw(st.sampled_from(["store", "store", "store", "evict", "find"]))
        prompt = draw(prompts())(earlier) if kind != "evict" else []
        steps.append(Step(kind, draw(st.integers(0, 1)), prompt, draw(st.integers(0, 60))))
        if kind == "store":
            earlier.append(prompt)
    return steps


@settings(max_examples=600)
@given(histories(), st.integers(1, 5), st.integers(1, 9), st.data())
def test_finds_what_brute_force_finds(
    steps: list[Step], block_tokens: int, min_tokens: int, data: st.DataObject
) -> None:
    segments = Segments(block_tokens, min_tokens=min_tokens, **NO_BOUNDS)
    tier = Tier(block_tokens)
    for kind, number, prompt, choice in [*steps, Step("find", 0, steps[0].prompt, 0)]:
        space = SPACES[number]
        if kind == "store":
            tier.store(segments, space, prompt)
        elif kind == "evict":
            tier.evict(choice)
        else:
            start = data.draw(st.integers(0, len(prompt)))
            stop = data.draw(st.integers(start, len(prompt)))
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
    with pytest.raises(ConfigError, match="from 0 on"):
        segments.find(SPACE, prompt, everything, -1)
    assert len(segments) == 0
    segments.check_integrity()


@pytest.mark.parametrize("name", ["block_tokens", "min_tokens", "max_tokens", "max_twins"])
def test_settings_out_of_range_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        Segments(**{"block_tokens": 16, name: 0})
