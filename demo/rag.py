"""`python -m demo.rag`: questions about documents in changing orders, answered with fusion.

Pages of Python's language reference, each with a fact in its middle, are warmed once, each on its
own. Then come questions about the facts, each behind the pages in another order, so that a prefix
cache has the first page at most. Each prompt is answered in full by the same engine without kvcore,
and then blended at several ratios.

The table compares each way with the full prefill: how far its distribution of the first token is
(KL, in nats), how much of the answer is the same, and how many of the facts that the full prefill
finds are found. A small model misses facts in a full prefill too. Those are not counted.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kvcore.errors import KVCoreError
from kvcore.harness.compare import ENGINES, engine_arguments, keep_on_reset
from kvcore.harness.engine_process import EngineProcess, Generation
from kvcore.harness.models import smollm2, token_nbytes

RATIOS = (0.0, 0.15, 0.3, 0.5, 1.0)
LIKELIEST = 256
"""Tokens whose probabilities are compared. The others count as one."""
COLOURS = ("blue", "green", "red", "white", "black", "yellow", "silver", "orange")
THINGS = ("vault", "gate", "cellar", "tower", "archive", "workshop", "cabinet", "lift")
FULL = "full prefill, no connector"
PREFIX = "prefix cache only"
LEGEND = """KL: how far the first token's distribution is from that of the full prefill.
Same tokens: share of its answer before the first token that differs.
Facts found: of those that the full prefill finds."""

Bar = Callable[[str, int], None]
"""Called with what is being done and the number of steps just completed."""


@dataclass(frozen=True)
class Prompt:
    """Pages and a question, as token ids, and the answer that a page gives (``code``)."""

    tokens: list[int]
    code: str


@dataclass(frozen=True)
class Answer:
    """The answer to one prompt, given in one way."""

    way: str
    prompt: int
    ttft_s: float
    token_ids: list[int]
    reused_tokens: int
    share: float
    """Share of rows times layers of the prompt's context that was computed."""
    found: bool
    """True if the answer contains the fact."""
    likeliest: dict[int, float]
    """Log-probabilities of the most likely first tokens."""


@dataclass(frozen=True)
class Row:
    """One way of answering, over all prompts."""

    way: str
    ttft_s: float
    speed_up: float
    share: float
    divergence: float
    """Mean divergence of the first token from the full prefill's, in nats (`divergence`)."""
    agreement: float
    """Mean share of the answer's tokens before the first that differs from the full prefill's."""
    found: int
    """Facts found, of those that the full prefill finds."""
    known: int
    """Facts that the full prefill finds."""


