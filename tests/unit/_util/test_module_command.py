"""Modules run without anything from the current folder, on Pythons with ``-P`` and without."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from kvcore._util.module_command import module_command

PLANTED = "print('planted')\n"


@pytest.mark.parametrize("version", [(3, 10), (3, 11)])
def test_the_current_folder_is_not_imported_from(tmp_path: Path, version: tuple[int, int]) -> None:
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    (home / "wanted.py").write_text(
        "import sys, json\nprint(__name__, __spec__.name, sys.argv[1:])"
    )
    for name in ("wanted", "json", "runpy"):
        (here / f"{name}.py").write_text(PLANTED)
    said = subprocess.run(
        [*module_command("wanted", version=version), "--flag", "x"],
        cwd=here, env={"PYTHONPATH": str(home)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert said.stdout == "__main__ wanted ['--flag', 'x']\n"
