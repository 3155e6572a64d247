"""Quotas and clears that would act on other namespaces than those of the engines."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("transformers")
pytest.importorskip("zmq")

from kvcore.cli import probe
from kvcore.cli.app import app
from kvcore.config import Config, load_config
from kvcore.errors import ConfigError, UnsupportedError
from kvcore.harness.prompts import words
from kvcore.testing.engine import EngineArgs, ReferenceEngine, random_llama
from kvcore_devtools.server_fixture import RunningServer

SECRET = "of-the-engines-only-7f3a"
Start = Callable[[dict[str, Any]], tuple[RunningServer, Path]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return what starts a server without a secret, and returns it with its settings' file."""
    running: list[RunningServer] = []

    def begin(tables: dict[str, Any]) -> tuple[RunningServer, Path]:
        given = {
            "server": {"address": "local", "folder": str(tmp_path / "run"), "deadline_s": 20.0},
            "host": {"capacity": "16MiB", "huge_pages": False},
            "control": {"audit": str(tmp_path / "audit.jsonl")},
            **tables,
        }
        file = tmp_path / "kvcore.yaml"
        file.write_text(json.dumps(given))
        running.append(RunningServer(load_config(file, env={})))
        return running[-1], file

    yield begin
    for each in running:
        each.close()


def _engine(file: Path, **namespace: str) -> ReferenceEngine:
    config = load_config(file, {"namespace": namespace}, {})
    return ReferenceEngine(random_llama(), EngineArgs(), config)


def _doctor(config: Config) -> Any:
    [found] = [f for f in probe.contacts(config, None, 5.0) if f.about == "kvcore server"]  # type: ignore[arg-type]
    return found


def test_an_engine_whose_quotas_would_not_count_is_refused(start: Start) -> None:
    """Before, the quota was off and `ctl clear tenant=` was told as done, without a word."""
    server, file = start({"tenants": {"ann": {"salt": "a", "quota": {"host": "10%"}}}})
    with pytest.raises(UnsupportedError, match=r"namespace\.secret or namespace\.salt differ"):
        _engine(file, secret=SECRET)
    assert server.status()["models"] == []
    serving = _engine(file)
    serving.close()
    theirs = load_config(file, {"namespace": {"secret": SECRET}}, {})
    assert _doctor(theirs).level is probe.Level.PROBLEM
    assert "another namespace.secret" in _doctor(theirs).found
    assert _doctor(load_config(file, env={})).level is probe.Level.GOOD


def test_a_clear_that_meets_nothing_fails(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    salt = tmp_path / "salt"
    salt.write_text("a\n")
    _, file = start({})
    with caplog.at_level(logging.WARNING, "kvcore.server"):
        serving = _engine(file, secret=SECRET)
    assert "`kvcore ctl` finds nothing by tenant, salt or tokens" in caplog.text
    request = serving.submit(words(1, 100), 6, salt="a")
    serving.run()
    serving.settle()
    assert request.answer
    tokens = tmp_path / "tokens.json"
    tokens.write_text(json.dumps(words(1, 100)))
    for which in (f"salt={salt}", f"tokens={tokens}", "salt=", f"namespace={'0a' * 16}"):
        cleared = CliRunner().invoke(app, ["ctl", "-c", str(file), "clear", which])
        assert cleared.exit_code == 2, which
        assert "nothing is held of" in cleared.stderr
        assert "among 1 namespaces; if that is wrong, give this process" in cleared.stderr
    audit = tmp_path / "audit.jsonl"
    done = [json.loads(line) for line in audit.read_text().splitlines()]
    assert not [line for line in done if line.get("blocks") is not None], "told as carried out"
    cleared = CliRunner().invoke(app, ["ctl", "-c", str(file), "clear", "all"])
    assert cleared.exit_code == 0
    serving.close()


def test_a_quota_of_nobody_holds_for_salts_without_number(start: Start) -> None:
    server, file = start({"clients": {"unnamed_quota": {"host": "64KiB"}}})
    serving = _engine(file)
    for n in range(8):
        serving.submit(words(n, 100), 2, salt=f"random-{n}")
        serving.run()
        serving.settle()
    [space] = server.server.models
    quota = space.manager.index.admin.quotas("host")["*"]
    assert 0 < quota.used <= quota.limit
    used, slots = space.used["host"]
    assert used == quota.used < slots
    serving.close()


def test_the_name_of_nobody_is_no_tenants() -> None:
    with pytest.raises(ConfigError, match="tenant name"):
        load_config(overrides={"tenants": {"*": {"salt": "a"}}}, env={})
