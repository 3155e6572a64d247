"""`kvcore bench`: your model and prompts on an engine, with and without kvcore.

    without    cold         every prompt for the first time, one after another
               own cache    again, from the engine's own prefix cache
    kvcore     miss         every prompt for the first time
               hit          again, after the engine's own cache was emptied
               restarted    again, in a new engine, if there is a disk tier or a store

Where a pass can be repeated, all prompts follow at once, to measure throughput. Each engine has the
machine to itself while it is measured. One command measures both, with the same prompts.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import median, quantiles
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console

from kvcore.cli.options import Assignments, ConfigFile, load
from kvcore.cli.report import Report
from kvcore.config import Config, explicit_settings
from kvcore.engines.serving import serve_environment
from kvcore.errors import ConfigError
from kvcore.harness.compare import keep_on_reset
from kvcore.harness.engine_process import EngineProcess, Generation

__all__ = [
    "Pass",
    "arguments",
    "draw",
    "passes",
    "read_prompts",
    "report",
    "settings",
    "starter",
    "synthetic",
]

COLD, OWN = "cold", "own cache"
MISS, HIT, RESTARTED = "kvcore miss", "kvcore hit", "kvcore restarted"
SETTLE_S = 600.0
WARM_UP = "This prompt comes first, so that one-time work is done before the measurement."
MAX_LINE = 64 << 20
_WORDS = (
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world",
    "school", "state", "family", "student", "group", "country", "problem", "hand", "part", "place",
    "case", "week", "company", "system", "program", "question", "work", "number", "night",
)  # fmt: skip

Start = Callable[[Mapping[str, Any] | None], AbstractContextManager[EngineProcess]]
"""Starts an engine with these settings of kvcore, or without kvcore for None."""


class Pass(NamedTuple):
    """One pass over all prompts by one contender.

    ``answers`` come from prompts asked one by one. ``tokens_s`` is the throughput of all at once,
    in tokens of prompts and answers per second, or None if that was not measured.
    """

    contender: str
    answers: list[Generation]
    tokens_s: float | None = None


# -- inputs ---------------------------------------------------------------------------------------


def read_prompts(file: Path, limit: int) -> list[str]:
    """Read the first ``limit`` prompts of a file: one per line, or JSON lines with ``prompt``.

    A file is JSON lines if its name ends in .jsonl. Raises ConfigError if the file cannot be read,
    a line is invalid, or the file has no prompt.
    """
    found: list[str] = []
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(iter(lambda: lines.readline(MAX_LINE), ""), 1):
                if line.strip() and len(found) < limit:
                    found.append(_prompt(file, number, line))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read as text: {error}") from error
    if not found:
        raise ConfigError(f"{file}: has no prompt; give one per line, or JSON lines with `prompt`")
    return found


def _prompt(file: Path, number: int, line: str) -> str:
    if file.suffix != ".jsonl":
        return line.strip()
    try:
        decoded = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}, line {number}: is not JSON: {error}") from error
    prompt = decoded.get("prompt") if isinstance(decoded, dict) else None
    if not isinstance(prompt, str) or not prompt:
        raise ConfigError(f'{file}, line {number}: supported is {{"prompt": "some text"}}')
    return prompt


def synthetic(count: int, words: int, seed: int = 0) -> list[str]:
    """Return random prompts of ``words`` words (about as many tokens) without a common prefix."""
    picks = random.Random(seed)
    return [
        f"{seed}-{number} " + " ".join(picks.choices(_WORDS, k=words)) for number in range(count)
    ]


def settings(config: Config, engine: str) -> dict[str, Any]:
    """Return kvcore's settings for the engine, such that only the engine's own cache is emptied."""
    given = explicit_settings(config)
    given.pop("engine", None)
    return keep_on_reset(engine, given)


def arguments(given: Sequence[str]) -> dict[str, Any]:
    """Parse NAME=VALUE arguments. A value is JSON, or else text. Raises ConfigError."""
    found: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise ConfigError(f"given {text!r}; supported is NAME=VALUE, as in max_model_len=4096")
        try:
            found[name] = json.loads(value)
        except (ValueError, RecursionError):
            found[name] = value
    return found


def starter(
    model: str, engine: str, log: Path, config: Config, engine_args: Mapping[str, Any]
) -> Start:
    """Return a function that starts ``model`` on ``engine``, with its output in ``log``.

    The secrets of ``config`` go by the environment, because engines log their arguments.
    """

    def start(kvcore: Mapping[str, Any] | None) -> EngineProcess:
        env = None if kvcore is None else serve_environment(config)
        return EngineProcess(model, engine=engine, kvcore=kvcore, log=log, env=env, **engine_args)

    return start


# -- measurement ----------------------------------------------------------------------------------


def passes(
    start: Start, kvcore: Mapping[str, Any], prompts: Sequence[str], tokens: int, *, restart: bool
) -> Iterator[Pass]:
    """Yield the passes of both contenders, with answers of ``tokens`` tokens.

    Blocks while engines start and answer.
    """
    with start(None) as engine:
        engine.generate([WARM_UP], tokens)
        cold = _alone(engine, prompts, tokens)
        own = _alone(engine, prompts, tokens)
        again = _together(engine, prompts, tokens)
        engine.reset_prefix_cache()
        yield Pass(COLD, cold, _together(engine, prompts, tokens))
        yield Pass(OWN, own, again)
    with start(kvcore) as engine:
        engine.generate([WARM_UP], tokens)
        yield Pass(MISS, _alone(engine, prompts, tokens))
        yield _hits(HIT, engine, prompts, tokens)
    if restart:
        with start(kvcore) as engine:
            engine.generate([WARM_UP], tokens)
            yield Pass(RESTARTED, _alone(engine, prompts, tokens))


def _hits(name: str, engine: EngineProcess, prompts: Sequence[str], tokens: int) -> Pass:
    """Ask the prompts one by one and then at once, after emptying the engine's own cache."""
    engine.settle(SETTLE_S)
    engine.reset_prefix_cache(timeout_s=SETTLE_S)
    alone = _alone(engine, prompts, tokens)
    engine.settle(SETTLE_S)
    engine.reset_prefix_cache(timeout_s=SETTLE_S)
    return Pass(name, alone, _together(engine, prompts, tokens))


