"""Runs parts as child processes, one after another, and gathers what they found.

for each part:  child ── lines ──▶ NAME.jsonl     what it found
                      ── output ─▶ NAME.log
after each part:  the whole result so far ──▶ gpu-DATE.json and gpu-DATE.md
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.gpu import page
from tools.gpu.metadata import ROOT, SOURCES, write_dist_info
from tools.gpu.parts import Part
from tools.gpu.record import FAILED, FIGURE, LEFT_OUT, PASSED, read

__all__ = ["Runner", "environment", "look_at_machine"]

TAIL = 15
"""Lines of its output that a failed part is reported with."""
LOOK_S = 120
"""Seconds that looking at the machine may take."""
GRACE_S = 5.0
"""Seconds in which killed processes must be gone."""
_MARK = "KVCORE_GPU_PART_RUN"


class Runner:
    """A run, which writes to ``out``. ``machine`` is what `tools.gpu.machine` says."""

    def __init__(self, out: Path, machine: Mapping[str, Any], env: Mapping[str, str]) -> None:
        self.out = out
        self._env = dict(env)
        self._at = datetime.datetime.now(datetime.timezone.utc)
        self.name = f"gpu-{self._at:%Y-%m-%d-%H%M%S}"
        self._folder = out / self.name
        self._folder.mkdir(parents=True)
        self.result: dict[str, Any] = {
            "name": "gpu",
            "date": self._at.isoformat(timespec="seconds"),
            "machine": dict(machine),
            "parts": [],
        }
        (self._folder / "machine.json").write_text(json.dumps(self.result["machine"]))
        self._write()

    @property
    def json_path(self) -> Path:
        return self.out / f"{self.name}.json"

    @property
    def failed(self) -> list[str]:
        """Names of the parts that failed so far."""
        return [part["name"] for part in self.result["parts"] if part["state"] == FAILED]

    def run(self, parts: Sequence[Part]) -> int:
        """Run the parts. Return 1 if something that could run has failed, else 0."""
        for part in parts:
            print(f"== {part.name}: {part.title} (at most {part.limit_s} s)", flush=True)
            found = self._run(part)
            self.result["parts"].append(found)
            self._write()
            print(f"== {part.name}: {found['state']}, {found['seconds']:.0f} s", flush=True)
            if found["state"] == FAILED:
                print(f"{found['why']}\n" + "\n".join(f"  | {line}" for line in found["tail"]))
        print("\n" + page.markdown(self.result))
        print(f"written: {self.json_path}")
        return int(bool(self.failed))

    def _run(self, part: Part) -> dict[str, Any]:
        scratch = self._folder / part.name
        scratch.mkdir()
        lines, log = self._folder / f"{part.name}.jsonl", self._folder / f"{part.name}.log"
        command = [
            sys.executable, "-m", "tools.gpu.part", part.function,
            str(lines.resolve()), str((self._folder / "machine.json").resolve()),
            str(scratch.resolve()),
        ]  # fmt: skip
        began = time.monotonic()
        ended = _run_within(command, self._env, log, part.limit_s)
        seconds = time.monotonic() - began
        findings = read(lines)
        failures = [line for line in findings if line["kind"] == FAILED]
        why = "; ".join(f"{line['what']}: {line['detail']}" for line in failures)
        if ended and not (ended == _exited(1) and failures):
            why = f"{ended}; {why}" if why else ended
        written = log.read_text(errors="replace").replace(f"{ROOT}/", "")  # results are published
        tail = written.splitlines()[-TAIL:]
        return {
            "name": part.name,
            "title": part.title,
            "needs": part.needs,
            "limit_s": part.limit_s,
            "seconds": round(seconds, 1),
            "state": _state(findings, why),
            "why": why,
            "tail": tail if why else [],
            "found": findings,
        }

    def _write(self) -> None:
        self.json_path.write_text(json.dumps(self.result, indent=1) + "\n")
        self.json_path.with_suffix(".md").write_text(page.markdown(self.result))


def _state(findings: Sequence[Mapping[str, Any]], why: str) -> str:
    """Return the state of a part: failed, passed, or left out if nothing of it ran."""
    if why:
        return FAILED
    return PASSED if any(line["kind"] in (PASSED, FIGURE) for line in findings) else LEFT_OUT


def _run_within(command: Sequence[str], env: Mapping[str, str], log: Path, limit_s: float) -> str:
    """Run a command, with its output in ``log``. Return what was wrong with its end, or "".

    When it returns, no process that the command started is left.
    """
    token = uuid.uuid4().hex
    with log.open("wb") as output:
        child = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**env, _MARK: token},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = child.wait(limit_s)
            problem = _exited(code)
        except subprocess.TimeoutExpired:
            problem = f"it ran past its limit of {limit_s:g} s and was killed"
        finally:
            _kill(_family(child.pid))
            _kill_marked(token)
            child.wait()
    return problem


def _exited(code: int) -> str:
    if code < 0:
        return f"it was ended by {signal.Signals(-code).name}"
    return f"it ended with exit status {code}" if code else ""


def _kill_marked(token: str) -> None:
    """Kill every process whose environment has the token, wherever it was started from."""
    limit = time.monotonic() + GRACE_S
    while (left := _marked(token)) and time.monotonic() < limit:
        _kill(left)
        time.sleep(0.05)


def _kill(pids: Sequence[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _family(pid: int) -> list[int]:
    """Return a process and all that descend from it. An engine may hide its environment."""
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                after_name = (folder / "stat").read_text().rpartition(")")[2].split()
                parents[int(folder.name)] = int(after_name[1])
    found = [pid] if pid in parents else []
    for one in found:  # it grows meanwhile
        found += [child for child, parent in parents.items() if parent == one]
    return found


def _marked(token: str) -> list[int]:
    mark, found = f"{_MARK}={token}".encode(), []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
            except OSError:  # it has ended, or is another user's
                continue
    return found


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of the parts: the tree on the module path, and no network.

    If kvcore is not installed, its metadata is written to ``folder``.
    """
    path = [str(ROOT / source) for source in SOURCES]
    try:
        importlib.metadata.distribution("kvcore")
    except importlib.metadata.PackageNotFoundError:
        write_dist_info(folder)
        path.append(str(folder.resolve()))
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path += [entry for entry in given if entry and entry not in path]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "COLUMNS": os.environ.get("COLUMNS", "120"),
    }


def look_at_machine(env: Mapping[str, str]) -> dict[str, Any]:
    """Describe the machine, in a process of its own. A failure to do so is in the result."""
    command = [sys.executable, "-m", "tools.gpu.machine"]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=dict(env), capture_output=True, text=True, timeout=LOOK_S,
            check=False,
        )  # fmt: skip
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (subprocess.SubprocessError, ValueError, IndexError) as error:
        return {"gpu": None, "why_no_gpu": f"the machine could not be looked at: {error}"}
    return found
