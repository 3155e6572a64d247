"""Secrets of tenants: who can read them, and what happens if an engine would not get one."""

from __future__ import annotations

import json
import logging
import os
import stat
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import pytest
from typer.testing import CliRunner

from kvcore.cli import ctl
from kvcore.cli import serve as serve_command
from kvcore.cli.app import app
from kvcore.config import Config, forwarded_config, load_config
from kvcore.errors import ConfigError
from kvcore.log import configure
from kvcore.model.identity import Namespaces
from kvcore.plugins import EngineSpec, ServeCommand

SECRET = "0123456789abcdef-of-all"
SALT = "salt-of-ann-d41d8cd98f00"
PASSWORD = "hunter2-of-the-store"
FILE = f"""
[namespace]
secret = "{SECRET}"
[tenants.ann]
salt = "{SALT}"
quota = {{ host = "10%" }}
[tiers.far]
plugin = "redis"
options = {{ url = "redis://me:{PASSWORD}@localhost:1/0" }}
[tiers.s3]
plugin = "objects"
[tiers.s3.options]
url = "s3://bucket/kv"
config = {{ aws_secret_access_key = "{PASSWORD}-2", aws_region = "here" }}
[events]
nats = "nats://{PASSWORD}-token@localhost:4222"
"""
SECRETS = (SECRET, SALT, PASSWORD)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "kvcore.toml"
    file.write_text(FILE)
    return file


