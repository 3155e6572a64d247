"""``vllm.switch_on``: who starts with kvcore without naming it, and who never does."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvcore.config import load_config
from kvcore.engines.verdict import Failed
from kvcore.errors import UnsupportedError
from kvcore_vllm import engine, plugin, switch
from kvcore_vllm.probes import PROBES, SWITCH_PROBE

ON = {"KVCORE__VLLM__SWITCH_ON": "true"}


class EngineArgs:
    """vLLM's, as far as the switch sees them."""

    def __init__(self, kv_transfer_config: Any = None, kv_offloading_size: Any = None) -> None:
        self.kv_transfer_config = kv_transfer_config
        self.kv_offloading_size = kv_offloading_size

    def create_engine_config(self, usage_context: Any = None, headless: bool = False) -> Any:
        return self.kv_transfer_config


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> type[EngineArgs]:
    """A vLLM that every probe holds of, with arguments of its own in each test."""

    class Own(EngineArgs):
        create_engine_config = EngineArgs.create_engine_config

    transfer = SimpleNamespace(KVTransferConfig=lambda **named: SimpleNamespace(**named))
    monkeypatch.setitem(sys.modules, "vllm.engine.arg_utils", SimpleNamespace(EngineArgs=Own))
    monkeypatch.setitem(sys.modules, "vllm.config", transfer)
    monkeypatch.setattr(engine, "verdict", lambda: SimpleNamespace(holds=lambda name: None))
    return Own


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = tmp_path / "kvcore.toml"
    made.write_text("[vllm]\nswitch_on = true\n")
    return made


@pytest.mark.parametrize("by_file", [True, False])
def test_one_variable_switches_it_on(vllm: type[EngineArgs], file: Path, by_file: bool) -> None:
    switch.install({"KVCORE_CONFIG": str(file)} if by_file else ON)
    switch.install(ON)  # vLLM may load plugins more than once in a process
    found = vllm().create_engine_config()
    assert (found.kv_connector, found.kv_role) == ("KVCoreConnector", "kv_both")
    assert found.kv_load_failure_policy == "recompute"
    assert vllm.create_engine_config.__wrapped__ is EngineArgs.create_engine_config, (  # type: ignore[attr-defined]
        "wrapped twice"
    )


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"KVCORE_PORT": "tcp://a:1"},
        {"KVCORE__HOST__CAPACITY": "1GiB"},
        {"KVCORE__VLLM__SWITCH_ON": "false"},
    ],
)
def test_without_it_vllm_is_as_it_was(vllm: type[EngineArgs], env: dict[str, str]) -> None:
    switch.install(env)
    assert vllm.create_engine_config is EngineArgs.create_engine_config
    assert vllm().create_engine_config() is None


@pytest.mark.parametrize(
    "given",
    [
        {"kv_transfer_config": SimpleNamespace(kv_connector="NixlConnector")},
        {"kv_transfer_config": SimpleNamespace(kv_connector="KVCoreConnector", own=1)},
        {"kv_transfer_config": SimpleNamespace(kv_connector=None)},
        {"kv_transfer_config": {"kv_connector": "MultiConnector"}},
        {"kv_offloading_size": 4.0},
    ],
)
def test_never_against_what_the_user_named(vllm: type[EngineArgs], given: dict[str, Any]) -> None:
    switch.install(ON)
    assert vllm(**given).create_engine_config() == given.get("kv_transfer_config")


def _lacks(name: str) -> None:
    raise UnsupportedError(f"it has no {name}")


