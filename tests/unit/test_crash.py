"""kill -9 at seeded points, on the real disk tier; and a short soak. More by command."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path


def run(module: str, *arguments: str) -> str:
    """What a command of `kvcore.testing` prints. It forks, or looks at its own memory: it has a
    process of its own."""
    command = [sys.executable, "-m", f"kvcore.testing.{module}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def test_after_a_kill_whole_blocks_are_there_and_nothing_else(tmp_path: Path) -> None:
    """A dozen rounds; `python -m kvcore.testing.crash --rounds 200` does more."""
    said = run("crash", "--rounds", "12", "--seed", "3", "--folder", str(tmp_path))
    assert len(re.findall(r"'(?!not)\w+': \d+", said)) >= 3, f"hardly killed anywhere: {said}"
    assert list(tmp_path.iterdir()) == []


def test_traffic_with_faults_leaves_nothing_behind(tmp_path: Path) -> None:
    """20 seconds; `python -m kvcore.testing.soak --minutes 30` does more."""
    said = run("soak", "--minutes", "0.33", "--seed", "2", "--folder", str(tmp_path))
    assert "all right" in said
    assert re.search(r"[1-9]\d* faults", said), said
    assert "'disk'" in said
    assert list(tmp_path.iterdir()) == []
