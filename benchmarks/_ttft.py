"""Time to first token of a real engine: the common part of `vllm_ttft` and `sglang_ttft`.

Every contender answers the same prompts, one request at a time. "own cache" is the engine's prefix
cache without kvcore. "host" is kvcore after the engine's cache was emptied. "disk" is kvcore in a
new engine process; the disk tier reads with O_DIRECT, so the page cache cannot help.

The cost of kvcore where it does not help is measured with two engines, one with and one without it.
Both are up and take turns, so that other work on the machine affects both. "miss" is a prompt that
nobody has seen; "decode" is four requests at once while kvcore saves.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, NamedTuple, TypeVar

from benchmarks._report import Report
from kvcore.harness.engine_process import EngineProcess
from kvcore.harness.models import smollm2, tiny_model
from kvcore.harness.prompts import windows
from kvcore.memory.arena import PREFAULTED

Forget = Callable[[EngineProcess], None]
"""Evicts earlier prompts from the engine's own cache, and from nothing else."""

_Item = TypeVar("_Item")

MEMORY_TIMEOUT_S = 300.0

MISSES = "TTFT of a miss"
COLD, OWN, MISS, HOST, DISK = "cold", "own cache", "kvcore miss", "kvcore host", "kvcore disk"
DRY_RUN = {"tokens": [384], "prompts": 2, "misses": 2, "decode_rounds": 2, "dtype": "float32"}


class Cost(NamedTuple):
    """A quantity measured without kvcore and with it."""

    what: str
    unit: str
    without: float
    ours: float

    @property
    def ratio(self) -> float:
        return self.ours / self.without


class Bar(NamedTuple):
    """A bar: ``ratio`` should be at most ``at_most``."""

    what: str
    tokens: int | None
    ratio: float
    at_most: float


