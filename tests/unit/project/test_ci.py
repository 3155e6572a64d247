"""`.ci/run` finds nothing that was cached on the machine, and leaves nothing there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
MAKE = """#!{python}
import json, os, pathlib, sys
home = pathlib.Path(os.environ["HOME"])
found = [str(path) for path in home.rglob("*")]
said = {{"env": dict(os.environ), "arguments": sys.argv[1:], "home": found}}
home.joinpath("left").touch()
pathlib.Path({said!r}).write_text(json.dumps(said))
sys.exit(int(os.environ["CODE"]))
"""
CACHES = (
    "HOME",
    "XDG_CACHE_HOME",
    "TORCH_EXTENSIONS_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
)


@pytest.fixture
def user(tmp_path: Path) -> dict[str, str]:
    """The environment of a user with caches, settings of pip and a `make` that says what it got."""
    tools = tmp_path / "bin"
    tools.mkdir()
    make = tools / "make"
    make.write_text(MAKE.format(python=sys.executable, said=str(tmp_path / "said")))
    make.chmod(0o755)
    settings = tmp_path / "home" / ".config" / "pip"
    settings.mkdir(parents=True)
    (settings / "pip.conf").touch()
    (tmp_path / "temporary").mkdir()
    caches = {name: str(tmp_path / "home" / "used") for name in (*CACHES, "HF_HOME")}
    return {
        **os.environ,
        **caches,
        "HOME": str(tmp_path / "home"),
        "XDG_CONFIG_HOME": str(tmp_path / "home" / ".config"),
        "TMPDIR": str(tmp_path / "temporary"),
        "PATH": f"{tools}:{os.environ['PATH']}",
        "CODE": "0",
    }


def run(user: dict[str, str], *arguments: str) -> tuple[int, dict[str, Any]]:
    """Return the exit code of ``.ci/run``, and what its `make` got."""
    done = subprocess.run(["bash", ROOT / ".ci" / "run", *arguments], env=user, check=False)
    return done.returncode, json.loads((Path(user["TMPDIR"]).parent / "said").read_text())


def test_it_starts_from_empty_caches_and_removes_them(user: dict[str, str]) -> None:
    code, said = run(user)
    assert code == 0
    assert said["arguments"][0] == "test"
    assert said["home"] == []
    for name in CACHES:
        assert Path(said["env"][name]).is_relative_to(user["TMPDIR"]), name
    assert "HF_HOME" not in said["env"]
    assert list(Path(user["TMPDIR"]).iterdir()) == []


def test_pip_keeps_its_settings_and_downloads(user: dict[str, str]) -> None:
    user.pop("PIP_CACHE_DIR", None)
    user.pop("PIP_CONFIG_FILE", None)
    env = run(user)[1]["env"]
    assert env["PIP_CONFIG_FILE"] == f"{user['XDG_CONFIG_HOME']}/pip/pip.conf"
    assert env["PIP_CACHE_DIR"] == f"{user['XDG_CACHE_HOME']}/pip"
    given = run({**user, "PIP_CONFIG_FILE": "/mine", "PIP_CACHE_DIR": "/too"})[1]["env"]
    assert (given["PIP_CONFIG_FILE"], given["PIP_CACHE_DIR"]) == ("/mine", "/too")


def test_it_fails_as_the_target_fails(user: dict[str, str]) -> None:
    code, said = run({**user, "CODE": "2"}, "test-all")
    assert (code, said["arguments"][0]) == (2, "test-all")
    assert list(Path(user["TMPDIR"]).iterdir()) == []
