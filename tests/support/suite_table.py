"""Seconds and engine starts of the tests, by file: where the time of `make test` goes.

make test PYTEST="--table=results/suite"
python tests/support/suite_table.py results/suite        a table in Markdown
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path

import pytest

from kvcore.harness.engine_process import EngineProcess


class SuiteTable:
    """A pytest plugin that notes the seconds of each test, and the engines that it starts."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / f"{os.getpid()}.jsonl"
        self._starts = 0
        started = EngineProcess._start

        def counted(engine: EngineProcess, *args: object, **named: object) -> object:
            self._starts += 1
            return started(engine, *args, **named)  # type: ignore[arg-type]

        EngineProcess._start = counted  # type: ignore[method-assign,assignment]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note one phase of a test. xdist's controller hears of what its workers have noted."""
        if hasattr(report, "node"):
            return
        line = {"test": report.nodeid, "seconds": report.duration, "starts": self._starts}
        self._starts = 0
        with self._file.open("a") as file:
            file.write(json.dumps(line) + "\n")


def table(folder: Path, least: float = 10.0) -> str:
    """Return the table of files that take ``least`` seconds or more, with a line for the rest."""
    seconds: Counter[str] = Counter()
    starts: Counter[str] = Counter()
    tests: dict[str, set[str]] = {}
    for part in folder.glob("*.jsonl"):
        for line in map(json.loads, part.read_text().splitlines()):
            file = line["test"].partition("::")[0]
            seconds[file] += line["seconds"]
            starts[file] += line["starts"]
            tests.setdefault(file, set()).add(line["test"])
    large = [file for file, taken in seconds.most_common() if taken >= least]
    rows = [(f"`{file}`", len(tests[file]), seconds[file], starts[file]) for file in large]
    rest = [file for file in seconds if file not in large]
    counted = sum(len(tests[file]) for file in rest)
    rows.append((f"{len(rest)} others", counted, seconds.total() - sum(r[2] for r in rows), 0))
    rows[-1] = (*rows[-1][:3], sum(starts[file] for file in rest))
    rows.append(("**all**", sum(map(len, tests.values())), seconds.total(), starts.total()))
    lines = [f"| {name} | {n} | {s:.0f} | {e or ''} |" for name, n, s, e in rows]
    return "\n".join(["| file | tests | seconds | engine starts |", "|---|---|---|---|", *lines])


if __name__ == "__main__":
    print(table(Path(sys.argv[1])))
