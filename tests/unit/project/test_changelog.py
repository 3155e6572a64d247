"""Changelog fragments: their names, and that towncrier collects them under the changelog's head."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[3]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["towncrier"]
KINDS = [kind["directory"] for kind in SETTINGS["type"]]
NAME = re.compile(rf"(\d+|\+[a-z0-9-]+)\.({'|'.join(KINDS)})(\.\d+)?\.md")


def unknown(folder: Path) -> list[str]:
    """The files of ``folder`` that towncrier would skip, without a word."""
    names = sorted(path.name for path in folder.iterdir() if path.name != "README.md")
    return [name for name in names if not NAME.fullmatch(name)]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with the changelog and no fragments."""
    for name in ("pyproject.toml", SETTINGS["filename"]):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / SETTINGS["directory"]).mkdir()
    shutil.copy(ROOT / SETTINGS["directory"] / "README.md", tmp_path / SETTINGS["directory"])
    return tmp_path


def test_towncrier_knows_the_name_of_every_fragment() -> None:
    assert unknown(ROOT / SETTINGS["directory"]) == [], "see changelog.d/README.md"


@pytest.mark.parametrize("name", ["words.fixed.md", "31.repaired.md", "31.md", "31.fixed.txt"])
def test_another_name_is_found(project: Path, name: str) -> None:
    (project / SETTINGS["directory"] / name).write_text("Something.\n")
    assert unknown(project / SETTINGS["directory"]) == [name]


def test_the_kinds_are_those_of_keep_a_changelog() -> None:
    assert KINDS == ["added", "changed", "deprecated", "removed", "fixed", "security"]


def test_a_release_collects_every_fragment_between_the_head_and_the_last_release(
    project: Path,
) -> None:
    pytest.importorskip("towncrier", reason="towncrier is not installed")
    fragments = project / SETTINGS["directory"]
    (fragments / "31.fixed.md").write_text("A fault is gone.\n")
    (fragments / "31.fixed.1.md").write_text("A second fault is gone.\n")
    (fragments / "+few-words.added.md").write_text("A thing is new.\n")
    before = (project / SETTINGS["filename"]).read_text()
    head, mark, releases = before.partition(SETTINGS["start_string"])
    assert mark
    command = ["build", "--yes", "--version", "9.9.0", "--date", "2026-12-01"]
    subprocess.run([sys.executable, "-m", "towncrier", *command], cwd=project, check=True)
    after = (project / SETTINGS["filename"]).read_text()
    assert after.startswith(head + mark)
    assert after.endswith(releases.lstrip())
    added = after.removeprefix(head + mark).removesuffix(releases.lstrip())
    assert added.split("\n\n") == [
        "\n## 9.9.0, 2026-12-01",
        "### Added",
        "- A thing is new.",
        "### Fixed",
        "- A fault is gone. (#31)\n- A second fault is gone. (#31)",
        "\n",
    ]
    assert [path.name for path in fragments.iterdir()] == ["README.md"]
