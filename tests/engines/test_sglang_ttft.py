"""The benchmark of SGLang runs, and each contender was answered from where it should have been."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.exhaustive, pytest.mark.timeout(3600)]


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / f"{name}.json").read_text())["rows"]
    return found


def test_a_dry_run_measures_every_contender(tmp_path: Path) -> None:
    from benchmarks import sglang_ttft

    sglang_ttft.main(["--dry-run", "--out", str(tmp_path)])
    tiers = {row["contender"]: row for row in rows(tmp_path, "sglang_ttft")}
    assert {name: row["cached_in"] for name, row in tiers.items()} == {
        "cold": "",
        "own cache": "device",
        "kvcore miss": "",
        "kvcore host": "host",
        "kvcore disk": "disk",
        "hicache miss": "",
        "hicache host": "host",
        "hicache file": "storage",
    }
    hits = [row for row in tiers.values() if row["cached_in"]]
    assert {row["cached_tokens"] for row in hits} == {320}
    assert not any(row["answers_differ"] for row in tiers.values())
    costs = [row["what"] for row in rows(tmp_path, "sglang_cost")]
    assert costs == [
        "TTFT of a miss, 384 tokens",
        "decode",
        "TTFT of a host hit, of the radix hit, 384 tokens",
    ]
    assert [(row["tokens"], row["at_most"]) for row in rows(tmp_path, "sglang_bars")] == [
        (None, 1.02),
        (None, 1.15),
        (384, 1.0),
        (384, 0.667),
    ]
