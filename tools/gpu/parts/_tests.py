"""Commands that parts run: benchmarks and pytest, with what they wrote."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.gpu.metadata import ROOT
from tools.gpu.record import Record

__all__ = ["benchmark", "call", "pytest_missing", "run_tests"]

_LINE = 240
"""Characters of a failure that are kept."""


def call(command: Sequence[str], env: Mapping[str, str] | None = None) -> int:
    """Run a command in the tree, with its output in the part's log. Return its exit status."""
    print("+", *command, flush=True)
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **(env or {})}, check=False
    ).returncode


def benchmark(record: Record, name: str, scratch: Path, *arguments: str) -> dict[str, Any]:
    """Run ``benchmarks.NAME`` and return its report; {} if it wrote none.

    Records a failure if its exit status is not 0: it then found something wrong, or broke.
    """
    module = name.partition(" ")[0]
    code = call([sys.executable, "-m", f"benchmarks.{module}", "--out", str(scratch), *arguments])
    path = scratch / f"{module}.json"
    report: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if code:
        wrong = "; ".join(map(str, report.get("notes", {}).get("wrong") or ()))
        record.failed(f"benchmarks.{module}", wrong[:_LINE] or f"exit status {code}")
    return report


def pytest_missing() -> str:
    """Return which package of the tests is missing, in words; empty if none is."""
    lacking = [name for name in ("pytest", "hypothesis") if importlib.util.find_spec(name) is None]
    return f"not installed: {', '.join(lacking)}" if lacking else ""


def run_tests(
    record: Record,
    what: str,
    scratch: Path,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    within: Sequence[str] = (),
) -> None:
    """Run pytest, behind the command ``within``, and record its counts and each failed test.

    A run in which no test passed is a failure: it would show nothing.
    """
    path = scratch / f"{what.replace('/', '-').replace(' ', '-')}.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short"]
    code = call([*within, *command, f"--junitxml={path}", *arguments], env)
    counts, failures, skipped = _read(path)
    detail = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    if code or failures or not counts.get("passed"):
        named = "; ".join(failures[:10]) or f"exit status {code}"
        record.failed(what, f"{detail or 'no test ran'}: {named}")
    else:
        record.passed(what, detail)
    for why, count in skipped.items():
        record.left_out(f"{count} tests of {what}", why)


def _read(path: Path) -> tuple[dict[str, int], list[str], dict[str, int]]:
    """Return counts, failed tests with their messages, and the number of tests a skip reason."""
    if not path.exists():
        return {}, [], {}
    cases = list(ElementTree.parse(path).getroot().iter("testcase"))
    failures: list[str] = []
    skipped: dict[str, int] = {}
    for case in cases:
        for kind in ("failure", "error"):
            if (found := case.find(kind)) is not None:
                message = " ".join((found.get("message") or "").split())[:_LINE]
                failures.append(f"{case.get('name')}: {message}")
        if (found := case.find("skipped")) is not None:
            why = " ".join((found.get("message") or "").split())[:_LINE]
            skipped[why] = skipped.get(why, 0) + 1
    gone = sum(skipped.values())
    passed = len(cases) - gone - len({name.partition(":")[0] for name in failures})
    return {"passed": passed, "failed": len(failures), "skipped": gone}, failures, skipped
