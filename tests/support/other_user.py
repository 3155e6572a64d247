"""Another user of this machine: attacks are real only where the test runs as root."""

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

OTHER = 65534
"""The uid and gid of the other user: nobody."""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


@contextmanager
def shared_folder() -> Iterator[Path]:
    """Make a folder in memory in which every user may create names, as in /dev/shm itself."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="adversary-") as made:
        folder = Path(made)
        folder.chmod(0o1777)
        yield folder


PRELUDE = f"""
import os
def become_other():
    os.setgroups([])
    os.setgid({OTHER})
    os.setuid({OTHER})
"""
"""The interpreter may lie in root's home, so the code imports what it needs and then calls this."""


class OtherProcess:
    """Python ``code`` that calls ``become_other()``, and what it prints, by lines."""

    def __init__(self, code: str, *args: str) -> None:
        self.lines: list[str] = []
        self._process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + code, *args],
            stdout=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line.rstrip("\n"))

    def wait(self, timeout: float = 60.0) -> None:
        """Wait until the process has ended by itself, without an error."""
        assert self._process.wait(timeout) == 0
        self._reader.join(timeout)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()


@contextmanager
def as_other_user(code: str, *args: str) -> Iterator[OtherProcess]:
    """Run ``code``, which calls ``become_other()`` first, until the block ends."""
    process = OtherProcess(code, *args)
    try:
        yield process
    finally:
        process.kill()