@pytest.mark.parametrize("fault", ["settings", "file", "probe", "import", "arguments"])
def test_what_is_wrong_is_logged_and_vllm_starts(
    vllm: type[EngineArgs],
    fault: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    env = dict(ON)
    if fault == "settings":
        env["KVCORE__HOST__CAPACITI"] = "1GiB"
    elif fault == "file":
        env["KVCORE_CONFIG"] = "/no/such.toml"
    elif fault == "probe":
        monkeypatch.setattr(engine, "verdict", lambda: SimpleNamespace(holds=_lacks))
    elif fault == "import":
        monkeypatch.setitem(sys.modules, "vllm.engine.arg_utils", None)
    else:
        monkeypatch.setitem(sys.modules, "vllm.config", None)
    with caplog.at_level(logging.INFO):
        switch.install(env)
        assert vllm().create_engine_config() is None
    said = " ".join(record.getMessage() for record in caplog.records)
    foreseen = fault in ("settings", "file", "probe")
    assert ("not_switched_on" if foreseen else "switch_failed") in said
    assert not foreseen or "Traceback" not in caplog.text


def test_a_plugin_that_was_loaded_before_switches_on_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM calls `register` again in some processes: the connector is known there already."""
    installed: list[bool] = []

    def known(*_: Any) -> None:
        raise ValueError("registered already")

    factory = SimpleNamespace(KVConnectorFactory=SimpleNamespace(register_connector=known))
    path = "vllm.distributed.kv_transfer.kv_connector.factory"
    monkeypatch.setitem(sys.modules, path, factory)
    monkeypatch.setattr(switch, "install", lambda: installed.append(True))
    plugin.register()
    assert installed


# --- what kvcore doctor says --------------------------------------------------------------------


@pytest.fixture
def sound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "verdict", lambda: SimpleNamespace(holds=lambda name: None))
    monkeypatch.setattr(switch, "has_entry_point", lambda *_: True)


@pytest.mark.usefixtures("sound")
def test_doctor_says_whether_it_is_on_and_why(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    default = load_config(env={})
    found = switch.find_switch(default, {})
    assert (found.on, found.advice) == (False, "")
    assert "vllm.switch_on is false" in found.why
    for env, source in ((ON, "KVCORE__VLLM__SWITCH_ON"), ({"KVCORE_CONFIG": str(file)}, str(file))):
        found = switch.find_switch(default, env)
        assert (found.on, found.advice) == (True, "")
        assert source in found.why
    given = load_config(file, env={})
    found = switch.find_switch(given, {})
    assert not found.on
    assert "not in vLLM's environment" in found.why
    assert "KVCORE_CONFIG" in found.advice, "vLLM does not see what doctor was given"
    found = switch.find_switch(default, {**ON, "KVCORE__HOST__CAPACITI": "1"})
    assert not found.on
    assert "capaciti" in found.why
    for plugins, on in (("kvcore,other", True), ("other", False), ("", False)):
        assert switch.find_switch(default, {**ON, "VLLM_PLUGINS": plugins}).on is on
    monkeypatch.setattr(engine, "verdict", lambda: SimpleNamespace(holds=_lacks))
    assert "it has no switch" in switch.find_switch(default, ON).why
    monkeypatch.setattr(switch, "has_entry_point", lambda *_: False)
    assert "reinstall" in switch.find_switch(default, ON).advice


def test_the_probe_is_of_what_is_wrapped() -> None:
    [probe] = [each for each in PROBES if each.name == SWITCH_PROBE]
    assert probe.without, "a vLLM that lacks it is served all the same"
    assert Failed(probe, "x").probe is probe


# --- vLLM's own arguments -----------------------------------------------------------------------

REAL = """
import sys
from vllm.engine.arg_utils import EngineArgs
other = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
for more in ({}, {"kv_transfer_config": other}):
    made = EngineArgs(model=sys.argv[1], skip_tokenizer_init=True, **more).create_engine_config()
    print("FOUND", made.kv_transfer_config.kv_connector)
"""


@pytest.mark.slow
@pytest.mark.exhaustive
def test_vllms_own_configuration() -> None:
    """No engine starts. `tests/engines/test_vllm_switch.py` starts one."""
    pytest.importorskip("vllm")
    from kvcore.harness.models import tiny_model

    rest = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    run = [sys.executable, "-c", REAL, str(tiny_model("llama"))]
    env = {**os.environ, **rest, **ON}
    found = subprocess.run(run, env=env, capture_output=True, text=True, timeout=600)
    assert found.returncode == 0, found.stderr[-3000:]
    told = [line for line in found.stdout.splitlines() if line.startswith("FOUND")]
    assert told == ["FOUND KVCoreConnector", "FOUND ExampleConnector"]