def main(arguments: list[str] | None = None) -> int:
    """Run the demo. Return 0 if it completed and the exact ways gave the engine's own tokens."""
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
    console.print(LEGEND, highlight=False)
    plot(options.results / "rag.png", title, rows)
    told = [{**vars(a), "likeliest": list(a.likeliest.items())} for a in answers]
    content = {"rows": [vars(row) for row in rows], "answers": told}
    (options.results / "rag.json").write_text(json.dumps(content, indent=1) + "\n")
    wrong = [row.way for row in rows if row.way in (PREFIX, _way(1.0)) and row.agreement < 1]
    if wrong:
        console.print(f"[red]not the engine's own tokens: {', '.join(wrong)}[/]")
    return 1 if wrong else 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m demo.rag", description=__doc__)
    add = parser.add_argument
    add("--model", default=None, help="a folder or a hub name; by default SmolLM2-135M-Instruct")
    add("--engine", default="vllm", choices=ENGINES, help="must be installed here (vllm)")
    add("--chunks", type=int, default=4, help="pages in a prompt (4)")
    add("--tokens", type=int, default=320, help="length of a page (320)")
    add("--prompts", type=int, default=12, help="questions asked (12)")
    add("--gate", type=float, help="also run with this bound of the quality gate (fusion.gate)")
    add("--attention", help="the engine's attention backend (its own choice)")
    add("--no-overlap", action="store_true", help="SGLang without its overlap schedule")
    add("--answer-tokens", type=int, default=12, help="length of an answer (12)")
    add("--results", type=Path, default=Path("results"), help="for table, plot and JSON (results)")
    options = parser.parse_args(arguments)
    for name in ("chunks", "tokens", "prompts", "answer_tokens"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if options.no_overlap and options.engine != "sglang":
        parser.error(f"--no-overlap is for sglang only; the engine is {options.engine}")
    return options


def prompts(tokenizer: Any, options: argparse.Namespace) -> tuple[list[list[int]], list[Prompt]]:
    """Return the pages and the prompts made of them. Each page has a fact in its middle."""

    def ids(words: str) -> list[int]:
        return list(tokenizer.encode(words, add_special_tokens=False))

    text: list[int] = []
    for name, body in sorted(topics.items(), key=lambda item: -len(item[1])):
        text += ids(f"# {name}\n\n{body}\n\n")
    count, draw = 2 * options.chunks, random.Random(1)
    codes = draw.sample(range(1000, 10000), count)
    names = draw.sample([f"{c} {t}" for c in COLOURS for t in THINGS], count)
    pages = []
    for number, (code, name) in enumerate(zip(codes, names, strict=True)):
        fact = ids(f"\n\nThe code of the {name} is {code}.\n\n")
        size = max(options.tokens - len(fact), 2)
        page = text[number * size : (number + 1) * size]
        pages.append([*page[: size // 2], *fact, *page[size // 2 :]])
    made = []
    for _ in range(options.prompts):
        chosen = draw.sample(range(count), options.chunks)
        wanted = draw.choice(chosen[1:] or chosen)  # the first page is a plain prefix
        name, code = names[wanted], codes[wanted]
        ask = f"Question: What is the code of the {name}?\nAnswer: The code of the {name} is"
        tokens = [token for page in chosen for token in pages[page]]
        made.append(Prompt(tokens + ids(ask), str(code)))
    return pages, made


def _answers(options: argparse.Namespace, console: Console) -> Iterator[Answer]:
    from transformers import AutoTokenizer

    model = options.model or smollm2()
    pages, asked = prompts(AutoTokenizer.from_pretrained(model), options)
    longest = max(len(prompt.tokens) for prompt in asked) + options.answer_tokens
    dtype = "auto" if Path("/proc/driver/nvidia/version").exists() else "float32"
    args = engine_arguments(
        options.engine,
        dtype=dtype,
        request_tokens=longest,
        cached_tokens=4 * (longest + 256),
        token_nbytes=token_nbytes(model, dtype),
        batch_tokens=max(longest, 2048),
    )
    if options.engine == "vllm":
        args["max_logprobs"] = LIKELIEST
    if options.attention:
        args["attention_backend"] = options.attention
    if options.no_overlap:
        args["disable_overlap_schedule"] = True
    engines = 1 if options.gate is None else 2
    steps = (1 + len(RATIOS) + engines) * len(asked) + engines * len(pages)
    with Progress(console=console) as progress:
        task = progress.add_task("answering in full", total=steps)

        def bar(doing: str, done: int) -> None:
            progress.update(task, description=doing, advance=done)

        log = options.results / "engine-rag-full.log"
        with EngineProcess(model, engine=options.engine, log=log, **args) as engine:
            _warm_up(engine)
            for number, prompt in enumerate(asked):
                engine.reset_prefix_cache()
                [got] = engine.generate([prompt.tokens], options.answer_tokens, likeliest=LIKELIEST)
                yield _answer(FULL, number, got, prompt)
                bar("answering in full", 1)
        blends = [(_way(r), {"ratio": r}) for r in RATIOS]
        # The exact way comes last: it leaves the whole prompt in the cache.
        ways: list[tuple[str, dict[str, Any]]] = [*blends, (PREFIX, {"enabled": False})]
        yield from _blended(model, pages, asked, ways, {}, options, args, bar)
        if options.gate is not None:
            ways = [(f"{_way(0.15)}, gate {options.gate}", {"ratio": 0.15})]
            settings = {"gate": options.gate}
            yield from _blended(model, pages, asked, ways, settings, options, args, bar)


def _blended(
    model: Any,
    pages: list[list[int]],
    asked: list[Prompt],
    ways: list[tuple[str, dict[str, Any]]],
    settings: dict[str, Any],
    options: argparse.Namespace,
    args: dict[str, Any],
    bar: Bar,
) -> Iterator[Answer]:
    """Answer every prompt in every way, with an engine that has seen only the pages."""
    config = keep_on_reset(
        options.engine, {"host": {"capacity": "2GiB"}, "fusion": {"enabled": True, **settings}}
    )
    log = options.results / "engine-rag.log"
    with EngineProcess(model, engine=options.engine, kvcore=config, log=log, **args) as engine:
        bar("warming pages", 0)
        _warm_up(engine)
        for page in pages:
            engine.generate([page], max_tokens=1)
            bar("warming pages", 1)
        for number, prompt in enumerate(asked):
            for way, wishes in ways:
                engine.reset_prefix_cache()
                [got] = engine.generate(
                    [prompt.tokens], options.answer_tokens, fusion=wishes, likeliest=LIKELIEST
                )
                yield _answer(way, number, got, prompt)
                bar("blending", 1)


def _warm_up(engine: EngineProcess) -> None:
    """Have the engine do what it does once, with text that no prompt contains."""
    engine.generate([list(range(100, 400))], max_tokens=2, likeliest=LIKELIEST)


def _way(ratio: float) -> str:
    return f"blend, {ratio:.0%} recomputed" if ratio else "pure reuse"


def _answer(way: str, number: int, got: Generation, prompt: Prompt) -> Answer:
    fusion = got.kvcore.get("fusion", {})
    made = fusion.get("recomputed_share")
    share = 1 - got.cached_tokens / len(prompt.tokens) if made is None else made
    return Answer(
        way,
        number,
        got.ttft_s,
        got.token_ids,
        got.reused_tokens,
        share,
        prompt.code in got.text,
        dict(got.likeliest),
    )


def summary(answers: Sequence[Answer]) -> list[Row]:
    """Return a row for each way, in the order in which the ways were first used."""
    right = {a.prompt: a for a in answers if a.way == FULL}
    cold = statistics.median(a.ttft_s for a in right.values())
    known = {number for number, a in right.items() if a.found}
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
                statistics.mean(divergence(a.likeliest, right[a.prompt].likeliest) for a in mine),
                statistics.mean(_agreement(a.token_ids, right[a.prompt].token_ids) for a in mine),
                sum(a.found for a in mine if a.prompt in known),
                len(known),
            )
        )
    return rows


def divergence(got: Mapping[int, float], right: Mapping[int, float]) -> float:
    """Return the Kullback-Leibler divergence from ``right`` to ``got``, in nats.

    Both map tokens to log-probabilities. Tokens that one of them lacks count as one outcome, so the
    divergence of the whole distributions is no smaller.
    """
    both = got.keys() & right.keys()
    pairs = [(math.exp(right[token]), math.exp(got[token])) for token in both]
    rest = (1 - sum(p for p, _ in pairs), 1 - sum(q for _, q in pairs))
    least = 1e-9  # what is left may round to nothing
    pairs.append((max(rest[0], least), max(rest[1], least)))
    return max(sum(p * math.log(p / q) for p, q in pairs), 0.0)


def _agreement(got: Sequence[int], right: Sequence[int]) -> float:
    same = 0
    for a, b in zip(got, right, strict=False):
        if a != b:
            break
        same += 1
    return same / len(right)


def table(title: str, rows: Sequence[Row]) -> Table:
    """Return the table for the terminal."""
    result = Table(title=title, title_justify="left")
    result.add_column("")
    for heading in ("TTFT, ms", "faster", "computed", "KL, nats", "same tokens", "facts found"):
        result.add_column(heading, justify="right")
    for row in rows:
        result.add_row(
            row.way,
            f"{row.ttft_s * 1000:.0f}",
            f"{row.speed_up:.1f}x",
            f"{row.share:.0%}",
            f"{row.divergence:.3f}",
            f"{row.agreement:.0%}",
            f"{row.found} of {row.known}" if row.known else "-",
        )
    return result


def plot(path: Path, title: str, rows: Sequence[Row]) -> None:
    """Plot divergence and agreement with the full prefill against time to first token."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, sharex=True, figsize=(8, 6))
    blends = [row for row in rows if row.way in map(_way, RATIOS)]
    seconds = [row.ttft_s for row in blends]
    above.plot(seconds, [row.divergence for row in blends], "o-", color="#2a7f62")
    below.plot(seconds, [row.agreement for row in blends], "o-", color="#2a7f62", label="blends")
    for row in blends:
        short = row.way.removeprefix("blend, ").removesuffix(" recomputed")
        above.annotate(short, (row.ttft_s, row.divergence), fontsize=7, xytext=(4, 4),
                       textcoords="offset points")  # fmt: skip
    for way, colour in ((FULL, "#808080"), (PREFIX, "#404040")):
        for row in rows:
            if row.way == way:
                above.plot(row.ttft_s, row.divergence, "s", color=colour)
                below.plot(row.ttft_s, row.agreement, "s", color=colour, label=way)
    above.set_ylabel("KL of the first token, nats")
    below.set_ylabel("share of the same tokens")
    below.set_ylim(-0.05, 1.08)
    below.set_xlabel("time to first token, s")
    above.set_title(title, fontsize=10, loc="left")
    below.legend(fontsize=8, loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
