"""The server's loop: one thread that answers every client and does no I/O itself.

    ROUTER socket ──▶ decode ──▶ session ──▶ ModelCache ──▶ reply
                         │ malformed or unknown: refused by name, and nothing else happens
    between messages: reports of the server's own transfers, sessions whose processes are gone

`kvcore.server.sessions` says who may speak in a session, `kvcore.server.model_caches` prepares the
models.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvcore import __version__
from kvcore._util.curve import client_names, curve_key
from kvcore._util.log_limit import LogLimit
from kvcore._util.msgpack import MAX_MESSAGE
from kvcore._util.zmq_socket import (
    Context,
    Entrance,
    Limits,
    bind_local,
    is_of_another_user,
    make_socket,
    zmq,
)
from kvcore.admin.audit import AuditLog, identity
from kvcore.admin.messages import ControlReply, ControlRequest, Refused, WrongProtocol, frames
from kvcore.admin.operations import record_refusal
from kvcore.config import Config
from kvcore.config.paths import folder_of, memory_of
from kvcore.errors import ConfigError, FormatError, KVCoreError
from kvcore.events.open import check_events
from kvcore.model.identity import settings_digest
from kvcore.server import machine_messages as told
from kvcore.server.errors import AmbiguousModel, Misfit, refusal_kind
from kvcore.server.exporter import show
from kvcore.server.machines import Machines
from kvcore.server.messages import (
    Bye,
    ClearRequest,
    CountReply,
    EnterSession,
    Heartbeat,
    HeartbeatReply,
    HeldRequest,
    Hello,
    LaunchReply,
    LearnTokens,
    LoadRequest,
    MatchReply,
    MatchRequest,
    OpsEnded,
    PathReply,
    PathRequest,
    PublishTokens,
    ReadReply,
    ReadRequest,
    SaveRequest,
    SearchReply,
    SearchRequest,
    ServerReply,
    ServerRequest,
    StatusReply,
    StatusRequest,
    Welcome,
    WithdrawRequest,
    decode_request,
)
from kvcore.server.model_cache import ModelCache
from kvcore.server.model_caches import ModelCaches
from kvcore.server.pending_clears import pending_clears
from kvcore.server.runtime_dir import RuntimeDir, address_of
from kvcore.server.sessions import Sessions
from kvcore.telemetry.metrics import Metrics
from kvcore.transfer.graph import RowError

__all__ = ["Server"]

_log = logging.getLogger("kvcore.server")

BUSY_POLL_MS = 1
IDLE_POLL_MS = 100
SWEEP_S = 0.2
"""Seconds between two checks whether the processes of sessions are gone."""
MAX_WARNED = 64
"""Log lines about engines with other settings; a client may make up any number of them."""
BATCH = 64
"""Messages answered before transfers and sessions get their turn."""
LIMITS = Limits(connections=1024, message=MAX_MESSAGE)
"""What clients over TCP may open and send. One without keys may send a handshake of 4 KiB."""


class Server:
    """The socket, the sessions and the models of one server.

    All methods but `stop` are called from one thread. `open` checks ``config`` and binds the
    socket.
    """

    def __init__(self, config: Config, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._stop = False
        self._swept = 0.0
        self._clears_seen: set[Path] = set()  # pending clears that the last sweep found
        self._refusals = 0
        self._logged = LogLimit()  # lines that a client can cause with every message
        self._admins: frozenset[str] | None = None  # CURVE keys; None: whoever is heard
        self._settings = settings_digest(config.namespace)
        self._warned: set[bytes] = set()  # digests of engines with other settings
        self._frame: Any = None  # the last frame received, which tells who sent it
        self._metrics = Metrics("server", enabled=config.metrics.enabled)
        self._close_exporter: Callable[[], None] = lambda: None
        self._handlers: dict[type, Callable[[bytes, Any], ServerReply | None]] = {
            Hello: self._hello,
            Heartbeat: self._heartbeat,
            Bye: self._bye,
            EnterSession: self._enter,
            MatchRequest: self._match,
            LoadRequest: self._load,
            SaveRequest: self._save,
            HeldRequest: self._held,
            OpsEnded: self._ops_ended,
            ReadRequest: self._read,
            WithdrawRequest: self._withdraw,
            ClearRequest: self._clear,
            LearnTokens: self._learn,
            PublishTokens: self._publish_tokens,
            SearchRequest: self._search,
            PathRequest: self._path,
            ControlRequest: self._control,
            told.JoinMachine: lambda client, asked: self.machines.join(client, asked),
            told.MachineBeat: lambda client, beat: self.machines.beat(client, beat),
            told.HeldBlocks: lambda client, held: self.machines.held(client, held),
            told.CachePrepared: lambda client, done: self.machines.prepared(client, done),
            told.CacheOpened: lambda client, done: self.machines.opened(client, done),
            told.MachineReports: lambda client, moved: self.machines.reports(client, moved),
            told.SessionBegun: lambda client, begun: self.machines.begun(client, begun),
            told.SessionFreed: lambda client, freed: self.machines.freed(client, freed),
            StatusRequest: lambda _, request: StatusReply(request.ref, self.status()),
        }

    # -- life ---------------------------------------------------------------------------------

    def open(self) -> str:
        """Take the folder, listen, and return the address.

        Raises ConfigError if another server has the folder, or if the settings cannot be used.
        """
        server = self._config.server
        check_events(self._config)
        address = address_of(server)
        folder, memory = folder_of(server), memory_of(server)
        self._folder = RuntimeDir(folder, None if memory == folder else memory)
        self._context = Context()
        self._entrance = Entrance(self._context)
        self._socket = make_socket(self._context, zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # what cannot be sent is told
        try:
            self._audit = AuditLog(self._config.control.audit)
            self._listen(address)
            if server.metrics is not None:
                self._close_exporter = show(self._metrics, server.metrics)
        except BaseException:
            self._stop_listening()
            self._folder.close()
            raise
        self.machines = Machines(self._config, self._send, self._key_name, clock=self._clock)
        self.models = ModelCaches(self._config, self._folder, self._audit, self.machines)
        self.sessions = Sessions(self._folder, server.lease_s, self._who, clock=self._clock)
        _log.info("kvcore server listens address=%s folder=%s", address, self._folder.path)
        return address

    def _listen(self, address: str) -> None:
        if address.startswith("tcp://"):
            keys = self._config.server.keys
            assert keys is not None
            self._admins = _admins(self._config.server.admins, keys)
            self._entrance = Entrance(self._context, keys)
            try:
                self._entrance.listen(self._socket, address, LIMITS)
            except OSError as error:
                raise ConfigError(f"server.address {address!r} cannot be bound: {error}") from error
        else:
            bind_local(self._socket, address, "server.address")

    def _stop_listening(self) -> None:
        """Close the socket before its guard, so that nobody is heard without one."""
        self._socket.close()
        self._entrance.close()

    def run(self) -> None:
        """Serve until `stop` is called, then close. Blocks."""
        try:
            while not self._stop:
                self.step()
        finally:
            self.close()

    def stop(self) -> None:
        """Make `run` return soon. Any thread or signal handler may call it."""
        self._stop = True

    def step(self) -> None:
        """Answer the messages that wait, then let transfers and sessions go on.

        Waits for a first message: 1 ms while transfers run, else 100 ms.
        """
        if self._socket.poll(BUSY_POLL_MS if self.models.busy else IDLE_POLL_MS):
            for _ in range(BATCH):
                try:
                    parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
                except zmq.Again:
                    break
                self._frame = parts[-1]
                client, *message = [part.bytes for part in parts]
                if self._admins is None and is_of_another_user(self._frame):
                    if self._logged.admit(("user", who := self._who())) is not None:
                        _log.warning("refused: a message of another user who=%s", who)
                else:
                    self._receive(client, message)
        for cache in self.models.take_lost():
            self.sessions.abandon(cache)
        for cache in self.models:
            cache.tick()
        self._sweep()

    def close(self) -> None:
        """Finish the writes, flush the tiers and give everything back. Blocks."""
        self.models.stop_preparing()
        self._close_exporter()
        for cache in self.models:
            cache.admin.close()  # answers waiting commands while there is still a socket
        self._stop_listening()
        self.models.close()
        self.sessions.close()
        self._folder.close()
        self._audit.close()
        _log.info("kvcore server ends")

    def status(self) -> dict[str, Any]:
        """Return the models and sessions of the server as plain data."""
        return {
            "version": __version__,
            "refusals": self._refusals,
            "settings": self._settings.hex(),
            "machines": self.machines.status(),
            "models": [
                {
                    "fingerprint": cache.model.fingerprint.hex(),
                    "block_tokens": cache.model.block_tokens,
                    "tiers": {tier: list(count) for tier, count in cache.used.items()},
                    "background": cache.background,
                    "sessions": self._session_status(cache),
                }
                for cache in self.models
            ],
        }

    def _session_status(self, cache: ModelCache) -> list[dict[str, Any]]:
        return [
            {
                "session": session.number,
                "version": session.version,
                "ranks": session.ranks,
                "silent": session.silent,
                "graphs": cache.claims(session.number),
            }
            for session in self.sessions
            if session.cache is cache
        ]

    def check_integrity(self) -> None:
        """Assert that the index and the transfers in flight of every model are consistent."""
        for cache in self.models:
            cache.check_integrity()

    def _sweep(self) -> None:
        now = self._clock()
        if now - self._swept < SWEEP_S:
            return
        self._swept = now
        self._count()
        self.machines.sweep()
        self.sessions.sweep()
        clears = pending_clears(self._folder.path)
        # A client may be about to ask for a clear that is new: that one waits for the next sweep.
        self.models.replay_clears(each for each in clears if each.path in self._clears_seen)
        self._clears_seen = {each.path for each in clears}

    def _count(self) -> None:
        """Add what the models have counted to the server's metrics."""
        for cache in self.models:
            count = sum(session.cache is cache for session in self.sessions)
            self._metrics.sessions(cache.model.fingerprint.hex()[:16], count)
            self._metrics.absorb(cache.take_metrics())

    # -- messages -----------------------------------------------------------------------------

    def _receive(self, client: bytes, parts: list[bytes]) -> None:
        try:
            request = decode_request(parts)
        except WrongProtocol as error:
            self._refuse(client, 0, "misfit", error)
        except FormatError as error:
            self._refuse(client, 0, "malformed", error)
        else:
            self._answer(client, request)

    def _answer(self, client: bytes, request: ServerRequest) -> None:
        try:
            reply = self._handlers[type(request)](client, request)
        except KVCoreError as error:
            self._refuse(client, request.ref, refusal_kind(error), error)
        except Exception as error:  # noqa: BLE001 - one client must not end the others' server
            _log.exception("a request failed kind=%s", type(request).__name__)
            self._refuse(client, request.ref, "internal", error)
        else:
            if reply is not None:
                self._send(client, reply)

    def _refuse(self, client: bytes, ref: int, kind: str, error: Exception) -> None:
        self._refusals += 1
        self._metrics.refused(kind)
        is_told = kind in ("malformed", "misfit")
        if is_told and self._logged.admit((kind, str(error))) is not None:
            _log.warning("refused kind=%s: %s", kind, error)
        self._send(client, Refused(ref, kind, str(error)[:1000]))

    def _send(self, client: bytes, reply: ServerReply) -> bool:
        """Send a message; return False if its client is gone, or takes no more."""
        try:
            self._socket.send_multipart([client, *frames(reply)], zmq.NOBLOCK)
        except (zmq.ZMQError, FormatError) as error:
            if isinstance(error, zmq.ZMQError) and error.errno == zmq.EHOSTUNREACH:
                _log.debug("its client is gone: %s", type(reply).__name__)
            elif self._logged.admit(("lost", str(error))) is not None:  # a client may read none
                _log.warning("a reply is lost: %s", error)
            return False
        return True

    def _who(self) -> str:
        """Return who sent the last message, as the kernel or CURVE vouches for it."""
        return identity(self._frame, curve=self._admins is not None)

    def _key_name(self) -> str | None:
        """Return the name of the CURVE key that the last message came with; None without keys."""
        keys = self._config.server.keys
        if self._admins is None or keys is None:
            return None
        return client_names(keys).get(curve_key(self._frame), "")

    # -- sessions -----------------------------------------------------------------------------

    def _hello(self, client: bytes, hello: Hello) -> None:
        """Begin a session, and welcome its leader once the session's ranks may join it."""
        self.sessions.check_room()
        self._check_settings(hello)
        cache = self.models.get(hello.model)
        self.models.replay_clears(pending_clears(self._folder.path))
        session = self.sessions.begin(client, hello, cache)
        backings = cache.manager.backings
        welcome = Welcome(
            hello.ref,
            session.number,
            session.file.name,
            tiers=[(tier.name, tier.read_path.value) for tier in backings],
            stores=any(tier.finder is not None for tier in backings),
            lease_s=self._config.server.lease_s,
            keeps_tokens=cache.keeps_tokens,
            wants_tokens=cache.wants_tokens,
            node=cache.manager.node,
        )
        secret = session.file.secret
        cache.begin(session.number, secret, lambda: self._send(client, welcome) and None)

    def _check_settings(self, hello: Hello) -> None:
        """Raise Misfit if quotas would act on other namespaces than those of the engine.

        Without quotas and tenants only log it: `kvcore ctl` then selects nothing by salt or tokens.
        """
        if hello.settings in (b"", self._settings):
            return
        problem = "namespace.secret or namespace.salt differ between this server and an engine"
        if self._config.tenants or self._config.clients.unnamed_quota:
            raise Misfit(f"{problem}, and quotas would act on other namespaces: give both the same")
        if hello.settings not in self._warned and len(self._warned) < MAX_WARNED:
            self._warned.add(hello.settings)
            _log.warning("%s: `kvcore ctl` finds nothing by tenant, salt or tokens", problem)

    def _heartbeat(self, client: bytes, beat: Heartbeat) -> ServerReply:
        session = self.sessions.find(client, beat.session, ranks=True)
        return HeartbeatReply(beat.ref, session.cache.used)

    def _enter(self, client: bytes, request: EnterSession) -> None:
        self.sessions.enter(client, request)

    def _bye(self, client: bytes, bye: Bye) -> None:
        self.sessions.end_if_left(self.sessions.find(client, bye.session))

    def _cache_of(self, client: bytes, number: int, *, ranks: bool = False) -> ModelCache:
        return self.sessions.find(client, number, ranks=ranks).cache

    # -- requests in a session ----------------------------------------------------------------

    def _match(self, client: bytes, request: MatchRequest) -> MatchReply:
        return self._cache_of(client, request.session).match(request)

    def _load(self, client: bytes, request: LoadRequest) -> LaunchReply:
        session = self.sessions.find(client, request.session)
        return session.cache.load(request, session.ranks)

    def _save(self, client: bytes, request: SaveRequest) -> LaunchReply:
        session = self.sessions.find(client, request.session)
        return session.cache.save(request, session.ranks)

    def _held(self, client: bytes, request: HeldRequest) -> CountReply:
        return CountReply(request.ref, self._cache_of(client, request.session).held(request))

    def _ops_ended(self, client: bytes, ended: OpsEnded) -> None:
        self._cache_of(client, ended.session).ops_ended(ended.session, ended.reports)

    def _read(self, client: bytes, read: ReadRequest) -> None:
        def reply(failed: dict[int, RowError]) -> None:
            self._send(client, ReadReply(read.ref, failed))

        cache = self._cache_of(client, read.session, ranks=True)
        cache.read(read.session, read.graph_id, read.op_id, read.rank, reply)

    def _withdraw(self, client: bytes, request: WithdrawRequest) -> None:
        cache = self._cache_of(client, request.session, ranks=True)
        cache.withdraw(request.session, request.graph_id)

    def _clear(self, client: bytes, request: ClearRequest) -> CountReply:
        cache = self._cache_of(client, request.session)
        return CountReply(request.ref, cache.clear(request.namespace))

    def _learn(self, client: bytes, message: LearnTokens) -> None:
        self._cache_of(client, message.session).learn(message)

    def _publish_tokens(self, client: bytes, message: PublishTokens) -> None:
        self._cache_of(client, message.session).publish_tokens(message)

    def _search(self, client: bytes, request: SearchRequest) -> SearchReply:
        return self._cache_of(client, request.session).search(request)

    def _path(self, client: bytes, request: PathRequest) -> PathReply:
        return self._cache_of(client, request.session).path(request)

    # -- commands of an operator --------------------------------------------------------------

    def _control(self, client: bytes, request: ControlRequest) -> None:
        def reply(result: dict[str, Any] | KVCoreError) -> None:
            if isinstance(result, KVCoreError):
                self._refuse(client, request.ref, "control", result)
            else:
                self._send(client, ControlReply(request.ref, result))

        try:
            self._check_administrator()
            admin = self.models.select(request.model).admin
        except (AmbiguousModel, ConfigError) as error:
            record_refusal(self._audit, request.order, self._who(), error)
            raise
        admin.begin(request.order, self._who(), reply)

    def _check_administrator(self) -> None:
        """Raise ConfigError if the client may not send commands. Without CURVE any client may."""
        if self._admins is not None and curve_key(self._frame) not in self._admins:
            raise ConfigError(
                "the keys of this client may not send commands: name it in server.admins of the "
                "server's settings"
            )


def _admins(names: list[str], folder: Path) -> frozenset[str]:
    """Return the keys of the clients ``names``. Raises ConfigError for one without a key."""
    keys = client_names(folder)
    if missing := set(names) - set(keys.values()):
        raise ConfigError(
            f"server.admins names {sorted(missing)}, who have no key in {folder}; supported are "
            f"{sorted(keys.values())}"
        )
    return frozenset(key for key, name in keys.items() if name in names)
