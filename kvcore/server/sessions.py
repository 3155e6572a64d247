"""The sessions of a server: who may speak in each, and when it ends.

A session is one leader and its workers. A number in a message proves nothing: only the connection
that was welcomed and the workers that know the secret of the session's file may speak in it. A
session ends when the kernel says that no process holds its lock (`kvcore.server.runtime_dir`).
"""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvcore._util.log_limit import LogLimit
from kvcore.server.errors import Misfit, NoSession
from kvcore.server.messages import EnterSession, Hello
from kvcore.server.model_cache import ModelCache
from kvcore.server.runtime_dir import RuntimeDir, SessionFile

__all__ = ["MAX_SESSIONS", "Session", "Sessions"]

_log = logging.getLogger("kvcore.server")

MAX_SESSIONS = 1024
CONNECTIONS = 4
"""Connections of one rank that are remembered.

A connection that was forgotten enters again with its next read.
"""


@dataclass
class Session:
    """A leader and its workers.

    ``leader`` is the connection that was welcomed. ``workers`` are the connections that gave the
    secret of the session's file, the latest last. ``joined`` is True once one of them has sent
    anything after the welcome. ``heard`` is when one of them last did.
    """

    number: int
    leader: bytes
    cache: ModelCache
    file: SessionFile
    ranks: int
    version: str
    heard: float
    joined: bool = False
    silent: bool = False
    workers: dict[bytes, None] = field(default_factory=dict)

    def enter(self, worker: bytes) -> None:
        """Admit a worker's connection; forget the oldest one when there are too many.

        A rank that reconnects has a new connection.
        """
        self.workers.pop(worker, None)
        self.workers[worker] = None
        if len(self.workers) > CONNECTIONS * self.ranks:
            del self.workers[next(iter(self.workers))]


class Sessions:
    """The sessions of one server. Only the server's thread calls it."""

    def __init__(
        self,
        folder: RuntimeDir,
        lease_s: float,
        who: Callable[[], str],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``who`` names the sender of the current message, for the log."""
        self._folder = folder
        self._lease_s = lease_s
        self._who = who
        self._clock = clock
        self._logged = LogLimit()
        self._sessions: dict[int, Session] = {}

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    def check_room(self) -> None:
        """Raise Misfit if the server already has as many clients as it can serve."""
        if len(self._sessions) >= MAX_SESSIONS:
            raise Misfit(f"{MAX_SESSIONS} engines are clients already")

    def begin(self, client: bytes, hello: Hello, cache: ModelCache) -> Session:
        """Begin a session of ``client`` with the model of ``cache``. Writes the session's file."""
        number = self._folder.next_number()
        file = SessionFile(self._folder, number, cache.metadata)
        session = Session(number, client, cache, file, hello.ranks, hello.version, self._clock())
        self._sessions[number] = session
        _log.info(
            "session begins session=%d ranks=%d version=%s", number, hello.ranks, hello.version
        )
        return session

    def find(self, client: bytes, number: int, *, ranks: bool = False) -> Session:
        """Return the session for its leader or, with ``ranks``, for its workers as well.

        This counts as a sign of life. Raises NoSession for every other client.
        """
        session = self._known(number)
        if client != session.leader and not (ranks and client in session.workers):
            raise self._foreign(number)
        session.heard, session.joined, session.silent = self._clock(), True, False
        return session

    def enter(self, client: bytes, request: EnterSession) -> None:
        """Admit a worker's connection. Raises NoSession unless it gives the session's secret."""
        session = self._known(request.session)
        if not hmac.compare_digest(request.secret, session.file.secret):
            raise self._foreign(request.session)
        session.enter(client)

    def _known(self, number: int) -> Session:
        session = self._sessions.get(number)
        if session is None:
            raise NoSession(f"session {number} is over: say hello")
        return session

    def _foreign(self, number: int) -> NoSession:
        if self._logged.admit(who := self._who()) is not None:
            _log.warning("refused: session of another client session=%d who=%s", number, who)
        return NoSession(f"session {number} is not this connection's: say hello on this one")

    def end_if_left(self, session: Session) -> None:
        """End a session if no process holds its lock any more."""
        if session.number in self._sessions and session.file.ended():
            del self._sessions[session.number]
            session.cache.leave(session.number)

    def abandon(self, cache: ModelCache) -> None:
        """End the sessions of a cache that is over. Processes may go on to use its memory."""
        for session in [each for each in self if each.cache is cache]:
            del self._sessions[session.number]
            session.file.close()
            _log.warning("session is over, with its memory session=%d", session.number)

    def sweep(self) -> None:
        """End the sessions whose processes are gone, and log those that have fallen silent."""
        now = self._clock()
        for session in list(self):
            quiet = now - session.heard
            if session.joined or quiet > self._lease_s:
                self.end_if_left(session)
            if session.number not in self._sessions:
                continue
            if quiet > self._lease_s and not session.silent:
                session.silent = True
                _log.warning("session is silent session=%d seconds=%.1f", session.number, quiet)

    def close(self) -> None:
        """Remove the sessions' files, so that clients see that the server ended."""
        for session in self:
            session.file.close()
