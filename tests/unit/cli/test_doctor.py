"""`kvcore doctor` finds what is wrong, says what to change, and leaves nothing behind."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvcore.cli import checks
from kvcore.cli.app import app
from kvcore.cli.probe import CONTACT_S, Finding, Level, contacts
from kvcore.config import load_config
from kvcore.plugins import PluginManager

ENGINE = """
from kvcore.engines.spec import Switch
from kvcore.plugins import EngineSpec, hookimpl
from kvcore.engines.probes import Has, Probe

@hookimpl
def kvcore_engines():
    def probes():
        return [Probe("gate", "to get in", (Has("pytest:" + {name!r}),))]

    def switch(config):
        on = config.vllm.switch_on
        return Switch(on, "on: why" if on else "off: why", "change it" if on else "")

    return [EngineSpec("toy", ("pytest",), None, lambda: "", "pytest", ("7.0",), probes, switch)]
"""
SMALL = {"host": {"capacity": 1 << 20}}


@pytest.fixture
def look(plugin: Callable[[str, str], EntryPoint]) -> Callable[..., dict[str, Finding]]:
    def examine(
        name: str = "fixture", contact_s: float | None = CONTACT_S, **settings: Any
    ) -> dict[str, Finding]:
        points = [plugin("toys", ENGINE.format(name=name))]
        config = load_config(overrides=SMALL | settings, env={})
        found = checks.examine(config, PluginManager(entry_points=points), contact_s=contact_s)
        worst: dict[str, Finding] = {}
        for each in found:
            if each.about not in worst or worst[each.about].level is Level.GOOD:
                worst[each.about] = each
        return worst

    return examine


def test_it_says_whether_an_engine_starts_with_kvcore_and_why(look: Any) -> None:
    off, on = look(), look(vllm={"switch_on": True})
    about = "start of toy"
    assert (off[about].level, off[about].found) == (Level.GOOD, "off: why")
    assert (on[about].level, on[about].change) == (Level.WARNING, "change it")


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
        ("encryption", "docs/stored-blocks.md", {"disk": {"key_env": "NO_SUCH_VARIABLE"}}),
    ],
)  # fmt: skip
def test_a_problem_is_found(look: Any, about: str, change: str, settings: dict[str, Any]) -> None:
    found = look(**settings)[about]
    assert found.level is Level.PROBLEM
    assert change in found.change


def test_without_a_temporary_folder_that_is_all_it_says(
    look: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries that engines import end the process then, after a table in which all was good."""
    nowhere = str(tmp_path / "gone")
    monkeypatch.setattr(tempfile, "tempdir", nowhere)
    [(about, finding)] = look().items()
    assert (about, finding.level) == ("temporary folder", Level.PROBLEM)
    assert "No such file" in finding.found
    assert "TMPDIR" in finding.change


def test_an_engine_that_lacks_an_interface_is_no_engine(look: Any) -> None:
    found = look(name="gate")
    assert found["engine toy"].level is Level.WARNING
    assert "not served: probe 'gate' failed" in found["engine toy"].found
    assert found["engine toy"].change == "install pytest 7.0, or a newer kvcore"
    assert found["engine"].level is Level.PROBLEM


def test_a_disk_that_is_too_small_or_no_folder(look: Any, tmp_path: Path) -> None:
    disk = {"path": str(tmp_path / "kv"), "capacity": 1 << 60}
    found = look(disk=disk)["disk"]
    assert found.change == "lower disk.capacity"
    assert found.found.startswith(f"{tmp_path}/kv: ")
    (tmp_path / "file").write_text("")
    disk = {"path": str(tmp_path / "file" / "kv")}
    assert look(disk=disk)["disk"].change == "give a folder to write to"


# -- servers --------------------------------------------------------------------------------------

STORES = """
import threading
from kvcore.errors import TierUnavailable
from kvcore.plugins import hookimpl, store_plugin
from kvcore.tiers.remote.memory import MemoryStore
from kvcore.tiers.remote.options import StoreOptions
from kvcore.tiers.remote.tier import StoreKind


class Hangs(MemoryStore):
    def exists(self, names):
        threading.Event().wait()


class Fails(MemoryStore):
    def exists(self, names):
        raise TierUnavailable("nobody at example:1")


class Raises(MemoryStore):
    def exists(self, names):
        raise ValueError("a client's own error")


def open_wrong(options, rank):
    raise TierUnavailable("it does not open")


@hookimpl
def kvcore_tiers():
    kinds = {"good": MemoryStore, "hangs": Hangs, "fails": Fails, "raises": Raises}
    made = [
        store_plugin(name, lambda kind=kind: StoreKind(StoreOptions, lambda o, r: kind()))
        for name, kind in kinds.items()
    ]
    return [*made, store_plugin("wrong", lambda: StoreKind(StoreOptions, open_wrong))]
"""


