"""`make test` collects every folder of tests: attacks were in none that it looked at."""

from __future__ import annotations

import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[3]


def test_pytest_looks_into_every_folder_with_tests() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    looked = set(settings["tool"]["pytest"]["ini_options"]["testpaths"])
    files = (ROOT / "tests").rglob("test_*.py")
    assert {f"tests/{file.relative_to(ROOT / 'tests').parts[0]}" for file in files} == looked