def _alone(engine: EngineProcess, prompts: Sequence[str], tokens: int) -> list[Generation]:
    return [engine.generate([prompt], tokens)[0] for prompt in prompts]


def _together(engine: EngineProcess, prompts: Sequence[str], tokens: int) -> float:
    """Return the throughput in tokens per second, of prompts and answers."""
    began = time.perf_counter()
    answers = engine.generate(prompts, tokens)
    seconds = time.perf_counter() - began
    return sum(answer.prompt_tokens + len(answer.token_ids) for answer in answers) / seconds


# -- results --------------------------------------------------------------------------------------

COLUMNS = (
    "contender", "ttft_s", "ttft_p90_s", "ttft_to_cold", "tokens_s", "tokens_s_to_cold",
    "cached_share", "found_in", "answers_differ",
)  # fmt: skip


def report(engine: str, done: Sequence[Pass], notes: Mapping[str, Any]) -> Report:
    """Return a report with a row for each pass.

    Ratios are relative to the first pass, the cold engine without kvcore. ``ttft_s`` is the median.
    ``cached_share`` is the share of prompt tokens that were not computed, and ``found_in`` says
    from which tiers kvcore loaded them.
    """
    made = Report("bench", COLUMNS, f"the same {engine} without kvcore, cold", notes)
    cold = done[0]
    base, base_rate = _ttft(cold), cold.tokens_s
    for each in done:
        prompt_tokens = sum(answer.prompt_tokens for answer in each.answers)
        rate = each.tokens_s
        made.add(
            contender=each.contender,
            ttft_s=round(_ttft(each), 5),
            ttft_p90_s=round(_p90([answer.ttft_s for answer in each.answers]), 5),
            ttft_to_cold=round(_ttft(each) / base, 4),
            tokens_s=None if rate is None else round(rate, 1),
            tokens_s_to_cold=None if rate is None or not base_rate else round(rate / base_rate, 4),
            cached_share=round(sum(a.cached_tokens for a in each.answers) / prompt_tokens, 4),
            found_in=_found_in(each.answers),
            answers_differ=sum(
                a.token_ids != b.token_ids for a, b in zip(each.answers, cold.answers, strict=True)
            ),
        )
    return made


def _ttft(each: Pass) -> float:
    return median(answer.ttft_s for answer in each.answers)


def _p90(times: Sequence[float]) -> float:
    return quantiles(times, n=10, method="inclusive")[-1] if len(times) > 1 else times[0]


def _found_in(answers: Sequence[Generation]) -> str:
    found: dict[str, int] = {}
    for answer in answers:
        for tier, count in answer.tiers.items():
            found[tier] = found.get(tier, 0) + count
    return ", ".join(f"{tier} {count}" for tier, count in found.items())


def draw(figure: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw the medians as bars, and the 90th percentile as a mark."""
    axes = figure.subplots()
    names = [row["contender"] for row in rows]
    axes.barh(names, [row["ttft_s"] for row in rows])
    axes.plot([row["ttft_p90_s"] for row in rows], names, "k|", markersize=12)
    axes.set_xlabel("time to first token, s: median, and 90th percentile as a mark")


# -- the command --------------------------------------------------------------------------------


def bench_model(
    model: Annotated[str, typer.Argument(help="Model name or path, as the engine takes it.")],
    engine: Annotated[
        str | None, typer.Option("--engine", help="Engine. Default: the setting `engine`, or vllm.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts", help="One prompt a line, or .jsonl with `prompt`. Default: random."
        ),
    ] = None,
    count: Annotated[int, typer.Option("--count", min=1, help="Number of prompts, at most.")] = 16,
    words: Annotated[
        int, typer.Option("--words", min=1, help="Words in each random prompt.")
    ] = 1000,
    answer: Annotated[int, typer.Option("--answer", min=1, help="Tokens in each answer.")] = 32,
    engine_args: Annotated[
        list[str] | None,
        typer.Option(
            "--engine-arg",
            metavar="NAME=VALUE",
            help="Argument of the engine's Python API. The value is JSON or text.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="Folder for bench.json and bench.png.")] = Path(
        "results"
    ),
    file: ConfigFile = None,
    assignments: Assignments = None,
) -> None:
    """Measure time to first token and throughput of a model, with kvcore and without it."""
    effective = load(file, assignments)
    name = engine or effective.engine or "vllm"
    asked = synthetic(count, words) if prompts is None else read_prompts(prompts, count)
    if model.startswith(("/", ".", "~")) and not Path(model).expanduser().is_dir():
        raise ConfigError(f"there is no folder {model}: give a model's folder or name")
    out.mkdir(parents=True, exist_ok=True)
    start = starter(model, name, out / "bench.log", effective, arguments(engine_args or []))
    outlives = effective.disk.path is not None or bool(effective.tiers)
    given, progress = settings(effective, name), Console(stderr=True)
    done: list[Pass] = []
    for each in passes(start, given, asked, answer, restart=outlives):
        done.append(each)
        progress.print(f"{each.contender}: {len(each.answers)} prompts", highlight=False)
    notes = {"model": model, "prompts": len(asked), "answer_tokens": answer}
    report(name, done, notes).finish(out, draw)
