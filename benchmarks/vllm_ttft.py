"""Time to first token of real vLLM: cold, its own prefix cache, kvcore from host and from disk.

    python -m benchmarks.vllm_ttft [--tokens 512 4096] [--prompts 5] [--peer-python PYTHON]

Every contender answers the same prompts, one request at a time. "own cache" is the engine's prefix
cache without any connector. "host" is kvcore after the engine's cache was emptied, "disk" kvcore in
a new engine process; the disk tier reads with O_DIRECT, so the page cache cannot help.
``--peer-python`` names the interpreter of an environment in which LMCache's multiprocess server
runs; it then contends too.

What kvcore costs where it does not help is measured side by side: two engines, one with and one
without it, both up, take turns, so that what else the machine does meets both. "miss" is a prompt
that nobody has seen; "decode" is four requests at once while kvcore saves.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from benchmarks._report import Report
from kvcore.testing.engine_process import EngineProcess
from kvcore.testing.models import smollm2
from kvcore.testing.prompts import windows

LMCACHE_START_S = 60.0

_Item = TypeVar("_Item")


class Bench:
    """Shared settings and the rows measured so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.model = smollm2()
        self.options = options
        longest = max(options.tokens)
        self.args: dict[str, Any] = {
            "max_model_len": max(2048, longest + 512),
            "dtype": options.dtype,
            "max_num_seqs": 8,
        }
        self.gigabytes = 2 + options.prompts * longest * 92_160 * 2 // (1 << 30)
        """Twice what all prompts need, for the engine's own cache and for the peer's."""
        self.env = {"VLLM_CPU_KVCACHE_SPACE": str(self.gigabytes)}
        self.prompts = {
            n: windows(self.model, options.prompts, n, n, seed=n) for n in options.tokens
        }
        self.warm_up = windows(self.model, 3, 200, 200, seed=0)
        self.seconds: dict[tuple[str, int], float] = {}
        self.answers: dict[tuple[int, int], list[int]] = {}
        self.differ: dict[tuple[str, int], int] = {}

    def kvcore(self, folder: str) -> dict[str, Any]:
        config: dict[str, Any] = {
            "host": {"capacity": f"{self.gigabytes}GiB"},
            "disk": {"path": folder, "capacity": "8GiB"},
        }
        if self.options.block_tokens:
            config["block_tokens"] = self.options.block_tokens
        return config

    @contextmanager
    def engine(self, kvcore: dict[str, Any] | None, **args: Any) -> Iterator[EngineProcess]:
        with EngineProcess(
            self.model, kvcore=kvcore, env=self.env, **{**self.args, **args}
        ) as made:
            made.generate(self.warm_up, 4)
            yield made

    def ask(self, process: EngineProcess, name: str) -> None:
        """Measure one contender on every prompt."""
        for size, prompts in self.prompts.items():
            times = []
            for i, prompt in enumerate(prompts):
                [answer] = process.generate([prompt], 8)
                times.append(answer.ttft_s)
                right = self.answers.setdefault((size, i), answer.token_ids)
                wrong = self.differ.get((name, size), 0)
                self.differ[name, size] = wrong + (answer.token_ids != right)
            self.seconds[name, size] = median(times)
            print(f"{name:>16} {size:>6} tokens: {median(times):.3f} s", flush=True)

    def decode(self, process: EngineProcess, seed: int) -> float:
        """Tokens a second of four requests at once, after their first token."""
        prompts = _unseen(windows(self.model, 4, 100, 100, seed=0), seed)
        got = process.generate(prompts, 96)
        return sum(95 / (g.total_s - g.ttft_s) for g in got)


def _fast_dtype() -> str:
    """bfloat16 where the CPU multiplies it; elsewhere vLLM falls back to code far slower than that
    for float32, and everything but a hit would look worse than it has to."""
    try:
        flags = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        flags = set()
    return "bfloat16" if flags & {"amx_bf16", "avx512_bf16"} else "float32"


@contextmanager
def lmcache(bench: Bench, python: Path) -> Iterator[EngineProcess]:
    """vLLM with LMCache's multiprocess connector, and its server beside it."""
    port, http = _free_port(), _free_port()
    command = [
        str(python.parent / "lmcache"), "server", "--port", str(port), "--http-port", str(http),
        "--l1-size-gb", str(bench.gigabytes), "--no-l1-use-lazy", "--eviction-policy", "LRU",
        "--supported-transfer-mode", "auto",
    ]  # fmt: skip
    env = {**os.environ, "PYTHONHASHSEED": "0", "LMCACHE_TRACK_USAGE": "false"}
    server = subprocess.Popen(
        command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    previous, sys.executable = sys.executable, str(python)
    try:
        _wait_for(http)
        transfer = {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://localhost",
                "lmcache.mp.port": port,
                "lmcache.mp.mp_transfer_mode": "lmcache_driven",
            },
        }
        bench.env |= {"PYTHONHASHSEED": "0", "LMCACHE_TRACK_USAGE": "false"}
        with bench.engine(None, kv_transfer_config=transfer) as process:
            yield process
    finally:
        sys.executable = previous
        server.terminate()
        server.wait(30)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for(port: int) -> None:
    limit = time.monotonic() + LMCACHE_START_S
    while time.monotonic() < limit:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.5)
    raise SystemExit(f"LMCache's server did not listen on {port} within {LMCACHE_START_S:.0f} s")


