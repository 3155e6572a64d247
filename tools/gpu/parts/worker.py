"""tests/gpu: the worker over device memory, its pinned arena and its streams."""

from __future__ import annotations

from pathlib import Path

from tools.gpu.machine import gpu_missing
from tools.gpu.parts import Machine
from tools.gpu.parts._tests import pytest_missing, run_tests
from tools.gpu.record import Record

WHAT = "tests/gpu"


def run(record: Record, machine: Machine, scratch: Path) -> None:
    """Run the tests; without a GPU, those that mean something with pages in host memory."""
    if missing := pytest_missing():
        record.left_out(WHAT, missing)
    elif missing := gpu_missing(dict(machine)):
        record.left_out("tests/gpu on a GPU", missing)
        env = {"GPU_TESTS_ON": "cpu"}
        run_tests(record, "tests/gpu with pages in host memory", scratch, WHAT, env=env)
    else:
        run_tests(record, WHAT, scratch, WHAT, "-s")
