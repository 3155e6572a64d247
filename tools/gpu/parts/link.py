"""Rates of the link by piece, what pinning costs others, and a short copy behind a long one.

`benchmarks.link_options` and `benchmarks.transfers`.
"""

from __future__ import annotations

from pathlib import Path

from tools.gpu.machine import gpu_missing
from tools.gpu.parts import Machine
from tools.gpu.parts._tests import benchmark
from tools.gpu.record import Record


def run(record: Record, machine: Machine, scratch: Path) -> None:
    """Measure; without a GPU, let loads pass each other in the CPU's memory and keep no time."""
    if missing := gpu_missing(dict(machine)):
        record.left_out("rates of the link, and pinning", missing)
        small = "--saves", "8", "--mib", "8", "--rounds", "1"
        if benchmark(record, "transfers", scratch, *small):
            record.passed("a short copy behind a long one, and saves that are joined", "all ended")
        return
    for row in benchmark(record, "transfers", scratch, "--device", "cuda").get("rows", ()):
        if row["what"] in ("loads", "fences"):
            record.figure(row["way"], row["ms"], "ms")
    for row in benchmark(record, "link_options", scratch).get("rows", ()):
        if row["to baseline"] is not None:
            record.figure(row["what"], row["to baseline"], "of one contiguous copy")
        else:
            record.figure(row["what"], row["longest wait ms"], "ms, the longest wait of a launch")
            record.figure(row["what"], row["launches/s"], "launches a second meanwhile")
