"""The conformance kit on the reference engine: quickly here, whole where engines are tried."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("transformers")

from kvcore.cli import conformance  # after the skip
from kvcore.cli.app import app
from kvcore.errors import ConfigError, FormatError
from kvcore.testing.conformance import (
    CASES,
    SECTIONS,
    Capability,
    Driver,
    Kit,
    Setup,
    find_driver,
    run,
)
from kvcore.testing.conformance.suite import ConformanceSuite

QUICK = ("miss", "host-hit", "salts-kept-apart", "metrics-add-up", "small-blocks")


@pytest.mark.engine
class TestReferenceEngine(ConformanceSuite):
    """Every case."""

    def make_driver(self) -> Driver:
        return find_driver("reference")

    def make_partners(self) -> Sequence[Driver]:
        return [find_driver("reference")]


def test_quick_cases(tmp_path: Path) -> None:
    with Kit(find_driver("reference"), tmp_path) as kit:
        results = run(kit, [one for one in CASES if one.name in QUICK])
    assert [(r.case, r.outcome, r.why) for r in results] == [
        (one.name, "passed", "") for one in CASES if one.name in QUICK
    ]


def test_every_case_is_named_once_and_says_what_it_is() -> None:
    names = [one.name for one in CASES]
    assert len(set(names)) == len(names) > 25
    assert {one.section for one in CASES} == set(SECTIONS)
    assert all(one.about.endswith(".") for one in CASES)


class Idle(Driver):
    """An engine that can do nothing, and fails to start."""

    name = "idle"
    capabilities: frozenset[Capability] = frozenset()

    def start(self, setup: Setup) -> None:  # type: ignore[override]
        raise RuntimeError(f"no engine for {setup.ranks} ranks")


def test_what_an_engine_lacks_is_left_out_and_what_it_raises_is_a_failure(tmp_path: Path) -> None:
    with Kit(Idle(), tmp_path) as kit:
        results = {result.case: result for result in run(kit)}
    assert results["salts-kept-apart"].outcome == "left out"
    assert results["salts-kept-apart"].why == "no tenant salts"
    assert results["reads-what-others-wrote"].why == "no other engine at hand"
    assert results["miss"].outcome == "failed"
    assert results["miss"].why == "RuntimeError: no engine for 1 ranks"


def test_setups_that_one_engine_serves_are_equal() -> None:
    one = Setup(Path("m"), {"host": {"capacity": 1}, "block": {"tokens": 16}})
    same = Setup(Path("m"), {"block": {"tokens": 16}, "host": {"capacity": 1}})
    assert one.key == same.key
    assert Setup(Path("m"), None).key != Setup(Path("m"), {}).key != Setup(Path("m"), {}, 2).key


def test_an_engine_without_a_driver() -> None:
    with pytest.raises(ConfigError, match=r"kvcore_nothing\.conformance"):
        find_driver("nothing")


def test_the_command_writes_table_json_and_page(tmp_path: Path) -> None:
    page = tmp_path / "conformance.md"
    before = {"other": {"about": "elsewhere", "date": "2026-01-01", "partners": [], "results": []}}
    page.with_suffix(".json").write_text(json.dumps(before))
    arguments = ["conformance", "--case", "miss", "--case", "reads*", "--page", str(page), "--json"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    record = json.loads(done.stdout)
    assert [r["outcome"] for r in record["reference"]["results"]] == ["passed", "left out"]
    text = page.read_text()
    assert "| miss | not run | yes | Nothing is stored" in text
    assert "reference: no other engine at hand" in text
    assert set(json.loads(page.with_suffix(".json").read_text())) == {"other", "reference"}


def test_a_failed_case_is_the_commands_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformance, "find_driver", lambda name: Idle())
    done = CliRunner().invoke(app, ["conformance", "--case", "miss"])
    assert done.exit_code == 1
    assert "failed" in done.output


def test_cases_that_are_not_there() -> None:
    done = CliRunner().invoke(app, ["conformance", "--case", "nonsense"])
    assert done.exit_code == 2
    listed = CliRunner().invoke(app, ["conformance", "--list"]).output
    assert all(one.name in listed for one in CASES)


def test_results_of_others_stay_and_a_wrong_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "r.json"

    def result(case: str, outcome: str) -> dict[str, object]:
        return {"section": "equality", "case": case, "outcome": outcome, "why": "", "seconds": 0}

    def record(*results: dict[str, object]) -> conformance.Record:
        return {"a": {"about": "", "date": "", "partners": [], "results": list(results)}}

    path.write_text(json.dumps(record(result("miss", "failed"), result("host-hit", "passed"))))
    made = conformance.merged(path, record(result("miss", "passed")))
    assert {r["case"]: r["outcome"] for r in made["a"]["results"]} == {
        "host-hit": "passed",
        "miss": "passed",
    }
    path.write_text("[1]")
    with pytest.raises(FormatError, match=r"r\.json"):
        conformance.merged(path, record())
