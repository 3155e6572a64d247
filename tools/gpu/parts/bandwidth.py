"""Copies and kernels beside the device's own copy and the link's (`benchmarks.kernels`)."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.gpu.machine import gpu_missing
from tools.gpu.parts import Machine
from tools.gpu.parts._tests import benchmark
from tools.gpu.record import Record

FLOORS = {
    "copy": "of the device's own copy",
    "to host": "of pinned cudaMemcpy",
    "to device": "of pinned cudaMemcpy",
}


def run(record: Record, machine: Machine, scratch: Path) -> None:
    """Measure at the largest size; without a GPU, check every way in Triton's interpreter."""
    if importlib.util.find_spec("triton") is None:
        record.left_out("benchmarks.kernels", "not installed: triton")
        return
    if missing := gpu_missing(dict(machine)):
        record.left_out("rates of copies and kernels", missing)
        report = benchmark(record, "kernels", scratch, "--dry-run", "--gib", "1e-6")
    else:
        report = benchmark(record, "kernels", scratch, "--rounds", "10")
        figures(record, report)
    if report and not report["notes"].get("wrong"):
        ways = {(row["op"], row["way"]) for row in report["rows"]}
        record.passed("results of all ways compared", f"{len(ways)} ways agree with torch's")


def figures(record: Record, report: Mapping[str, Any]) -> None:
    """Record the floors, and the largest size of each op that has a bar."""
    for name, rate in report.get("notes", {}).get("floors", {}).items():
        unit = "TFLOP/s" if name == "matmul" or name.startswith("flash") else "GB/s"
        record.figure(f"floor: {name}", rate / (1e12 if unit == "TFLOP/s" else 1e9), unit)
    for row in largest(report.get("rows", ())):
        floor = "to host" if "to the host" in row["op"] else "to device"
        of = FLOORS["copy"] if "host" not in row["op"] else FLOORS[floor]
        if row["TFLOP/s"] is not None:
            of = "of FlashAttention"
        record.figure(f"{row['op']}, {row['size']}", row["of floor"], of, at_least=row["bar"])


def largest(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the last row of each op that has a bar; sizes ascend within an op."""
    return list({row["op"]: row for row in rows if row["bar"] is not None}.values())
