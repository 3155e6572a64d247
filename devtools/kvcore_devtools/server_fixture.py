"""A server in a thread or a process, for tests of `kvcore.server`, with its settings and waits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import msgspec

from kvcore.cli.server import status
from kvcore.config import Config, load_config
from kvcore.events import Subscriber
from kvcore.events.view import Hash
from kvcore.harness.prompts import words
from kvcore.model.keys import KEY_BYTES, ROOT_PARENT
from kvcore.server.messages import ServerReply, ServerRequest
from kvcore.server.server import Server
from kvcore.server.session import SessionKeeper
from kvcore.testing.engine import ReferenceEngine
from kvcore.testing.waiting import PATIENCE_S, until

__all__ = [
    "RunningServer",
    "blocking_requests",
    "expire",
    "follows",
    "hurry",
    "running",
    "serve",
    "server_process",
    "settings",
    "wait_until_idle",
    "words",
]


def blocking_requests(keeper: SessionKeeper) -> list[ServerRequest]:
    """Return a list that collects the blocking requests this client sends from now on.

    Heartbeats are left out, because nothing waits for them.
    """
    asked: list[ServerRequest] = []
    ask = keeper.link.ask

    def noting(request: ServerRequest, timeout: float, **options: Any) -> ServerReply | None:
        if "alive" not in options:
            asked.append(request)
        return ask(request, timeout, **options)

    keeper.link.ask = noting  # type: ignore[method-assign]
    return asked


def hurry(keeper: SessionKeeper) -> None:
    """Let a client wait only moments for a reply from now on, because its server has ended.

    Until then a client is patient, because a busy machine may take seconds for an answer.
    """
    keeper._config = keeper._config.model_copy(update={"deadline_s": 0.2})


def expire(keeper: SessionKeeper) -> None:
    """Let a client take its server, which has ended, for gone after moments and not after a lease.

    A client without a server asks nothing. Call it after what is said of a client that still waits.
    """
    if (member := keeper.member) is not None:
        member.welcome = msgspec.structs.replace(member.welcome, lease_s=0.2)
    keeper._poke.set()


def settings(folder: Path, **tables: Any) -> Config:
    """Return the config of a server and its clients."""
    server = {"address": "local", "folder": str(folder), "deadline_s": 20.0, "lease_s": 20.0}
    tables["server"] = server | tables.get("server", {})
    tables["host"] = {"capacity": "16MiB", "huge_pages": False} | tables.get("host", {})
    return load_config(None, tables)


class RunningServer:
    """A `Server` in a thread of this process."""

    def __init__(self, config: Config) -> None:
        self.server = Server(config)
        self.server.open()
        self._thread = threading.Thread(target=self.server.run, daemon=True)
        self._thread.start()

    def status(self) -> dict[str, Any]:
        """Return the server's status. Only numbers are safe to read while its thread works."""
        return self.server.status()

    @property
    def idle(self) -> bool:
        """True if no session and no job of the server has anything in flight."""
        return _is_idle(self.status())

    def index(self) -> dict[str, dict[Hash, Hash | None]]:
        """Return what the server's only model publishes, by tier, as `Subscriber.tiers` does.

        Call it only while the server is idle, because its thread owns the index.
        """
        [space] = self.server.models
        found: dict[str, dict[Hash, Hash | None]] = {}
        for tier in space.manager.index.tiers:
            keys, parents = map(_cut, space.manager.index.admin.published(tier))
            if keys:
                above = (None if parent == ROOT_PARENT else parent for parent in parents)
                found[tier] = dict(zip(keys, above, strict=True))
        return found

    def close(self) -> None:
        self.server.stop()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "the server did not end"


def _cut(packed: bytes) -> list[bytes]:
    return [packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES)]


def follows(subscriber: Subscriber, server: RunningServer) -> bool:
    """Poll a subscriber once. Return True if its view equals the index of the idle server."""
    subscriber.poll(0.05)
    return server.idle and subscriber.synced and subscriber.tiers() == server.index()


def wait_until_idle(folder: Path) -> None:
    """Wait until a server in another process is idle.

    Clients send on sockets of their own, so an engine that has settled may be ahead of the server.
    """
    until(lambda: _is_idle(running(folder)))


def running(folder: Path) -> dict[str, Any]:
    """Return the status of a server in another process. Raises TierUnavailable if none answers."""
    found: dict[str, Any] = json.loads(status(settings(folder)))
    return found


def _is_idle(status: dict[str, Any]) -> bool:
    for model in status["models"]:
        if model["background"] or any(session["graphs"] for session in model["sessions"]):
            return False
    return True


@contextmanager
def server_process(*given: str, config: Path | None = None) -> Iterator[subprocess.Popen[str]]:
    """Run `kvcore server` with these settings, and kill it at the end.

    They are ``TABLE.NAME=VALUE``, beside those of the file ``config``.

    It is ready for clients when the block begins. Its output, and that of its libraries, goes to
    the test's own output. If the test fails, the server prints the stacks of its threads first.
    """
    command = [sys.executable, "-X", "faulthandler", "-c"]
    command += ["from kvcore.cli import main; main()", "server"]
    command += [] if config is None else ["-c", str(config)]
    for setting in given:
        command += ["--set", setting]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        printed = threading.Thread(target=_pass_on, args=(process.stdout,), daemon=True)
        try:
            assert "listens on" in process.stdout.readline(), "the server does not start"
            printed.start()
            yield process
        except BaseException:
            process.send_signal(signal.SIGABRT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(10.0)
            raise
        finally:
            process.kill()
            if printed.ident is not None:
                printed.join()


def _pass_on(lines: IO[str]) -> None:
    """Pass on what is printed, because a full pipe would stop the process that prints."""
    for line in lines:
        os.write(2, line.encode())


def serve(engine: ReferenceEngine, prompt: Sequence[int]) -> tuple[list[int], dict[str, int]]:
    """Answer a prompt. Return the answer, and the number of reused tokens by tier."""
    request = engine.submit(prompt, 6)
    engine.run()
    engine.settle()
    return request.answer, request.reused
