"""tests/gpu: the worker over device memory, its pinned arena and its streams."""

from __future__ import annotations

import sys
from pathlib import Path

from tools.gpu.machine import gpu_missing
from tools.gpu.parts import Machine
from tools.gpu.parts._tests import call, pytest_missing, run_tests
from tools.gpu.record import Record

WHAT = "tests/gpu"


def run(record: Record, machine: Machine, scratch: Path) -> None:
    """Run the tests; without a GPU, import and collect them."""
    if missing := pytest_missing():
        record.left_out(WHAT, missing)
        return
    if missing := gpu_missing(dict(machine)):
        record.left_out(WHAT, missing)
        command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider"]
        if code := call([*command, WHAT]):
            record.failed("tests/gpu, collected", f"exit status {code}")
        else:
            record.passed("tests/gpu, collected", "every module imports")
        return
    run_tests(record, WHAT, scratch, WHAT, "-s")
