"""The worker's tests under compute-sanitizer: no access out of bounds, no race in shared memory."""

from __future__ import annotations

from pathlib import Path

from tools.gpu.machine import gpu_missing
from tools.gpu.parts import Machine
from tools.gpu.parts._tests import pytest_missing, run_tests
from tools.gpu.record import Record

CASES = {
    "memcheck": "come_back and LBNHC and host",
    "racecheck": "sums_of_device_memory and triton",
}
"""The tests for each tool, by pytest's -k: under it a kernel takes many times as long."""
_FOUND = 86
"""Exit status if the tool found something."""


def run(record: Record, machine: Machine, scratch: Path) -> None:
    """Run some of tests/gpu under each tool, if the machine has a GPU and the tool."""
    missing = gpu_missing(dict(machine)) or pytest_missing()
    tool = machine.get("sanitizer")
    if not missing and not tool:
        missing = "compute-sanitizer is not on the path"
    for name, cases in CASES.items():
        what = f"tests/gpu under {name}"
        if missing:
            record.left_out(what, missing)
            continue
        within = [
            str(tool), "--tool", name, "--target-processes", "all", "--error-exitcode",
            str(_FOUND), "--print-limit", "20",
        ]  # fmt: skip
        # With torch's cache, memory that was freed stays allocated for the tool.
        env = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        run_tests(record, what, scratch, "tests/gpu", "-k", cases, env=env, within=within)