def compare(bench: Bench) -> None:
    """Measure every contender on the same prompts, one engine process after the other."""
    with bench.engine(None) as process:
        bench.ask(process, "cold")
        bench.ask(process, "own cache")
    with tempfile.TemporaryDirectory(prefix="kvcore-bench-") as folder:
        kvcore = bench.kvcore(folder)
        with bench.engine(kvcore) as process:
            bench.ask(process, "kvcore miss")
            time.sleep(1)
            process.reset_prefix_cache()
            bench.ask(process, "kvcore host")
        with bench.engine(kvcore) as process:
            bench.ask(process, "kvcore disk")
    if bench.options.peer_python:
        with lmcache(bench, bench.options.peer_python) as process:
            bench.ask(process, "lmcache miss")
            time.sleep(2)
            process.reset_prefix_cache()
            bench.ask(process, "lmcache hit")


def side_by_side(bench: Bench) -> list[tuple[str, str, float, float]]:
    """What kvcore costs: (what, unit, without, with) from two engines that take turns."""
    options = bench.options
    found: list[tuple[str, str, float, float]] = []
    with (
        tempfile.TemporaryDirectory(prefix="kvcore-bench-") as folder,
        bench.engine(None) as without,
        bench.engine(bench.kvcore(folder)) as ours,
    ):
        engines = (without, ours)
        for size in options.tokens if options.misses else []:
            prompts = _unseen(windows(bench.model, options.misses, size, size, seed=0), size)
            times: tuple[list[float], list[float]] = ([], [])
            for prompt, which in _turns(prompts):
                [answer] = engines[which].generate([prompt], 4)
                if answer.cached_tokens:
                    raise SystemExit(f"{answer.cached_tokens} tokens of a new prompt were cached")
                times[which].append(answer.ttft_s)
            without_s, ours_s = map(median, times)
            found.append((f"TTFT of a miss, {size} tokens", "s", without_s, ours_s))
            print(found[-1], flush=True)
        rates: tuple[list[float], list[float]] = ([], [])
        for seed, which in _turns(range(options.decode_rounds)):
            rates[which].append(bench.decode(engines[which], seed))
        without_rate, our_rate = map(median, rates)
        found.append(("decode", "tokens/s", without_rate, our_rate))
        print(found[-1], flush=True)
    return found


def _unseen(prompts: Sequence[Sequence[int]], number: int) -> list[list[int]]:
    """The prompts, each with a first token that makes every block of it new."""
    return [[1000 + (number * 31 + i) % 40000, *prompt[1:]] for i, prompt in enumerate(prompts)]


def _turns(items: Iterable[_Item]) -> Iterator[tuple[_Item, int]]:
    """Each item for both engines; who goes first changes."""
    for number, item in enumerate(items):
        yield item, number % 2
        yield item, 1 - number % 2


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("--misses", type=int, default=20, help="prompts to measure misses with")
    parser.add_argument("--decode-rounds", type=int, default=6)
    parser.add_argument(
        "--dtype", default=_fast_dtype(), help="of the model (default here: %(default)s)"
    )
    parser.add_argument("--block-tokens", type=int, help="of kvcore; its default when left out")
    parser.add_argument("--only", choices=("tiers", "cost"), help="measure only this")
    parser.add_argument("--peer-python", type=Path)
    parser.add_argument("--out", type=Path, default=Path("results"))
    bench = Bench(parser.parse_args(arguments))
    if bench.options.only != "cost":
        compare(bench)
        _report_tiers(bench)
    if bench.options.only != "tiers":
        _report_cost(bench, side_by_side(bench))


def _report_tiers(bench: Bench) -> None:
    report = Report(
        "vllm_ttft",
        ["contender", "tokens", "ttft_s", "to_cold", "to_own_cache", "answers_differ"],
        baseline="the same vLLM without a connector, cold and from its own prefix cache",
    )
    for (name, size), seconds in bench.seconds.items():
        report.add(
            contender=name,
            tokens=size,
            ttft_s=round(seconds, 4),
            to_cold=round(seconds / bench.seconds["cold", size], 4),
            to_own_cache=round(seconds / bench.seconds["own cache", size], 3),
            answers_differ=bench.differ[name, size],
        )
    report.finish(bench.options.out, plot=_plot)


def _report_cost(bench: Bench, found: Iterable[tuple[str, str, float, float]]) -> None:
    report = Report(
        "vllm_cost",
        ["what", "unit", "without", "with kvcore", "ratio"],
        baseline="the same vLLM without a connector, in turns with the one measured",
    )
    for what, unit, without, ours in found:
        row = {"what": what, "unit": unit, "without": round(without, 4)}
        report.add(**row, **{"with kvcore": round(ours, 4), "ratio": round(ours / without, 4)})
    report.finish(bench.options.out)


def _plot(figure: Any, rows: Sequence[Any]) -> None:
    axes = figure.subplots()
    shown = [row for row in rows if row["ttft_s"]]
    labels = [f"{row['contender']}, {row['tokens']}" for row in shown]
    axes.barh(labels, [row["ttft_s"] for row in shown])
    axes.set_xscale("log")
    axes.set_xlabel("time to first token, s (log)")


if __name__ == "__main__":
    main()
