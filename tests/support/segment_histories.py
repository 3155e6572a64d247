"""Histories of a tier's blocks, and a brute-force check of what `Segments` finds in them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hypothesis import strategies as st

from kvcore.fusion.segments import Reusable, Segments
from kvcore.model.keys import KeyChain, Namespace

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


class Stored(NamedTuple):
    """A block in a tier. ``tokens`` are those of its chain up to its end."""

    namespace: bytes
    parent: bytes
    tokens: tuple[int, ...]


class Tier:
    """The blocks of a tier by key, prefix-closed: the oracle for `Segments`."""

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
        """Evict a block and all its descendants."""
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
        """Check that every reported run exists, and that no run was missed."""
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
        """Check that no run begins in the first ``gap`` tokens of ``rest``."""
        for i in range(gap):
            assert tuple(rest[i : i + min_tokens]) not in windows

    def check_end(self, chains: list[tuple[int, ...]], prompt: list[int], run: Reusable) -> None:
        """Check that no chain of the same full blocks continues with the prompt's next token."""
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
    """Return a function that mixes a prompt's start, parts of other prompts and new text."""
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
