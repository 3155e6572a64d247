"""Inter-token time beside a running save and a running load (`benchmarks.decode_beside`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.gpu.machine import gpu_missing
from tools.gpu.parts import Machine
from tools.gpu.parts._tests import benchmark
from tools.gpu.record import Record


def run(record: Record, machine: Machine, scratch: Path) -> None:
    """Measure; without a GPU, do so with a tiny shape and keep no time."""
    if missing := gpu_missing(dict(machine)):
        record.left_out("inter-token times", missing)
        report = benchmark(record, "decode_beside", scratch, "--dry-run")
    else:
        report = benchmark(record, "decode_beside", scratch)
        figures(record, report)
    if report and not report["notes"].get("wrong"):
        done = report["notes"]["transfers"]
        counts = ", ".join(f"{count} times {what}" for what, count in done.items())
        record.passed("what was loaded is what was saved", counts)


def figures(record: Record, report: Mapping[str, Any]) -> None:
    """Record median and 99th percentile of a step, and its ratio to a step alone."""
    for row in report.get("rows", ()):
        what = "alone" if row["beside"] == "alone" else f"beside {row['beside']}"
        record.figure(f"{what}, p50", row["p50 ms"], "ms a token")
        record.figure(f"{what}, p99", row["p99 ms"], "ms a token")
        if row["bar"] is not None:
            record.figure(f"{what}, p50", row["p50 to alone"], "times alone", at_most=row["bar"])
