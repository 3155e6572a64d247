"""Parts of a run that end in every way, for the tests of the runner."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.gpu.parts import Part
from tools.gpu.record import Record

LIMIT_S = 60


def part(name: str, limit_s: int = LIMIT_S) -> Part:
    """Return the part whose function in this module has this name."""
    return Part(name, f"a part that {name}", "nothing", "", limit_s, f"support.gpu_parts:{name}")


def passes(record: Record, machine: Mapping[str, Any], scratch: Path) -> None:
    (scratch / "own").write_text("a folder of its own")
    record.passed("a check", "3 cases")
    record.figure("a rate", 0.9, "of the device's own copy", at_least=0.85)
    record.figure("a slower rate", 0.8, "of the device's own copy", at_least=0.85)
    record.left_out("another check", "no GPU")


def measures(record: Record, machine: Mapping[str, Any], scratch: Path) -> None:
    record.figure("a rate", 0.9, "of the device's own copy")


def leaves_out(record: Record, machine: Mapping[str, Any], scratch: Path) -> None:
    record.left_out("all of it", machine["why_no_gpu"])


def finds_a_fault(record: Record, machine: Mapping[str, Any], scratch: Path) -> None:
    record.failed("a comparison", "row 7 differs")
    record.passed("another comparison")


def raises(record: Record, machine: Mapping[str, Any], scratch: Path) -> None:
    record.figure("measured before", 1.0, "s")
    raise RuntimeError("the kernel is not there")


def crashes(record: Record, machine: Mapping[str, Any], scratch: Path) -> None:
    record.figure("measured before", 2.0, "s")
    print("about to read address 0", flush=True)
    ctypes.string_at(0)


def finds_a_fault_and_is_killed(record: Record, machine: Mapping[str, Any], scratch: Path) -> None:
    record.failed("a comparison", "row 7 differs")
    is_killed(record, machine, scratch)


def is_killed(record: Record, machine: Mapping[str, Any], scratch: Path) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(record: Record, machine: Mapping[str, Any], scratch: Path) -> None:
    """Start a process with another session and environment, as an engine may; neither ends."""
    record.figure("measured before", 3.0, "s")
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    child = subprocess.Popen(command, start_new_session=True, env={})
    (scratch / "pid").write_text(str(child.pid))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(1)


def leaves_a_process(record: Record, machine: Mapping[str, Any], scratch: Path) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    child = subprocess.Popen(command, start_new_session=True)
    (scratch / "pid").write_text(str(child.pid))
    record.passed("it ended")


def says_nothing(record: Record, machine: Mapping[str, Any], scratch: Path) -> None:
    pass
