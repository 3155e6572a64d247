"""Tokens of stored blocks: against brute force, as chains branch and grow and are evicted."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import random
import stat
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.block import ROOT_PARENT, KeyChain, Namespace
from kvcore.errors import ConfigError, FormatError
from kvcore.fusion import _segment_file as file_module
from kvcore.fusion import segments as segments_module
from kvcore.fusion._chains import Piece
from kvcore.fusion._segment_file import SegmentFile
from kvcore.fusion.segments import Reusable, Segments

NO_BOUNDS = {"max_twins": 1 << 30, "max_checks": 1 << 30, "max_tokens": 1 << 16}
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
    for _ in range(draw(st.integers(1, 14))):
        kind = draw(st.sampled_from(["store", "store", "store", "store", "evict", "find"]))
        prompt = draw(prompts())(earlier) if kind != "evict" else []
        space = draw(st.sampled_from([0, 0, 0, 1]))
        steps.append(Step(kind, space, prompt, draw(st.integers(0, 60))))
        if kind == "store":
            earlier.append(prompt)
    return steps


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


# ---------------------------------------------------------------------------------------------
# over a restart


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "segments"


def stored(segments: Segments, prompt: list[int], space: Namespace = SPACES[0]) -> list[bytes]:
    keys = keys_of(prompt, segments.block_tokens, space)
    segments.add(space.digest, keys, 0, prompt)
    return keys


def reopened(path: Path, **options: int) -> Segments:
    segments = Segments(16, path=path, **options)
    segments.check_integrity()
    return segments


@settings(max_examples=80)
@given(histories(), st.integers(1, 5), st.integers(1, 9), st.sets(st.integers(0, 14)))
def test_a_restart_loses_nothing(
    steps: list[Step], block_tokens: int, min_tokens: int, restarts: set[int]
) -> None:
    tier = Tier(block_tokens)
    with tempfile.TemporaryDirectory() as folder:

        def opened() -> Segments:
            path = Path(folder) / "segments"
            return Segments(block_tokens, min_tokens=min_tokens, path=path, **NO_BOUNDS)

        segments = opened()
        again = [Step("find", step.space, step.prompt, 0) for step in steps if step.kind == "store"]
        for i, (kind, number, prompt, choice) in enumerate([*steps, *again]):
            if i in restarts or i == len(steps):
                segments.close()
                segments = opened()
                segments.check_integrity()
            space = SPACES[number]
            if kind == "store":
                tier.store(segments, space, prompt)
            elif kind == "evict":
                tier.evict(choice)
            else:
                found = segments.find(space.digest, prompt, tier.blocks.__contains__)
                tier.check(space.digest, prompt, found, (0, len(prompt)), min_tokens)
        assert segments.corrupt == segments.dropped == 0
        segments.close()


def test_the_file_is_as_specified(path: Path) -> None:
    """Written out here byte by byte: it is read by engines to come."""
    prompt, tokens = list(range(100, 170)), np.arange(100, 170, dtype="<u4")
    keys = keys_of(prompt, 16)
    segments = Segments(16, min_tokens=20, path=path)
    segments.add(SPACE, keys, 2, prompt)
    segments.close()

    def sealed(data: bytes) -> bytes:
        return data + struct.pack("<Q", xxhash.xxh3_64_intdigest(data))

    body = SPACE + keys[2] + keys[3] + tokens[32 - 19 : 64].tobytes()
    fields = (b"KVSR", 2, 2, 19, 16, keys[1], xxhash.xxh3_64_intdigest(body))
    header = struct.pack("<8sII8x", b"KVCSEGS\0", 1, 16)
    wanted = sealed(header) + sealed(struct.pack("<4s4I16sQ", *fields)) + body
    assert path.read_bytes() == wanted


def test_a_torn_end_is_cut_off_and_writing_goes_on(path: Path) -> None:
    rng = random.Random(20)
    prompts = [text(rng, 160) for _ in range(3)]
    sizes = []
    for prompt in prompts:
        segments = reopened(path)
        stored(segments, prompt)
        segments.close()
        sizes.append(path.stat().st_size)
    whole = path.read_bytes()
    for size in (sizes[2] - 1, sizes[1] + 60, sizes[1] + 52, sizes[1] + 7, sizes[1] + 1, sizes[0]):
        path.write_bytes(whole[:size])
        segments = reopened(path)
        kept = sum(mark <= size for mark in sizes)
        assert path.stat().st_size == sizes[kept - 1]
        assert [bool(segments.find(SPACE, p, everything)) for p in prompts] == [
            i < kept for i in range(3)
        ]
        stored(segments, prompts[2])
        segments.close()
        segments = reopened(path)
        assert segments.find(SPACE, prompts[2], everything)
        assert segments.corrupt == 0
        segments.close()


@pytest.mark.parametrize("size", [0, 1, 31, 32])
def test_a_file_torn_at_its_making_is_made_anew(path: Path, size: int) -> None:
    segments = reopened(path)
    segments.close()
    path.write_bytes(path.read_bytes()[:size])
    prompt = text(random.Random(21), 160)
    segments = reopened(path)
    keys = stored(segments, prompt)
    segments.close()
    assert reopened(path).find(SPACE, prompt, everything) == [Reusable(0, 160, 0, keys[-1])]


def test_damaged_records_are_skipped_and_counted(path: Path) -> None:
    """Whichever byte it is; the others are found."""
    rng = random.Random(22)
    prompts = [text(rng, 96) for _ in range(3)]
    segments = reopened(path)
    for prompt in prompts:
        stored(segments, prompt)
    segments.close()
    whole = path.read_bytes()
    each = (len(whole) - 32) // 3
    for at in (*range(0, 60, 3), 100, 300, each - 1):
        data = bytearray(whole)
        data[32 + each + at] ^= 0x40
        path.write_bytes(data)
        segments = reopened(path)
        found = [segments.find(SPACE, prompt, everything) for prompt in prompts]
        assert [bool(runs) for runs in found] == [True, False, True]
        assert segments.corrupt == 1
        segments.close()


FOREIGN = {
    "format version 2": struct.pack("<8sII16x", b"KVCSEGS\0", 2, 16),
    "not a file of segments": b"the notes of somebody else, kept here by mistake",
    "damaged header": struct.pack("<8sII16x", b"KVCSEGS\0", 1, 16),
}


@pytest.mark.parametrize("reason", FOREIGN)
def test_files_of_others_are_named_and_left_as_they_are(
    path: Path, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    data = FOREIGN[reason] + bytes(100)
    path.write_bytes(data)
    segments = reopened(path)
    assert reason in caplog.text
    prompt = text(random.Random(23), 160)
    stored(segments, prompt)
    assert segments.find(SPACE, prompt, everything)
    segments.clear()
    segments.close()
    assert path.read_bytes() == data


def test_blocks_of_another_size_are_refused(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    segments = Segments(32, path=path)
    stored(segments, text(random.Random(24), 160))
    segments.close()
    data = path.read_bytes()
    assert len(reopened(path)) == 0
    assert "blocks of 32 tokens, this engine has blocks of 16" in caplog.text
    assert path.read_bytes() == data


def test_a_folder_that_is_not_there_costs_a_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    segments = reopened(tmp_path / "nowhere" / "segments")
    prompt = text(random.Random(25), 160)
    stored(segments, prompt)
    assert segments.find(SPACE, prompt, everything)
    segments.close()
    assert "not kept" in caplog.text


def test_only_the_owner_reads_the_file(path: Path) -> None:
    def mode() -> int:
        return stat.S_IMODE(path.stat().st_mode)

    segments = reopened(path)
    assert mode() == 0o600
    segments.close()
    path.chmod(0o644)
    segments = reopened(path)
    assert mode() == 0o600
    segments.clear()  # another file takes its place
    segments.close()
    assert mode() == 0o600


def test_of_two_engines_one_writes_and_both_read(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(26)
    prompts = [text(rng, 160) for _ in range(3)]
    first = reopened(path)
    stored(first, prompts[0])
    first.close()
    first = reopened(path)
    second = reopened(path)
    assert "written by another engine" in caplog.text
    data = path.read_bytes()
    assert second.find(SPACE, prompts[0], everything)
    stored(second, prompts[1])
    second.clear()
    stored(second, prompts[1])
    second.close()
    assert path.read_bytes() == data
    before = path.stat().st_ino
    first.clear()
    while path.stat().st_ino == before:  # what was locked is another file now
        time.sleep(0.01)
    third = reopened(path)
    stored(third, prompts[1])
    third.close()
    assert path.stat().st_size == 32
    stored(first, prompts[2])
    first.close()
    last = reopened(path)
    found = [bool(last.find(SPACE, prompt, everything)) for prompt in prompts]
    assert found == [False, False, True]
    last.close()


def test_what_is_dead_is_cleared_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_module, "_COMPACT_NBYTES", 4096)
    rng = random.Random(27)
    segments = reopened(path, max_tokens=1000)
    prompts = [text(rng, 160) for _ in range(60)]
    for i, prompt in enumerate(prompts):
        stored(segments, prompt)
        if i % 10 == 9:
            segments.close()
            live = segments.num_tokens * 5 + len(segments) * 100
            assert path.stat().st_size <= max(2 * live, 4096) + 1000
            segments = reopened(path, max_tokens=1000)
            assert segments.num_tokens == 960
    found = [bool(segments.find(SPACE, prompt, everything)) for prompt in prompts]
    assert found == [False] * 54 + [True] * 6
    assert [file.name for file in path.parent.iterdir()] == ["segments"]
    segments.close()


def test_records_of_evicted_tails_die(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_module, "_COMPACT_NBYTES", 1)
    prompt = text(random.Random(28), 640)
    keys = keys_of(prompt, 16)
    segments = reopened(path)
    for done in range(0, 40, 4):
        segments.add(SPACE, keys[: done + 4], done, prompt)
    segments.find(SPACE, prompt, set(keys[:10]).__contains__)
    segments.close()
    data = path.read_bytes()
    assert keys[11] in data  # in a record of which a part lives
    assert keys[12] not in data
    segments = reopened(path)
    assert segments.find(SPACE, prompt, set(keys[:10]).__contains__) == [
        Reusable(0, 160, 0, keys[9])
    ]
    segments.close()


def test_what_is_cleared_leaves_no_trace(path: Path) -> None:
    rng = random.Random(29)
    prompt, other = text(rng, 160), text(rng, 160)
    packed = np.array(prompt[:20], dtype="<u4").tobytes()
    segments = reopened(path)
    stored(segments, prompt)
    stored(segments, other, SPACES[1])
    segments.close()
    assert packed in path.read_bytes()
    segments = reopened(path)
    stored(segments, [*prompt, *prompt])
    segments.clear(SPACE)
    segments.close()
    assert packed not in path.read_bytes()
    segments = reopened(path)
    assert segments.find(SPACE, prompt, everything) == []
    assert segments.find(SPACES[1].digest, other, everything)
    segments.clear()
    segments.close()
    assert path.stat().st_size == 32


def test_what_cannot_be_erased_alone_is_erased_with_the_rest(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(self: SegmentFile, draft: Path) -> None:
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(SegmentFile, "_copy_to", full)
    rng = random.Random(30)
    segments = reopened(path)
    stored(segments, text(rng, 160))
    stored(segments, text(rng, 160), SPACES[1])
    segments.clear(SPACE)
    segments.close()
    assert path.stat().st_size == 32
    assert "could not be compacted" in caplog.text


# ---------------------------------------------------------------------------------------------
# the writing thread


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The disk does not answer before this is set; and only threads of ours write."""
    event, write, main = threading.Event(), os.pwrite, threading.main_thread()

    def waits(file: int, data: bytes, offset: int) -> int:
        if offset:
            assert threading.current_thread() is not main
            event.wait(60)
        return write(file, data, offset)

    monkeypatch.setattr(os, "pwrite", waits)
    yield event
    event.set()


