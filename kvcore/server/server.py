"""The server's loop: one thread that answers every client and does no I/O itself.

    ROUTER socket ──▶ decode ──▶ session ──▶ Space ──▶ reply
                         │ malformed, unknown: refused by name, and nothing else happens
    between messages: reports of the server's own transfers, sessions whose processes are gone

A model is prepared (memory taken, disk scanned) by a thread of its own, while its first client is
told to ask again. A session ends when the kernel says that nobody holds its lock (`places`), and is
spoken in only by the connections that are its own: a number in a message is no proof.
"""

from __future__ import annotations

import hmac
import logging
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvcore import __version__
from kvcore._util.zmq_socket import Context, make_socket, zmq
from kvcore.config import Config
from kvcore.config.paths import folder_of
from kvcore.control.audit import AuditLog, identity
from kvcore.control.messages import Control, Controlled, Refused, WrongProtocol, frames
from kvcore.errors import CapacityError, ConfigError, FormatError, KVCoreError, LayoutError
from kvcore.events.open import check_events
from kvcore.server.exporter import show
from kvcore.server.messages import (
    Ask,
    Beat,
    Beating,
    Bye,
    Clear,
    Done,
    Enter,
    Held,
    Hello,
    Launched,
    Learn,
    Load,
    Match,
    Matched,
    Model,
    Read,
    Reply,
    Request,
    Reuses,
    Rows,
    Save,
    Search,
    Spell,
    Status,
    Trail,
    Trailed,
    Value,
    Welcome,
    Withdraw,
    decode_request,
)
from kvcore.server.model_cache import Space
from kvcore.server.pending_clears import Note, notes_in
from kvcore.server.runtime_dir import Folder, SessionFile, address_of
from kvcore.telemetry.metrics import Metrics
from kvcore.transfer.graph import RowError

__all__ = ["Server"]

_log = logging.getLogger("kvcore.server")

MAX_SESSIONS = 1024
BUSY_POLL_MS = 1
IDLE_POLL_MS = 100
SWEEP_S = 0.2
"""How often it is looked whether sessions' processes are gone."""
CONNECTIONS = 4
"""Of one rank that are remembered; one that was forgotten enters again with its next read."""
BATCH = 64
"""Messages answered before transfers and sessions are looked after."""


@dataclass
class _Session:
    """A leader and its workers. ``leader`` is the connection that was welcomed, ``workers`` those
    that told the secret of the session's file, the latest last. ``joined``: one of them has said
    something since."""

    number: int
    leader: bytes
    space: Space
    file: SessionFile
    ranks: int
    version: str
    heard: float
    joined: bool = False
    silent: bool = False
    workers: dict[bytes, None] = field(default_factory=dict)

    def enter(self, worker: bytes) -> None:
        """A rank that connects anew is another one: the oldest goes."""
        self.workers.pop(worker, None)
        self.workers[worker] = None
        if len(self.workers) > CONNECTIONS * self.ranks:
            del self.workers[next(iter(self.workers))]


class _NoSession(KVCoreError):
    """The server does not know the session: it ended, another server gave it, or it is another
    client's."""


class _Busy(KVCoreError):
    """The model is being prepared."""


class _Misfit(KVCoreError):
    """This client can never be served with these settings."""


class _NoModel(KVCoreError):
    """It is not clear which model an order is for, or there is none yet."""


