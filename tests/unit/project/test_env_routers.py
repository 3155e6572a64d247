"""What tools/env_routers.py does when, and the versions that the documentation names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools import env, env_routers

ROOT = Path(__file__).parents[3]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What pip is asked for, instead of pip."""
    asked: list[str] = []
    monkeypatch.setattr(env.Environment, "pip", lambda _, *packages: asked.extend(packages))
    monkeypatch.setattr(env.Environment, "create", lambda made: made.path.mkdir(exist_ok=True))
    return asked


def test_it_is_made_once_and_again_for_another_version(
    tmp_path: Path, installed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ["--path", str(tmp_path / "routers")]
    assert env_routers.main([*given, "--check"]) == 1
    assert env_routers.main(given) == 0
    packages = [f"{name}=={version}" for name, version in env_routers.ROUTERS.items()]
    assert installed == ["install", *packages]
    assert env_routers.main([*given, "--check"]) == 0
    assert env_routers.main(given) == 0
    assert len(installed) == 1 + len(packages), "it was up to date"
    monkeypatch.setitem(env_routers.ROUTERS, "vllm-router", "9.9")
    assert env_routers.main([*given, "--check"]) == 1
    assert env_routers.main(given) == 0
    assert installed[-1] == "vllm-router==9.9"


def test_a_failure_is_told_and_not_taken_for_done(
    tmp_path: Path,
    installed: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fails(_: env.Environment, *packages: str) -> None:
        raise env.EnvError("no such version")

    monkeypatch.setattr(env.Environment, "pip", fails)
    given = ["--path", str(tmp_path / "routers")]
    assert env_routers.main(given) == 1
    assert "no such version" in capsys.readouterr().err
    assert env_routers.main([*given, "--check"]) == 1


def test_the_documentation_names_these_versions() -> None:
    page = (ROOT / "docs" / "events.md").read_text()
    [table] = re.findall(r"^## Routers$(.*?)^## ", page, re.MULTILINE | re.DOTALL)
    for name, version in env_routers.ROUTERS.items():
        assert re.search(rf"`{name}`[^|]*\| {re.escape(version)} ", table), f"{name} {version}"
