"""What the link to a GPU gives for copies in pieces, and what pinning memory costs others.

    python -m benchmarks.link_options [--gib 4]

Three questions, whose answers are constants of `kvcore.memory`:

    pieces    the rate of the driver's batched copy, by the size of its pieces
    options   the same with other options: sources read in any order, the flag "prefer overlap"
    pinning   how long it takes to register memory that nobody has touched, and memory that threads
              have faulted in before, without pauses and with a pause after each chunk that is as
              long as the chunk took; the longest wait of a launch on the GPU meanwhile, and how
              many launches a second there were

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
from itertools import pairwise, product
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch

from benchmarks._report import Report
from kvcore.memory import pinned
from kvcore.memory.cuda_batch import BatchCopy, batch_copy
from kvcore.memory.device import Device, device_of
from kvcore.memory.hugepages import Pages

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = (
    "question", "what", "GB/s", "to baseline", "seconds", "longest wait ms", "launches/s"
)  # fmt: skip
PIECES = (4 << 10, 8 << 10, 16 << 10, 28 << 10, 64 << 10, 256 << 10, 2 << 20, 32 << 20)
NBYTES = 64 << 20
ORDERS = {"stream": 1, "any": 3}
"""Values of CUmemcpySrcAccessOrder."""
FLAGS = {"": 0, ", prefer overlap": 1}
"""Values of CUmemcpyFlags."""
CHUNKS = (1 << 30, pinned.CHUNK_NBYTES)
THREADS = (0, 1, 8)
"""How many threads fault the memory in before it is registered."""


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


class _Pinned(NamedTuple):
    """A way to register memory: its chunks, threads that fault it in before, huge pages, pauses."""

    chunk: int
    threads: int
    huge: bool
    pauses: bool = False

    def __str__(self) -> str:
        pauses = ", with pauses" * self.pauses
        chunk = f"chunks of {self.chunk >> 20} MiB{pauses}"
        return f"{chunk}, {self.threads} threads before, huge={self.huge}"


def pinning(report: Report, nbytes: int, device: Device, watch: Callable[[], Watch]) -> None:
    """Measure registration of new memory in several ways.

    ``watch`` begins to look at how long launches take.
    """
    ways = [_Pinned(*way) for way in product(CHUNKS, THREADS, (True, False))]
    ways += [_Pinned(CHUNKS[-1], threads, huge=True, pauses=True) for threads in (0, THREADS[-1])]
    for way in ways:
        pages = Pages(nbytes, huge=way.huge)
        watching = watch()
        began = time.perf_counter()
        if way.threads:
            cuts = np.linspace(0, nbytes >> 12, way.threads + 1).astype(int) << 12
            with ThreadPoolExecutor(way.threads) as pool:
                for start, stop in pairwise(cuts):
                    pool.submit(pages.prefault, int(start), int(stop), lambda: True)
        faulted = time.perf_counter() - began
        pinned.CHUNK_NBYTES, default = way.chunk, pinned.CHUNK_NBYTES
        wanted = _Pauses() if way.pauses else _always
        done = pinned.PinnedRange(device, pages.address, nbytes, 1 << 21, wanted=wanted)
        pinned.CHUNK_NBYTES = default
        seconds = time.perf_counter() - began
        seen = watching.stop()
        done.close()
        pages.close()
        report.add(
            question="pinning",
            what=f"{way} (faulted in {faulted:.2f} s)",
            seconds=seconds,
            **{
                "GB/s": nbytes / seconds / 1e9,
                "longest wait ms": seen.longest * 1e3,
                "launches/s": seen.launches / seconds,
            },
        )


def _always() -> bool:
    return True


class _Pauses:
    """Sleeps before each chunk but the first, for as long as the chunk before it took."""

    def __init__(self) -> None:
        self._ended: float | None = None

    def __call__(self) -> bool:
        now = time.perf_counter()
        if self._ended is not None:
            time.sleep(now - self._ended)
        self._ended = time.perf_counter()
        return True


class Seen(NamedTuple):
    """The longest time in seconds that a launch took to be made and to end, and how many ended."""

    longest: float
    launches: int


class Watch(Protocol):
    """Launches something again and again until `stop`."""

    def stop(self) -> Seen: ...


class _Launches:
    """A small kernel, launched again when it has ended."""

    def __init__(self) -> None:
        self._stopped = threading.Event()
        self._seen = Seen(0.0, 0)
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
                longest, launches = self._seen
                self._seen = Seen(max(longest, time.perf_counter() - began), launches + 1)

    def stop(self) -> Seen:
        self._stopped.set()
        self._thread.join()
        return self._seen


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
        device = device_of(torch.device("cuda"))
        pinning(report, int(options.gib * (1 << 30)), device, _Launches)
    finally:  # keep what was measured
        report.finish(options.out, draw)
    return 0


if __name__ == "__main__":
    sys.exit(main())
