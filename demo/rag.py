"""`python -m demo.rag`: documents in ever new orders, answered by fusion.

Pages of Python's language reference are warmed once, each on its own. Then questions come, each
behind the pages in another order, so that a prefix cache knows the first page at most. Every prompt
is answered in full by the same engine without kvcore, and then blended at several ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kvcore.errors import KVCoreError
from kvcore.testing.engine_process import EngineProcess, Generation
from kvcore.testing.models import smollm2

RATIOS = (0.0, 0.05, 0.15, 0.3, 0.5, 1.0)
QUESTIONS = (
    "Which statement does the text name first, and what does it do?",
    "What does the text say about exceptions?",
    "Name two special methods that the text describes.",
    "When is a name local to a block?",
    "What is evaluated first in an assignment?",
    "What does an import statement do to the namespace?",
)
FULL = "full prefill, no connector"
PREFIX = "prefix cache only"


@dataclass(frozen=True)
class Answer:
    """One prompt, answered one way."""

    way: str
    prompt: int
    ttft_s: float
    token_ids: list[int]
    reused_tokens: int
    share: float
    """Of rows x layers of the prompt's context: what was computed."""


@dataclass(frozen=True)
class Row:
    """One way, over all prompts."""

    way: str
    ttft_s: float
    speed_up: float
    share: float
    agreement: float
    """Mean share of the answer's tokens before the first that is not the full prefill's."""


