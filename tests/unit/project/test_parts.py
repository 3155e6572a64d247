"""The parts of `make test`, and of `make test-unit`, run every file of tests, each once."""

import fnmatch
import os
import shlex
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def parts(*targets: str) -> list[list[str]]:
    """Return the arguments of pytest in each run of targets that share the cores."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    said = subprocess.run(
        ["make", "--dry-run", *targets],
        cwd=ROOT, env=env, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    lines = [line for line in said.splitlines() if " -m pytest " in line]
    return [shlex.split(line.rstrip("; \\"))[1:] for line in lines]


def runs(part: list[str], file: str) -> bool:
    ignored = [word.partition("=")[2] for word in part if word.startswith("--ignore")]
    given = [word for word in part if word.startswith("tests/")]
    return not any(fnmatch.fnmatch(file, name) for name in ignored) and any(
        fnmatch.fnmatch(file, name) or file.startswith(f"{name}/") for name in given
    )


@pytest.mark.parametrize(
    ("targets", "count", "folders"),
    [
        (("test-vllm", "test-beside"), 4, ["."]),
        (("test-unit-adapters", "test-unit-c-o", "test-unit-p-z"), 3, ["unit", "adapters"]),
    ],
)
def test_every_file_is_in_one_part(
    targets: tuple[str, ...], count: int, folders: list[str]
) -> None:
    found = [file for name in folders for file in (ROOT / "tests" / name).glob("**/test_*.py")]
    files = [str(file.relative_to(ROOT)) for file in found]
    assert len(files) > 200
    made = parts(*targets)
    assert len(made) == count
    assert {file: [runs(part, file) for part in made].count(True) for file in files} == (
        dict.fromkeys(files, 1)
    )
