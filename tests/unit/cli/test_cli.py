"""The command line: what it prints, and one clear line when it cannot."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvcore import __version__
from kvcore.cli.app import app
from kvcore.cli.server import check
from kvcore.config import load_config
from kvcore.errors import ConfigError
from kvcore.plugins import manager as manager_module
from kvcore.server import server as server_module
from tools import settings

ROOT = Path(__file__).parents[3]
runner = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})

ENGINE = """
from kvcore.plugins import EngineSpec, ServeCommand, hookimpl
from kvcore.engines.probes import Has, Probe

def serve(model, config, engine_args):
    argv = ["engine", model, str(config.host.capacity), *engine_args]
    return ServeCommand(argv, {"ENGINE_KEY": "hunter2"})

def broken():
    raise RuntimeError("status is broken")

def lacking():
    return [Probe("gate", "to get in", (Has("pytest:gate"),))]

@hookimpl
def kvcore_engines():
    return [
        EngineSpec("toy", ("pytest",), serve, lambda: "all is well", "pytest"),
        EngineSpec("old", ("pytest",), serve, lambda: "", "pytest", ("7.0",), lacking),
        EngineSpec("absent", ("no-such-engine",), serve, lambda: "", tried=("1.0",)),
        EngineSpec("shaky", ("pytest",), serve, broken, "pytest"),
    ]
"""


@pytest.fixture(autouse=True)
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two third-party plugins, one of them broken, and no settings from outside."""
    module = f"engine_{tmp_path.name}"
    (tmp_path / f"{module}.py").write_text(ENGINE)
    monkeypatch.syspath_prepend(tmp_path)
    points = [
        EntryPoint("toys", module, "kvcore.plugins"),
        EntryPoint("sad", "no_such_module_here", "kvcore.plugins"),
    ]
    found = {point: manager_module.Origin(point.name) for point in points}
    monkeypatch.setattr(manager_module, "discovered", lambda: found)
    for name in [name for name in os.environ if name.startswith("KVCORE_")]:
        monkeypatch.delenv(name)


def run(*args: str, **env: str) -> str:
    result = runner.invoke(app, args, env=env)
    assert result.exit_code == 0, result.output
    return result.stdout


def fail(*args: str, **env: str) -> str:
    """Standard error of a command that must end with exit code 2 and print nothing else."""
    result = runner.invoke(app, args, env=env)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return result.stderr


def test_version() -> None:
    assert run("--version") == f"kvcore {__version__}\n"


def test_config_shows_values_and_sources(tmp_path: Path) -> None:
    file = tmp_path / "kvcore.toml"
    file.write_text('[host]\ncapacity = "1GiB"\n[namespace]\nsecret = "hunter2-hunter2-"\n')
    out = run(
        "config", "--show", "-c", str(file), "--set", "block.tokens=32", KVCORE__HOST__PIN="false"
    )
    rows = {
        row[0]: row[1:]
        for row in (line.split(None, 2) for line in map(str.rstrip, out.splitlines()))
    }
    assert rows["host.capacity"] == ["1GiB", f"file {file}"]
    assert rows["host.pin"] == ["false", "environment KVCORE__HOST__PIN"]
    assert [cell.strip() for cell in rows["block.tokens"]] == ["32", "overrides --set"]
    assert rows["disk.path"][0] == "unset"
    assert "hunter2" not in out


def test_config_as_json() -> None:
    shown = json.loads(run("config", "--json", "--set", "host.capacity=3MiB"))
    assert shown["host.capacity"] == {"value": "3MiB", "from": "overrides --set"}
    assert shown["engine"] == {"value": None, "from": "default"}


@pytest.mark.parametrize("name", settings.PAGES)
def test_the_reference_pages_are_current(name: str) -> None:
    page = (ROOT / "docs" / name).read_text()
    assert settings.text(settings.PAGES[name]) == page, "run: python -m tools.settings"


def test_every_table_is_on_one_page() -> None:
    """`kvcore config --docs` prints all of them, on one."""
    pages = "".join(settings.text(page) for page in settings.PAGES.values())
    titles = [line for line in run("config", "--docs").splitlines() if line.startswith("## ")]
    assert sorted(line for line in pages.splitlines() if line.startswith("## ")) == sorted(titles)
    assert "## [disk]" in titles


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (("config", "--set", "host.capcity=1GiB"), "did you mean host.capacity?"),
        (("config", "--set", "host.capacity=big"), "host.capacity (overrides --set): given 'big'"),
        (("config", "-c", "none.toml"), "none.toml: cannot be read: No such file"),
        (("serve", "m"), "no engine given; found are: toy, old, absent, shaky"),
        (("serve", "m", "--engine", "toyy"), "did you mean 'toy'?"),
        (("serve", "m", "--engine", "absent"), "not installed; tried are 1.0: install"),
        (("serve", "m", "--engine", "old"), "probe 'gate' failed"),
        (("serve", "m", "--engine", "toy", "--set", "host.policy=lruu"), "host.policy (overrides"),
        (("serve", "m", "--engine", "toy"), "'engine' cannot be run: No such file"),
        (("plugins", "--set", "plugins.strict=true"), "plugin 'sad' (no_such_module_here)"),
    ],
)
def test_errors_are_one_line(args: tuple[str, ...], expected: str) -> None:
    (line,) = fail(*args).splitlines()
    assert line.startswith("kvcore: error: ")
    assert expected in line


