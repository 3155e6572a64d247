"""Cost of a server: a scheduler's calls, and the time to first token of a host hit on vLLM.

    python -m benchmarks.server [--rounds 200] [--tokens 512 4096] [--prompts 4] [--out results]

Calls: a match and the plan of a save, with indexes of the same size and content, one embedded and
one behind a server. They take turns, so the ratio is of one minute on one machine. Reports are left
out, because nothing waits for an answer to them. Results are medians, and the 99th percentile.

TTFT: two vLLM engines with SmolLM2, one with kvcore embedded and one behind the server, answer the
same prompts in turn. Their own caches are emptied before each prompt. Results are medians of
`--prompts` x `--turns`. The server is a process of its own on a local socket.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from benchmarks._report import Report
from benchmarks._ttft import fast_dtype
from kvcore.config import Config, load_config
from kvcore.connector.build import build_leader
from kvcore.connector.step_transport import Outbox
from kvcore.harness.engine_process import EngineProcess
from kvcore.harness.models import smollm2
from kvcore.harness.prompts import windows
from kvcore.manager.base import Manager
from kvcore.model.shape import BlockShape
from kvcore.model.spec import LayerGroup, ModelDescription
from kvcore.transfer.graph import OpReport, UnitTable
from kvcore_devtools.server_fixture import server_process

SHAPE = BlockShape(1, 1, 8, 16, "bfloat16")
MODEL = ModelDescription(SHAPE, (LayerGroup(0, 16, (0,)),), b"a model of the benchmark", 1)
SPACE = bytes(16)
COLUMNS = ["what", "blocks", "embedded us", "server us", "ratio", "server p99 us"]
TTFT_COLUMNS = ["tokens", "embedded s", "server s", "ratio", "bar"]
TTFT_BAR = 1.1
GIGABYTES = 2


class Side(NamedTuple):
    manager: Manager
    outbox: Outbox
    close: Callable[[], None]


def side(config: Config) -> Side:
    outbox = Outbox()
    parts = build_leader(config, MODEL, outbox)

    def close() -> None:
        for release in parts.releases:
            release()

    return Side(parts.manager, outbox, close)


def chain(seed: int, blocks: int) -> list[bytes]:
    return [hashlib.sha256(b"%d.%d" % (seed, i)).digest()[:16] for i in range(blocks)]


def units(start: int, stop: int) -> list[UnitTable]:
    return [UnitTable(16, 1, bytes(8 * (stop - start)))]


def save(at: Side, keys: Sequence[bytes]) -> float:
    """Return the seconds to plan a save. Then report it as done, as the workers would."""
    began = time.perf_counter()
    planned = at.manager.plan_save(keys, SPACE, len(keys))
    assert planned is not None, "the host tier has room for all of this"
    graph = at.manager.launch(planned, units(*planned.blocks))
    seconds = time.perf_counter() - began
    at.outbox.graphs.clear()
    at.manager.complete(OpReport(graph.graph_id, 0))
    return seconds


def match(at: Side, keys: Sequence[bytes]) -> float:
    began = time.perf_counter()
    hit = at.manager.get_match(keys, SPACE)
    seconds = time.perf_counter() - began
    assert hit.depth == len(keys), "everything was saved"
    return seconds


def add(report: Report, what: str, blocks: int, times: list[list[float]]) -> None:
    embedded, served = (statistics.median(taken) * 1e6 for taken in times)
    worst = sorted(times[1])[-max(len(times[1]) // 100, 1)] * 1e6
    report.add(
        **{
            "what": what,
            "blocks": blocks,
            "embedded us": round(embedded, 1),
            "server us": round(served, 1),
            "ratio": round(served / embedded, 1),
            "server p99 us": round(worst, 1),
        }
    )


def measure(report: Report, sides: Sequence[Side], rounds: int) -> None:
    for blocks in (8, 64, 512):
        chains = [chain(blocks << 20 | seed, blocks) for seed in range(rounds)]
        saves = [[save(at, keys) for keys in chains] for at in sides]
        matches: list[list[float]] = [[], []]
        for keys in chains:
            for taken, at in zip(matches, sides, strict=True):
                taken.append(match(at, keys))
        add(report, "match, all held", blocks, matches)
        add(report, "plan a save", blocks, saves)


def time_hits(report: Report, folder: str, options: argparse.Namespace) -> None:
    """Report one row for each length of prompt.

    Raises SystemExit if a request was no host hit, or an answer differs.
    """
    model, longest = smollm2(), max(options.tokens)
    embedded = {"host": {"capacity": f"{GIGABYTES}GiB"}}
    served = {**embedded, "server": {"address": "local", "folder": f"{folder}/kv"}}
    with ExitStack() as stack:
        engines = [
            stack.enter_context(
                EngineProcess(
                    model,
                    kvcore=config,
                    env={"VLLM_CPU_KVCACHE_SPACE": "1"},
                    max_model_len=longest + 512,
                    max_num_seqs=4,
                    dtype=fast_dtype(),
                )
            )
            for config in (embedded, served)
        ]
        for size in options.tokens:
            prompts = windows(model, options.prompts, size, size, seed=size)
            for engine in engines:
                engine.generate(prompts, 8)
            times: list[list[float]] = [[], []]
            answers: list[list[int] | None] = [None] * len(prompts)
            for turn in range(options.turns):
                for i, prompt in enumerate(prompts):
                    for which in (0, 1) if (turn + i) % 2 else (1, 0):
                        engines[which].reset_prefix_cache()
                        [answer] = engines[which].generate([prompt], 8)
                        if (answers[i] or answer.token_ids) != answer.token_ids:
                            raise SystemExit(f"another answer to the same KV: {answer}")
                        answers[i] = answer.token_ids
                        if list(answer.tiers) != ["host"]:
                            raise SystemExit(f"not a host hit: {answer}")
                        times[which].append(answer.ttft_s)
            ours, theirs = (statistics.median(taken) for taken in times)
            report.add(
                **{
                    "tokens": size,
                    "embedded s": round(ours, 4),
                    "server s": round(theirs, 4),
                    "ratio": round(theirs / ours, 3),
                    "bar": TTFT_BAR,
                }
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--tokens", type=int, nargs="*", default=[512, 4096])
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("results"))
    args = parser.parse_args()
    calls = Report("server", COLUMNS, baseline="the same calls on a manager in this process")
    hits = Report("server_ttft", TTFT_COLUMNS, baseline="the same vLLM with kvcore embedded")
    with tempfile.TemporaryDirectory() as folder:
        tables = {
            "host": {"capacity": "1GiB", "huge_pages": False},
            "server": {"folder": f"{folder}/kv", "deadline_s": 10.0},
        }
        served = {**tables, "server": {**tables["server"], "address": "local"}}
        shared = (f"server.folder={folder}/kv", "log.level=error")
        with server_process("host.capacity=1GiB", *shared):
            sides = [side(load_config(None, tables)), side(load_config(None, served))]
            measure(calls, sides, args.rounds)
            for each in sides:
                each.close()
        calls.finish(args.out)
        if args.tokens:
            with server_process(f"host.capacity={GIGABYTES}GiB", *shared):
                time_hits(hits, folder, args)
            hits.finish(args.out)


if __name__ == "__main__":
    main()
