"""The reference engine end to end, in Llama-3-8B's shape (`benchmarks.end_to_end`)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.gpu.machine import gpu_missing
from tools.gpu.parts import Machine
from tools.gpu.parts._tests import benchmark
from tools.gpu.record import Record

BLEND, BAR_TOKENS, BAR = "blend at 15%", 16384, 4.0
"""The way, the length of its prompt, and how many times sooner than cold its first token comes."""


def run(record: Record, machine: Machine, scratch: Path) -> None:
    """Measure cold, host, disk and blend; without a GPU, do so with a tiny shape."""
    if missing := gpu_missing(dict(machine)):
        record.left_out("times in Llama-3-8B's shape", missing)
        report = benchmark(record, "end_to_end", scratch, "--dry-run", "--rounds", "1")
    else:
        arguments = ["--rounds", "3", "--tokens", "4096", "16384", "32768", "--disk", str(scratch)]
        if not reads_directly(scratch):
            record.left_out("reads that bypass the page cache", f"no direct I/O in {scratch}")
            arguments.append("--buffered")
        report = benchmark(record, "end_to_end", scratch, *arguments)
        figures(record, report)
    if report and not report["notes"].get("wrong"):
        ways = {row["way"] for row in report["rows"]}
        record.passed("tokens and reuse of all ways compared", f"{len(ways)} ways")


def reads_directly(folder: Path) -> bool:
    """Return True if the folder's file system has direct I/O."""
    path = folder / "direct"
    path.write_bytes(bytes(4096))
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return False
    finally:
        path.unlink()
    return True


def figures(record: Record, report: Mapping[str, Any]) -> None:
    """Record the time of every way, and how many times sooner than cold it answers."""
    for row in report.get("rows", ()):
        what = f"{row['way']}, {row['tokens']} tokens"
        record.figure(what, row["ms"], "ms to the first token")
        if row["way"] != "cold":
            with_bar = row["way"] == BLEND and row["tokens"] == BAR_TOKENS
            bar = BAR if with_bar else None
            record.figure(what, 1 / row["to cold"], "times sooner than cold", at_least=bar)
