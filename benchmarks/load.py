"""Real engines under load: alone, with their own offloading, with LMCache, and with kvcore.

    python -m benchmarks.load [--contenders alone offloading kvcore] [--rates 0.5 1] [--rounds 1]
    python -m benchmarks.load --short
    python -m benchmarks.load --engine sglang [--contenders alone hicache hicache-file kvcore]

Every contender is an engine behind HTTP, vLLM or SGLang, with caches of the same sizes. They take
turns: one engine runs at a time, is given every workload, and then asked some probes. All are given
the same requests; in the chat also at the same times. `benchmarks._load_traffic` has the workloads
and the generators, none of which is kvcore's; `benchmarks._load_servers` has the contenders.

    chat        all contexts together are 4 times the device's cache and 1.5 times the host's
    prefix      prefixes that together are twice the device's cache
    fits        prefixes that fit the device's cache: what a cache behind it costs
    rag         questions behind documents in new orders, for fusion
    talk        conversations (``--aiperf-python``)
    agents      coding agents, which wait for tools (``--aiperf-python``)
    documents   LMCache's long documents (``--peer-python``)

A probe is asked twice, and the engine's own cache is emptied in between: the second answer comes
from the contender's cache, and both are compared with those of the engine alone. ``probes_loaded``
are the tokens that the second ones did not compute. ``answers_differ`` counts those of the
generator's own requests: with several at a time, an engine's sums depend on which run together.

With more than one round, the contenders' order turns round, and each number is a median. What has
been measured is written after each round.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks import _load_servers, _load_sglang
from benchmarks._load_servers import ALONE, NOT_BUILT, Contender, Engine, Sizes, Tokens, running
from benchmarks._load_traffic import WORKLOADS, Generators, Scale, Served, Workload
from benchmarks._report import Report
from kvcore.harness.models import smollm2, tiny_model
from kvcore.harness.prompts import words

PROBES = 4
PROBE_TOKENS = 24
SETTLE_S = 2.0
"""Seconds after which an idle engine has saved the last prompt."""
VOCABULARY = range(1000, 40_000)
SMOLLM2 = "smollm2"
ARCHS = {
    SMOLLM2: (),
    # vLLM's CPU kernel rotates a part of LFM2's heads, by positions that depend on the chunk.
    "lfm2": ("--compilation-config", '{"custom_ops": ["-rotary_embedding"]}'),
    "gpt_oss": (),
}
"""Models, and what ``vllm serve`` is told for each: all layers alike, with states, with windows."""
FULL = Scale(
    users=16, turns=4, turn_tokens=256, answer_tokens=32, at_once=4, rates=(0.5, 1.0), requests=32
)
SHORT = FULL._replace(users=12, turns=3, turn_tokens=192, rates=(1.0,), requests=16)
DRAWN = "chat"
"""The workload of the picture: the one that is given at several rates."""
ENGINES: Mapping[str, Mapping[str, Contender]] = {
    "vllm": _load_servers.CONTENDERS,
    "sglang": _load_sglang.CONTENDERS,
}
DEFAULT = {
    "vllm": (ALONE, "offloading", "offloading-fs", "kvcore"),
    "sglang": (ALONE, "hicache", "hicache-file", "kvcore", "kvcore-disk"),
}
PLACE = ("workload", "rate", "contender")
SPEED = ("requests_s", "tokens_s", "ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms")
WORK = ("asked", "computed", "from_device", "from_cache", "memory_mib", "failed", "answers_differ")
COMPARED = ("tokens_s", "ttft_p99_ms", "itl_p99_ms")
RATIOS = tuple(f"{column}_to_{base}" for base in ("alone", "best") for column in COMPARED)
TOKENS_BAR, TTFT_BAR, ITL_BAR, FITS_BAR = 1.1, 0.85, 1.05, 0.99


class Place(NamedTuple):
    """A workload at one rate. ``rate`` is None if its requests wait for each other."""

    workload: str
    rate: float | None


class Measured(NamedTuple):
    """What one contender did with one workload, in one round."""

    served: Served
    tokens: Tokens
    memory_nbytes: int


class Probed(NamedTuple):
    """The answers to all probes, each asked twice, and the tokens that the second ones loaded."""

    answers: tuple[str, ...]
    loaded: int


class Bar(NamedTuple):
    """A bar for a contender of kvcore's: ``ratio`` is to be at least or at most ``limit``."""

    what: str
    place: Place
    contender: str
    against: str
    ratio: float
    limit: float
    at_least: bool

    @property
    def met(self) -> bool:
        return self.ratio >= self.limit if self.at_least else self.ratio <= self.limit


