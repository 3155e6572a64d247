"""The three tasks on which fusion's quality is measured, as token ids.

    one fact    one of the chunks contains a fact, and a question asks for it
    two facts   a chunk contains the fact, and the chunk before it says what the fact is about;
                another pair of chunks does the same for something else
    running     consecutive text, cut into chunks, is to be continued

Of a "half" task every second chunk is not cached, so that much of the prompt is computed.

Chunks are prose from the Python reference that comes with every interpreter (`pydoc_data`), so the
text is the same on every machine. The questions are worded so that a model of 135M parameters
mostly answers them when it has computed the whole text.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pydoc_data.topics import topics
from typing import Any, TypeAlias

__all__ = ["TASKS", "WHOLE", "Prompt"]

CHUNK_TOKENS = 200
CHUNKS = (6, 7, 8)
CONTINUED = 32
"""Tokens of the real continuation on which running text is scored."""

LEAD = "Read these notes and answer the question.\n\n"
PLACES = ("library", "harbour", "museum", "bakery", "theatre", "station", "school", "garden")
THINGS = ("vault", "gate", "cellar", "tower", "archive", "workshop", "cabinet", "lift")
COLOURS = ("blue", "green", "red", "white", "black", "yellow", "silver", "orange")


@dataclass(frozen=True)
class Prompt:
    """A prompt: an exact prefix, chunks, fresh tokens at the end, and the right continuation.

    ``uncached`` has the indices of chunks that nobody has computed before.
    """

    lead: tuple[int, ...]
    chunks: tuple[tuple[int, ...], ...]
    question: tuple[int, ...]
    gold: tuple[int, ...]
    is_fact: bool
    uncached: frozenset[int] = frozenset()

    @property
    def tokens(self) -> list[int]:
        """All tokens of the prompt, without ``gold``."""
        return [*self.lead, *(token for chunk in self.chunks for token in chunk), *self.question]


@cache
def sentences() -> tuple[str, ...]:
    """Return sentences of prose in their order: from paragraphs that are nearly all letters."""
    found: list[str] = []
    for text in topics.values():
        for paragraph in text.split("\n\n"):
            line = " ".join(paragraph.split())
            letters = sum(c.isalpha() or c in " ,." for c in line)
            if len(line) > 120 and letters > 0.9 * len(line):
                found += re.split(r"(?<=[.:;]) (?=[A-Z])", line)
    return tuple(found)


class Text:
    """A source of prose in pieces. Every prompt starts reading at a place of its own."""

    def __init__(self, tokenizer: Any, start: int) -> None:
        self.tokenizer = tokenizer
        self.next = start

    def ids(self, text: str) -> list[int]:
        found: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    def pieces(self, tokens: int) -> list[list[int]]:
        """Return the next whole sentences that have at least ``tokens`` tokens together."""
        taken: list[list[int]] = []
        while sum(map(len, taken)) < tokens:
            taken.append(self.ids(sentences()[self.next % len(sentences())] + " "))
            self.next += 1
        return taken


def _chunk(text: Text, inside: str, draw: random.Random) -> tuple[int, ...]:
    """Return a chunk of prose with the sentence ``inside`` somewhere in its middle."""
    pieces = text.pieces(CHUNK_TOKENS - 30)
    if inside:
        pieces.insert(draw.randint(1, max(1, len(pieces) - 1)), text.ids(inside + " "))
    return (*(token for piece in pieces for token in piece), *text.ids("\n\n"))


def _facts(text: Text, stated: dict[int, str], count: int, draw: random.Random, ask: str) -> Prompt:
    question, gold = ask.rsplit("|", 1)
    return Prompt(
        lead=tuple(text.ids(LEAD)),
        chunks=tuple(_chunk(text, stated.get(i, ""), draw) for i in range(count)),
        question=tuple(text.ids(question)),
        gold=tuple(text.ids(gold)),
        is_fact=True,
    )


def one_fact(tokenizer: Any, seed: int) -> Prompt:
    draw = random.Random(f"one {seed}")
    count = draw.choice(CHUNKS)
    colour, thing, place = draw.choice(COLOURS), draw.choice(THINGS), draw.choice(PLACES)
    what, code = f"the {colour} {thing} of the {place}", draw.randint(1000, 9999)
    ask = f"Question: What is the code of {what}?\nAnswer: The code of {what} is| {code}"
    stated = {draw.randrange(count): f"The code of {what} is {code}."}
    return _facts(Text(tokenizer, seed * 61), stated, count, draw, ask)


def two_facts(tokenizer: Any, seed: int) -> Prompt:
    draw = random.Random(f"two {seed}")
    count = draw.choice(CHUNKS)
    thing = draw.choice(THINGS)
    places = draw.sample(PLACES, 2)
    codes = draw.sample(range(1000, 9999), 2)
    at = draw.sample(range(0, count - 1, 2), 2)
    stated: dict[int, str] = {}
    for start, place, code in zip(at, places, codes, strict=True):
        stated[start] = f"The next note is about the {thing} of the {place}."
        stated[start + 1] = f"The code of this {thing} is {code}."
    what = f"the {thing} of the {places[0]}"
    ask = f"Question: What is the code of {what}?\nAnswer: The code of {what} is| {codes[0]}"
    return _facts(Text(tokenizer, seed * 61 + 29), stated, count, draw, ask)


def running(tokenizer: Any, seed: int) -> Prompt:
    draw = random.Random(f"running {seed}")
    count = draw.choice(CHUNKS)
    text = Text(tokenizer, seed * 61 + 13)
    question = 64
    needed = count * CHUNK_TOKENS + question + CONTINUED
    tokens = [token for piece in text.pieces(needed) for token in piece]
    cuts = [i * CHUNK_TOKENS for i in range(count + 1)]
    end = cuts[-1] + question
    return Prompt(
        lead=(),
        chunks=tuple(tuple(tokens[a:b]) for a, b in pairwise(cuts)),
        question=tuple(tokens[cuts[-1] : end]),
        gold=tuple(tokens[end : end + CONTINUED]),
        is_fact=False,
    )


Task: TypeAlias = Callable[[Any, int], Prompt]


def half(task: Task) -> Task:
    """Return a task whose chunks are cached in turns. Of even seeds the last chunk is."""

    def made(tokenizer: Any, seed: int) -> Prompt:
        prompt = task(tokenizer, seed)
        count = len(prompt.chunks)
        return replace(prompt, uncached=frozenset(range((count + seed) % 2, count, 2)))

    return made


WHOLE: dict[str, Task] = {"one fact": one_fact, "two facts": two_facts, "running": running}
TASKS = WHOLE | {f"{name}, half": half(task) for name, task in WHOLE.items()}


# --- scores of an answer ----------------------------------------------------------------------


def f1(answer: Sequence[str], gold: Sequence[str]) -> float:
    """Return the harmonic mean of precision and recall over words, counting repeated words."""
    left = list(gold)
    common = sum(1 for word in answer if word in left and not left.remove(word))
    return 2 * common / (len(answer) + len(gold)) if common else 0.0


def rouge_l(answer: Sequence[str], gold: Sequence[str]) -> float:
    """Return the F-measure of the longest common subsequence of words."""
    row = [0] * (len(gold) + 1)
    for word in answer:
        diagonal = 0
        for i, other in enumerate(gold, 1):
            longest = diagonal + 1 if word == other else max(row[i], row[i - 1])
            diagonal, row[i] = row[i], longest
    return 2 * row[-1] / (len(answer) + len(gold)) if row[-1] else 0.0
