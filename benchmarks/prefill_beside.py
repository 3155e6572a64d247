"""How fast kvcore's copies are beside a prefill on a GPU, and what the prefill pays for them.

    python -m benchmarks.prefill_beside [--rows 8192] [--seconds 2]

A prefill step does the matrix products of every layer of Llama-3-8B's shape for ``--rows`` tokens.
Its kernels fill the GPU, and the next step is queued before the last one has ended, as an engine
with asynchronous scheduling queues it. A save gathers pages, and a load scatters them, with a
kernel of the same GPU: if it waits behind the prefill's kernels, the link is idle meanwhile. The
ways:

    memcpy        one large `cudaMemcpyAsync`, contiguous and pinned: what the link can give
    4 x 32 MiB    kvcore's worker, pages of the reference engine to and from host memory, with so
                  many slots of its staging, of so many bytes

`--dry-run` does all of it on a CPU with a tiny shape. It tests the script, and its times mean
nothing. The exit status is 1 if a transfer changed a byte.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import torch
from torch.nn import functional

from benchmarks._report import Report, Row
from benchmarks.decode_beside import DRY, FULL, LOAD, SAVE, Scale, Transfers
from kvcore.memory.copy import link
from kvcore.testing.engine import Llama, random_llama

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = (
    "way", "what", "GB/s alone", "GB/s beside", "beside to alone", "step ms", "step to alone",
)  # fmt: skip
BLOCKS = 1024
"""Blocks of a transfer: 2 GiB."""
AHEAD = 2
"""Steps that are queued on the GPU."""


class Way(NamedTuple):
    """kvcore with so many slots in a staging, of so many MiB."""

    slots: int
    mib: int

    def __str__(self) -> str:
        return f"{self.slots} x {self.mib} MiB"


WAYS = (Way(2, 64), Way(1, 32), Way(2, 128))


class Prefill:
    """Prefill steps of a model over ``rows`` tokens, without attention."""

    def __init__(self, model: Llama, rows: int) -> None:
        self._model = model
        hidden = model.layers[0].q.shape[1]
        self._rows = torch.randn(rows, hidden, device=model.device, dtype=model.dtype)
        self._queued: list[tuple[Any, Any]] = []
        # Of its own: kvcore's copies wait for what is queued on the stream that asks for them.
        self._issuing = (
            partial(torch.cuda.stream, torch.cuda.Stream(model.device))  # type: ignore[no-untyped-call]
            if model.device.type == "cuda"
            else nullcontext
        )
        self.steps: list[float] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Queue steps from a thread while this block runs, and wait for all of them at its end."""
        stopped = threading.Event()

        def run() -> None:
            with torch.no_grad(), self._issuing():
                while not stopped.is_set():
                    self._queue()
                while self._queued:
                    self._take()

        self.steps = []
        thread = threading.Thread(target=run)
        thread.start()
        try:
            while not self.steps:  # the GPU is busy from here on
                time.sleep(1e-3)
            yield
        finally:
            stopped.set()
            thread.join()

    def _queue(self) -> None:
        """Queue a step. If more than `AHEAD` are on the GPU, wait for the oldest."""
        if self._model.device.type != "cuda":
            began = time.perf_counter()
            self._compute()
            self.steps.append(time.perf_counter() - began)
            return
        start, end = (torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(2))
        start.record()
        self._compute()
        end.record()
        self._queued.append((start, end))
        if len(self._queued) > AHEAD:
            self._take()

    def _take(self) -> None:
        start, end = self._queued.pop(0)
        end.synchronize()
        self.steps.append(start.elapsed_time(end) / 1e3)

    def _compute(self) -> None:
        rows = self._rows
        for layer in self._model.layers:
            normal = functional.rms_norm(rows, layer.norm.shape, layer.norm)
            mixed = normal @ layer.q.T + (normal @ layer.k.T).sum() + (normal @ layer.v.T).sum()
            normal = functional.rms_norm(rows, layer.mlp_norm.shape, layer.mlp_norm)
            inner = functional.silu(normal @ layer.gate.T) * (normal @ layer.up.T)
            rows = rows + mixed @ layer.o.T + inner @ layer.down.T


class Copies(NamedTuple):
    """Copies of ``nbytes`` bytes: ``start`` begins one, ``ended`` says whether it is done."""

    nbytes: int
    start: Callable[[], object]
    ended: Callable[[], bool]


def rate(copies: Copies, seconds: float) -> float:
    """Return bytes a second of copies one after another: the median."""
    taken: list[float] = []
    limit = time.monotonic() + seconds
    while time.monotonic() < limit or len(taken) < 2:
        began = time.perf_counter()
        copies.start()
        while not copies.ended():
            time.sleep(1e-4)
        taken.append(time.perf_counter() - began)
    return copies.nbytes / median(taken)


