"""`kvcore doctor` finds what is wrong, says what to change, and leaves nothing behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvcore.cli import doctor
from kvcore.cli.app import app
from kvcore.cli.doctor import Finding, Level
from kvcore.config import load_config
from kvcore.plugins import PluginManager

ENGINE = """
from kvcore.plugins import EngineSpec, hookimpl

@hookimpl
def kvcore_engines():
    return [EngineSpec("toy", ("pytest",), {versions!r}, None, lambda: "")]
"""
SMALL = {"host": {"capacity": 1 << 20}}


@pytest.fixture
def look(plugin: Callable[[str, str], EntryPoint]) -> Callable[..., dict[str, Finding]]:
    def examine(versions: str = ">=1", **settings: Any) -> dict[str, Finding]:
        points = [plugin("toys", ENGINE.format(versions=versions))]
        config = load_config(overrides=SMALL | settings, env={})
        found = doctor.examine(config, PluginManager(entry_points=points), probe=True)
        worst: dict[str, Finding] = {}
        for each in found:
            if each.about not in worst or worst[each.about].level is Level.GOOD:
                worst[each.about] = each
        return worst

    return examine


def test_a_machine_in_order_has_no_problem(look: Any, tmp_path: Path) -> None:
    disk = {"path": str(tmp_path / "kv"), "capacity": 1 << 20}
    found = look(disk=disk)
    assert not [each for each in found.values() if each.level is Level.PROBLEM]
    assert found["engine toy"].level is found["disk"].level is Level.GOOD
    assert "GB/s" in found["disk speed"].found
    assert list((tmp_path / "kv").iterdir()) == [], "the probe is gone"
    assert all(each.change for each in found.values() if each.level is not Level.GOOD)


@pytest.mark.parametrize(
    ("about", "change", "settings"),
    [
        ("engine", "set engine to one of toy", {"engine": "toyy"}),
        ("host memory", "lower host.capacity", {"host": {"capacity": 1 << 60}}),
        ("settings", "kvcore plugins", {"host": {"capacity": 1 << 20, "policy": "lruu"}}),
        ("planner", "metrics.enabled = true",
         {"planner": {"enabled": True}, "metrics": {"enabled": False}}),
        ("encryption", "operations.md", {"disk": {"key_env": "NO_SUCH_VARIABLE"}}),
    ],
)  # fmt: skip
def test_a_problem_is_found(look: Any, about: str, change: str, settings: dict[str, Any]) -> None:
    found = look(**settings)[about]
    assert found.level is Level.PROBLEM
    assert change in found.change


def test_an_engine_of_another_version_is_no_engine(look: Any) -> None:
    found = look(versions="<1")
    assert found["engine toy"].level is Level.WARNING
    assert found["engine"].level is Level.PROBLEM


def test_a_disk_that_is_too_small_or_no_folder(look: Any, tmp_path: Path) -> None:
    disk = {"path": str(tmp_path / "kv"), "capacity": 1 << 60}
    assert look(disk=disk)["disk"].change == "lower disk.capacity"
    (tmp_path / "file").write_text("")
    disk = {"path": str(tmp_path / "file" / "kv")}
    assert look(disk=disk)["disk"].change == "give a folder to write to"


def test_the_command_tells_by_its_exit_code(tmp_path: Path, monkeypatch: Any) -> None:
    runner = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})
    problem = Finding("x", Level.PROBLEM, "found", "change")
    for findings, code in (([problem], 1), ([problem._replace(level=Level.WARNING)], 0)):
        monkeypatch.setattr(doctor, "examine", lambda *_, found=findings, **__: found)
        result = runner.invoke(app, ["doctor", "--json"])
        assert result.exit_code == code
        assert [each["about"] for each in json.loads(result.stdout)] == ["x"]
        assert "change" in runner.invoke(app, ["doctor"]).stdout
