"""Time to find stored segments in a prompt that does not mark them.

    python -m benchmarks.chunk_find [--segments 100000] [--tokens 32768] [--out results]

Prompts consist of stored segments (whole, cut, or none) and of new text, over a vocabulary of
150,000 tokens. The last two prompts are worst cases, in which nearly every window is stored. Each
row is timed in turn with a plain-Python scan that hashes the window at every offset and looks it up
in an empty dict.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks._report import Report, Row
from benchmarks.control_plane import best, resident
from kvcore.fusion.find import SegmentIndex, SegmentMatch

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = ["prompt", "tokens", "found", "tokens found", "milliseconds", "to plain scan", "bar (ms)"]
VOCABULARY = 150_000
MIN_TOKENS = 64
BAR = 20.0


def name(number: int) -> bytes:
    return number.to_bytes(16, "little")


def plain_scan(tokens: Sequence[int], window: int) -> int:
    """Roll a polynomial hash over every offset in plain Python, and look each one up in a dict."""
    held: dict[int, int] = {}
    modulus, base, value, hits = (1 << 61) - 1, 1_000_003, 0, 0
    leaving = pow(base, window, modulus)
    for at, token in enumerate(tokens):
        value = (value * base + token) % modulus
        if at >= window:
            value = (value - tokens[at - window] * leaving) % modulus
        hits += value in held
    return hits


class Corpus:
    """Random segments of ``length`` tokens, and pieces for prompts made of them."""

    def __init__(self, segments: int, length: int) -> None:
        rng = np.random.default_rng(0)
        self.tokens = rng.integers(0, VOCABULARY, (segments, length), dtype=np.uint32)
        self.rng = random.Random(1)

    def segment(self) -> list[int]:
        chosen: list[int] = self.tokens[self.rng.randrange(len(self.tokens))].tolist()
        return chosen

    def text(self, count: int) -> list[int]:
        return [self.rng.randrange(VOCABULARY) for _ in range(count)]

    def cut(self) -> list[int]:
        start = self.rng.randrange(len(self.tokens[0]) // 3)
        return self.segment()[start : start + len(self.tokens[0]) // 2] + self.text(30)


def prompts(corpus: Corpus, count: int) -> dict[str, list[int]]:
    """Return prompts of ``count`` tokens, by their content."""
    kinds: dict[str, Callable[[], list[int]]] = {
        "new text": lambda: corpus.text(512),
        "whole segments": corpus.segment,
        "segments and new text": lambda: corpus.segment() + corpus.text(500),
        "cut segments": corpus.cut,
        "one token repeated": lambda: [7] * 512,
        "matches one token short": lambda: [8] + [7] * (MIN_TOKENS - 1),
    }
    made = {}
    for kind, piece in kinds.items():
        tokens: list[int] = []
        while len(tokens) < count:
            tokens += piece()
        made[kind] = tokens[:count]
    return made


def fill(corpus: Corpus) -> tuple[SegmentIndex, dict[str, float]]:
    """Return an index of all segments, and what adding them cost.

    The index also has a segment of one repeated token.
    """
    index = SegmentIndex(MIN_TOKENS)
    gc.collect()
    before, worst, start = resident(), 0.0, time.perf_counter()
    for number, tokens in enumerate(corpus.tokens):
        began = time.perf_counter()
        index.add(name(number), tokens)
        worst = max(worst, time.perf_counter() - began)
    seconds = time.perf_counter() - start
    count = len(corpus.tokens)
    index.add(b"repeated", [7] * corpus.tokens.shape[1])
    return index, {
        "segments": count,
        "tokens a segment": corpus.tokens.shape[1],
        "us to add a segment": seconds / count * 1e6,
        "ms, slowest add (the table doubles)": worst * 1e3,
        "bytes a segment, tokens and anchors": index.nbytes / count,
        "bytes a segment (resident set)": (resident() - before) / count,
    }


def churn(index: SegmentIndex, corpus: Corpus, count: int) -> float:
    """Return the microseconds that it takes to remove a segment and add it again."""
    start = time.perf_counter()
    for number in range(count):
        index.remove(name(number))
        index.add(name(number), corpus.tokens[number])
    return (time.perf_counter() - start) / count * 1e6


def search(report: Report, index: SegmentIndex, made: dict[str, list[int]], rounds: int) -> None:
    for kind, tokens in made.items():
        found: list[SegmentMatch] = []

        def find(tokens: list[int] = tokens, found: list[SegmentMatch] = found) -> None:
            found[:] = index.find(tokens)

        def plain(tokens: list[int] = tokens) -> None:
            plain_scan(array("I", tokens), MIN_TOKENS // 2)

        base, seconds = best(rounds, plain, find)
        report.add(
            **{
                "prompt": kind,
                "tokens": len(tokens),
                "found": len(found),
                "tokens found": sum(match.length for match in found),
                "milliseconds": seconds * 1e3,
                "to plain scan": seconds / base,
                "bar (ms)": BAR,
            }
        )


def draw(figure: Figure, rows: Sequence[Row]) -> None:
    axes = figure.subplots()
    names = [row["prompt"] for row in rows]
    axes.barh(names, [row["milliseconds"] for row in rows])
    axes.axvline(BAR, color="black", linestyle="--", label="bar")
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds for the whole prompt")
    axes.grid(visible=True, axis="x", alpha=0.3)
    axes.legend()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--segments", type=int, default=100_000)
    parser.add_argument("--length", type=int, default=500, help="tokens a segment")
    parser.add_argument("--tokens", type=int, default=32_768, help="tokens of the prompt")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args()

    corpus = Corpus(options.segments, options.length)
    index, notes = fill(corpus)
    report = Report(
        "chunk_find",
        COLUMNS,
        baseline="a rolling hash at every offset in plain Python, timed in turn with each row",
        notes={**notes, "min_tokens": MIN_TOKENS},
    )
    search(report, index, prompts(corpus, options.tokens), options.rounds)
    report.notes["us to remove and add again"] = churn(index, corpus, min(2000, options.segments))
    report.finish(options.out, draw)
    for key, value in report.notes.items():
        print(f"{key}: {value:,.0f}")


if __name__ == "__main__":
    main()