def main(arguments: list[str] | None = None) -> int:
    """0 when everything ran and the exact ways gave the engine's own tokens."""
    options = _parse(arguments)
    console = Console() if sys.stdout.isatty() else Console(width=110)
    options.results.mkdir(parents=True, exist_ok=True)
    try:
        answers = list(_answers(options, console))
    except KVCoreError as error:
        console.print(f"[red]{type(error).__name__}:[/red] {error}", highlight=False)
        return 1
    rows = summary(answers)
    title = (
        f"{options.prompts} prompts of {options.chunks} pages x {options.tokens} tokens, "
        f"{os.cpu_count()} CPUs"
    )
    console.print(table(title, rows))
    plot(options.results / "rag.png", title, rows)
    content = {"rows": [vars(row) for row in rows], "answers": [vars(a) for a in answers]}
    (options.results / "rag.json").write_text(json.dumps(content, indent=1) + "\n")
    wrong = [row.way for row in rows if row.way in (PREFIX, _way(1.0)) and row.agreement < 1]
    if wrong:
        console.print(f"[red]not the engine's own tokens: {', '.join(wrong)}[/]")
    return 1 if wrong else 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m demo.rag", description=__doc__)
    add = parser.add_argument
    add("--model", default=None, help="a folder or a hub name; by default SmolLM2-135M-Instruct")
    add("--chunks", type=int, default=4, help="pages in a prompt (4)")
    add("--tokens", type=int, default=480, help="length of a page (480)")
    add("--prompts", type=int, default=4, help="questions asked (4)")
    add("--answer-tokens", type=int, default=24, help="length of an answer (24)")
    add("--results", type=Path, default=Path("results"), help="for table, plot and JSON (results)")
    options = parser.parse_args(arguments)
    for name in ("chunks", "tokens", "prompts", "answer_tokens"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    return options


def prompts(tokenizer: Any, options: argparse.Namespace) -> tuple[list[list[int]], list[list[int]]]:
    """(the pages, the prompts made of them), as token ids."""
    text: list[int] = []
    for name, body in sorted(topics.items(), key=lambda item: -len(item[1])):
        text += tokenizer.encode(f"# {name}\n\n{body}\n\n", add_special_tokens=False)
    size, count = options.tokens, 2 * options.chunks
    pages = [text[i * size : (i + 1) * size] for i in range(count)]
    picks, made = random.Random(1), []
    for number in range(options.prompts):
        chosen = picks.sample(range(count), options.chunks)
        question = QUESTIONS[number % len(QUESTIONS)]
        asked = tokenizer.encode(f"\n\nQuestion: {question}\nAnswer:", add_special_tokens=False)
        made.append([token for page in chosen for token in pages[page]] + list(asked))
    return pages, made


def _answers(options: argparse.Namespace, console: Console) -> Iterator[Answer]:
    from transformers import AutoTokenizer

    model = options.model or smollm2()
    pages, asked = prompts(AutoTokenizer.from_pretrained(model), options)
    longest = max(map(len, asked)) + options.answer_tokens
    args = {
        "dtype": "auto" if Path("/proc/driver/nvidia/version").exists() else "float32",
        "max_model_len": longest,
        "max_num_batched_tokens": max(longest, 2048),
    }
    ways = 2 + len(RATIOS)
    with Progress(console=console) as progress:
        bar = progress.add_task("answering in full", total=ways * len(asked) + len(pages))
        with EngineProcess(model, log=options.results / "engine-rag-full.log", **args) as engine:
            engine.generate([list(range(100, 400))], max_tokens=2)
            for number, prompt in enumerate(asked):
                engine.reset_prefix_cache()
                [got] = engine.generate([prompt], options.answer_tokens)
                yield _answer(FULL, number, got, len(prompt))
                progress.advance(bar)
        config = {"host": {"capacity": "4GiB"}, "fusion": {"enabled": True}}
        progress.update(bar, description="warming pages")
        log = options.results / "engine-rag.log"
        with EngineProcess(model, kvcore=config, log=log, **args) as engine:
            for page in pages:
                engine.generate([page], max_tokens=1)
                progress.advance(bar)
            progress.update(bar, description="blending")
            for number, prompt in enumerate(asked):
                for way, wishes in _wishes():
                    engine.reset_prefix_cache()
                    [got] = engine.generate([prompt], options.answer_tokens, fusion=wishes)
                    yield _answer(way, number, got, len(prompt))
                    progress.advance(bar)


def _wishes() -> list[tuple[str, dict[str, Any]]]:
    """The exact way comes last: it leaves the whole prompt in the cache."""
    blends: list[tuple[str, dict[str, Any]]] = [(_way(r), {"ratio": r}) for r in RATIOS]
    return [*blends, (PREFIX, {"enabled": False})]


def _way(ratio: float) -> str:
    return f"blend, {ratio:.0%} recomputed" if ratio else "pure reuse"


def _answer(way: str, number: int, got: Generation, tokens: int) -> Answer:
    fusion = got.kvcore.get("fusion", {})
    made = fusion.get("recomputed_share")
    share = 1 - got.cached_tokens / tokens if made is None else made
    return Answer(way, number, got.ttft_s, got.token_ids, got.reused_tokens, share)


def summary(answers: Sequence[Answer]) -> list[Row]:
    """A row for each way, in the order first asked."""
    right = {a.prompt: a.token_ids for a in answers if a.way == FULL}
    cold = statistics.median(a.ttft_s for a in answers if a.way == FULL)
    rows = []
    for way in dict.fromkeys(a.way for a in answers):
        mine = [a for a in answers if a.way == way]
        seconds = statistics.median(a.ttft_s for a in mine)
        rows.append(
            Row(
                way,
                seconds,
                cold / seconds,
                statistics.mean(a.share for a in mine),
                statistics.mean(_agreement(a.token_ids, right[a.prompt]) for a in mine),
            )
        )
    return rows


def _agreement(got: Sequence[int], right: Sequence[int]) -> float:
    same = 0
    for a, b in zip(got, right, strict=False):
        if a != b:
            break
        same += 1
    return same / len(right)


def table(title: str, rows: Sequence[Row]) -> Table:
    """For the terminal."""
    result = Table(title=title, title_justify="left")
    result.add_column("")
    for heading in ("TTFT, ms", "faster", "computed", "same tokens until"):
        result.add_column(heading, justify="right")
    for row in rows:
        result.add_row(
            row.way,
            f"{row.ttft_s * 1000:.0f}",
            f"{row.speed_up:.1f}x",
            f"{row.share:.0%}",
            f"{row.agreement:.0%} of the answer",
        )
    return result


def plot(path: Path, title: str, rows: Sequence[Row]) -> None:
    """Agreement with the full prefill against time to first token."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    blends = [row for row in rows if row.way not in (FULL, PREFIX)]
    line = [row.ttft_s for row in blends], [row.agreement for row in blends]
    axes.plot(*line, "o-", color="#2a7f62", label="blend")
    for row in blends:
        axes.annotate(row.way, (row.ttft_s, row.agreement), fontsize=7, xytext=(4, -10),
                      textcoords="offset points")  # fmt: skip
    for way, colour in ((FULL, "#808080"), (PREFIX, "#404040")):
        for row in rows:
            if row.way == way:
                axes.plot(row.ttft_s, row.agreement, "s", color=colour, label=way)
    axes.set_xlabel("time to first token, s")
    axes.set_ylabel("share of the answer that is the full prefill's")
    axes.set_ylim(-0.05, 1.08)
    axes.set_title(title, fontsize=10, loc="left")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
