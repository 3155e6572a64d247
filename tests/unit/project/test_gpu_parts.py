"""The parts of `make gpu`: what they run on a machine, and what they make of how it ended."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tools.gpu.metadata import ROOT
from tools.gpu.parts import _tests, kernels, sanitizer, worker
from tools.gpu.record import Record, read

pytestmark = pytest.mark.slow

H100: dict[str, Any] = {"gpu": "NVIDIA H100", "cores": 16, "sanitizer": "/opt/compute-sanitizer"}
NONE: dict[str, Any] = {"gpu": None, "why_no_gpu": "torch sees no GPU"}

PASSED = '<testcase name="a"/>'
SKIPPED = '<testcase name="b"><skipped message="needs 8 GiB"/></testcase>'
WRONG = '<testcase name="c"><failure message="row 7\n differs"/></testcase>'
BROKEN = '<testcase name="d"><error message="no fixture"/></testcase>'


class Calls:
    """Commands that were not run. Each ends with ``code`` and has written ``cases``, if any."""

    def __init__(self) -> None:
        self.code, self.cases = 0, PASSED
        self.made: list[tuple[list[str], dict[str, str]]] = []

    def __call__(self, command: Sequence[str], env: Mapping[str, str] | None = None) -> int:
        self.made.append((list(command), dict(env or {})))
        for argument in command:
            if argument.startswith("--junitxml=") and self.cases:
                path = Path(argument.partition("=")[2])
                path.write_text(f"<testsuites><testsuite>{self.cases}</testsuite></testsuites>")
        return self.code


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    made = Calls()
    for module in (_tests, kernels):
        monkeypatch.setattr(module, "call", made)
    return made


@pytest.fixture
def record(tmp_path: Path) -> Record:
    return Record(tmp_path / "lines.jsonl")


def found(tmp_path: Path) -> list[tuple[str, str, str]]:
    lines = read(tmp_path / "lines.jsonl")
    return [(line["kind"], line["what"], line["detail"]) for line in lines]


@pytest.mark.parametrize(
    ("code", "cases", "kind", "detail"),
    [
        (0, PASSED + SKIPPED, "passed", "1 passed, 1 skipped"),
        (1, PASSED + WRONG, "failed", "1 passed, 1 failed: c: row 7 differs"),
        (1, BROKEN, "failed", "1 failed: d: no fixture"),
        (0, SKIPPED, "failed", "1 skipped: exit status 0"),
        (-11, PASSED, "failed", "1 passed: exit status -11"),  # it died at its end
        (86, PASSED, "failed", "1 passed: exit status 86"),  # the sanitizer found something
        (5, "", "failed", "no test ran: exit status 5"),
    ],
)
def test_a_run_of_tests_passes_only_if_something_did_and_nothing_failed(
    code: int, cases: str, kind: str, detail: str, tmp_path: Path, record: Record, calls: Calls
) -> None:
    calls.code, calls.cases = code, cases
    _tests.run_tests(record, "the tests", tmp_path, "tests/gpu")
    first, *rest = found(tmp_path)
    assert first == (kind, "the tests", detail)
    skipped = [("left out", "1 tests of the tests", "needs 8 GiB")] if SKIPPED in cases else []
    assert rest == skipped
    assert record.failures == (kind == "failed")


def test_a_benchmark_fails_with_what_it_found_or_its_exit_status(
    tmp_path: Path, record: Record, calls: Calls
) -> None:
    assert _tests.benchmark(record, "kernels", tmp_path, "--rounds", "3") == {}
    calls.code = 1
    _tests.benchmark(record, "kernels", tmp_path)
    report = {"notes": {"wrong": ["gather: torch"]}}
    (tmp_path / "kernels.json").write_text(json.dumps(report))
    assert _tests.benchmark(record, "kernels", tmp_path) == report
    assert found(tmp_path) == [
        ("failed", "benchmarks.kernels", "exit status 1"),
        ("failed", "benchmarks.kernels", "gather: torch"),
    ]
    assert calls.made[0][0][1:] == ["-m", "benchmarks.kernels", "--out", str(tmp_path),
                                    "--rounds", "3"]  # fmt: skip


def test_on_a_gpu_the_kernels_are_compiled_for_it(
    tmp_path: Path, record: Record, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    kernels.run(record, H100, tmp_path)
    [(command, env)] = calls.made
    assert env["KERNEL_TESTS_ON"] == "cuda"
    assert "TRITON_INTERPRET" not in os.environ
    assert "tests/kernels" in command
    left = [word.partition("=")[2] for word in command if word.startswith("--ignore=")]
    assert left
    assert all((ROOT / path).is_file() for path in left)


def test_without_a_gpu_the_kernels_are_built_and_the_tests_left_out(
    tmp_path: Path, record: Record, calls: Calls
) -> None:
    pytest.importorskip("triton")
    (tmp_path / "aot.json").write_text("[{}, {}]")
    kernels.run(record, NONE, tmp_path)
    [(command, env)] = calls.made
    assert command[1:3] == ["-m", "kvcore_kernels.aot"]
    assert env == {"TRITON_INTERPRET": "0"}
    assert found(tmp_path) == [
        ("left out", kernels.COMPILED, "torch sees no GPU"),
        ("passed", "builds for sm_90", "2 compiled, none spills"),
    ]


@pytest.mark.parametrize("machine", [H100, NONE])
def test_the_workers_tests_run_where_the_pages_are(
    machine: dict[str, Any], tmp_path: Path, record: Record, calls: Calls
) -> None:
    worker.run(record, machine, tmp_path)
    [(command, env)] = calls.made
    assert "tests/gpu" in command
    assert env == ({} if machine is H100 else {"GPU_TESTS_ON": "cpu"})
    left = [what for kind, what, _ in found(tmp_path) if kind == "left out"]
    assert left == ([] if machine is H100 else ["tests/gpu on a GPU"])


def test_what_the_sanitizer_finds_is_a_failure(
    tmp_path: Path, record: Record, calls: Calls
) -> None:
    sanitizer.run(record, H100, tmp_path)
    assert len(calls.made) == len(sanitizer.CASES)
    for (command, _), (tool, cases) in zip(calls.made, sanitizer.CASES.items(), strict=True):
        assert command[0] == H100["sanitizer"]
        assert command[command.index("--tool") + 1] == tool
        assert int(command[command.index("--error-exitcode") + 1]) not in range(6)  # pytest's own
        assert command[-3:] == ["tests/gpu", "-k", cases]


@pytest.mark.parametrize("machine", [NONE, {**H100, "sanitizer": None}])
def test_without_gpu_or_sanitizer_nothing_runs_under_it(
    machine: dict[str, Any], tmp_path: Path, record: Record, calls: Calls
) -> None:
    sanitizer.run(record, machine, tmp_path)
    assert calls.made == []
    assert [kind for kind, *_ in found(tmp_path)] == ["left out"] * 2


COLLECT = """
import sys, pytest
for number, cases in enumerate(sys.argv[1:]):
    print("choice", number)
    pytest.main(["tests/gpu", "--collect-only", "-q", "-p", "no:cacheprovider", "-k", cases])
"""
"""Collects several times in one process: the imports take the time."""


def test_every_choice_of_cases_is_of_some_tests() -> None:
    env = {
        **os.environ,
        "GPU_TESTS_ON": "cpu",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    command = [sys.executable, "-c", COLLECT, *sanitizer.CASES.values()]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    found = re.split(r"^choice \d+$", done.stdout, flags=re.MULTILINE)[1:]
    assert len(found) == len(sanitizer.CASES), done.stdout + done.stderr
    assert all("::" in each for each in found), done.stdout + done.stderr
