"""What the link to a GPU gives for copies in pieces, and what pinning memory costs others.

    python -m benchmarks.link_options [--gib 4]

Three questions, whose answers are constants of `kvcore.memory`:

    pieces    the rate of the driver's batched copy, by the size of its pieces
    options   the same with other options: sources read in any order, the flag "prefer overlap"
    pinning   how long it takes to register memory that nobody has touched, and memory that threads
              have faulted in before; the longest wait of a launch on the GPU meanwhile

It needs a GPU. The baseline of a rate is one contiguous `cudaMemcpyAsync` of as many bytes.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks._report import Report
from kvcore.memory import pinned
from kvcore.memory.cuda_batch import BatchCopy, batch_copy
from kvcore.memory.device import device_of
from kvcore.memory.hugepages import Pages

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = ("question", "what", "GB/s", "to baseline", "seconds", "longest wait ms")
PIECES = (4 << 10, 8 << 10, 16 << 10, 28 << 10, 64 << 10, 256 << 10, 2 << 20, 32 << 20)
NBYTES = 64 << 20
ORDERS = {"stream": 1, "any": 3}
"""Values of CUmemcpySrcAccessOrder."""
FLAGS = {"": 0, ", prefer overlap": 1}
"""Values of CUmemcpyFlags."""


def seconds_of(way: Callable[[], object], rounds: int = 10) -> float:
    """Return the median seconds of work on the current stream."""
    way()
    taken = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        way()
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end) / 1e3)
    return median(taken)


def rates(report: Report) -> None:
    """Measure pieces and options in both directions."""
    size = 4 * NBYTES
    here = torch.ones(size, dtype=torch.uint8, device="cuda")
    host = torch.ones(size, dtype=torch.uint8, pin_memory=True)
    batch = batch_copy()
    if batch is None:
        raise RuntimeError("the driver has no batched copy")
    stream = int(torch.cuda.current_stream().cuda_stream)
    for to_host in (True, False):
        target, source = (host, here) if to_host else (here, host)
        base = NBYTES / seconds_of(
            lambda t=target, s=source: t[:NBYTES].copy_(s[:NBYTES], non_blocking=True)
        )
        way = "to host" if to_host else "to device"
        report.add(question="baseline", what=way, **{"GB/s": base / 1e9, "to baseline": 1.0})
        for piece in PIECES:
            places = np.random.default_rng(0).permutation(size // piece)[: NBYTES // piece]
            a = target.data_ptr() + np.sort(places) * piece
            b = source.data_ptr() + places * piece
            sizes = np.full(len(places), piece)
            for order, number in ORDERS.items():
                for flag, bits in FLAGS.items():
                    plain = number == 1 and not bits
                    if not plain and piece not in (28 << 10, 2 << 20, 32 << 20):
                        continue
                    one = BatchCopy(batch._function)
                    one._attributes.order, one._attributes.flags = number, bits
                    code = one(a, b, sizes, stream)
                    if code:
                        print(f"{way}, {order}{flag}: error {code}", flush=True)
                        continue
                    rate = NBYTES / seconds_of(partial(one, a, b, sizes, stream))
                    report.add(
                        question="pieces" if plain else "options",
                        what=f"{way}, {piece >> 10} KiB{'' if plain else f', {order}{flag}'}",
                        **{"GB/s": rate / 1e9, "to baseline": rate / base},
                    )


def pinning(report: Report, nbytes: int) -> None:
    """Measure registration of new memory, in chunks of two sizes, faulted in before or not."""
    device = device_of(torch.device("cuda"))
    for chunk in (1 << 30, 128 << 20):
        for threads in (0, 1, 8):
            for huge in (True, False):
                pages = Pages(nbytes, huge=huge)
                watch = _Watch()
                began = time.perf_counter()
                if threads:
                    cuts = np.linspace(0, nbytes >> 12, threads + 1).astype(int) << 12
                    with ThreadPoolExecutor(threads) as pool:
                        for start, stop in pairwise(cuts):
                            pool.submit(pages.prefault, int(start), int(stop), lambda: True)
                faulted = time.perf_counter() - began
                pinned.CHUNK_NBYTES = chunk
                done = pinned.PinnedRange(device, pages.address, nbytes, 1 << 21)
                seconds = time.perf_counter() - began
                longest = watch.stop()
                done.close()
                pages.close()
                what = f"chunks of {chunk >> 20} MiB, {threads} threads before, huge={huge}"
                report.add(
                    question="pinning", what=f"{what} (faulted in {faulted:.2f} s)",
                    seconds=seconds, **{"GB/s": nbytes / seconds / 1e9,
                    "longest wait ms": longest * 1e3},
                )  # fmt: skip


class _Watch:
    """The longest time that a small kernel took to be launched and to end, until `stop`."""

    def __init__(self) -> None:
        self._stopped = threading.Event()
        self._longest = 0.0
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        time.sleep(0.05)

    def _look(self) -> None:
        one = torch.zeros(1, device="cuda")
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            one.add_(1)
            stream.synchronize()
            while not self._stopped.is_set():
                began = time.perf_counter()
                one.add_(1)
                stream.synchronize()
                self._longest = max(self._longest, time.perf_counter() - began)

    def stop(self) -> float:
        self._stopped.set()
        self._thread.join()
        return self._longest


def draw(figure: Figure, rows: Sequence[dict[str, Any]]) -> None:
    """Plot the share of the baseline's rate, by pieces and options."""
    axes = figure.subplots()
    shown = [row for row in rows if row.get("to baseline")]
    axes.barh([row["what"] for row in shown], [row["to baseline"] for row in shown])
    axes.tick_params(axis="y", labelsize="xx-small")
    axes.set_xlabel("of one contiguous copy")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        prog="python -m benchmarks.link_options",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--gib", type=float, default=4.0, help="GiB that are pinned")
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args(arguments)
    os.environ.setdefault("COLUMNS", "120")
    if not torch.cuda.is_available():
        print("torch sees no GPU", file=sys.stderr)
        return 2
    notes = {"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__}
    baseline = "one contiguous copy of as many bytes, pinned"
    report = Report("link_options", COLUMNS, baseline, notes)
    try:
        with device_of(torch.device("cuda")).stream().issuing():
            rates(report)
        pinning(report, int(options.gib * (1 << 30)))
    finally:  # keep what was measured
        report.finish(options.out, draw)
    return 0


if __name__ == "__main__":
    sys.exit(main())