def asked(plugin: Any, seconds: float, **overrides: Any) -> dict[str, Finding]:
    config = load_config(overrides=overrides, env={})
    plugins = PluginManager(entry_points=[plugin("stores", STORES)])
    return {each.about: each for each in contacts(config, plugins, seconds)}


def test_every_store_is_asked_and_one_that_hangs_holds_nobody_up(plugin: Any) -> None:
    tiers = {name: {"plugin": name} for name in ("good", "fails", "raises", "wrong")}
    found = asked(plugin, 30.0, tiers=tiers)
    assert found["store good"].level is Level.GOOD
    for name, why in (
        ("fails", "nobody at example:1"),
        ("raises", "a client's own error"),
        ("wrong", "it does not open"),
    ):
        finding = found[f"store {name}"]
        assert finding.level is Level.PROBLEM
        assert why in finding.found
        assert f"[tiers.{name}.options]" in finding.change
    hung = asked(plugin, 0.2, tiers={"hangs": {"plugin": "hangs"}})["store hangs"]
    assert (hung.level, hung.found) == (Level.PROBLEM, "TierUnavailable: no answer in 0.2 s")


def test_servers_that_are_not_there_are_named_without_passwords(
    plugin: Any, tmp_path: Path
) -> None:
    """Where a client's package is missing too, that is what is named."""
    server = {"address": f"ipc://{tmp_path}/none", "folder": str(tmp_path)}
    found = asked(plugin, 0.5, server=server)  # nobody refuses: all of that time is waited
    found |= asked(
        plugin,
        30.0,
        cluster={"etcd": ["http://127.0.0.1:1", "http://me:hush@127.0.0.1:2"]},
        events={"nats": "nats://me:hush@127.0.0.1:1"},
    )
    assert found.keys() == {
        "kvcore server", "etcd 127.0.0.1:1", "etcd 127.0.0.1:2", "nats 127.0.0.1:1",
    }  # fmt: skip
    for finding in found.values():
        assert finding.level is Level.PROBLEM
        assert finding.change
        assert "hush" not in str(finding)


def test_nobody_is_asked_where_nothing_is_set(plugin: Any) -> None:
    assert asked(plugin, 1.0) == {}


def test_the_command_tells_by_its_exit_code(tmp_path: Path, monkeypatch: Any) -> None:
    runner = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})
    problem = Finding("x", Level.PROBLEM, "found", "change")
    for findings, code in (([problem], 1), ([problem._replace(level=Level.WARNING)], 0)):
        monkeypatch.setattr(checks, "examine", lambda *_, found=findings, **__: found)
        result = runner.invoke(app, ["doctor", "--json"])
        assert result.exit_code == code
        assert [each["about"] for each in json.loads(result.stdout)] == ["x"]
        assert "change" in runner.invoke(app, ["doctor"]).stdout


def test_a_server_has_the_pages_of_its_mount(
    look: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = {"server": {"address": "local", "folder": str(tmp_path / "none yet" / "kv")}}
    asked: list[Path] = []

    def none(mount: Path) -> bool:
        asked.append(mount)
        return False

    monkeypatch.setattr(checks, "gives_huge_pages", none)
    found = look(contact_s=None, **server)["huge pages"]
    assert found.level is Level.WARNING
    assert asked[0].is_mount()
    assert tmp_path.is_relative_to(asked[0])
    assert f"remount,huge=advise {asked[0]}" in found.change
    monkeypatch.setattr(checks, "gives_huge_pages", lambda mount: True)
    assert look(contact_s=None, **server)["huge pages"].level is Level.GOOD


@pytest.mark.parametrize(
    ("module", "settings", "direct"),
    [
        (True, None, True),
        (False, None, False),
        (False, '{"properties": {\n  "use_pci_p2pdma": true,\n}}', True),
        (False, '{"properties": {\n  // "use_pci_p2pdma": true,\n}}', False),
    ],
)
def test_it_tells_whether_disk_to_device_goes_past_host_memory(
    look: Any,
    tmp_path: Path,
    monkeypatch: Any,
    module: bool,
    settings: str | None,
    direct: bool,
) -> None:
    started: list[str] = []
    monkeypatch.setattr(checks, "FileAgent", started.append)
    for name in ("_DRIVER", "_NVIDIA_FS", "_CUFILE"):
        monkeypatch.setattr(checks, name, tmp_path / name)
    (tmp_path / "_DRIVER").write_text("NVRM version: NVIDIA UNIX 580.1 of some day\n")
    if module:
        (tmp_path / "_NVIDIA_FS").mkdir()
    if settings is not None:
        (tmp_path / "_CUFILE").write_text(settings)
    disk = {"path": str(tmp_path / "kv"), "capacity": 1 << 20, "to_device": "on"}
    found = look(disk=disk)["disk to device"]
    assert started == ["GDS_MT"]
    assert found.level is (Level.GOOD if direct else Level.WARNING)
    assert ("compatibility mode" in found.found) is not direct