Found = dict[tuple[str, Place], list[Measured]]
"""All rounds, by contender and place."""


# -- measuring -------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    model, arguments = options.model or model_of(options.arch), ARCHS[options.arch]
    scale = scale_of(options)
    generators = Generators(options.aiperf_python, options.peer_python)
    workloads = [*scale.workloads(options.workloads, model, generators)]
    sizes = scale.sizes(model, options.dtype, arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    found: Found = {}
    probed: dict[str, list[Probed]] = {}
    for number in range(options.rounds):
        for name in turned(options.contenders, number):
            for place, measured in turn(name, workloads, sizes, options, probed):
                found.setdefault((name, place), []).append(measured)
        notes = {**scale._asdict(), "rounds": number + 1, "dtype": options.dtype}
        notes |= {"engine": options.engine}
        notes["model"] = options.model.name if options.model else options.arch
        notes |= {"device_bytes": sizes.device_nbytes, "host_bytes": sizes.host_nbytes}
        report_load(found, notes, options.out, options.picture)
        report_probes(probed, options.out)
        report_bars(bars(found, probed), options.out)


def model_of(arch: str) -> Path:
    """Return SmolLM2, or a random model of about a quarter of its size."""
    if arch == SMOLLM2:
        return smollm2()
    return tiny_model(
        arch, layers=12, heads=8, kv_heads=4, head_dim=64, sliding_window=128, vocabulary=None,
        mlp_width=1024,
    )  # fmt: skip


def turn(
    name: str,
    workloads: Sequence[Workload],
    sizes: Sizes,
    options: argparse.Namespace,
    probed: dict[str, list[Probed]],
) -> Iterator[tuple[Place, Measured]]:
    """Run one contender's engine, yield what it did with each workload, and add its probes."""
    began = time.monotonic()
    contender, log = ENGINES[options.engine][name], options.out / f"load-{name}-generators.log"
    log.unlink(missing_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="kvcore-load-") as folder,
        running(contender, sizes, Path(folder), options.out, options.peer_python) as engine,
    ):
        for seed in (1, 2):
            engine.ask(words(seed, sizes.max_tokens // 2, VOCABULARY), 4)
        print(f"{name}: ready after {time.monotonic() - began:.0f} s", flush=True)
        if engine.says(NOT_BUILT):
            print(f"{name}: kvcore's copies in C are not built here, so it is slower", flush=True)
        for number, workload in enumerate(workloads):
            files = Path(folder) / f"workload-{number}"
            files.mkdir()
            measured = measure(workload, engine, files, log)
            place = Place(workload.name, workload.rate)
            print(f"{name}: {told(place, measured)}", flush=True)
            yield place, measured
        probed.setdefault(name, []).append(probe(engine, sizes))
    print(f"{name}: {time.monotonic() - began:.0f} s in all", flush=True)


def measure(workload: Workload, engine: Engine, folder: Path, log: Path) -> Measured:
    """Put one load on an engine. Memory is what its processes hold when the load has ended."""
    before = engine.tokens()
    served = workload.run(engine, folder, log)
    time.sleep(SETTLE_S)
    return Measured(served, engine.tokens().since(before), engine.memory_nbytes())


def probe(engine: Engine, sizes: Sizes) -> Probed:
    """Ask all probes, empty the engine's own cache, and ask them again."""
    prompts = [words(100 + n, sizes.max_tokens // 2, VOCABULARY) for n in range(PROBES)]
    answers = [engine.ask(prompt, PROBE_TOKENS) for prompt in prompts]
    engine.ask(prompts[0][:40], 2)  # vLLM's connector stores in the next step what is complete
    time.sleep(SETTLE_S)
    engine.reset()
    before = engine.tokens()
    answers += [engine.ask(prompt, PROBE_TOKENS) for prompt in prompts]
    return Probed(tuple(answers), engine.tokens().since(before).external)


def ours(name: str) -> bool:
    """Return True if a contender is one of kvcore's."""
    return name.startswith("kvcore")


def turned(names: Sequence[str], number: int) -> list[str]:
    """Return the names beginning with another one in each round."""
    first = number % len(names)
    return [*names[first:], *names[:first]]


# -- arithmetic ------------------------------------------------------------------------------------


def middle(values: Sequence[float | None]) -> float | None:
    """Return the median; None if a generator does not measure it."""
    given = [value for value in values if value is not None]
    return median(given) if given else None


def ratio(value: float | None, base: float | None) -> float | None:
    return None if value is None or not base else round(value / base, 3)


def differing(answers: Sequence[str], right: Sequence[str]) -> int | None:
    """Count the answers that are not those of the engine alone; None if there are none of those."""
    if not right or not answers:
        return None
    pairs = zip(answers, right, strict=False)
    return sum(a != b for a, b in pairs) + abs(len(answers) - len(right))


def rows(found: Found) -> list[dict[str, Any]]:
    """Return a row for each place and contender.

    "best" is the best of the contenders that are not kvcore's, without the row's own.
    """
    made = []
    for place in dict.fromkeys(place for _, place in found):
        names = [*dict.fromkeys(name for name, where in found if where == place)]
        alone = found.get((ALONE, place))
        here = {name: numbers(found[name, place], alone) for name in names}
        for name, row in here.items():
            peers = [here[n] for n in names if n != name and not ours(n)]
            for column in COMPARED:
                base = here.get(ALONE, {}).get(column)
                row[f"{column}_to_alone"] = ratio(row[column], base)
                row[f"{column}_to_best"] = ratio(row[column], best(peers, column))
            made.append({"workload": place.workload, "rate": place.rate, "contender": name, **row})
    return made


def best(peers: Sequence[Mapping[str, Any]], column: str) -> float | None:
    """Return the most output tokens a second, or the shortest of the times."""
    values = [row[column] for row in peers if row[column] is not None]
    if not values:
        return None
    return float(max(values) if column == "tokens_s" else min(values))


def numbers(rounds: Sequence[Measured], alone: Sequence[Measured] | None) -> dict[str, Any]:
    """Return one contender's medians; failures and differing answers are sums over its rounds."""
    served = [each.served for each in rounds]
    tokens = [each.tokens for each in rounds]
    differ = [
        differing(ours.texts, right.served.texts)
        for ours, right in zip(served, alone or (), strict=False)
    ]
    return {
        "requests_s": _rounded(middle([each.requests_s for each in served])),
        "tokens_s": _rounded(middle([each.tokens_s for each in served])),
        "ttft_p50_ms": _rounded(middle([each.ttft_p50 for each in served])),
        "ttft_p99_ms": _rounded(middle([each.ttft_p99 for each in served])),
        "itl_p50_ms": _rounded(middle([each.itl_p50 for each in served])),
        "itl_p99_ms": _rounded(middle([each.itl_p99 for each in served])),
        "asked": round(median(each.asked for each in tokens)),
        "computed": round(median(each.computed for each in tokens)),
        "from_device": round(median(each.local for each in tokens)),
        "from_cache": round(median(each.external for each in tokens)),
        "memory_mib": round(median(each.memory_nbytes for each in rounds) / (1 << 20)),
        "failed": sum(each.failed for each in served),
        "answers_differ": None if not differ or None in differ else sum(filter(None, differ)),
    }


def bars(found: Found, probed: Mapping[str, Sequence[Probed]]) -> list[Bar]:
    """Return the project's bars with this run's ratios, for each of kvcore's contenders."""
    made = [bar for row in rows(found) for bar in _bars_of(row, rows(found))]
    anywhere = Place("probes", None)
    for name in probed:
        if ours(name) and ALONE in probed:
            wrong = probes_wrong(probed, name)
            made.append(Bar("probes that differ", anywhere, name, ALONE, wrong, 0, False))
    return made


def _bars_of(row: Mapping[str, Any], every: Sequence[Mapping[str, Any]]) -> Iterator[Bar]:
    place, name = Place(row["workload"], row["rate"]), row["contender"]
    if not ours(name):
        return
    here = [r for r in every if (r["workload"], r["rate"]) == place]
    others = [r for r in here if not ours(r["contender"])]
    alone = next((r for r in others if r["contender"] == ALONE), None)
    if place.workload == "fits":
        if alone is not None:
            share = row["tokens_s"] / alone["tokens_s"]
            yield Bar("tokens a second", place, name, ALONE, share, FITS_BAR, True)
        return
    if others:
        most = max(others, key=lambda r: r["tokens_s"])
        share = row["tokens_s"] / most["tokens_s"]
        yield Bar("tokens a second", place, name, most["contender"], share, TOKENS_BAR, True)
        least = min(others, key=lambda r: r["ttft_p99_ms"])
        share = row["ttft_p99_ms"] / least["ttft_p99_ms"]
        yield Bar("TTFT, p99", place, name, least["contender"], share, TTFT_BAR, False)
    if alone is not None and row["itl_p99_ms"] and alone["itl_p99_ms"]:
        share = row["itl_p99_ms"] / alone["itl_p99_ms"]
        yield Bar("inter-token time, p99", place, name, ALONE, share, ITL_BAR, False)


def probes_wrong(probed: Mapping[str, Sequence[Probed]], name: str) -> int:
    """Count the probes, over all rounds, that were answered otherwise than by the engine alone."""
    right = probed[ALONE][0].answers
    return sum(differing(each.answers, right) or 0 for each in probed[name])


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


# -- reports ---------------------------------------------------------------------------------------


def told(place: Place, measured: Measured) -> str:
    """Return a line of progress."""
    served, tokens = measured.served, measured.tokens
    return (
        f"{place.workload} {place.rate or ''}: {served.requests_s:.2f} requests/s, "
        f"TTFT {served.ttft_p50:.0f} and {served.ttft_p99:.0f} ms, "
        f"{tokens.computed} of {tokens.asked} tokens computed, {served.failed} failed"
    )


def report_load(found: Found, notes: Mapping[str, Any], out: Path, picture: Path | None) -> None:
    """Report how fast, of what, and the ratios. Draw the picture."""
    report = _report("load", SPEED, found, notes)
    _report("load_work", WORK, found).finish(out)
    _report("load_ratios", RATIOS, found).finish(out)
    timed = any(row["workload"] == DRAWN for row in report.rows)
    report.finish(out, plot=plot if timed else None)
    drawn = out / "load.png"
    if picture is not None and drawn.exists():
        picture.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(drawn, picture)


def _report(
    name: str, columns: Sequence[str], found: Found, notes: Mapping[str, Any] | None = None
) -> Report:
    columns = [*PLACE, *columns]
    report = Report(name, columns, f"the same engine without a cache behind it ({ALONE})", notes)
    for row in rows(found):
        report.add(**{column: row[column] for column in columns})
    return report


def report_probes(probed: Mapping[str, Sequence[Probed]], out: Path) -> None:
    """Report how many probes were answered otherwise, and that they came from the caches."""
    columns = ["contender", "probes", "probes_loaded", "probes_differ"]
    report = Report("load_probes", columns, f"the answers of {ALONE}")
    for name, rounds in probed.items():
        report.add(
            contender=name,
            probes=sum(len(each.answers) for each in rounds),
            probes_loaded=sum(each.loaded for each in rounds),
            probes_differ=probes_wrong(probed, name) if ALONE in probed else None,
        )
    report.finish(out)


def report_bars(found: Sequence[Bar], out: Path) -> None:
    columns = ["workload", "rate", "what", "contender", "against", "ratio", "bar", "verdict"]
    report = Report("load_bars", columns, "ratios within this run")
    for bar in found:
        report.add(
            workload=bar.place.workload,
            rate=bar.place.rate,
            what=bar.what,
            contender=bar.contender,
            against=bar.against,
            ratio=round(bar.ratio, 3),
            bar=f"{'>=' if bar.at_least else '<='} {bar.limit}",
            verdict="met" if bar.met else "missed",
        )
    report.finish(out)


def plot(figure: Any, found: Sequence[Mapping[str, Any]]) -> None:
    """Draw the chat's TTFT over the rate of arrivals, kvcore's contenders with solid lines."""
    timed = sorted((row for row in found if row["workload"] == DRAWN), key=lambda row: row["rate"])
    names = dict.fromkeys(row["contender"] for row in found)
    columns = {"ttft_p50_ms": "median", "ttft_p99_ms": "99th percentile"}
    left, right = figure.subplots(1, len(columns))
    for axes, (column, title) in zip((left, right), columns.items(), strict=True):
        for name in names:
            mine = [row for row in timed if row["contender"] == name]
            seconds = [row[column] / 1000 for row in mine]
            style = "-o" if ours(name) else "--s"
            axes.plot([row["rate"] for row in mine], seconds, style, label=name)
        axes.set_title(title)
        axes.set_xticks(sorted({row["rate"] for row in timed}))
        axes.set_xlabel("requests a second that arrive")
        axes.set_ylim(bottom=0)
    left.set_ylabel("time to first token, s")
    left.legend()


# -- options ---------------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--engine", choices=ENGINES, default="vllm")
    every = sorted({name for contenders in ENGINES.values() for name in contenders})
    parser.add_argument("--contenders", nargs="+", choices=every, help="by default without LMCache")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, help=_default(WORKLOADS[:3]))
    parser.add_argument("--short", action="store_true", help="two contenders, one load, minutes")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--users", type=int, help="of the chat")
    parser.add_argument("--turns", type=int, help="of each user")
    parser.add_argument("--turn-tokens", type=int, help="that a turn adds to a context")
    parser.add_argument("--answer-tokens", type=int)
    parser.add_argument("--rates", type=float, nargs="+", help="of the chat, requests a second")
    parser.add_argument("--requests", type=int, help="of prefix and of fits, about")
    parser.add_argument("--at-once", type=int, help="requests that an engine runs")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--to-device", type=float, help="all contexts, in caches of the device")
    parser.add_argument("--to-host", type=float, help="all contexts, in caches of the host")
    parser.add_argument("--arch", choices=ARCHS, default=SMOLLM2, help="a random model's, or")
    parser.add_argument("--model", type=Path, help="a folder with a dense model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--peer-python", type=Path, help="of an environment with LMCache")
    parser.add_argument("--aiperf-python", type=Path, help="of an environment with aiperf")
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--picture", type=Path, help="where to put the picture as well")
    options = parser.parse_args(arguments)
    usual = DEFAULT[options.engine]
    defaults = ((ALONE, "kvcore"), ("chat",)) if options.short else (usual, WORKLOADS[:3])
    options.contenders = options.contenders or [*defaults[0]]
    options.workloads = options.workloads or [*defaults[1]]
    contenders = ENGINES[options.engine]
    if unknown := [name for name in options.contenders if name not in contenders]:
        parser.error(f"{options.engine} has no {unknown[0]}: choose of {', '.join(contenders)}")
    if options.engine != "vllm" and options.arch != SMOLLM2:
        parser.error(f"--arch {options.arch} is for vLLM")
    if options.peer_python is None and any(contenders[n].peer for n in options.contenders):
        parser.error("lmcache needs --peer-python: run python3 -m tools.env_load")
    return options


def scale_of(options: argparse.Namespace) -> Scale:
    """Return the sizes: the short or the full ones, with those that were given."""
    base = SHORT if options.short else FULL
    given = {name: getattr(options, name, None) for name in Scale._fields}
    if given["rates"] is not None:
        given["rates"] = tuple(given["rates"])
    return base._replace(**{name: value for name, value in given.items() if value is not None})


def _default(names: Sequence[str]) -> str:
    return f"by default {', '.join(names)}"


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # engines end too
    main()
