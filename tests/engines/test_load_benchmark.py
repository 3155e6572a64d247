"""The short form of the benchmark under load: two engines over HTTP, with equal answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.engine, pytest.mark.exhaustive, pytest.mark.whole_machine,
    pytest.mark.timeout(3600),
]  # fmt: skip


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / f"{name}.json").read_text())["rows"]
    return found


def test_the_short_form_measures_both_and_their_answers_are_equal(tmp_path: Path) -> None:
    from benchmarks import load

    load.main(["--short", "--out", str(tmp_path), "--picture", str(tmp_path / "picture.png")])
    found = {row["contender"]: row for row in rows(tmp_path, "load_work")}
    assert [*found] == ["alone", "kvcore"]
    alone, ours = found.values()
    assert alone["failed"] == ours["failed"] == 0
    assert alone["from_cache"] == 0
    assert ours["from_cache"] > 0
    assert alone["asked"] == ours["asked"], "both are asked the same"
    assert ours["computed"] < alone["computed"]
    probes = {row["contender"]: row for row in rows(tmp_path, "load_probes")}
    assert probes["kvcore"]["probes_loaded"] > 0
    assert probes["kvcore"]["probes_differ"] == 0
    assert len(rows(tmp_path, "load_bars")) == 4
    assert (tmp_path / "picture.png").exists()
