"""Rates of the link by piece, and what pinning costs others (`benchmarks.link_options`)."""

from __future__ import annotations

from pathlib import Path

from tools.gpu.machine import gpu_missing
from tools.gpu.parts import Machine
from tools.gpu.parts._tests import benchmark
from tools.gpu.record import Record


def run(record: Record, machine: Machine, scratch: Path) -> None:
    """Measure, if there is a GPU."""
    if missing := gpu_missing(dict(machine)):
        record.left_out("rates of the link, and pinning", missing)
        return
    for row in benchmark(record, "link_options", scratch).get("rows", ()):
        if row["to baseline"] is not None:
            record.figure(row["what"], row["to baseline"], "of one contiguous copy")
        else:
            record.figure(row["what"], row["longest wait ms"], "ms, the longest wait of a launch")
