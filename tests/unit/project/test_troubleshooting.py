"""docs/troubleshooting.md has a row for every error and every line that is logged, and no other.

The errors are the classes of kvcore/errors.py. The lines are what kvcore and its adapters give to a
logger's ``warning``, ``error`` or ``exception``.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from kvcore import errors

ROOT = Path(__file__).parents[3]
CODE = ("kvcore", "kernels", "adapters")
LEFT_OUT = ("kvcore/testing", "kvcore/harness")
LEVELS = {"warning": "warning", "error": "error", "exception": "error"}


class Line(NamedTuple):
    """A line that can be logged, as the page shows it: ``...`` for what varies."""

    text: str
    level: str


def logged(root: Path = ROOT) -> dict[Line, str]:
    """Return every line that can be logged as a warning or an error, with its file."""
    found: dict[Line, str] = {}
    for room in CODE:
        for file in sorted((root / room).rglob("*.py")):
            name = file.relative_to(root).as_posix()
            if not name.startswith(LEFT_OUT):
                found.update(dict.fromkeys(_lines(ast.parse(file.read_text())), name))
    return found


def _lines(tree: ast.Module) -> Iterator[Line]:
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or not call.args:
            continue
        level = _level(call.func)
        first = call.args[0]
        if level and isinstance(first, ast.Constant) and isinstance(first.value, str):
            yield Line(re.sub(r"%[.\d]*[a-z]", "...", first.value), level)
        elif level and isinstance(call.func, ast.Attribute):
            yield Line(ast.unparse(first), level)


def _level(func: ast.expr) -> str:
    """Return the level of a logging call, or "" for any other call.

    ``tell`` is a local name for one of a logger's methods.
    """
    if isinstance(func, ast.Attribute) and func.attr in LEVELS:
        return LEVELS[func.attr] if ast.unparse(func.value) in ("_log", "log", "logger") else ""
    return "warning" if isinstance(func, ast.Name) and func.id == "tell" else ""


def rows() -> Iterator[list[str]]:
    """Yield the cells of every row of the page's tables."""
    for line in (ROOT / "docs" / "troubleshooting.md").read_text().splitlines():
        if line.startswith("| `"):
            cells = re.split(r"(?<!\\) \| ", line.removeprefix("| ").removesuffix(" |"))
            yield [cell.replace("\\|", "|") for cell in cells]


@pytest.mark.slow
def test_every_line_has_its_row_with_its_level() -> None:
    there = logged()
    assert len(there) > 80
    known = [Line(row[0][1:-1], row[1]) for row in rows() if len(row) == 4]
    assert len(known) == len(set(known)), "a line has two rows"
    assert {line: file for line, file in there.items() if line not in known} == {}, "no row"
    assert sorted(set(known) - there.keys()) == [], "no code logs it"


def test_every_error_has_its_row() -> None:
    classes = inspect.getmembers(errors, inspect.isclass)
    ours = [name for name, one in classes if issubclass(one, errors.KVCoreError)]
    assert sorted(row[0][1:-1] for row in rows() if len(row) == 3) == sorted(ours)


def test_every_row_says_what_it_means_and_what_to_do() -> None:
    for row in rows():
        assert len(row) in (3, 4), row
        assert all(cell.strip() for cell in row), row
        assert all(cell.endswith((".", "?")) for cell in row[-2:]), row


def test_a_new_line_is_noticed(tmp_path: Path) -> None:
    """The scanner sees what a logger is told, in whatever words."""
    (tmp_path / "kvcore").mkdir()
    (tmp_path / "kvcore" / "new.py").write_text(
        "def f(x):\n"
        '    _log.info("no")\n'
        '    _log.warning("one %s", x)\n'
        '    _log.exception(f"two {x}")\n'
    )
    assert list(logged(tmp_path)) == [Line("one ...", "warning"), Line("f'two {x}'", "error")]
