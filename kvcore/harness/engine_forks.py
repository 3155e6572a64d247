"""Engines as forks of a process that has imported the engine.

    test process                 mother (python -m kvcore.harness.engine_forks MODULE MODEL FD)
      fork ── log, socket ──▶      has imported MODULE and what an engine for MODEL needs
                                   └─ minder, a fork: waits for the child, reports how it ended
      ◀── pid, exit code ──────        └─ child, a fork: calls ``run`` of MODULE

On a CPU, a small model's engine spends most of its start in the import of vLLM or SGLang: 8 s of a
core, which a fork saves. A child leads its own process group. It has the log, the socket and
the environment that a separate process would have. A mother makes the children of one interpreter,
driver, environment, folder and set of cores. Environment variables that no import reads are each
child's own (`_OF_A_CHILD`). At most `KEPT` mothers are kept. A child may run a program instead,
which finds the engine imported.

The driver's module has ``preload(model)``, which imports modules and starts no thread, and
``run(descriptor)``. ``preload`` returns the architectures of models whose engines can be forks of
the process, or None if those of every model can. Forks are for CPUs only, because a GPU's state
does not survive a fork.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvcore.errors import KVCoreError

__all__ = ["Child", "architecture", "close", "fork", "possible"]

KEPT = 3
"""Most idle mothers to keep. Each holds the memory of an engine's modules."""

_DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
_LONGEST = 1 << 16
"""Bytes of a message: what a mother is told of a child, or what it tells of it."""
_OF_A_TEST = "PYTEST_CURRENT_TEST"
"""An environment variable that changes with each test and that no engine reads."""
_NOT_COMPARED = frozenset({"TORCHINDUCTOR_CACHE_DIR"})
"""Environment variables that torch sets, to what it takes without them."""
_OF_A_CHILD = ("KVCORE_", "OTEL_", "UCX_", "VLLM_CPU_")
"""How environment variables begin that are read when an engine starts, not while it is imported."""


def possible() -> bool:
    """Return True if engines may be forks here, that is, if there is no GPU."""
    return hasattr(os, "fork") and not any(Path(device).exists() for device in _DEVICES)


def architecture(model: str | Path) -> str:
    """Return the architecture that the config in a folder names, or an empty string."""
    try:
        [name] = json.loads((Path(model) / "config.json").read_text())["architectures"]
    except (OSError, ValueError, KeyError):
        return ""
    return str(name)


class Child:
    """A forked child, with the methods of `subprocess.Popen` that are needed."""

    def __init__(self, pid: int, status: socket.socket) -> None:
        self.pid = pid
        self._status = status
        self._code: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the child's end and return its exit code, negative for a signal.

        Raises:
            subprocess.TimeoutExpired: it still runs after ``timeout`` seconds.
        """
        if self._code is None:
            said = _received(self._status, timeout)
            if said is None:
                raise subprocess.TimeoutExpired([f"fork {self.pid}"], timeout or 0.0)
            self._code = int(said or -signal.SIGKILL)  # the minder was killed with it
            self._status.close()
        return self._code


def fork(
    module: str,
    model: str | Path,
    *,
    python: str,
    env: Mapping[str, str],
    path: str,
    log: Path,
    connection: socket.socket,
    timeout_s: float,
    program: Sequence[str] = (),
) -> Child:
    """Fork a child that calls ``run`` of ``module`` with its end of a connection.

    With ``program``, a file and its arguments, it runs that instead, as the interpreter would, and
    has no use for the connection.

    ``path`` has folders from which the child imports first, as in PYTHONPATH. What the mother has
    imported it does not import again. If no mother has imported the module, start one and block
    until it has.

    ``env`` is the child's whole environment.

    Raises:
        KVCoreError: the fork failed. The message has the tail of the mother's log.
    """
    own = {name: value for name, value in env.items() if name.startswith(_OF_A_CHILD)}
    given = {name: value for name, value in env.items() if name not in {_OF_A_TEST, *own}}
    if Path(model).is_dir():
        given.setdefault("HF_HUB_OFFLINE", "1")  # drivers set it too, before they import
    cores = tuple(sorted(os.sched_getaffinity(0)))
    environment = tuple(sorted(each for each in given.items() if each[0] not in _NOT_COMPARED))
    kind = (python, module, environment, os.getcwd(), cores)
    wanted = architecture(model)
    with _lock:
        mother = next((one for one in _mothers if one.kind == kind and one.serves(wanted)), None)
        if mother is None:
            mother = _Mother([python, "-m", __name__, module, str(model)], given, kind)
        else:
            _mothers.remove(mother)
        _mothers.append(mother)
        while len(_mothers) > KEPT:
            _mothers.pop(0).close()
        try:
            child = _Child({**own, "PYTHONPATH": path}, list(program))
            return mother.fork(child, log, connection, timeout_s)
        except KVCoreError:
            _mothers.remove(mother)
            mother.close()
            raise


class _Child(NamedTuple):
    """What a mother is told of a child: its own environment, and the program that it runs."""

    own: Mapping[str, str]
    program: list[str]


class _Mother:
    """The process that forks, as seen by the process that asks for forks.

    ``kind`` is what all its children have in common, except their models.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], kind: Any) -> None:
        self.kind = kind
        self._architectures: frozenset[str] = frozenset()  # empty: all
        self._command = " ".join(command)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # open as long as the process lives
        self._socket, theirs = _messages()
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

    def serves(self, architecture: str) -> bool:
        """Return True if it lives and can fork an engine for a model of this architecture."""
        fits = not self._architectures or architecture in self._architectures
        return fits and self._process.poll() is None

    def fork(self, child: _Child, log: Path, connection: socket.socket, timeout_s: float) -> Child:
        status, theirs = _messages()
        with theirs, log.open("ab") as output:
            files = [connection.fileno(), output.fileno(), theirs.fileno()]
            with contextlib.suppress(OSError):  # the mother is gone; `_received` finds that below
                socket.send_fds(self._socket, [json.dumps(child).encode()], files)
        said = _received(status, timeout_s)
        if not said:
            status.close()
            raise KVCoreError(self._told(timeout_s if said is None else None))
        pid, *architectures = said.decode().split()
        self._architectures = frozenset(architectures)
        return Child(int(pid), status)

    def _told(self, waited_s: float | None) -> str:
        self._log.seek(0)
        tail = "\n".join(self._log.read().decode(errors="replace").splitlines()[-25:])
        what = "ended" if waited_s is None else f"did not fork within {waited_s:.0f} s"
        return f"process {self._command}, which forks engines, {what}; its log ends:\n{tail}"

    def close(self) -> None:
        """End the mother. Its children continue."""
        self._socket.close()
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:  # it still imports and has no child
            self._process.kill()
            self._process.wait()
        self._log.close()


