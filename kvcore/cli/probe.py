"""Probes of the servers in the settings: does each answer, and does anybody listen there.

    [tiers.NAME]        a store, through its own client: does it hold a block that nobody has?
    server.address      `kvcore server`: its status
    cluster.etcd        each endpoint: its members
    events.nats         the server, and whether it has JetStream

Each server is asked once, with a deadline, in a thread of its own. A thread that hangs is left
behind and ends with the process. Nothing is written anywhere. Findings name hosts and ports, never
users or passwords.
"""

from __future__ import annotations

import asyncio
import queue
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from kvcore._util.threads import GuardedThread
from kvcore.config import Config
from kvcore.errors import ConfigError, TierUnavailable, UnsupportedError

if TYPE_CHECKING:
    from kvcore.plugins import PluginManager

__all__ = ["CONTACT_S", "Finding", "Level", "Listening", "contacts"]


class Level(str, Enum):
    """How bad a finding is."""

    GOOD = "good"
    WARNING = "warning"
    PROBLEM = "problem"


class Finding(NamedTuple):
    """One result: what was checked, what was found, and what to change."""

    about: str
    level: Level
    found: str
    change: str = ""


CONTACT_S = 3.0
"""Seconds that a server has to answer. A store's own client waits less by default."""

_WITHOUT_STORE = "start it, or correct {table}: until it answers its KV is computed"
_WITHOUT_SERVER = "start `kvcore server` with these settings, or unset server.address"
_WITHOUT_ETCD = "start it, or correct cluster.etcd: until then engines do not find each other"
_WITHOUT_NATS = "start it with JetStream, or correct events.nats: until then events are dropped"


def contacts(config: Config, plugins: PluginManager, seconds: float) -> Iterator[Finding]:
    """Yield a finding for each server. Blocks at most ``seconds`` for each."""
    for name, tier in sorted(config.tiers.items()):
        plugin = plugins.tier(tier.plugin)
        if plugin.medium == "remote" and plugin.prepare is not None:
            about = f"store {name}"
            change = _WITHOUT_STORE.format(table=f"[tiers.{name}.options]")
            yield _ask(about, change, seconds, partial(_store, name, config, plugins))
    if config.server.address is not None:
        yield _ask("kvcore server", _WITHOUT_SERVER, seconds, partial(_server, config, seconds))
    for endpoint in config.cluster.etcd:
        one = config.cluster.model_copy(update={"etcd": [endpoint], "members": {}})
        alone = config.model_copy(update={"cluster": one})
        about = f"etcd {_place(endpoint)}"
        yield _ask(about, _WITHOUT_ETCD, seconds, partial(_etcd, alone))
    if config.events.nats:
        url = config.events.nats
        yield _ask(f"nats {_place(url)}", _WITHOUT_NATS, seconds, partial(_nats, url, seconds))


def _ask(about: str, change: str, seconds: float, call: Callable[[], str]) -> Finding:
    """Return the finding about one server. ``call`` returns what it found, or raises."""
    from kvcore.plugins.manager import reason

    began = time.perf_counter()
    try:
        found = _within(seconds, call)
    except Exception as error:  # noqa: BLE001 - third-party clients: report whatever they raise
        return Finding(about, Level.PROBLEM, reason(error), change)
    took = 1e3 * (time.perf_counter() - began)
    return Finding(about, Level.GOOD, f"{found} ({took:.0f} ms)")


def _within(seconds: float, call: Callable[[], str]) -> str:
    """Return what ``call`` returns. Raises what it raises, or TierUnavailable after ``seconds``."""
    outcomes: queue.SimpleQueue[str | BaseException] = queue.SimpleQueue()

    def run() -> None:
        try:
            outcomes.put(call())
        except Exception as error:  # noqa: BLE001 - thread boundary: raised on the other side
            outcomes.put(error)

    GuardedThread("kvcore-doctor", run, outcomes.put).start()
    try:
        outcome = outcomes.get(timeout=seconds)
    except queue.Empty:
        raise TierUnavailable(f"no answer in {seconds:g} s") from None
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


