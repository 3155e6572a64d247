"""What tensor-parallel ranks pay to stay in step in a blend: one agreement before each layer.

    python -m benchmarks.blend_ranks [--ranks 2 4] [--rounds 40] [--calls 50]

Ranks are processes of this machine with a Gloo group, the CPU group that vLLM and SGLang have. An
agreement is `InStep.meet` through `TensorParallelLayers`, as in a blend. The baseline is a bare
``torch.distributed.all_reduce`` of one number in a tensor that exists already. Beside them are the
baseline once more, which shows how much two equal ways differ; an all_reduce of a new tensor each
time; and the agreement without its collective, which is what kvcore adds. The ways run in
another order in each round. A ratio is the median over rounds of the ratio in each round.

"us" is the time of a call as the slowest rank sees it. "CPU us" is the CPU time that a call takes
of a rank's process, Gloo's threads included. On cores that others use too, the first holds much
waiting for a core, and the second does not.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed
import torch.multiprocessing

from benchmarks._report import Report
from kvcore.connector.engine_layers import TensorParallelLayers
from kvcore.fusion.decoder import Attend, HiddenState, InStep
from kvcore.fusion.plan import LayerKV

COLUMNS = ("ranks", "way", "us", "CPU us", "to all_reduce", "CPU to all_reduce")
BASELINE = "all_reduce"
AGAIN, NEW = "all_reduce again", "all_reduce, new tensor"
AGREEMENT, ALONE = "agreement", "agreement alone"
WAYS = (BASELINE, AGAIN, NEW, AGREEMENT, ALONE)
WARM_UP = 20
MANY = 20
"""Agreements in one call of the way that has no collective: it is too short to be timed once."""


class Layers(TensorParallelLayers):
    """Layers that only agree."""

    def serving(self, served: Any) -> Any:
        raise NotImplementedError

    def write(self, layer: int, kv: LayerKV, slots: torch.Tensor) -> None:
        raise NotImplementedError

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def run(
        self, layer: int, positions: torch.Tensor, state: HiddenState, attend: Attend
    ) -> HiddenState:
        raise NotImplementedError


def calls() -> dict[str, Callable[[], object]]:
    """Return the call of each way."""
    group = torch.distributed.group.WORLD
    number = torch.zeros(1, dtype=torch.int64)
    engine = SimpleNamespace(get_tp_group=lambda: SimpleNamespace(cpu_group=group))
    meet = InStep(Layers(engine)).meet

    def reduce() -> None:
        torch.distributed.all_reduce(number, group=group)

    def new() -> None:
        torch.distributed.all_reduce(torch.zeros(1, dtype=torch.int64), group=group)

    def alone() -> None:
        with mock.patch.object(torch.distributed, "all_reduce", lambda *_, **__: None):  # noqa: PT008 - a mock is slow
            for _ in range(MANY):
                meet()

    return {BASELINE: reduce, AGAIN: reduce, NEW: new, AGREEMENT: meet, ALONE: alone}


def rank(number: int, ranks: int, folder: str, rounds: int, count: int) -> None:
    """Run one rank. Rank 0 writes the times: a row of (seconds, CPU seconds) for each way."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=number, world_size=ranks
    )
    made = calls()
    for call in made.values():
        for _ in range(WARM_UP):
            call()
    rows: list[list[list[float]]] = []
    for turn in range(rounds):
        row = [[0.0, 0.0] for _ in WAYS]
        for way in random.Random(turn).sample(range(len(WAYS)), len(WAYS)):  # alike on all ranks
            name = WAYS[way]
            call, times = made[name], count * (MANY if name == ALONE else 1)
            torch.distributed.barrier()
            started, used = time.perf_counter(), time.process_time()
            for _ in range(count):
                call()
            row[way] = [
                (time.perf_counter() - started) / times,
                (time.process_time() - used) / times,
            ]
        rows.append(row)
    found: list[Any] = [None] * ranks
    torch.distributed.all_gather_object(found, rows)
    if not number:
        every = torch.tensor(found)  # [ranks, rounds, ways, 2]
        slowest, spent = every[..., 0].amax(dim=0), every[..., 1].mean(dim=0)
        torch.save((slowest, spent), f"{folder}/times")
    torch.distributed.destroy_process_group()


def measure(report: Report, ranks: int, rounds: int, count: int) -> None:
    """Report a row for each way with so many ranks."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(  # type: ignore[attr-defined,no-untyped-call]  # not typed
            rank, (ranks, folder, rounds, count), nprocs=ranks
        )
        slowest, spent = torch.load(Path(folder) / "times")
    for place, way in enumerate(WAYS):
        numbers = [
            1e6 * statistics.median(slowest[:, place].tolist()),
            1e6 * statistics.median(spent[:, place].tolist()),
            statistics.median((slowest[:, place] / slowest[:, 0]).tolist()),
            statistics.median((spent[:, place] / spent[:, 0]).tolist()),
        ]
        report.add(**dict(zip(COLUMNS, (ranks, way, *(round(x, 3) for x in numbers)), strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--calls", type=int, default=50)
    options = parser.parse_args()
    report = Report(
        "blend_ranks",
        COLUMNS,
        baseline="torch.distributed.all_reduce of one int64 over Gloo, the tensor exists already",
    )
    for ranks in options.ranks:
        measure(report, ranks, options.rounds, options.calls)
    report.finish()


if __name__ == "__main__":
    main()
