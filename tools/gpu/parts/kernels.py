"""The property tests of tests/kernels on a real device, compiled."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

from tools.gpu.machine import gpu_missing
from tools.gpu.parts import Machine
from tools.gpu.parts._tests import call, pytest_missing, run_tests
from tools.gpu.record import Record

COMPILED = "tests/kernels, compiled"
SAMPLE = ("copy wide", "shift bf16 128 n", "merge wide", "choose", "sums")
"""Builds of `kvcore_kernels.aot` that take seconds."""
_PROCESSES = 8
_ELSEWHERE = tuple(
    f"tests/kernels/test_{name}.py" for name in ("aot", "benchmark", "blend_host", "specialized")
)
"""Tests that start processes without the device: they run on every machine."""


def run(record: Record, machine: Machine, scratch: Path) -> None:
    """Compare each kernel with its naive twin on the GPU; without one, compile a sample."""
    missing = gpu_missing(dict(machine)) or pytest_missing()
    if not missing:
        _on_the_device(record, machine, scratch)
        return
    record.left_out(COMPILED, missing)
    if importlib.util.find_spec("triton") is None:
        record.left_out("builds for sm_90", "not installed: triton")
        return
    path = scratch / "aot.json"
    command = [sys.executable, "-m", "kvcore_kernels.aot", "--target", "sm_90", "--json", str(path)]
    code = call([*command, "--kernel", *SAMPLE], {"TRITON_INTERPRET": "0"})
    built = len(json.loads(path.read_text())) if path.exists() else 0
    if code or not built:
        record.failed("builds for sm_90", f"exit status {code}, {built} builds")
    else:
        record.passed("builds for sm_90", f"{built} compiled, none spills")


def _on_the_device(record: Record, machine: Machine, scratch: Path) -> None:
    arguments = ["tests/kernels", *(f"--ignore={path}" for path in _ELSEWHERE)]
    if importlib.util.find_spec("xdist") is not None:
        processes = max(1, min(_PROCESSES, int(machine["cores"]) - 1))
        arguments += ["-n", str(processes)]
    env = {"KERNEL_TESTS_ON": "cuda", "TRITON_CACHE_DIR": str(scratch / "triton")}
    os.environ.pop("TRITON_INTERPRET", None)
    run_tests(record, COMPILED, scratch, *arguments, env=env)
