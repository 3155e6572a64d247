"""Write docs/troubleshooting.md: every error that kvcore raises and every warning that it logs.

    python -m tools.troubleshooting > docs/troubleshooting.md

The errors and lines come from the code: the classes of kvcore/errors.py, and each call of a
logger's ``warning``, ``error`` or ``exception`` in kvcore and its adapters. Their meaning and what
to do come from `tools.troubles`. A test fails for a line without an entry, and for an entry without
a line.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvcore import errors
from tools.troubles import ERRORS, TROUBLES

ROOT = Path(__file__).resolve().parent.parent
CODE = ("kvcore", "kernels", "adapters")
LEFT_OUT = ("kvcore/testing", "kvcore/harness")
LEVELS = {"warning": "warning", "error": "error", "exception": "error"}


class Line(NamedTuple):
    """A line that the code can log: its format string, its level and the file it is in."""

    text: str
    level: str
    file: str


def logged(root: Path = ROOT) -> list[Line]:
    """Return every line that can be logged as a warning or an error, ordered by file."""
    found = []
    for room in CODE:
        for file in sorted((root / room).rglob("*.py")):
            name = file.relative_to(root).as_posix()
            if not name.startswith(LEFT_OUT):
                found += [Line(*line, name) for line in _lines(ast.parse(file.read_text()))]
    return found


def _lines(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or not call.args:
            continue
        level = _level(call.func)
        first = call.args[0]
        if level and isinstance(first, ast.Constant) and isinstance(first.value, str):
            yield first.value, level
        elif level and isinstance(call.func, ast.Attribute):
            yield ast.unparse(first), level


def _level(func: ast.expr) -> str:
    """Return the level of a logging call, or "" for any other call.

    ``tell`` is a local name for one of a logger's methods.
    """
    if isinstance(func, ast.Attribute) and ast.unparse(func.value) in ("_log", "log", "logger"):
        return LEVELS.get(func.attr, "")
    return "warning" if isinstance(func, ast.Name) and func.id == "tell" else ""


def error_names() -> list[str]:
    """Return the names of kvcore's errors, in the order of their module."""
    classes = inspect.getmembers(errors, inspect.isclass)
    ours = [one for _, one in classes if issubclass(one, errors.KVCoreError)]
    return [one.__name__ for one in sorted(ours, key=lambda one: inspect.getsourcelines(one)[1])]


def missing(lines: list[Line]) -> list[str]:
    """Return a sentence for each entry that the catalogue lacks or has too many."""
    known = {trouble.text for group in TROUBLES.values() for trouble in group}
    there = {line.text for line in lines}
    texts = [f"{line.file}: no entry for {line.text!r}" for line in lines if line.text not in known]
    texts += [f"no code logs {text!r}" for text in sorted(known - there)]
    names = set(error_names())
    return texts + [f"error {name!r}: entry or class?" for name in sorted(names ^ set(ERRORS))]


HEAD = """\
<!-- Made by `python -m tools.troubleshooting` from the code; do not edit. -->
# Troubleshooting

Start with `kvcore doctor -c kvcore.toml`: it checks the machine, the engines, the settings and the
servers they name ([operations](doctor.md)). `kvcore explain` says
why a single request was served the way it was.

This page lists every error that kvcore raises on purpose, and every warning and error that it logs.
Search it for a fixed part of the line; `...` stands for the parts that vary. Unless an entry says
otherwise, answers stay right: the engine computes what kvcore cannot load.
"""


def page(lines: list[Line]) -> str:
    """Return docs/troubleshooting.md for the lines that `logged` found."""
    levels = {line.text: line.level for line in lines}
    rows = [HEAD, "## Errors", "", "| error | meaning | what to do |", "|---|---|---|"]
    for name in error_names():
        means = " ".join((getattr(errors, name).__doc__ or "").split())
        rows.append(_row(f"`{name}`", means, ERRORS[name]))
    for title, troubles in TROUBLES.items():
        rows += [
            "",
            f"## {title}",
            "",
            "| line | level | meaning | what to do |",
            "|---|---|---|---|",
        ]
        for text, means, do in troubles:
            rows.append(_row(f"`{_shown(text)}`", levels[text], means, do))
    return "\n".join(rows) + "\n"


def _shown(text: str) -> str:
    return re.sub(r"%[a-z]", "...", text)


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    found = logged()
    if problems := missing(found):
        sys.exit("\n".join(problems))
    sys.stdout.write(page(found))
