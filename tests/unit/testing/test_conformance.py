"""The conformance kit: every case on the reference engine, and its command."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

pytest.importorskip("transformers")

from kvcore.cli import conformance  # after the skip
from kvcore.cli.app import app
from kvcore.config import load_config
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
from kvcore.testing.conformance.kit import store_plugin
from kvcore.testing.conformance.suite import ConformanceSuite


@pytest.mark.engine
class TestReferenceEngine(ConformanceSuite):
    """Every case."""

    def make_driver(self) -> Driver:
        return find_driver("reference")

    def make_partners(self) -> Sequence[Driver]:
        return [find_driver("reference")]


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


@pytest.mark.slow
def test_what_an_engine_lacks_is_left_out_and_what_it_raises_is_a_failure(tmp_path: Path) -> None:
    with Kit(Idle(), tmp_path) as kit:
        results = {result.case: result for result in run(kit)}
    assert results["salts-kept-apart"].outcome == "left out"
    assert results["salts-kept-apart"].why == "no tenant salts"
    assert results["reads-what-others-wrote"].why == "no other engine at hand"
    with Kit(Idle(), tmp_path, partners=[Idle()]) as kit:
        [stored] = [one for one in CASES if one.store and one.pairs]
        assert stored.lacks(kit) == "no remote store at hand"
    assert results["miss"].outcome == "failed"
    assert results["miss"].why == "RuntimeError: no engine for 1 ranks"


def test_setups_that_one_engine_serves_are_equal() -> None:
    one = Setup(Path("m"), {"host": {"capacity": 1}, "block": {"tokens": 16}})
    same = Setup(Path("m"), {"block": {"tokens": 16}, "host": {"capacity": 1}})
    assert one.key == same.key
    assert Setup(Path("m"), None).key != Setup(Path("m"), {}).key != Setup(Path("m"), {}, 2).key


def test_an_engine_without_a_driver() -> None:
    with pytest.raises(ConfigError, match=r"kvcore_nothing\.testing\.conformance"):
        find_driver("nothing")


def test_an_interpreter_is_for_an_engine_that_starts_processes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="engine reference runs in this process"):
        find_driver("reference", tmp_path)
    with pytest.raises(ConfigError, match="it is not executable"):
        find_driver("sglang", tmp_path / "python")
    assert conformance.interpreters(["a=b/c", "d=/e=f"]) == {
        "a": Path("b/c").absolute(),
        "d": Path("/e=f"),
    }
    for told, message in (("vllm", "takes ENGINE=PATH"), ("vllm=python", "none of the engines")):
        arguments = ["conformance", "--case", "miss", "--python", told]
        assert message in squeezed(CliRunner().invoke(app, arguments).output)


def squeezed(output: str) -> str:
    """Words of what the command printed, however the terminal cut it."""
    return " ".join(output.replace("│", " ").split())


def test_a_store_is_named_by_a_url(tmp_path: Path) -> None:
    plugins = {"redis://h:1/0": "redis", "unix:///s": "redis", "s3://b/p": "objects"}
    assert {url: store_plugin(url) for url in plugins} == plugins
    done = CliRunner().invoke(app, ["conformance", "--case", "miss", "--store", "localhost:6379"])
    assert "given the store 'localhost:6379'" in squeezed(done.output)
    with Kit(Idle(), tmp_path, store="redis://h:1/0") as kit:
        one, other = kit.store_tier(), kit.store_tier()
        assert one["options"]["prefix"] != other["options"]["prefix"], "cases share no blocks"
        assert load_config(None, {"tiers": {"far": one}}, {}).tiers["far"].plugin == "redis"


@given(st.integers(1, 600), st.integers(1, 40), st.sampled_from([1, 8, 16, 48, 64]), st.data())
def test_an_engine_that_takes_whole_pages_is_asked_for_as_many(
    prompt: int, answer: int, block: int, data: st.DataObject
) -> None:
    """SGLang's numbers beside counting one by one, and never more than another engine's."""
    driver, page = find_driver("sglang"), 32
    stored = driver.stores(prompt + answer - 1)
    assert stored == max(n for n in range(prompt + answer) if n % page == 0)
    shared = data.draw(st.integers(0, prompt))
    held = max(n for n in range(min(stored, shared) + 1) if n % block == 0 or n == 0)
    usable = [n for n in range(prompt) if n % page == 0 and covered(n, held, prompt, block)]
    assert driver.reuses(prompt, min(stored, shared), block) == max(usable)
    assert max(usable) <= find_driver("reference").reuses(prompt, shared, block)


def covered(tokens: int, held: int, prompt: int, block: int) -> bool:
    """Whether blocks that an engine asks for, all of whose tokens it looks up, hold so many."""
    return tokens <= min(held, (prompt - 1) // block * block)


@pytest.mark.slow
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
    monkeypatch.setattr("kvcore.testing.conformance.find_driver", lambda name, python: Idle())
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


@pytest.mark.parametrize(
    ("case", "outcome", "about", "partners"),
    [
        ("miss", "left out", "engine 1", ["b"]),
        ("miss", "passed", "engine 2", ["b"]),
        ("reads-what-others-wrote", "passed", "engine 2", []),
    ],
)
def test_an_engine_is_as_it_was_when_it_last_ran(
    tmp_path: Path, case: str, outcome: str, about: str, partners: list[str]
) -> None:
    path = tmp_path / "r.json"

    def record(case: str, outcome: str, about: str, partners: list[str]) -> conformance.Record:
        one = {"section": "", "case": case, "outcome": outcome, "why": "", "seconds": 0}
        return {"a": {"about": about, "date": "", "partners": partners, "results": [one]}}

    path.write_text(json.dumps(record("host-hit", "passed", "engine 1", ["b"])))
    made = conformance.merged(path, record(case, outcome, "engine 2", []))["a"]
    assert (made["about"], made["partners"]) == (about, partners)


def test_variants_of_vllm_by_name() -> None:
    found = {
        name: find_driver(name)
        for name in ("vllm", "vllm:v2", "vllm:0.33", "vllm:0.30-sync", "vllm:0.33-v2")
    }
    assert [driver.name for driver in found.values()] == list(found)
    told = [(d.version, d.asynchronous, d.v2) for d in found.values()]  # type: ignore[attr-defined]
    assert told == [
        ("", True, False),
        ("", True, True),
        ("0.33", True, False),
        ("0.30", False, False),
        ("0.33", True, True),
    ]


@pytest.mark.parametrize("name", ["vllm:v3", "vllm:v2-0.33", "reference:v2"])
def test_a_variant_that_is_not_there_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"given '?{name}"):
        find_driver(name)
