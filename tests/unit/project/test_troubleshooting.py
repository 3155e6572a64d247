"""docs/troubleshooting.md names every error and every warning there is, and no other."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def tool() -> Any:
    return importlib.import_module("tools.troubleshooting")


@pytest.fixture(scope="module")
def lines(tool: Any) -> list[Any]:
    logged: list[Any] = tool.logged()
    return logged


def test_every_error_and_every_line_has_its_entry(tool: Any, lines: list[Any]) -> None:
    assert len(lines) > 80
    assert not tool.missing(lines)


def test_the_page_is_current(tool: Any, lines: list[Any]) -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    assert tool.page(lines) == page, "python -m tools.troubleshooting > docs/troubleshooting.md"


def test_a_new_line_or_one_that_went_is_noticed(tool: Any, tmp_path: Path) -> None:
    """The scanner sees what a logger is told, in whatever words."""
    (tmp_path / "kvcore").mkdir()
    (tmp_path / "kvcore" / "new.py").write_text(
        "def f(x):\n"
        '    _log.info("no")\n'
        '    _log.warning("one %s", x)\n'
        '    _log.exception(f"two {x}")\n'
    )
    lines = tool.logged(tmp_path)
    assert [(line.text, line.level) for line in lines] == [
        ("one %s", "warning"), ("f'two {x}'", "error"),
    ]  # fmt: skip
    said = tool.missing(lines)
    assert "kvcore/new.py: no entry for 'one %s'" in said
    assert "no code logs 'weights_not_watched'" in said
