"""Engines' processes as forks of one that has imported the engine.

    test process                 mother (python -m kvcore.harness.engine_forks MODULE MODEL FD)
      fork ── log, socket ──▶      has imported MODULE and what an engine for MODEL needs
                                   └─ minder, a fork: waits for the child and tells how it ended
      ◀── pid, exit code ──────        └─ child, a fork: runs MODULE's `run`

Importing vLLM or SGLang takes most of the time in which a small model's engine starts on a CPU:
8 s of a core, which a fork does not need. A child leads a process group of its own and has the log,
the socket and the environment that a process of its own would have. A mother makes children of one
interpreter, driver, architecture, environment, folder and set of cores; where one of these differs
there is another mother. `KEPT` of them are kept.

The driver's module has ``preload(model)``, which imports and starts no thread, and
``run(descriptor)``. CPUs alone: a GPU's state does not survive a fork.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvcore.errors import KVCoreError

__all__ = ["Child", "architecture", "close", "fork", "possible"]

KEPT = 2
"""Mothers that wait for work, each with the memory of an engine's modules."""

_DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
_OF_A_TEST = "PYTEST_CURRENT_TEST"
"""Changes with each test, and no engine reads it."""


def possible() -> bool:
    """Whether an engine may be a fork here: there is no GPU, whose state its mother could make."""
    return hasattr(os, "fork") and not any(Path(device).exists() for device in _DEVICES)


def architecture(model: str | Path) -> str:
    """What a folder's config says that it holds; empty where it says nothing."""
    try:
        [name] = json.loads((Path(model) / "config.json").read_text())["architectures"]
    except (OSError, ValueError, KeyError):
        return ""
    return str(name)


class Child:
    """A fork, with what `subprocess.Popen` has of it."""

    def __init__(self, pid: int, status: socket.socket) -> None:
        self.pid = pid
        self._status = status
        self._code: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, negative for a signal.

        Raises:
            subprocess.TimeoutExpired: it still runs after ``timeout`` seconds.
        """
        if self._code is None:
            said = _received(self._status, timeout)
            if said is None:
                raise subprocess.TimeoutExpired([f"fork {self.pid}"], timeout or 0.0)
            self._code = int(said or -signal.SIGKILL)  # its minder was killed with it
            self._status.close()
        return self._code


def fork(
    module: str,
    model: str | Path,
    *,
    python: str,
    env: Mapping[str, str],
    log: Path,
    connection: socket.socket,
    timeout_s: float,
) -> Child:
    """A child that runs ``module``'s `run` with its end of a connection.

    Blocks until a mother has imported the module, where there is none that has.

    Raises:
        KVCoreError: there is no child; with what the mother said.
    """
    given = {name: value for name, value in env.items() if name != _OF_A_TEST}
    if Path(model).is_dir():
        given.setdefault("HF_HUB_OFFLINE", "1")  # drivers do so too, before they import
    cores = tuple(sorted(os.sched_getaffinity(0)))
    environment = tuple(sorted(given.items()))
    key = (python, module, architecture(model), environment, os.getcwd(), cores)
    with _lock:
        mother = _mothers.pop(key, None)
        if mother is None or not mother.lives:
            mother = _Mother([python, "-m", __name__, module, str(model)], given)
        _mothers[key] = mother
        while len(_mothers) > KEPT:
            _mothers.popitem(last=False)[1].close()
        try:
            return mother.fork(log, connection, timeout_s)
        except KVCoreError:
            _mothers.pop(key).close()
            raise


class _Mother:
    """The process that forks, seen from the one that asks it to."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self._command = " ".join(command)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # for as long as the process
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                env=dict(env),
                start_new_session=True,
            )

    @property
    def lives(self) -> bool:
        return self._process.poll() is None

    def fork(self, log: Path, connection: socket.socket, timeout_s: float) -> Child:
        status, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, log.open("ab") as output:
            files = [connection.fileno(), output.fileno(), theirs.fileno()]
            with contextlib.suppress(OSError):  # then it is gone, and says nothing below
                socket.send_fds(self._socket, [b"f"], files)
        said = _received(status, timeout_s)
        if not said:
            status.close()
            raise KVCoreError(self._told(timeout_s if said is None else None))
        return Child(int(said), status)

    def _told(self, waited_s: float | None) -> str:
        self._log.seek(0)
        tail = "\n".join(self._log.read().decode(errors="replace").splitlines()[-25:])
        what = "ended" if waited_s is None else f"did not fork within {waited_s:.0f} s"
        return f"the process {self._command} that forks engines {what}; its log ends:\n{tail}"

    def close(self) -> None:
        """Let it go; its children go on."""
        self._socket.close()
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:  # it imports, and has no child
            self._process.kill()
            self._process.wait()
        self._log.close()


_mothers: OrderedDict[Any, _Mother] = OrderedDict()
_lock = threading.Lock()


@atexit.register
def close() -> None:
    """End the mothers; their children go on."""
    with _lock:
        while _mothers:
            _mothers.popitem()[1].close()


def _received(status: socket.socket, timeout_s: float | None) -> bytes | None:
    """One message, empty at the end of a connection; None when nothing came in time."""
    poll = select.poll()
    poll.register(status, select.POLLIN)
    ready = poll.poll(None if timeout_s is None else timeout_s * 1000)
    return status.recv(64) if ready else None


# --- the mother's side ------------------------------------------------------------------------


def _serve(module: str, model: str, descriptor: int) -> None:
    """Fork a child for each message until the asking process closes the socket."""
    driver = importlib.import_module(module)
    driver.preload(model)
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for minders
    with socket.socket(fileno=descriptor) as asked:
        asked.set_inheritable(False)
        while True:
            message, files, _, _ = socket.recv_fds(asked, 1, 3)
            if not message:
                return
            assert threading.active_count() == 1, f"threads would be lost: {threading.enumerate()}"
            sys.stdout.flush()
            sys.stderr.flush()
            if os.fork() == 0:
                asked.close()
                _mind(driver, *files)
            for file in files:
                os.close(file)


def _mind(driver: Any, connection: int, log: int, status: int) -> None:
    """Fork the child, tell its pid and how it ended, and end."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        os.close(status)
        _be_child(driver, connection, log)
    os.close(connection)
    os.close(log)
    with contextlib.suppress(OSError):  # who asked is gone; the child sees that for itself
        os.write(status, b"%d" % pid)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.write(status, b"%d" % code)
    os._exit(0)


def _be_child(driver: Any, connection: int, log: int) -> None:
    """Run the driver and end, without tearing down the modules."""
    os.setsid()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    code = 0
    try:
        driver.run(connection)
    except BaseException:  # noqa: BLE001  # as the interpreter would at its end
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2], int(sys.argv[3]))
