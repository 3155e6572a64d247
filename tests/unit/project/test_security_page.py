"""docs/security.md promises nothing without a test, and the adversary suite holds nothing else."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "security.md").read_text()
TABLES = PAGE.partition("## What is promised")[2].partition("\n## What is not promised")[0]
ROWS = [
    [cell.strip() for cell in line.strip().strip("|").split("|")]
    for line in TABLES.splitlines()
    if line.startswith("| ") and not line.startswith("| attack ")
]
NAMED = re.compile(r"`([\w/]+\.py)::(\w+)`")


@functools.cache
def names_in(file: Path) -> set[str]:
    nodes = ast.walk(ast.parse(file.read_text()))
    functions = {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
    return {name for name in functions if name.startswith("test_")}


def named() -> set[tuple[str, str]]:
    return {found for row in ROWS for found in NAMED.findall(row[-1])}


def test_every_promise_names_tests_that_exist() -> None:
    assert len(ROWS) > 30
    for row in ROWS:
        assert len(row) == 3, row
        assert NAMED.findall(row[-1]), f"no test is named: {row}"
    for file, test in sorted(named()):
        assert test in names_in(ROOT / "tests" / file), f"{file} has no {test}"


def test_every_attack_of_the_suite_is_on_the_page() -> None:
    suite = sorted((ROOT / "tests" / "adversary").glob("test_*.py"))
    assert suite
    attacks = {(f"adversary/{file.name}", test) for file in suite for test in names_in(file)}
    assert not attacks - set(NAMED.findall(PAGE))
