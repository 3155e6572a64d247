"""How a leader joins a server, and stays joined.

    joined ──no answer in time──▶ waiting ──a heartbeat is answered──▶ joined
       ▲                             │ silence for a lease, or the server refuses the session
       └───welcome─── alone ◀────────┘

A thread sends heartbeats while the leader is joined, and `Hello` until it is.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from kvcore import __version__
from kvcore._util.threads import GuardedThread
from kvcore.admin.messages import Refused
from kvcore.config.paths import folder_of
from kvcore.config.schema_server import ServerConfig
from kvcore.errors import ConfigError, KVCoreError, UnsupportedError
from kvcore.model.spec import ModelDescription
from kvcore.server.messages import (
    MAX_REPORTS,
    Bye,
    Heartbeat,
    HeartbeatReply,
    Hello,
    LaunchReply,
    Model,
    OpsEnded,
    ServerReply,
    ServerRequest,
    Welcome,
)
from kvcore.server.rpc import Link
from kvcore.server.runtime_dir import SessionLock
from kvcore.transfer.graph import OpReport, RowError, TransferGraph

__all__ = ["MISFIT_RETRY_S", "RETRY_S", "START_WAIT_S", "JoinedSession", "SessionKeeper", "undone"]

_log = logging.getLogger("kvcore.server.session")

START_WAIT_S = 60.0
"""Seconds that a start waits while the server prepares the model."""
RETRY_S = 0.2
MISFIT_RETRY_S = 5.0
END_S = 5.0
"""Seconds that `SessionKeeper.close` waits for its thread, which waits for a reply."""
_R = TypeVar("_R", bound=ServerReply)


@dataclass
class JoinedSession:
    """The session that a welcome gave."""

    welcome: Welcome
    held: SessionLock
    tiers: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def number(self) -> int:
        return self.welcome.session


class SessionKeeper:
    """Keeps one leader joined to its server, from a thread of its own.

    ``member`` is None while there is no server. ``waiting`` is True if a reply did not come in time
    and nothing has been heard since.
    """

    def __init__(self, config: ServerConfig, model: ModelDescription, settings: bytes) -> None:
        """Begin nothing yet; ``settings`` is the `settings_digest` of this engine."""
        self._config = config
        self._settings = settings
        shared = model.by_machine()
        self.model = Model.of(
            model.shape,
            model.fingerprint,
            model.point,
            packed=model.packed is not None,
            machines=model.machines,
            stages=shared.stages if model.machines > 1 else (),
        )
        self._ranks = model.world_size
        self.folder = folder_of(config)
        self.link = Link(config, self._late)
        self.member: JoinedSession | None = None
        self._asked_in_vain = 0.0
        self._unheard = 0  # the session to which a report could not be sent
        self._refusal = ""
        self._poke = threading.Event()
        self._ended = threading.Event()
        self._thread = GuardedThread("kvcore-keeper", self._keep, lambda error: self._leave())

    @property
    def waiting(self) -> bool:
        return self.link.heard < self._asked_in_vain

    def start(self) -> None:
        """Join the server; wait up to `START_WAIT_S` while it prepares the model.

        A server that does not answer is joined later, when it does. Raises UnsupportedError if it
        refuses this client for good. Without a thread the server is left: the engine computes.
        """
        limit = time.monotonic() + START_WAIT_S
        answered = self._hello(max(1.0, self._config.deadline_s))
        while isinstance(answered, Refused) and answered.kind == "busy":
            if time.monotonic() > limit:
                break
            time.sleep(RETRY_S)
            answered = self._hello(max(1.0, self._config.deadline_s))
        if isinstance(answered, Refused) and answered.kind == "misfit":
            self.link.close()
            raise UnsupportedError(f"the kvcore server refuses this engine: {answered.message}")
        if isinstance(answered, Refused) and answered.kind in ("distrusted", "away"):
            self._log_refusal(answered)
        elif answered is None:
            _log.warning("no kvcore server answers: the engine computes until one does")
        self._thread.start()

    def ask(self, request: ServerRequest, kind: type[_R]) -> _R | Refused | None:
        """Send a request and return its reply, or None if none comes in time.

        Blocks for the deadline at most, and not at all while a reply is overdue.
        """
        if self.member is None or self.waiting:
            return None
        reply = self.link.ask(request, self._config.deadline_s)
        if reply is None:
            self._asked_in_vain = time.monotonic()
            self._poke.set()
            _log.warning("the server does not answer in %g s", self._config.deadline_s)
            return None
        if isinstance(reply, Refused) and reply.kind == "session":
            self._poke.set()
            self._asked_in_vain = time.monotonic()
        return reply if isinstance(reply, (kind, Refused)) else None

    def report_ended(self, member: JoinedSession, reports: Sequence[OpReport]) -> None:
        """Report ended ops to the server.

        If that cannot be sent the session is left, because the server would otherwise keep the
        slots of those ops for as long as the session lasts.
        """
        for start in range(0, len(reports), MAX_REPORTS):
            part = list(reports[start : start + MAX_REPORTS])
            if not self.link.tell(OpsEnded(self.link.ref(), member.number, part)):
                self._unheard = member.number
                self._poke.set()

    def close(self) -> None:
        """Leave the server. Blocks for a moment."""
        self._ended.set()
        self._poke.set()
        self._thread.join(END_S)
        self._leave()
        self.link.close()

    # -- the thread -----------------------------------------------------------------------------

    def _keep(self) -> None:
        pause = 0.0
        while not self._ended.is_set():
            self._poke.wait(pause)
            self._poke.clear()
            if self._ended.is_set():
                return
            try:
                pause = self._beat() if self.member is not None else self._try_hello()
            except Exception:  # noqa: BLE001 - thread boundary: it is joined anew
                _log.exception("the session with the kvcore server has failed: joining it anew")
                self._leave()
                pause = MISFIT_RETRY_S

    def _beat(self) -> float:
        """Send one heartbeat; return the seconds until the next."""
        member = self.member
        assert member is not None
        if self._unheard == member.number:
            _log.warning("the kvcore server takes no more messages: joining it anew")
            self._leave()
            return 0.0
        lease_s = member.welcome.lease_s
        beat = Heartbeat(self.link.ref(), member.number)
        reply = self.link.ask(beat, min(1.0, lease_s / 4), alive=lambda: not self._ended.is_set())
        if isinstance(reply, HeartbeatReply):
            member.tiers = reply.tiers
        elif isinstance(reply, Refused) or time.monotonic() - self.link.heard > lease_s:
            _log.warning("the kvcore server is gone: the engine computes until it is back")
            self._leave()
            return 0.0
        self.link.drain()
        return RETRY_S if self.waiting else lease_s / 4

    def _try_hello(self) -> float:
        reply = self._hello(1.0)
        if isinstance(reply, Refused) and reply.kind in ("misfit", "distrusted", "away"):
            self._log_refusal(reply)
            if reply.kind == "distrusted":
                self.link.renew()
            return RETRY_S if reply.kind == "away" else MISFIT_RETRY_S
        if reply is None:
            self.link.renew()
        return RETRY_S

    def _log_refusal(self, refused: Refused) -> None:
        """Log why this engine is not joined, once."""
        if refused.message == self._refusal:
            return
        self._refusal = refused.message
        if refused.kind == "away":
            _log.warning("the engine computes until it is joined: %s", refused.message)
        elif refused.kind == "misfit":
            _log.error("the kvcore server refuses this engine: %s", refused.message)
        else:
            _log.error("no kvcore server is joined, because of other users: %s", refused.message)

    def _hello(self, timeout: float) -> ServerReply | None:
        self.link.refused = None
        hello = Hello(self.link.ref(), self.model, self._ranks, __version__, self._settings)
        reply = self.link.ask(hello, timeout, alive=self._may_be_welcome)
        if self.link.distrusted:
            return Refused(hello.ref, "distrusted", self.link.distrusted)
        if not isinstance(reply, Welcome):
            return reply or self.link.refused
        try:
            held = SessionLock(self.folder, reply.file)
        except ConfigError as error:
            return Refused(reply.ref, "distrusted", str(error))
        except KVCoreError as error:
            # If this is the server's folder, the session ended while this process stood still.
            kind = "busy" if os.path.exists(self.folder / "server.lock") else "misfit"
            return Refused(reply.ref, kind, f"{error} (server.folder is {self.folder})")
        self.member = JoinedSession(reply, held)
        self._refusal = ""
        self.link.tell(Heartbeat(self.link.ref(), reply.session))
        _log.info("joined the kvcore server session=%d", reply.session)
        return reply

    def _may_be_welcome(self) -> bool:
        """Return False once it is known that no server of this version and user will answer."""
        refused = self.link.refused
        if self._ended.is_set() or self.link.distrusted:
            return False
        return refused is None or refused.kind != "misfit"

    def _leave(self) -> None:
        member, self.member = self.member, None
        if member is not None:
            member.held.close()
            self.link.tell(Bye(self.link.ref(), member.number))

    def _late(self, reply: ServerReply) -> None:
        """Report a plan that no request waits for any more as not carried out."""
        member = self.member
        if isinstance(reply, LaunchReply) and reply.graph is not None and member is not None:
            self.report_ended(member, undone(reply.graph, RowError.CANCELLED))


def undone(graph: TransferGraph, why: RowError) -> list[OpReport]:
    return [
        OpReport(graph.graph_id, op.op_id, dict.fromkeys(range(*op.rows), why)) for op in graph.ops
    ]