class Server:
    """Owns every `Space`. All methods are called from one thread, but `stop`.

    ``config`` is checked and the socket bound by `open`.
    """

    def __init__(self, config: Config, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._sessions: dict[int, _Session] = {}
        self._spaces: dict[Model, Space] = {}
        self._preparing: dict[Model, Future[Space]] = {}
        self._prepare = ThreadPoolExecutor(1, "kvcore-prepare")
        self._arenas = 0
        self._stop = False
        self._swept = 0.0
        self._owed: set[Path] = set()  # clears that were seen at the last sweep
        self._refusals = 0
        self._guard: Any = None
        self._frame: Any = None  # the last one that came, which says from whom
        self._metrics = Metrics("server", enabled=config.metrics.enabled)
        self._hide: Callable[[], None] = lambda: None
        self._handlers: dict[type, Callable[[bytes, Any], Reply | None]] = {
            Hello: self._hello,
            Beat: self._beat,
            Bye: self._bye,
            Enter: self._enter,
            Match: self._match,
            Load: self._load,
            Save: self._save,
            Held: self._held,
            Done: self._done,
            Read: self._read,
            Withdraw: self._withdraw,
            Clear: self._clear,
            Learn: self._learn,
            Spell: self._spell,
            Search: self._search,
            Trail: self._trail,
            Control: self._control,
            Ask: lambda _, asked: Status(asked.ref, self.status()),
        }

    # -- life ---------------------------------------------------------------------------------

    def open(self) -> str:
        """Take the folder and listen; returns the address. Raises ConfigError when another server
        has it, or the settings do not do."""
        server = self._config.server
        check_events(self._config)
        address = address_of(server)
        self._folder = Folder(folder_of(server))
        self._context = Context()
        self._socket = make_socket(self._context, zmq.ROUTER)
        try:
            self._audit = AuditLog(self._config.control.audit)
            self._listen(address)
            if server.metrics is not None:
                self._hide = show(self._metrics, server.metrics)
        except BaseException:
            self._context.destroy(linger=0)
            self._folder.close()
            raise
        _log.info("kvcore server listens address=%s folder=%s", address, self._folder.path)
        return address

    def _listen(self, address: str) -> None:
        from kvcore.server.curve_keys import lock_server

        if address.startswith("tcp://"):
            assert self._config.server.keys is not None
            self._guard = lock_server(self._socket, self._config.server.keys)
        before = os.umask(0o177)  # the socket is ours alone from its first moment on
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(f"server.address {address!r} cannot be bound: {error}") from error
        finally:
            os.umask(before)

    def run(self) -> None:
        """Serve until `stop`, then close. Blocks."""
        try:
            while not self._stop:
                self.step()
        finally:
            self.close()

    def stop(self) -> None:
        """End `run` soon. From any thread, or a signal handler."""
        self._stop = True

    def step(self) -> None:
        """Wait for messages a moment, answer them, look after what goes on."""
        busy = any(space.busy for space in self._spaces.values())
        if self._socket.poll(BUSY_POLL_MS if busy else IDLE_POLL_MS):
            for _ in range(BATCH):
                try:
                    parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
                except zmq.Again:
                    break
                self._frame = parts[-1]
                client, *said = [part.bytes for part in parts]
                self._take(client, said)
        for space in self._spaces.values():
            space.tick()
        self._sweep()

    def close(self) -> None:
        """Finish what is written, flush the tiers, give everything back. Blocks."""
        self._prepare.shutdown(wait=True, cancel_futures=True)
        for prepared in self._preparing.values():
            if not prepared.cancelled() and prepared.exception() is None:
                prepared.result().close()
        self._hide()
        if self._guard is not None:
            self._guard.stop()
        for space in self._spaces.values():
            space.control.close()  # while there is a socket to tell who waits for an order
        self._context.destroy(linger=0)
        for space in self._spaces.values():
            space.close()
        for session in self._sessions.values():
            session.file.close()
        self._folder.close()
        self._audit.close()
        _log.info("kvcore server ends")

    def status(self) -> dict[str, Any]:
        """How it is, as plain data."""
        return {
            "version": __version__,
            "refusals": self._refusals,
            "models": [
                {
                    "fingerprint": space.model.fingerprint.hex(),
                    "block_tokens": space.model.block_tokens,
                    "tiers": {tier: list(count) for tier, count in space.used.items()},
                    "background": space.background,
                    "sessions": [
                        {
                            "session": session.number,
                            "version": session.version,
                            "ranks": session.ranks,
                            "silent": session.silent,
                            "graphs": space.claims(session.number),
                        }
                        for session in self._sessions.values()
                        if session.space is space
                    ],
                }
                for space in self._spaces.values()
            ],
        }

    def check_integrity(self) -> None:
        """Every model's index and flights are sound."""
        for space in self._spaces.values():
            space.check_integrity()

    # -- messages -----------------------------------------------------------------------------

    def _take(self, client: bytes, parts: list[bytes]) -> None:
        try:
            request = decode_request(parts)
        except WrongProtocol as error:
            self._refuse(client, 0, "misfit", error)
        except FormatError as error:
            self._refuse(client, 0, "malformed", error)
        else:
            self._answer(client, request)

    def _answer(self, client: bytes, request: Request) -> None:
        try:
            reply = self._handlers[type(request)](client, request)
        except KVCoreError as error:
            self._refuse(client, request.ref, _kind(error), error)
        except Exception as error:  # noqa: BLE001 - one client must not end the others' server
            _log.exception("a request failed kind=%s", type(request).__name__)
            self._refuse(client, request.ref, "internal", error)
        else:
            if reply is not None:
                self._send(client, reply)

    def _refuse(self, client: bytes, ref: int, kind: str, error: Exception) -> None:
        self._refusals += 1
        self._metrics.refused(kind)
        if kind in ("malformed", "misfit"):
            _log.warning("refused kind=%s: %s", kind, error)
        self._send(client, Refused(ref, kind, str(error)[:1000]))

    def _send(self, client: bytes, reply: Reply) -> None:
        try:
            self._socket.send_multipart([client, *frames(reply)], zmq.NOBLOCK)
        except (zmq.ZMQError, FormatError) as error:
            _log.warning("a reply is lost: %s", error)

    def _of(self, client: bytes, number: int, *, ranks: bool = False) -> _Session:
        """The session, for its leader, or with ``ranks`` for its workers as well. Raises _NoSession
        for everyone else, and what they say is no sign of life."""
        session = self._known(number)
        if client != session.leader and not (ranks and client in session.workers):
            raise self._foreign(number)
        session.heard, session.joined, session.silent = self._clock(), True, False
        return session

    def _known(self, number: int) -> _Session:
        session = self._sessions.get(number)
        if session is None:
            raise _NoSession(f"session {number} is over: say hello")
        return session

    def _foreign(self, number: int) -> _NoSession:
        who = identity(self._frame)
        _log.warning("refused: session of another client session=%d who=%s", number, who)
        return _NoSession(f"session {number} is not this connection's: say hello on this one")

    # -- sessions -----------------------------------------------------------------------------

    def _hello(self, client: bytes, hello: Hello) -> Reply:
        if len(self._sessions) >= MAX_SESSIONS:
            raise _Misfit(f"{MAX_SESSIONS} engines are clients already")
        space = self._space(hello.model)
        self._pay(notes_in(self._folder.path))
        number = self._folder.next_number()
        file = SessionFile(self._folder, number, space.told)
        self._sessions[number] = _Session(
            number, client, space, file, hello.ranks, hello.version, self._clock()
        )
        tiers = [(tier.name, tier.read_path.value) for tier in space.manager.backings]
        stores = any(tier.finder is not None for tier in space.manager.backings)
        _log.info(
            "session begins session=%d ranks=%d version=%s", number, hello.ranks, hello.version
        )
        lease_s = self._config.server.lease_s
        return Welcome(
            hello.ref,
            number,
            file.name,
            tiers,
            stores,
            lease_s,
            space.texts,
            space.spells,
            space.manager.node,
        )

    def _space(self, model: Model) -> Space:
        """The model's space. Raises _Busy while it is being made, _Misfit where it cannot be."""
        if model in self._spaces:
            return self._spaces[model]
        prepared = self._preparing.get(model)
        if prepared is None:
            self._check_room(model)
            self._arenas += 1
            prepared = self._preparing[model] = self._prepare.submit(
                Space, self._config, model, self._folder, f"arena-{self._arenas}", self._audit
            )
        if not prepared.done():
            raise _Busy("the model is being prepared: ask again")
        del self._preparing[model]
        try:
            space = self._spaces[model] = prepared.result()
        except KVCoreError as error:
            raise _Misfit(str(error)) from error
        return space

    def _check_room(self, model: Model) -> None:
        _ = model.shape  # raises LayoutError
        known = [*self._spaces, *self._preparing]
        if len(known) < self._config.server.models:
            return
        differs = [
            f"{name} is {getattr(model, name)}, served is {getattr(other, name)}"
            for other in known
            for name in model.__struct_fields__
            if other.fingerprint == model.fingerprint
            and getattr(model, name) != getattr(other, name)
        ]
        why = "; ".join(differs) or f"{len(known)} other models are served"
        raise _Misfit(
            f"this server has room for {self._config.server.models} models: {why}. Give the engine "
            "the same settings (block.tokens), or raise server.models"
        )

    def _beat(self, client: bytes, beat: Beat) -> Reply:
        return Beating(beat.ref, self._of(client, beat.session, ranks=True).space.used)

    def _enter(self, client: bytes, asked: Enter) -> None:
        session = self._known(asked.session)
        if not hmac.compare_digest(asked.secret, session.file.secret):
            raise self._foreign(asked.session)
        session.enter(client)

    def _bye(self, client: bytes, bye: Bye) -> None:
        self._end_if_left(self._of(client, bye.session))

    def _sweep(self) -> None:
        now = self._clock()
        if now - self._swept < SWEEP_S:
            return
        self._swept = now
        self._count()
        for session in list(self._sessions.values()):
            quiet = now - session.heard
            if session.joined or quiet > self._config.server.lease_s:
                self._end_if_left(session)
            if session.number not in self._sessions:
                continue
            if quiet > self._config.server.lease_s and not session.silent:
                session.silent = True
                _log.warning("session is silent session=%d seconds=%.1f", session.number, quiet)
        notes = notes_in(self._folder.path)
        self._pay([note for note in notes if note.path in self._owed])
        self._owed = {note.path for note in notes}  # a client may be about to tell us of those

    def _pay(self, notes: Iterable[Note]) -> None:
        """Clear what clients could not tell a server, of the models that are here."""
        for note in notes:
            for model, space in self._spaces.items():
                if note.is_of(model):
                    spaces = [None] if note.namespaces is None else note.namespaces
                    count = sum(space.clear(namespace) for namespace in spaces)
                    note.path.unlink(missing_ok=True)
                    _log.info("paid a clear that an engine could not tell blocks=%d", count)

    def _count(self) -> None:
        """Take in what the models have counted."""
        for model, space in self._spaces.items():
            count = sum(session.space is space for session in self._sessions.values())
            self._metrics.sessions(model.fingerprint.hex()[:16], count)
            self._metrics.absorb(space.take_metrics())

    def _end_if_left(self, session: _Session) -> None:
        """End a session that no process holds any more."""
        if session.number in self._sessions and session.file.ended():
            del self._sessions[session.number]
            left = session.space.end(session.number)
            _log.info("session ends session=%d graphs_left=%d", session.number, left)

    # -- a session's requests -----------------------------------------------------------------

    def _match(self, client: bytes, asked: Match) -> Matched:
        return self._of(client, asked.session).space.match(asked)

    def _load(self, client: bytes, asked: Load) -> Launched:
        session = self._of(client, asked.session)
        return session.space.load(asked, session.ranks)

    def _save(self, client: bytes, asked: Save) -> Launched:
        session = self._of(client, asked.session)
        return session.space.save(asked, session.ranks)

    def _held(self, client: bytes, asked: Held) -> Value:
        return Value(asked.ref, self._of(client, asked.session).space.held(asked))

    def _done(self, client: bytes, done: Done) -> None:
        self._of(client, done.session).space.done(done.session, done.reports)

    def _read(self, client: bytes, read: Read) -> None:
        def tell(failed: dict[int, RowError]) -> None:
            self._send(client, Rows(read.ref, failed))

        space = self._of(client, read.session, ranks=True).space
        space.read(read.session, read.graph_id, read.op_id, read.rank, tell)

    def _withdraw(self, client: bytes, asked: Withdraw) -> None:
        space = self._of(client, asked.session, ranks=True).space
        space.withdraw(asked.session, asked.graph_id)

    def _clear(self, client: bytes, asked: Clear) -> Value:
        return Value(asked.ref, self._of(client, asked.session).space.clear(asked.namespace))

    def _learn(self, client: bytes, told: Learn) -> None:
        self._of(client, told.session).space.learn(told)

    def _spell(self, client: bytes, told: Spell) -> None:
        self._of(client, told.session).space.spell(told)

    def _search(self, client: bytes, asked: Search) -> Reuses:
        return self._of(client, asked.session).space.search(asked)

    def _trail(self, client: bytes, asked: Trail) -> Trailed:
        return self._of(client, asked.session).space.trail(asked)

    # -- an operator's orders -----------------------------------------------------------------

    def _control(self, client: bytes, asked: Control) -> None:
        def tell(told: dict[str, Any] | KVCoreError) -> None:
            if isinstance(told, KVCoreError):
                self._refuse(client, asked.ref, "control", told)
            else:
                self._send(client, Controlled(asked.ref, told))

        control = self._meant(asked.model).control
        control.begin(asked.order, identity(self._frame), tell)

    def _meant(self, fingerprint: bytes) -> Space:
        """The model whose fingerprint begins so. Raises _NoModel where it is not one."""
        models = [
            space for model, space in self._spaces.items()
            if model.fingerprint.startswith(fingerprint)
        ]  # fmt: skip
        if len(models) == 1:
            return models[0]
        there = ", ".join(model.fingerprint.hex() for model in self._spaces)
        raise _NoModel(
            f"{len(models)} models are meant; served: {there or 'none, before an engine joins'}. "
            "Give --model the first digits of one"
        )


_KINDS = {
    _NoSession: "session",
    _Busy: "busy",
    _Misfit: "misfit",
    CapacityError: "capacity",
    _NoModel: "control",
    LayoutError: "misfit",
    FormatError: "malformed",
}


def _kind(error: KVCoreError) -> str:
    return next((name for kind, name in _KINDS.items() if isinstance(error, kind)), "stale")
