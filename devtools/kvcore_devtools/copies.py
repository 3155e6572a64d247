"""A copy of this source tree, in which tests run on changed sources.

    tracked and new files ──▶ temporary folder ──▶ `change` one file ──▶ `run` tests ──▶ as it was

Processes that run in the copy import kvcore from there, whatever the environment has installed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["ROOT", "TESTS_FAILED", "Outcome", "TreeCopy", "copied"]

ROOT = Path(__file__).resolve().parents[2]
"""The root of the source tree that has this file."""

TESTS_FAILED = 1
"""pytest's exit status when tests ran and some of them failed."""

_SOURCES = (".", "kernels", "devtools", "adapters/vllm", "adapters/trtllm", "adapters/sglang")
_RESULT = re.compile(r"(PASSED|FAILED|ERROR|SKIPPED) (tests/\S+?\.py\S*.*)")


@dataclass(frozen=True)
class Outcome:
    """The end of one run of pytest: its exit status, or None if it was killed at its time limit.

    ``results`` maps each test, with its parameters, to PASSED, FAILED or ERROR.
    """

    status: int | None
    seconds: float
    output: str
    results: dict[str, str] = field(default_factory=dict)

    def of(self, test: str) -> set[str]:
        """Return the results of a test, which may have parameters."""
        return {
            result
            for name, result in self.results.items()
            if name == test or name.startswith((f"{test}[", f"{test}::"))
        }


class TreeCopy:
    """A copy of the tree in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stamp = int(time.time())

    @property
    def path(self) -> list[str]:
        """The folders from which processes in the copy import, before all others."""
        return [str((self.folder / source).resolve()) for source in _SOURCES]

    def check(self) -> None:
        """Raise RuntimeError unless processes in the copy import kvcore from there."""
        probe = "import kvcore; print(kvcore.__file__)"
        done = subprocess.run(
            [sys.executable, "-c", probe],
            cwd=self.folder,
            env=self._environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode or not Path(done.stdout.strip()).is_relative_to(self.folder):
            raise RuntimeError(
                f"processes in {self.folder} do not import the copy: {done.stdout}{done.stderr}"
            )

    @contextlib.contextmanager
    def change(self, file: str, source: str) -> Iterator[None]:
        """Give a file other text within the block."""
        path = self.folder / file
        before = path.read_text()
        self._write(path, source)
        try:
            yield
        finally:
            self._write(path, before)

    def run(self, tests: Sequence[str], *options: str, limit_s: float) -> Outcome:
        """Run tests with pytest. Blocks. Kills it, and all that it has started, at the limit."""
        command = [sys.executable, "-m", "pytest", "-q", "-rA", "--tb=line", "--show-capture=no"]
        command += ["-p", "no:cacheprovider", *options, *tests]
        started = time.monotonic()
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=self._environment(),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            status: int | None = None
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    status = process.wait(limit_s)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            output.seek(0)
            text = output.read()
        found = (_RESULT.fullmatch(line) for line in text.splitlines())
        results = {one[2].split(" - ")[0]: one[1] for one in found if one is not None}
        return Outcome(status, time.monotonic() - started, text, results)

    def _write(self, path: Path, source: str) -> None:
        """Write a file with a time of its own: Python takes compiled files by time and size."""
        path.write_text(source)
        self._stamp += 2
        os.utime(path, (self._stamp, self._stamp))

    def _environment(self) -> dict[str, str]:
        return os.environ | {"PYTHONPATH": os.pathsep.join(self.path)}


@contextlib.contextmanager
def copied(root: Path = ROOT) -> Iterator[TreeCopy]:
    """Return a copy of a tree's files that git tracks, or would track, for the block."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    with tempfile.TemporaryDirectory(prefix="kvcore-copy-") as made:
        folder = Path(made).resolve()
        for name in filter(None, listed.split("\0")):
            if (root / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, folder / name)
        if (root / ".venvs").exists():
            (folder / ".venvs").symlink_to((root / ".venvs").resolve())
        copy = TreeCopy(folder)
        copy.check()
        yield copy