def memcpy(device: torch.device, nbytes: int, to_host: bool) -> Copies:
    """Return plain copies of pinned memory, on a stream of their own."""
    here = torch.ones(nbytes, dtype=torch.uint8, device=device)
    host = torch.ones(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target, source = (host, here) if to_host else (here, host)
    if device.type != "cuda":
        return Copies(nbytes, partial(target.copy_, source), lambda: True)
    stream, event = torch.cuda.Stream(device), torch.cuda.Event()

    def start() -> None:
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            event.record()

    return Copies(nbytes, start, event.query)


@contextmanager
def configured(way: Way) -> Iterator[None]:
    """Let kvcore's copies be made as ``way`` says, for engines that are built in this block."""
    with (
        mock.patch.object(link, "SLOTS", way.slots),
        mock.patch.object(link, "SLOT_BYTES", (way.mib << 20,)),
    ):
        yield


def measured(
    copies: Copies, prefill: Prefill, alone_s: float, seconds: float
) -> tuple[float, float, float, float]:
    """Return rates alone and beside, seconds of a step beside, and its ratio to one alone."""
    alone = rate(copies, seconds)
    with prefill.running():
        beside = rate(copies, seconds)
    step = median(prefill.steps)
    return alone, beside, step, step / alone_s


def run(scale: Scale, rows: int, seconds: float, device: torch.device, out: Path) -> int:
    """Measure and write the report. Return 1 if something was wrong, else 0."""
    model = random_llama(**scale.shape, device=str(device), dtype=scale.dtype)
    notes: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else "none",
        "torch": torch.__version__,
        "rows": rows,
        "blocks": scale.blocks,
    }
    report = Report("prefill_beside", COLUMNS, "the same copies with no prefill beside", notes)
    wrong: list[str] = []

    def add(way: str, what: str, found: tuple[float, float, float, float]) -> None:
        alone, beside, step, to_alone = found
        row: Row = {
            "way": way, "what": what, "GB/s alone": alone / 1e9, "GB/s beside": beside / 1e9,
            "beside to alone": beside / alone, "step ms": step * 1e3, "step to alone": to_alone,
        }  # fmt: skip
        report.add(**row)
        print({name: value if isinstance(value, str) else round(value, 3)
               for name, value in row.items()}, flush=True)  # fmt: skip

    with torch.no_grad():
        prefill = Prefill(model, rows)
        with prefill.running():
            time.sleep(seconds)
        alone_s = median(prefill.steps)
        notes["step alone ms"] = alone_s * 1e3
        try:
            for what in (SAVE, LOAD):
                copies = memcpy(device, scale.blocks * (1 << 21 if device.type == "cuda" else 64),
                                what == SAVE)  # fmt: skip
                add("memcpy", what, measured(copies, prefill, alone_s, seconds))
                del copies
            for way in WAYS:
                with configured(way), Transfers(model, scale, "auto") as transfers:
                    nbytes = scale.blocks * model.block_shape(16).nbytes
                    for what in (SAVE, LOAD):  # compiles kernels and touches memory
                        transfers.start(what)
                        transfers.end()
                    for what in (SAVE, LOAD):
                        start = partial(transfers.start, what)
                        copies = Copies(nbytes, start, lambda: not transfers.in_flight)
                        add(str(way), what, measured(copies, prefill, alone_s, seconds))
                    transfers.end()
                    if not transfers.intact():
                        wrong.append(f"{way}: what was loaded is not what was saved")
        finally:  # keep what was measured before a way failed
            report.notes["wrong"] = wrong
            report.finish(out, draw)
    print(f"{len(wrong)} wrong", *wrong, sep="\n  ")
    return int(bool(wrong))


def draw(figure: Figure, rows: Sequence[Row]) -> None:
    """Plot the rate alone and beside a prefill, of every way."""
    axes = figure.subplots()
    names = [f"{row['way']}, {row['what']}" for row in rows]
    for column in ("GB/s alone", "GB/s beside"):
        axes.plot([row[column] for row in rows], names, "o", label=column)
    axes.set_xlim(left=0)
    axes.legend()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        prog="python -m benchmarks.prefill_beside",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rows", type=int, default=8192, help="tokens of a prefill step")
    parser.add_argument("--seconds", type=float, default=1.5, help="of each measurement")
    parser.add_argument("--dry-run", action="store_true", help="run on a CPU; times mean nothing")
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args(arguments)
    os.environ.setdefault("COLUMNS", "120")
    if not options.dry_run and not torch.cuda.is_available():
        print("torch sees no GPU: `--dry-run` tests the script on a CPU", file=sys.stderr)
        return 2
    if options.dry_run:
        torch.set_num_threads(1)
        return run(DRY, 8, 0.05, torch.device("cpu"), options.out)
    scale = FULL._replace(blocks=BLOCKS)
    return run(scale, options.rows, options.seconds, torch.device("cuda"), options.out)


if __name__ == "__main__":
    sys.exit(main())
