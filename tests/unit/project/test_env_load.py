"""What tools/env_load.py does when. Nothing is installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import env, env_load


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What pip is asked for, instead of pip."""
    asked: list[str] = []
    monkeypatch.setattr(env.Environment, "pip", lambda _, *packages: asked.extend(packages))
    monkeypatch.setattr(env.Environment, "create", lambda made: made.path.mkdir(exist_ok=True))
    monkeypatch.setattr(env.Environment, "site", property(lambda made: made.path))
    return asked


@pytest.fixture
def given(tmp_path: Path) -> list[str]:
    base = tmp_path / "vllm"
    base.mkdir()
    env.Environment(base, tmp_path / "log").stamp({"recipe": "1"})
    return ["--folder", str(tmp_path), "--base", str(base)]


def test_both_are_made_once_and_lmcache_again_for_another_vllm(
    tmp_path: Path, installed: list[str], given: list[str]
) -> None:
    assert env_load.main([*given, "--check"]) == 1
    assert env_load.main(given) == 0
    lmcache = ["install", "--no-deps", env_load.LMCACHE, *env_load.LMCACHE_NEEDS]
    assert installed == ["install", env_load.AIPERF, *lmcache]
    assert str(tmp_path / "vllm") in (tmp_path / "lmcache" / env.BASE).read_text()
    assert env_load.main([*given, "--check"]) == 0
    assert env_load.main(given) == 0
    assert len(installed) == 2 + len(lmcache), "both were up to date"
    env.Environment(tmp_path / "vllm", tmp_path / "log").stamp({"recipe": "2"})
    assert env_load.main([*given, "--check"]) == 1
    assert env_load.main(given) == 0
    assert installed[2 + len(lmcache) :] == lmcache


def test_without_vllm_it_says_what_to_do(
    tmp_path: Path, installed: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--folder", str(tmp_path), "--base", str(tmp_path / "vllm")]
    assert env_load.main(given) == 1
    assert "tools/env.py vllm" in capsys.readouterr().err
    assert not installed