class Contest(ABC):
    """One engine with and without kvcore. A subclass has what is specific to the engine.

    The model is SmolLM2; in a dry run it is a tiny random one.
    """

    engine: ClassVar[str]
    engine_args: dict[str, Any]
    gigabytes: int
    """Gigabytes of host memory for kvcore, and for a peer's cache."""
    settle_s: ClassVar[float] = 1.0
    """Seconds after which kvcore has saved the last prompt."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.model = _tiny() if options.dry_run else smollm2()
        self.env: dict[str, str] = {}
        self.prompts = {
            n: _unseen(windows(self.model, options.prompts, n, n, seed=n), n)
            for n in options.tokens
        }
        self.longest = max(options.tokens)
        self.warm_up = windows(self.model, 3, 200, 200, seed=0)
        self.long_warm_up = _unseen(windows(self.model, 1, self.longest, self.longest, seed=98), 98)
        self.seconds: dict[tuple[str, int], float] = {}
        self.cached: dict[tuple[str, int], float] = {}
        self.sources: dict[tuple[str, int], str] = {}
        self.differ: dict[tuple[str, int], int] = {}
        self._answers: dict[tuple[int, int], list[int]] = {}

    # -- what is the engine's own -------------------------------------------------------------

    @abstractmethod
    def forget(self, process: EngineProcess) -> None:
        """Empty the engine's own cache between requests to kvcore; a `Forget`."""

    @abstractmethod
    def compare_peers(self) -> None:
        """Measure other caches for the same engine."""

    @property
    def disturb(self) -> Forget | None:
        """Called before each request to the engine's own cache: as much work as `forget`."""
        return None

    def tier_args(self) -> dict[str, Any]:
        """Return engine arguments for the contenders that have tiers."""
        return {}

    def bars(self, costs: Sequence[Cost]) -> list[Bar]:
        """Return the project's bars for this engine, with the measured ratios."""
        return []

    # -- measuring ----------------------------------------------------------------------------

    def kvcore(self, folder: str) -> dict[str, Any]:
        """Return kvcore's config, with its disk tier in ``folder``."""
        config: dict[str, Any] = {
            "host": {"capacity": f"{self.gigabytes}GiB", "prefault": f"{self.gigabytes}GiB"},
            "disk": {"path": folder, "capacity": "8GiB"},
        }
        if self.options.block_tokens:
            config["block"] = {"tokens": self.options.block_tokens}
        return config

    @contextmanager
    def running(
        self,
        kvcore: Mapping[str, Any] | None,
        env: Mapping[str, str] | None = None,
        python: Path | None = None,
        **args: Any,
    ) -> Iterator[EngineProcess]:
        """Run an engine that is warmed up, with kvcore's host memory pre-faulted.

        It has answered a long prompt: the first long prompts of a process take a fifth longer,
        wherever their KV comes from.
        """
        with EngineProcess(
            self.model,
            engine=self.engine,
            kvcore=kvcore,
            python=python,
            env={**self.env, **(env or {})},
            **{**self.engine_args, **args},
        ) as made:
            made.generate(self.warm_up, 4)
            made.generate(self.long_warm_up, 4)
            if kvcore is not None:
                _await_memory(made)
            yield made

    def ask(self, process: EngineProcess, name: str, forget: Forget | None = None) -> None:
        """Measure one contender on every prompt, with ``forget`` before each."""
        for size, prompts in self.prompts.items():
            times, cached = [], []
            sources: dict[str, int] = {}
            for i, prompt in enumerate(prompts):
                if forget is not None:
                    forget(process)
                [answer] = process.generate([prompt], 8)
                times.append(answer.ttft_s)
                cached.append(answer.cached_tokens)
                for source, tokens in (answer.tiers or answer.sources).items():
                    sources[source] = sources.get(source, 0) + tokens
                right = self._answers.setdefault((size, i), answer.token_ids)
                wrong = self.differ.get((name, size), 0)
                self.differ[name, size] = wrong + (answer.token_ids != right)
            self.seconds[name, size] = median(times)
            self.cached[name, size] = median(cached)
            self.sources[name, size] = " ".join(n for n, tokens in sources.items() if tokens)
            print(f"{name:>18} {size:>6} tokens: {median(times):.3f} s", flush=True)

    def compare(self) -> None:
        """Measure every contender on the same prompts, one engine process after the other."""
        with self.running(None) as process:
            self.ask(process, COLD)
            self.ask(process, OWN, self.disturb)
        with tempfile.TemporaryDirectory(prefix="kvcore-bench-") as folder:
            kvcore, args = self.kvcore(folder), self.tier_args()
            with self.running(kvcore, **args) as process:
                self.ask(process, MISS)
                time.sleep(self.settle_s)
                self.forget(process)
                self.ask(process, HOST, self.forget)
            with self.running(kvcore, **args) as process:
                self.ask(process, DISK)
        self.compare_peers()

    def side_by_side(self) -> list[Cost]:
        """Measure the cost of kvcore with two engines that take turns."""
        with (
            tempfile.TemporaryDirectory(prefix="kvcore-bench-") as folder,
            self.running(None) as without,
            self.running(self.kvcore(folder)) as ours,
        ):
            engines = (without, ours)
            found = [self._misses(engines, n) for n in self.options.tokens if self.options.misses]
            if self.options.decode_rounds:
                found.append(self._decoding(engines))
        return found

    def _misses(self, engines: Sequence[EngineProcess], size: int) -> Cost:
        prompts = _unseen(windows(self.model, self.options.misses, size, size, seed=0), 7 * size)
        times: tuple[list[float], list[float]] = ([], [])
        for prompt, which in _turns(prompts):
            [answer] = engines[which].generate([prompt], 4)
            if answer.cached_tokens:
                raise SystemExit(f"{answer.cached_tokens} tokens of a new prompt were cached")
            times[which].append(answer.ttft_s)
        return shown(Cost(f"{MISSES}, {size} tokens", "s", *map(median, times)))

    def _decoding(self, engines: Sequence[EngineProcess]) -> Cost:
        """Measure tokens a second of four requests at once, after their first token."""
        rates: tuple[list[float], list[float]] = ([], [])
        for seed, which in _turns(range(self.options.decode_rounds)):
            prompts = _unseen(windows(self.model, 4, 100, 100, seed=0), seed)
            got = engines[which].generate(prompts, 96)
            rates[which].append(sum(95 / (g.total_s - g.ttft_s) for g in got))
        return shown(Cost("decode", "tokens/s", *map(median, rates)))

    # -- reports ------------------------------------------------------------------------------

    def report_tiers(self) -> None:
        report = Report(
            f"{self.engine}_ttft",
            [
                "contender",
                "tokens",
                "ttft_s",
                "to_cold",
                "to_own_cache",
                "cached_tokens",
                "cached_in",
                "answers_differ",
            ],
            baseline=f"the same {self.engine} without kvcore, cold and from its own prefix cache",
        )
        for (name, size), seconds in self.seconds.items():
            report.add(
                contender=name,
                tokens=size,
                ttft_s=round(seconds, 4),
                to_cold=round(seconds / self.seconds[COLD, size], 4),
                to_own_cache=round(seconds / self.seconds[OWN, size], 3),
                cached_tokens=self.cached[name, size],
                cached_in=self.sources[name, size],
                answers_differ=self.differ[name, size],
            )
        report.finish(self.options.out, plot=_plot)

    def report_cost(self, found: Iterable[Cost]) -> None:
        report = Report(
            f"{self.engine}_cost",
            ["what", "unit", "without", "with kvcore", "ratio"],
            baseline=f"the same {self.engine} without kvcore, in turns with the one measured",
        )
        for cost in found:
            row = {"what": cost.what, "unit": cost.unit, "without": round(cost.without, 4)}
            report.add(**row, **{"with kvcore": round(cost.ours, 4), "ratio": round(cost.ratio, 4)})
        report.finish(self.options.out)

    def report_bars(self, costs: Sequence[Cost]) -> None:
        """Report each bar beside this run's ratio; nothing if there is no bar."""
        bars = self.bars(costs)
        if not bars:
            return
        report = Report(
            f"{self.engine}_bars",
            ["what", "tokens", "ratio", "at_most", "kept"],
            baseline="ratios within this run",
        )
        for bar in bars:
            report.add(
                what=bar.what,
                tokens=bar.tokens,
                ratio=round(bar.ratio, 4),
                at_most=bar.at_most,
                kept=bar.ratio <= bar.at_most,
            )
        report.finish(self.options.out)


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that every engine's benchmark has."""
    made = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    made.add_argument("--tokens", type=int, nargs="+", default=[512, 4096])
    made.add_argument("--prompts", type=int, default=5)
    made.add_argument("--misses", type=int, default=20, help="prompts that measure misses")
    made.add_argument("--decode-rounds", type=int, default=6)
    made.add_argument(
        "--dtype", default=fast_dtype(), help="type of the model (default here: %(default)s)"
    )
    made.add_argument("--block-tokens", type=int, help="kvcore's block.tokens (its default)")
    made.add_argument("--only", choices=("tiers", "cost"), help="measure only this")
    made.add_argument("--out", type=Path, default=Path("results"))
    made.add_argument(
        "--dry-run",
        action="store_true",
        help="a tiny model and short prompts: tests the script, its times mean nothing",
    )
    return made