_mothers: list[_Mother] = []
"""In the order in which they were last used."""
_lock = threading.Lock()


@atexit.register
def close() -> None:
    """End all mothers. Their children continue."""
    with _lock:
        while _mothers:
            _mothers.pop().close()


def _messages() -> tuple[socket.socket, socket.socket]:
    """Return a connection that keeps messages apart."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _received(status: socket.socket, timeout_s: float | None) -> bytes | None:
    """Return one message, empty at the end of the connection; None after ``timeout_s`` seconds."""
    poll = select.poll()
    poll.register(status, select.POLLIN)
    ready = poll.poll(None if timeout_s is None else timeout_s * 1000)
    return status.recv(_LONGEST) if ready else None


# --- the mother's side ------------------------------------------------------------------------


def _serve(module: str, model: str, descriptor: int) -> None:
    """Fork a child for each message until the asking process closes the socket."""
    driver = importlib.import_module(module)
    with _as_written():
        architectures = driver.preload(model) or ()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no parent waits for minders
    with socket.socket(fileno=descriptor) as asked:
        asked.set_inheritable(False)
        while True:
            message, files, _, _ = socket.recv_fds(asked, _LONGEST, 3)
            if not message:
                return
            assert threading.active_count() == 1, f"threads would be lost: {threading.enumerate()}"
            sys.stdout.flush()
            sys.stderr.flush()
            if os.fork() == 0:
                asked.close()
                _mind(driver, architectures, _Child(*json.loads(message)), *files)
            for file in files:
                os.close(file)


@contextlib.contextmanager
def _as_written() -> Iterator[None]:
    """Functions that are imported within are not compiled by ``torch.compile``.

    Engines have small ones compiled, for log-probabilities or shares of a vocabulary. On a CPU that
    takes each process four seconds, and saves microseconds. Models are compiled later, if at all.
    """
    name = "TORCHDYNAMO_DISABLE"
    given = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if given is None:
            del os.environ[name]
        else:
            os.environ[name] = given


def _mind(
    driver: Any,
    architectures: Iterable[str],
    child: _Child,
    connection: int,
    log: int,
    status: int,
) -> None:
    """Fork the child; send its pid with the architectures, then its exit status; and end."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        os.close(status)
        _be_child(driver, child, connection, log)
    os.close(connection)
    os.close(log)
    with contextlib.suppress(OSError):  # the asking process is gone; the child notices that itself
        os.write(status, " ".join([str(pid), *architectures]).encode())
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.write(status, b"%d" % code)
    os._exit(0)


def _be_child(driver: Any, child: _Child, connection: int, log: int) -> None:
    """Run the driver or the program, and end the process without tearing down the modules."""
    own, program = child
    os.setsid()
    path = own["PYTHONPATH"].split(os.pathsep)
    before = [folder for folder in path if folder and folder not in sys.path]
    sys.path[:0] = before
    python_path = os.pathsep.join([*before, os.environ.get("PYTHONPATH", "")])
    os.environ.update({**own, "PYTHONPATH": python_path})
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    code = 0
    try:
        if program:
            os.close(connection)
            sys.argv[:] = program
            runpy.run_path(program[0], run_name="__main__")
        else:
            driver.run(connection)
    except BaseException:  # noqa: BLE001  # as the interpreter would at its end
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2], int(sys.argv[3]))
