"""The rate of saves and loads beside a prefill (`benchmarks.prefill_beside`)."""

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
        record.left_out("rates beside a prefill", missing)
        report = benchmark(record, "prefill_beside", scratch, "--dry-run", "--seconds", "0.05")
    else:
        report = benchmark(record, "prefill_beside", scratch, "--seconds", "0.7")
        figures(record, report)
    if report and not report["notes"].get("wrong"):
        ways = {row["way"] for row in report["rows"]}
        record.passed("what was loaded is what was saved", f"{len(ways)} ways")


def figures(record: Record, report: Mapping[str, Any]) -> None:
    """Record each way's rate alone and beside a prefill."""
    for row in report.get("rows", ()):
        what = f"{row['way']}, {row['what']}"
        record.figure(f"{what}, alone", row["GB/s alone"], "GB/s")
        record.figure(f"{what}, beside a prefill", row["GB/s beside"], "GB/s")
        record.figure(f"a prefill step beside it ({what})", row["step to alone"], "times alone")