def test_each_problem_of_a_config_gets_its_line() -> None:
    lines = fail("config", "--set", "host.a=1", "--set", "host.b=1").splitlines()
    assert [line[:22] for line in lines] == ["kvcore: error: host.a ", "kvcore: error: host.b "]


def test_debug_shows_the_traceback() -> None:
    result = runner.invoke(app, ["--debug", "config", "--set", "a=1"])
    assert isinstance(result.exception, ConfigError)


def test_plugins_are_listed() -> None:
    out = run("plugins")
    assert "toy" in out
    assert "probed: tried are no versions; 0 probes hold; all is well" in out
    assert "not served: probe 'gate' failed: pytest has no gate. It is needed to get in" in out
    assert "install pytest 7.0, or a newer kvcore" in out
    assert "not installed; tried are 1.0" in out
    assert "status failed: RuntimeError: status is broken" in out
    assert "left out: sad" in out
    assert f"kvcore {__version__}" in out
    assert "disabled: sad" in run("plugins", "--set", "plugins.disable=sad")


def test_plugins_as_json() -> None:
    shown = json.loads(run("plugins", "--json"))
    rows = {(row["kind"], row["name"]): row for row in shown["found"]}
    assert rows["engine", "toy"]["supported"] is True
    assert rows["engine", "old"]["supported"] is False
    assert rows["engine", "old"]["standing"] == "not served"
    assert rows["policy", "lru"]["plugin"] == "builtin"
    assert shown["left_out"][0]["plugin"] == "sad"


def test_serve_builds_the_engines_command() -> None:
    args = ["--set", "host.capacity=1KiB", "--dry-run", "m", "--", "--flag", "a b"]
    for engine in (["--engine", "toy"], ["--set", "engine=toy"]):
        out = run("serve", *engine, *args)
        assert out == "ENGINE_KEY=... engine m 1024 --flag 'a b'\n"


def test_serve_becomes_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("os.execvpe", lambda *args: seen.append(args))
    runner.invoke(app, ["serve", "--engine", "toy", "m"], env={"OTHER": "1"})
    ((file, argv, env),) = seen
    assert (file, argv[:2]) == ("engine", ["engine", "m"])
    assert (env["ENGINE_KEY"], env["OTHER"]) == ("hunter2", "1")


def test_unknown_options_are_not_passed_on_by_accident() -> None:
    assert "No such option" in fail("serve", "--engine", "toy", "m", "--flag")


@pytest.mark.slow
def test_the_console_script_runs() -> None:
    code = "from kvcore.cli import main; main()"
    result = subprocess.run(
        [sys.executable, "-c", code, "config", "--set", "x=1"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("kvcore: error: x (overrides --set)")


@pytest.mark.parametrize("machines", [0, 1, 2])
def test_each_machine_needs_room_for_its_share_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, machines: int
) -> None:
    room = shutil.disk_usage(tmp_path)._replace(total=100 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: room)
    server = {"machines": [f"m{number}" for number in range(machines)], "folder": str(tmp_path)}
    config = load_config(None, {"host": {"capacity": "250MiB"}, "server": server})
    if machines == 2:
        check(config)
    else:
        with pytest.raises(ConfigError, match="has 100MiB in all"):
            check(config)


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("tiers.far.plugin=rediss", "no tier called 'rediss'; did you mean 'redis'?"),
        ("host.policy=lruu", "no policy called 'lruu'; did you mean 'lru'?"),
        (
            'tenants.ann={salt="a",quota={hots="1%"}}',
            "tenants.ann.quota names the tiers hots; there are",
        ),
        ("host.capacity=4096TiB", "host.capacity is 4096TiB and {path} has"),
    ],
)
def test_a_server_that_could_serve_nobody_does_not_start(
    setting: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(config: object) -> None:
        pytest.fail("it was started")

    monkeypatch.setattr(server_module, "Server", nothing)
    name, _, value = setting.partition("=")
    *tables, key = name.split(".")
    line = f"{key} = {value if value[0] == '{' else json.dumps(value)}"
    file = tmp_path / "kvcore.toml"
    file.write_text(f"[server]\nfolder = '{tmp_path}/run'\n[{'.'.join(tables)}]\n{line}\n")
    refused = runner.invoke(app, ["server", "-c", str(file)])
    assert refused.exit_code == 2
    assert told.format(path=tmp_path) in refused.output


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["scrub", "{folder}"], "holds nothing of kvcore: give the disk.path"),
        (["explain", "--path", "{folder}"], "no records in"),
        (["simulate", "{folder}/trace.jsonl"], "has no requests"),
        (["bench", "/no/such/folder"], "there is no folder /no/such/folder"),
        (
            ["ctl", "--address", "ipc://{folder}/s", "clear", "all"],
            "start a server (`kvcore server`)",
        ),
    ],
)
def test_where_there_is_nothing_it_is_said(tmp_path: Path, args: list[str], expected: str) -> None:
    (tmp_path / "trace.jsonl").touch()
    tmp_path.chmod(0o700)
    result = runner.invoke(app, [arg.format(folder=tmp_path) for arg in args])
    assert result.exit_code == 2, result.output
    assert expected in " ".join(result.stderr.split())
