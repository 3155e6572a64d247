"""What a server costs a scheduler: a match and the plan of a save, embedded and through a server.

    python -m benchmarks.server [--rounds 200] [--out results]

One index of the same size and contents on both sides; the calls are taken in turn, so the ratio
is of one minute on one machine. The server is a process of its own on a local socket. A report has
no answer that is waited for. Medians, and the worst of a hundred.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks._report import Report
from kvcore.adapting.build import build_leader
from kvcore.adapting.model import LayerGroup, ModelDescription
from kvcore.adapting.outbox import Outbox
from kvcore.config import Config, load_config
from kvcore.facade import Manager
from kvcore.layout import BlockShape
from kvcore.transfer.graph import OpReport, UnitTable

SHAPE = BlockShape(1, 1, 8, 16, "bfloat16")
MODEL = ModelDescription(SHAPE, (LayerGroup(0, 16, (0,)),), b"a model of the benchmark", 1)
SPACE = bytes(16)
SERVER = "from kvcore.cli import main; main()"
COLUMNS = ["what", "blocks", "embedded us", "server us", "ratio", "server p99 us"]


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
    """Seconds to plan a save; then it is reported done, as the workers would."""
    began = time.perf_counter()
    graph = at.manager.launch_save(keys, SPACE, len(keys), units)
    seconds = time.perf_counter() - began
    assert graph is not None, "the host tier has room for all of this"
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("results"))
    args = parser.parse_args()
    report = Report("server", COLUMNS, baseline="the same calls on a manager in this process")
    with tempfile.TemporaryDirectory() as folder:
        tables = {
            "host": {"capacity": "1GiB", "huge_pages": False},
            "server": {"folder": f"{folder}/kv", "deadline_s": 10.0},
        }
        served = {**tables, "server": {**tables["server"], "address": "local"}}
        command = [sys.executable, "-c", SERVER, "server", "--set", "host.capacity=1GiB"]
        server = subprocess.Popen(
            [*command, "--set", f"server.folder={folder}/kv", "--set", "log.level=error"],
            stdout=subprocess.PIPE,
        )
        try:
            assert server.stdout is not None
            server.stdout.readline()
            sides = [side(load_config(None, tables)), side(load_config(None, served))]
            measure(report, sides, args.rounds)
            for each in sides:
                each.close()
        finally:
            server.terminate()
            server.wait()
    report.finish(args.out)


if __name__ == "__main__":
    main()
