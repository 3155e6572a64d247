"""What many small saves cost the host, and how long a short copy waits behind a long one.

    python -m benchmarks.transfers [--saves 256] [--rounds 7] [--mib 1024] [--device cuda]

    saves    saves of one block each, as those of one step: joined, as the transfer engine does it,
             beside one by one, and beside one save of all the blocks. Measured is the time on a
             core of all threads of the process. The device does nothing.
    loads    a load of one block that comes just after a load of --mib MiB, whose copy is cut as
             the leader cuts it, and uncut. Measured is the time until each has ended. The pages are
             on --device: by default in the CPU's memory, so that the copies are real. A GPU's link
             is several times as fast.
    fences   the same with saves, of which the short one is waited for, as by a step that gives its
             pages to another request. Both are saves of one step.

Every ratio is of two medians of the same run, whose rounds alternate.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks._report import Report
from benchmarks.copies import IdleDevice, NoKernels
from kvcore.memory.arena import HostArena
from kvcore.memory.copy.link import LinkOps
from kvcore.memory.copy.native import NativeOps
from kvcore.memory.device import device_of, serve_devices
from kvcore.memory.device_group import DeviceGroup
from kvcore.memory.layout import KVView, from_strides
from kvcore.model.shape import BlockShape
from kvcore.transfer.graph import COPY_BYTES, TransferGraph, UnitTable
from kvcore.transfer.plan import Chain, build_load, build_save
from kvcore.worker import EnginePages, KVWorker, WorkerLimits

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from kvcore.memory.copy.base import DeviceOps

COLUMNS = ("what", "way", "ms", "of the baseline")
WAIT_S = 60.0
BEGUN_S = 0.002
"""Seconds after which the copy of a long load has begun."""
TOKENS = 16


@contextmanager
def worker(shape: BlockShape, blocks: int, device: str, ops: DeviceOps) -> Iterator[KVWorker]:
    """Yield a worker with ``blocks`` pages and slots, each of one block."""
    size = (blocks, shape.kv_heads, TOKENS, sum(shape.dims()))
    dtype = getattr(torch, shape.dtype)
    tensors = [torch.zeros(size, dtype=dtype, device=device) for _ in range(shape.layers)]
    view = KVView(from_strides(tensors, shape), tensors)
    arena = HostArena(shape, blocks, pin=device_of(torch.device(device)))
    made = KVWorker(
        arena=arena,
        arena_view=KVView(arena.layout(), [arena.tensor().fill_(1)]),
        ops=ops,
        pages=EnginePages(
            [DeviceGroup(tuple(range(shape.layers)), view)], device=torch.device(device)
        ),
        limits=WorkerLimits(),
    )
    try:
        yield made
    finally:
        made.close()


class Graphs:
    """Plans graphs over blocks, each of whose page and slot have the same number."""

    def __init__(self) -> None:
        self._ids = itertools.count(1)

    def save(self, blocks: Sequence[int], copy_rows: int | None = None) -> TransferGraph:
        """Return a save of these blocks, cut into copies of ``copy_rows``."""
        graph = build_save(
            next(self._ids), _chain(blocks), blocks, None, batch_rows=16, copy_rows=copy_rows
        )
        return graph.bind(_units(blocks))

    def load(self, blocks: Sequence[int], copy_rows: int | None) -> TransferGraph:
        """Return a load of these blocks, cut into copies of ``copy_rows``."""
        graph = build_load(
            next(self._ids), _chain(blocks), blocks, (), batch_rows=16, copy_rows=copy_rows
        )
        return graph.bind(_units(blocks))


def _chain(blocks: Sequence[int]) -> Chain:
    return Chain(b"n" * 16, b"p" * 16, tuple(i.to_bytes(16, "big") for i in blocks))


def _units(blocks: Sequence[int]) -> list[UnitTable]:
    return [UnitTable.of(np.array(blocks, dtype=np.int64)[:, None], TOKENS)]


def medians(ways: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Return the median of each way in milliseconds, after one round that is not counted."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            taken = way()
            if number:
                found[name].append(taken * 1e3)
    return {name: statistics.median(taken) for name, taken in found.items()}


def saves(count: int, rounds: int) -> dict[str, float]:
    """Return the milliseconds on a core for ``count`` blocks, by way."""
    undo = serve_devices("meta", IdleDevice)
    shape = BlockShape(32, 8, 128, TOKENS, "bfloat16")
    graphs = Graphs()
    with worker(shape, count, "meta", LinkOps(NoKernels(), NoKernels())) as rank:

        def run(sizes: int, *, together: bool) -> float:
            made = [graphs.save(range(first, first + sizes)) for first in range(0, count, sizes)]
            wave = rank.wave() if together else None
            began, after = time.process_time(), rank.mark()
            for graph in made:
                rank.submit(graph, wave=wave, after=after)
            for graph in made:
                assert rank.engine.wait(graph.graph_id, WAIT_S)
            taken = time.process_time() - began
            assert not any(report.failed for report in rank.poll())
            return taken

        found = medians(
            {
                "one by one": lambda: run(1, together=False),
                "joined": lambda: run(1, together=True),
                "one save of all": lambda: run(count, together=False),
            },
            rounds,
        )
    undo()
    return found


def waits(nbytes: int, rounds: int, device: str, *, save: bool) -> dict[str, float]:
    """Return the milliseconds until a short copy and the long one before it have ended.

    Loads, of which no step waits for either, or saves of one step, of which the short one is
    waited for.
    """
    shape = BlockShape(32, 8, 128, TOKENS, "bfloat16")
    blocks = max(2, nbytes // shape.nbytes)
    graphs = Graphs()
    found: dict[str, list[float]] = {}
    ops = NativeOps() if device == "cpu" else LinkOps()
    with worker(shape, blocks + 1, device, ops) as rank:
        for number in range(rounds + 1):
            for way, rows in (("uncut", None), ("cut", COPY_BYTES // shape.nbytes)):
                plan = graphs.save if save else graphs.load
                long, short = plan(range(blocks), rows), plan([blocks], rows)
                together = rank.wave() if save else None
                began = time.perf_counter()
                assert not rank.submit(long, together)
                time.sleep(BEGUN_S)  # else the short one is first in both ways
                assert not rank.submit(short, together)
                for name, graph in (("short", short), ("long", long)):
                    if save:
                        rank.follow(graph.graph_id)
                    assert rank.engine.wait(graph.graph_id, WAIT_S)
                    if number:
                        since = began + (BEGUN_S if name == "short" else 0)
                        taken = (time.perf_counter() - since) * 1e3
                        what = f"{name} {'save' if save else 'load'}, {way}"
                        found.setdefault(what, []).append(taken)
                assert not any(report.failed for report in rank.poll())
    return {name: statistics.median(taken) for name, taken in found.items()}


def draw(figure: Figure, rows: Sequence[Mapping[str, Any]]) -> None:
    """Plot the milliseconds of each way."""
    axes = figure.subplots()
    axes.barh([f"{row['what']}: {row['way']}" for row in rows], [row["ms"] for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("ms")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        prog="python -m benchmarks.transfers",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--saves", type=int, default=256, help="saves of one block")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mib", type=int, default=1024, help="MiB of the long copy")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the waits")
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    notes = {
        "saves": options.saves,
        "rounds": options.rounds,
        "MiB": options.mib,
        "device": options.device,
    }
    report = Report("transfers", COLUMNS, "saves one by one; copies that are uncut", notes)
    found = saves(options.saves, options.rounds)
    for way, ms in found.items():
        ratio = ms / found["one by one"]
        report.add(what="saves, on a core", way=way, ms=ms, **{"of the baseline": ratio})
    for what in ("loads", "fences"):
        found = waits(options.mib << 20, options.rounds, options.device, save=what == "fences")
        for way, ms in found.items():
            ratio = ms / found[f"{way.split(',')[0]}, uncut"]
            report.add(what=what, way=way, ms=ms, **{"of the baseline": ratio})
    report.finish(options.out, draw)
    return 0


if __name__ == "__main__":
    sys.exit(main())
