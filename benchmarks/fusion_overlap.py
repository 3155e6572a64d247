"""Share of a blend's loading that hides behind computing, on real vLLM.

    python -m benchmarks.fusion_overlap [--chunks 8] [--tokens 500] [--ratio .15] [--out results]

Chunks are warmed, each on its own, in SmolLM2-135M. Then two prompts made of them are blended in
each way: with the default selector, whose look with the question needs every layer, and with
``key``, which has no look. The spans are those of the second blend, from kvcore's own trace
(`trace.path`). ``hidden`` is the share of the loading time during which some layer was computed.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks._report import Report, Row
from kvcore.harness.engine_process import EngineProcess
from kvcore.harness.models import smollm2
from kvcore.harness.prompts import windows
from kvcore.telemetry.timeline import read_trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WAYS = {"look": "runs", "no look": "key"}
COMPUTING = ("look", "recompute")
COLOURS = {"h2d": "#4e79a7", "wait": "#e15759", "look": "#b07aa1", "recompute": "#2a7f62"}

Span = dict[str, Any]


def joined(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """Return the union of the spans as disjoint (start, stop) in microseconds, ascending."""
    found: list[tuple[float, float]] = []
    for start, stop in sorted((e["ts"], e["ts"] + e["dur"]) for e in spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return found


def length(parts: Iterable[tuple[float, float]]) -> float:
    return sum(stop - start for start, stop in parts)


def shared(one: Sequence[tuple[float, float]], other: Sequence[tuple[float, float]]) -> float:
    """Return the microseconds that two unions have in common."""
    return sum(max(0.0, min(b, d) - max(a, c)) for a, b in one for c, d in other)


def blend(options: argparse.Namespace, selector: str) -> tuple[list[Span], dict[str, Any]]:
    """Return the spans of a blend, and the response's report on it."""
    model = smollm2()
    chunks = windows(model, options.chunks, options.tokens, options.tokens, seed=1)
    first, last = windows(model, 2, 30, 30, seed=2)
    prompts = [
        [*first[:number], *(t for chunk in order for t in chunk), *last]
        for number, order in ((10, chunks), (20, chunks[::-1]))
    ]
    with tempfile.TemporaryDirectory() as folder:
        config = {
            "host": {"capacity": "2GiB"},
            "fusion": {"enabled": True, "selector": selector},
            "trace": {"path": folder},
        }
        limit = max(map(len, prompts)) + 8
        with EngineProcess(
            model,
            kvcore=config,
            dtype="float32",
            max_model_len=limit,
            max_num_batched_tokens=limit,
        ) as engine:
            for chunk in chunks:
                engine.generate([chunk], max_tokens=1)
            [path] = Path(folder).glob("rank0-*.json")
            for prompt in prompts:
                before = len(list(read_trace(path)))
                [got] = engine.generate([prompt], 1, fusion={"ratio": options.ratio})
            spans = list(read_trace(path))[before:]
    return [e for e in spans if e["track"] in COLOURS], got.kvcore["fusion"]


def draw(figure: Figure, spans: Sequence[tuple[str, Sequence[Span]]]) -> None:
    for number, (way, found) in enumerate(spans, 1):
        axes = figure.add_subplot(len(spans), 1, number)
        start = min(e["ts"] for e in found)
        for height, track in enumerate(COLOURS):
            bars = [((e["ts"] - start) / 1e3, e["dur"] / 1e3) for e in found if e["track"] == track]
            axes.broken_barh(bars, (height - 0.4, 0.8), color=COLOURS[track], edgecolor="white",
                             linewidth=0.3)  # fmt: skip
        axes.set_yticks(range(len(COLOURS)), list(COLOURS))
        axes.invert_yaxis()
        axes.set_title(f"{way}: one bar a layer", fontsize=8, loc="left")
        axes.set_xlabel("ms", fontsize=8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--ratio", type=float, default=0.15)
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args()
    columns = ["way", "reused tokens", "load ms", "hidden", "wait ms", "look ms", "recompute ms"]
    report = Report(
        "fusion_overlap",
        columns,
        baseline="loading first, computing afterwards (hidden 0)",
        notes={"chunks": options.chunks, "tokens": options.tokens, "ratio": options.ratio},
    )
    drawn = []
    for way, selector in WAYS.items():
        spans, told = blend(options, selector)
        by = {track: joined(e for e in spans if e["track"] == track) for track in COLOURS}
        computing = joined(e for e in spans if e["track"] in COMPUTING)
        report.add(
            way=way,
            hidden=shared(by["h2d"], computing) / max(length(by["h2d"]), 1e-9),
            **{
                "reused tokens": told["blended_tokens"],
                "load ms": length(by["h2d"]) / 1e3,
                "wait ms": length(by["wait"]) / 1e3,
                "look ms": length(by["look"]) / 1e3,
                "recompute ms": length(by["recompute"]) / 1e3,
            },
        )
        drawn.append((way, spans))

    def plot(figure: Figure, rows: Sequence[Row]) -> None:
        draw(figure, drawn)

    report.finish(options.out, plot)


if __name__ == "__main__":
    main()