def _place(url: str) -> str:
    """Return host and port of an address, without user and password."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        return "(no address)"
    return f"{host}:{port}" if port else str(host)


# -- one kind each --------------------------------------------------------------------------------


def _store(name: str, config: Config, plugins: PluginManager) -> str:
    from kvcore.model.shape import BlockShape
    from kvcore.plugins import TierContext
    from kvcore.tiers.geometry import Geometry

    # A model that nobody serves: no store holds a block of it.
    nobody = Geometry(BlockShape(1, 1, 16, 16, "float16"), b"kvcore doctor 01", ((0, 1),))
    tier = config.tiers[name]
    prepare = plugins.tier(tier.plugin).prepare
    assert prepare is not None
    prepared = prepare(
        TierContext(name, nobody, tier.capacity, tier.options, cluster=config.cluster)
    )
    finder = prepared.finder
    if finder is None:
        prepared.release()
        return "opened; it cannot be asked what it holds"
    question = finder.ask([secrets.token_bytes(16)])
    assert question is not None, "the first question of a finder"
    while not question.ended:
        finder.wait(CONTACT_S)
    prepared.release()
    if question.failed:
        raise TierUnavailable(question.error)
    return "answers"


def _server(config: Config, seconds: float) -> str:
    from kvcore.model.identity import settings_digest
    from kvcore.server.messages import StatusReply, StatusRequest
    from kvcore.server.rpc import Link

    link = Link(config.server)
    try:
        reply = link.ask(StatusRequest(link.ref()), seconds)
    finally:
        link.close()
    if link.distrusted:
        raise TierUnavailable(link.distrusted)
    if not isinstance(reply, StatusReply):
        raise TierUnavailable(f"none answers for {config.server.address!r}")
    if reply.status.get("settings") != settings_digest(config.namespace).hex():
        raise ConfigError(
            "it has another namespace.secret or namespace.salt than these settings: quotas and "
            "`kvcore ctl` act on other namespaces than the engines'"
        )
    return "answers"


def _etcd(config: Config) -> str:
    from kvcore.cluster.open import open_directory

    directory = open_directory(config)
    assert directory is not None
    try:
        return f"answers; {len(directory.members())} members"
    finally:
        directory.close()


def _nats(url: str, seconds: float) -> str:
    try:
        import nats
    except ImportError as error:
        raise UnsupportedError(f"{error}: events.nats needs `pip install nats-py`") from error

    async def quiet(error: Exception) -> None:
        """Ignore the error, because it is raised as well."""

    async def ask() -> str:
        client = await nats.connect(
            url,
            allow_reconnect=False,
            max_reconnect_attempts=1,  # of the first connection too
            reconnect_time_wait=0.1,
            connect_timeout=max(1, int(seconds)),
            error_cb=quiet,
        )
        try:
            account = await client.jetstream().account_info()
        finally:
            await client.close()
        return f"answers; {account.streams} streams"

    return asyncio.run(ask())


# -- a ZeroMQ address ---------------------------------------------------------------------------

AGAIN_S = 5.0
"""Seconds between two checks."""
CONNECT_S = 1.0


class Listening:
    """A periodic check that somebody listens at ``address``.

    ``address`` is "ipc://SOCKET" or "tcp://HOST:PORT". ZeroMQ itself waits for a peer and does not
    report that there is none. ``why`` is the system's error once nobody listens, and empty before.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._next = 0.0
        self.why = ""

    def holds(self) -> bool:
        """Return False once nobody listens. Blocks for `CONNECT_S` at most, plus a name lookup.

        A peer that is slow to accept counts as listening: the request has its own deadline.
        """
        if not self.why and time.monotonic() >= self._next:
            self._next = time.monotonic() + AGAIN_S
            try:
                self._connect()
            except TimeoutError:
                pass
            except OSError as error:
                self.why = error.strerror or str(error)
        return not self.why

    def _connect(self) -> None:
        kind, _, place = self._address.partition("://")
        if kind == "ipc":
            with socket.socket(socket.AF_UNIX) as local:
                local.settimeout(CONNECT_S)
                local.connect(place)
        elif kind == "tcp":
            host, _, port = place.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