def parse(made: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line. A dry run replaces sizes by its own."""
    options = made.parse_args(arguments)
    if options.dry_run:
        for name, value in DRY_RUN.items():
            setattr(options, name, value)
    return options


def measure(contest: Contest) -> None:
    """Run what the options ask for, and write the reports."""
    costs: list[Cost] = []
    if contest.options.only != "cost":
        contest.compare()
        contest.report_tiers()
    if contest.options.only != "tiers":
        costs = contest.side_by_side()
        contest.report_cost(costs)
    contest.report_bars(costs)


def _await_memory(process: EngineProcess) -> None:
    """Block until the engine's log says that host memory is pre-faulted.

    That work in an engine's first seconds is no part of its answers' times.
    """
    line, limit = PREFAULTED.split("%", 1)[0], time.monotonic() + MEMORY_TIMEOUT_S
    while line not in process.log.read_text(errors="replace"):
        if time.monotonic() > limit:
            raise SystemExit(f"host memory is not there after {MEMORY_TIMEOUT_S} s: {process.log}")
        time.sleep(0.2)


def _tiny() -> Path:
    return tiny_model("llama", layers=4, heads=4, kv_heads=2, head_dim=64, vocabulary=None)


def fast_dtype() -> str:
    """Return bfloat16 if the CPU multiplies it, else float32.

    Without such instructions engines' bfloat16 is far slower than float32, and everything but a hit
    would look worse than it has to.
    """
    try:
        flags = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        flags = set()
    return "bfloat16" if flags & {"amx_bf16", "avx512_bf16"} else "float32"


def _unseen(prompts: Sequence[Sequence[int]], number: int) -> list[list[int]]:
    """Return the prompts, each with another first token, which makes every block new."""
    return [[1000 + (number * 31 + i) % 40000, *prompt[1:]] for i, prompt in enumerate(prompts)]


def _turns(items: Iterable[_Item]) -> Iterator[tuple[_Item, int]]:
    """Yield each item for both engines. The engine that goes first alternates."""
    for number, item in enumerate(items):
        yield item, number % 2
        yield item, 1 - number % 2


def shown(cost: Cost) -> Cost:
    print(f"{cost.what}: {cost.without:.4g} -> {cost.ours:.4g} {cost.unit}", flush=True)
    return cost


def _plot(figure: Any, rows: Sequence[Any]) -> None:
    axes = figure.subplots()
    shown = [row for row in rows if row["ttft_s"]]
    labels = [f"{row['contender']}, {row['tokens']}" for row in shown]
    axes.barh(labels, [row["ttft_s"] for row in shown])
    axes.set_xscale("log")
    axes.set_xlabel("time to first token, s (log)")