def _engine_config(engine: str, command: ServeCommand) -> Config:
    """Return the settings that an engine's own processes read from this command."""
    if engine == "trtllm":
        return forwarded_config(command.env)
    given = next(json.loads(arg) for arg in command.argv if arg.startswith("{"))
    key = "kv_connector_extra_config" if engine == "vllm" else "linker_extra_config"
    return load_config(overrides=given[key], env=command.env)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_an_engine_gets_every_secret_and_shows_none(
    engine: str, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = load_config(file, env={})
    command = import_module(f"kvcore_{engine}.plugin").ENGINE.serve("MODEL", config, [])
    argv = " ".join(command.argv)
    assert not [secret for secret in SECRETS if secret in argv]
    theirs = _engine_config(engine, command)
    assert theirs == config
    # What quotas and clears act on is what the tenant's requests are hashed with.
    spaces = [Namespaces(c.namespace, b"f" * 16).of("", c.tenants["ann"].salt)
              for c in (config, theirs)]  # fmt: skip
    assert spaces[0].digest == spaces[1].digest


def test_kvcore_serve_hands_secrets_over_by_the_environment_alone(
    file: Path, tmp_path: Path
) -> None:
    stub, seen = tmp_path / "vllm", tmp_path / "seen.json"
    stub.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        f"json.dump([sys.argv, dict(os.environ)], open({str(seen)!r}, 'w'))\n"
    )
    stub.chmod(stub.stat().st_mode | stat.S_IXUSR)
    code = (
        "import kvcore_vllm.engine\n"
        f"kvcore_vllm.engine.command_beside = lambda name: {str(stub)!r}\n"
        "from kvcore.cli.app import app; app()"
    )
    env = {**os.environ, "KVCORE_CONFIG": str(file)}
    served = subprocess.run(
        [sys.executable, "-c", code, "serve", "MODEL", "--engine", "vllm"],
        env=env, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert served.returncode == 0, served.stderr
    argv, environ = json.loads(seen.read_text())
    for secret in SECRETS:
        assert secret not in " ".join(argv) + served.stdout + served.stderr
    given = json.loads(argv[argv.index("--kv-transfer-config") + 1])["kv_connector_extra_config"]
    assert load_config(overrides=given, env=environ) == load_config(file, env={})


def test_a_plugin_that_drops_a_secret_does_not_start(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A salt that is lost would make quotas and clears act on another namespace, silently."""

    def serve(model: str, config: Config, args: Any) -> ServeCommand:
        return ServeCommand(["engine", model], {"KVCORE__NAMESPACE__SECRET": SECRET})

    spec = EngineSpec("toy", ("pytest",), serve, lambda: "", "pytest")
    plugins = type("P", (), {"engine": lambda *_: spec, "check": lambda *_: None})()
    monkeypatch.setattr(serve_command, "manager", lambda config: plugins)
    with pytest.raises(ConfigError, match=r"does not pass .*tenants\.ann\.salt.*") as refused:
        serve_command.command("MODEL", load_config(file, env={}), "toy", [])
    assert "namespace.secret" not in str(refused.value)
    assert not [secret for secret in SECRETS if secret in str(refused.value)]


def test_no_command_shows_a_password(file: Path) -> None:
    for args in (
        ("config",),
        ("config", "--json"),
        ("serve", "MODEL", "--engine", "vllm", "--dry-run"),
        ("doctor", "--no-probe", "--json", "--seconds", "1"),
        ("config", "--set", f"disk.io_threads=redis://a:{PASSWORD}@h"),
        ("config", "--set", f"server.address=redis://a:{PASSWORD}@h"),
        ("config", "--set", f"cluster.etcd=http://a:{PASSWORD}@h,x"),
    ):
        result = CliRunner().invoke(app, [args[0], "-c", str(file), *args[1:]])
        said = result.output + result.stderr + repr(result.exception)
        assert not [secret for secret in SECRETS if secret in said], args


def test_errors_and_logs_do_not_show_a_password() -> None:
    url = f"https://me:{PASSWORD}@host/path?region=x&sig_key={PASSWORD}#f"
    error = ConfigError(f"url {url}: refused")
    assert PASSWORD not in str(error) + repr(error)
    assert "host/path?region=x" in str(error)


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_line_of_another_librarys_error_shows_no_password(
    form: Literal["text", "json"], capsys: pytest.CaptureFixture[str]
) -> None:
    log = logging.getLogger("kvcore.adversary")
    root, outer = logging.getLogger("kvcore"), logging.getLogger()
    kept = root.handlers[:], root.propagate, outer.handlers[:]
    try:
        outer.handlers.clear()
        configure("info", form)
        try:
            raise OSError(f"redis://me:{PASSWORD}@store:6379 is not there")
        except OSError as error:
            log.warning("the store is left alone: %s", error, exc_info=error)
    finally:
        root.handlers[:], root.propagate, outer.handlers[:] = kept
    shown = capsys.readouterr().err
    assert "@store:6379 is not there" in shown
    assert PASSWORD not in shown


def test_the_secret_cannot_be_guessed_by_trying_all() -> None:
    with pytest.raises(ConfigError, match="has 11 bytes; supported are 16 or more") as refused:
        load_config(overrides={"namespace": {"secret": "one for all"}}, env={})
    assert "one for all" not in str(refused.value)


def test_a_tenants_name_is_not_its_salt() -> None:
    """Names are shown in metrics; whoever knows a salt can read what its tenant has cached."""
    with pytest.raises(ConfigError, match=r"tenants\.ann \(overrides\): has no salt; give the"):
        load_config(overrides={"tenants": {"ann": {}}}, env={})
    nobody = load_config(overrides={"tenants": {"rest": {"salt": ""}}}, env={})
    assert nobody.tenants["rest"].salt == ""


@pytest.mark.parametrize("given", ["{", "[1]", '"x"', "[" * 100_000, f'{{"a": "{SECRET}'])
def test_a_broken_variable_is_named_and_not_shown(given: str) -> None:
    with pytest.raises(ConfigError, match="KVCORE_SECRETS is ") as refused:
        load_config(env={"KVCORE_SECRETS": given})
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    "given",
    [
        f"namespace.secret={SECRET}",
        f"tenants.ann.salt={SALT}",
        f"tiers.far.options.url=redis://me:{PASSWORD}@h:1/0",
        f'tenants={{"ann": {{"salt": "{SALT}"}}}}',
    ],
)
def test_a_secret_on_the_command_line_is_refused(given: str) -> None:
    result = CliRunner().invoke(app, ["config", "--set", given])
    assert result.exit_code == 2
    assert "other users can read command lines" in result.stderr
    assert not [secret for secret in SECRETS if secret in result.output + result.stderr]


def test_ctl_takes_a_salt_from_a_file_or_standard_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    salt = tmp_path / "salt"
    salt.write_text(f"{SALT}\n")
    asked = []
    monkeypatch.setattr(ctl, "ask", lambda target, order: asked.append(order) or {})
    run = CliRunner().invoke
    assert run(app, ["ctl", "clear", f"salt={salt}"]).exit_code == 0
    assert run(app, ["ctl", "clear", "salt=-"], input=SALT).exit_code == 0
    assert run(app, ["ctl", "clear", "salt="]).exit_code == 0
    assert run(app, ["ctl", "quota", "set", "a", "host", "1MiB", "--salt", "-"], input=SALT)
    assert [order.where.salt for order in asked[:3]] == [SALT, SALT, ""]
    assert asked[3].salt == SALT
    refused = run(app, ["ctl", "clear", f"salt={SALT}"])
    assert refused.exit_code == 2
    assert "give the name of a file that holds the salt, or - for standard input" in refused.stderr
    assert SALT not in refused.stderr