def test_no_call_waits_for_the_disk(path: Path, stuck: threading.Event) -> None:
    rng = random.Random(31)
    prompts = [text(rng, 160) for _ in range(5)]
    segments = reopened(path)
    for prompt in prompts:
        stored(segments, prompt)
        assert segments.find(SPACE, prompt, everything)
    segments.clear()
    keys = stored(segments, prompts[0])
    stuck.set()
    segments.close()
    segments.close()
    segments = reopened(path)
    assert segments.find(SPACE, prompts[0], everything) == [Reusable(0, 160, 0, keys[-1])]
    assert len(segments) == 1
    segments.close()


def test_a_full_queue_drops_and_counts(path: Path, stuck: threading.Event) -> None:
    tokens = np.arange(64, dtype="<u4")
    piece = Piece(0, ROOT_PARENT, keys_of(tokens.tolist(), 16), 0, tokens)
    file = SegmentFile(path, 16, queue_nbytes=1000)
    assert list(file.records()) == []
    numbers = [file.append(SPACE, piece) for _ in range(5)]
    assert numbers == [1, 2, 0, 0, 0]
    assert file.dropped == 3
    file.start()
    stuck.set()
    file.close()
    assert file.append(SPACE, piece) == 0
    file = SegmentFile(path, 16)
    found = list(file.records())
    file.close()
    assert [kept.number for kept in found] == [1, 2]
    for _, namespace, back in found:
        assert namespace == SPACE
        assert back[:4] == piece[:4]
        assert back.tokens.tolist() == tokens.tolist()


