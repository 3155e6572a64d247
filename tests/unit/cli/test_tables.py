"""Tables of the commands: nothing is cut where there is no terminal."""

from __future__ import annotations

import pytest
from rich.table import Table

from kvcore.cli.tables import WIDTH, print_table

WORDS = [f"column {number:04}" for number in range(10)]


def made() -> Table:
    table = Table(*WORDS)
    table.add_row(*(f"value {word}" for word in WORDS))
    return table


def test_a_file_gets_whole_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    print_table(made())
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) > 80
    assert max(map(len, shown.splitlines())) <= WIDTH


def test_columns_says_how_wide(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    print_table(made())
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 60