def test_what_dies_in_the_queue_is_not_written(path: Path) -> None:
    tokens = np.arange(32, dtype="<u4")
    keys = keys_of(tokens.tolist(), 16)
    file = SegmentFile(path, 16)
    first = file.append(SPACE, Piece(0, ROOT_PARENT, keys[:1], 0, tokens[:16]))
    file.append(SPACE, Piece(1, keys[0], keys[1:], 0, tokens[16:]))
    file.forget([first])
    file.start()
    file.close()
    assert len(path.read_bytes()) == 32 + 52 + 16 + 16 + 64


def test_the_file_that_is_locked_is_the_one_that_has_the_name(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between opening and locking, who had the lock put another file there."""
    other = path.with_name("other")
    SegmentFile(other, 16).close()
    flock, calls = fcntl.flock, []

    def replaced(file: int, how: int) -> None:
        calls.append(how)
        if len(calls) == 1:
            other.replace(path)
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", replaced)
    file = SegmentFile(path, 16)
    assert len(calls) == 2
    assert file.writable
    assert os.path.samestat(os.fstat(file._file), path.stat())
    file.close()


def test_a_failing_disk_drops_and_counts_and_may_come_back(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(32)
    prompts = [text(rng, 160) for _ in range(4)]
    segments = reopened(path)
    tried = threading.Semaphore(0)
    write = os.pwrite

    def fails(file: int, data: bytes, offset: int) -> int:
        write(file, data[: len(data) // 2], offset)
        tried.release()
        raise OSError(errno.EIO, "the disk is ill")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", fails)
        for prompt in prompts[:2]:
            stored(segments, prompt)
            assert tried.acquire(timeout=60)
        while segments.dropped < 2:
            time.sleep(0.01)
        assert path.stat().st_size == 32
    for prompt in prompts[2:]:
        stored(segments, prompt)
    segments.close()
    assert segments.dropped == 2
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "could not be written" in caplog.text
    assert str(prompts[0][0]) not in caplog.text
    segments = reopened(path)
    found = [bool(segments.find(SPACE, prompt, everything)) for prompt in prompts]
    assert found == [False, False, True, True]
    assert segments.corrupt == 0
    segments.close()


def test_records_of_a_chain_whose_beginning_is_lost_still_serve(path: Path) -> None:
    """They have no head, and are findable by what they hold."""
    prompt = text(random.Random(33), 640)
    keys = keys_of(prompt, 16)
    file = SegmentFile(path, 16)
    tokens = np.array(prompt, dtype="<u4")
    for first in range(10, 40):
        span = tokens[first * 16 : (first + 1) * 16]
        file.append(SPACE, Piece(first, keys[first - 1], [keys[first]], 0, span))
    file.start()
    file.close()
    segments = reopened(path)
    assert len(segments) == 1
    assert segments.find(SPACE, prompt, everything) == [Reusable(160, 480, 160, keys[-1])]
    segments.close()


def test_a_shorter_run_may_count_after_a_restart(path: Path) -> None:
    """Heads kept for the longer one are cut, those for a shorter one serve as they are."""
    rng = random.Random(34)
    trunk = text(rng, 200)
    prompts = [[*trunk, *text(rng, 200)] for _ in range(2)]
    for min_tokens in (64, 24, 100, 64):
        segments = reopened(path, min_tokens=min_tokens)
        for prompt in prompts:
            keys = stored(segments, prompt)
            segments.check_integrity()
            found = segments.find(SPACE, [1, *prompt[50:400]], everything)
            assert sum(run.length for run in found) == 350
            assert [run.source_start - run.prompt_start for run in found] == [49] * len(found)
            assert found[-1].last_key == keys[-1]
        segments.close()
