"""The worker's side of a server: it maps the shared arena and copies to and from it.

A graph's id tells its session. With the first graph of a session the worker locks the session. A
graph of a session that is over is refused, so a slot that the server has given to another session
is never touched. The server carries out the reads from tiers; this side says when it is ready for
them.

On a GPU, pinning the arena takes seconds. The tender's thread does it (`kvcore.server.mapped`), and
graphs that come meanwhile are refused at once: no step of the engine waits.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import Any

from kvcore._util.cpus import node_cores, settle_thread
from kvcore._util.threads import GuardedThread, nobody_waits
from kvcore.admin.messages import Refused
from kvcore.config import Config
from kvcore.config.paths import folder_of
from kvcore.errors import KVCoreError, TierUnavailable
from kvcore.memory.arena import HostArena
from kvcore.memory.device import Event
from kvcore.memory.layout import KVView
from kvcore.model.spec import ModelDescription
from kvcore.server.mapped import MappedArenas
from kvcore.server.messages import EnterSession, Heartbeat, ReadReply, ReadRequest, WithdrawRequest
from kvcore.server.rpc import Link
from kvcore.server.runtime_dir import SessionLock, session_of
from kvcore.transfer.graph import OpReport, RowError, TransferGraph, TransferOp
from kvcore.worker import EnginePages, KVWorker, refuse

__all__ = ["ServedWorker"]

_log = logging.getLogger("kvcore.server.worker")

TEND_S = 0.5
"""Seconds between two checks whether the session is over, so that its memory can be released."""
KEPT_S = 10.0
"""Seconds that the memory of a session that is over stays mapped.

A load may be planned and on its way here. TensorRT-LLM fails a batch whose load does not come, and
its steps may take seconds. A new server that meanwhile has no room is asked again
(`session.MISFIT_RETRY_S`).
"""
BEAT_S = 0.25
"""Seconds between two checks, during a read, whether the server is there."""


class _ServedRead:
    """Executor of reads from tiers, which the server carries out into the shared arena."""

    def __init__(self, config: Config, link: Link, rank: int) -> None:
        self._link = link
        self._rank = rank
        self._longest = config.transfer.load_deadline_s
        self._silence_s = max(1.0, 10 * config.server.deadline_s)
        self.secret = b""
        """The secret of the session that the worker has joined."""

    def enter(self, session: int, secret: bytes | None = None) -> None:
        """Say that this connection belongs to a rank. ``secret`` is that of a session not joined.

        It is said before every read, because after a break the connection is a new one.
        """
        secret = self.secret if secret is None else secret
        self._link.tell(EnterSession(self._link.ref(), session, secret))

    def withdraw(self, graph_id: int, secret: bytes | None = None) -> None:
        """Fail the reads of a graph that have not begun: other ranks may wait for this one."""
        session = session_of(graph_id)
        self.enter(session, secret)
        self._link.tell(WithdrawRequest(self._link.ref(), session, graph_id))

    def run(self, graph: TransferGraph, op: TransferOp, rows: list[int]) -> dict[int, RowError]:
        link, session = self._link, session_of(graph.graph_id)
        asked = beaten = time.monotonic()

        def alive() -> bool:
            nonlocal beaten
            now = time.monotonic()
            if now - beaten > BEAT_S:
                beaten = now
                link.tell(Heartbeat(link.ref(), session))
            over = link.refused is not None and link.refused.kind == "session"
            return not over and now - max(link.heard, asked) < self._silence_s

        link.refused = None  # it may have been about the connection before
        self.enter(session)
        read = ReadRequest(link.ref(), session, graph.graph_id, op.op_id, self._rank)
        longest = graph.deadline_s or self._longest
        reply = link.ask(read, longest, alive=alive)
        if isinstance(reply, ReadReply):
            return {row: why for row, why in reply.failed.items() if row in rows}
        error = RowError.IO
        if isinstance(reply, Refused):
            why = reply.message
        elif time.monotonic() - asked >= longest:  # the same as a deadline that the engine sees
            why, error = f"it has not ended in {longest:g} s", RowError.DEADLINE
        else:
            why = "the server does not answer"
        _log.warning("read failed graph=%d op=%d: %s", graph.graph_id, op.op_id, why)
        return dict.fromkeys(rows, error)


class ServedWorker(KVWorker):
    """A `KVWorker` over a server's arena.

    ``parts`` are the arguments of `KVWorker`. Their arena has one slot and stands in while there is
    no session.
    """

    def __init__(
        self,
        *,
        served: Config,
        model: ModelDescription,
        rank: int,
        pages: EnginePages,
        **parts: Any,
    ) -> None:
        """Start without waiting for a server.

        Raises ConfigError for an address or keys that cannot be used.
        """
        self._link = Link(served.server)
        self._reads = _ServedRead(served, self._link, rank)
        super().__init__(reads=self._reads, pages=pages, **parts)
        self._folder = folder_of(served.server)
        self._shape = model.shape
        self._part, self._part_at = model.part_on_machine(rank)
        pin = self.device if served.host.pin and self.device.queues else None
        machine = model.by_machine().rank_shape(rank // model.firsts.step)
        self._arenas = MappedArenas(self._folder, machine, model.fingerprint, pin)
        self._held: SessionLock | None = None
        self._session = 0
        self._over_since: tuple[SessionLock, float] | None = None
        self._joining = threading.Lock()
        """Guards the session. Nobody pins, unpins or unmaps memory of a server under it."""
        self._ended, self._wake = threading.Event(), threading.Event()
        self._tender = GuardedThread("kvcore-tender", self._tend, nobody_waits)
        self._tender.start()

    def submit(
        self,
        graph: TransferGraph,
        wave: int | None = None,
        after: Event | None = None,
    ) -> list[OpReport]:
        """Submit a graph as `KVWorker.submit` does.

        Refuses it if its session is over or, as not ready, while the session's arena is pinned.
        Without the tender no session can be joined or left: this rank takes no more work. No other
        rank waits for the reads of a graph that is refused here.
        """
        with self._joining:
            refused = self._begin(graph, wave, after)
            if refused:
                self._withdraw_refused(graph)
            return refused

    def _begin(self, graph: TransferGraph, wave: int | None, after: Event | None) -> list[OpReport]:
        if self._tender.error is not None:
            return refuse(graph, RowError.REFUSED)
        try:
            ready = self._join(graph)
        except KVCoreError as error:
            _log.warning("graph refused graph=%d: %s", graph.graph_id, error)
            return refuse(graph, RowError.IO)
        if not ready:
            _log.debug("graph refused graph=%d: memory is being pinned", graph.graph_id)
            return refuse(graph, RowError.NOT_READY)
        return super().submit(graph, wave, after)

    def _withdraw_refused(self, graph: TransferGraph) -> None:
        session = session_of(graph.graph_id)
        if not session or not any(op.path.reads_tier for op in graph.ops):
            return
        secret = None
        if session != self._session:
            try:
                held = SessionLock(self._folder, f"session-{session}")
            except KVCoreError:
                return  # it is over for all ranks
            with contextlib.closing(held):
                secret = bytes.fromhex(held.metadata()["secret"])
        self._reads.withdraw(graph.graph_id, secret)

    def cancel(self, graph_id: int) -> None:
        super().cancel(graph_id)
        if self._session == session_of(graph_id):
            self._reads.withdraw(graph_id)

    def _join(self, graph: TransferGraph) -> bool:
        """Join the graph's session, unless it is joined; return False while memory is pinned."""
        session = session_of(graph.graph_id)
        if not session:
            raise TierUnavailable("the server did not plan this load")
        if session == self._session:
            return True
        if self.engine.in_flight:
            raise TierUnavailable("copies of the previous session are still in flight")
        held = SessionLock(self._folder, f"session-{session}")
        try:
            told = held.metadata()
            arena = self._arenas.get(told)
        except BaseException:
            held.close()
            raise
        if arena is None:
            held.close()
            self._wake.set()
            return False
        self._link.renew()  # its folder may be a new one
        layers = range(*self._part.layers)
        layout = arena.layout().select_heads(*self._part.heads).select_layers(layers)
        self._reads.secret = bytes.fromhex(told["secret"])
        self._swap(arena, layout, session, held)
        _log.info("joined session=%d host_bytes=%d pinned=%s", session, arena.nbytes, arena.pinned)
        return True

    def _swap(self, arena: HostArena, layout: Any, session: int, held: SessionLock | None) -> None:
        """Copy from and to another arena from now on, then release the lock of the one before.

        If the arena cannot be used, it is the new lock that is released.
        """
        stand_in = None if self._session else self.arena
        at = self._part_at if session else 0  # the stand-in has this rank's part alone
        try:
            self.use_arena(arena, KVView(layout, [arena.tensor()]), at)
        except BaseException:
            if held is not None:
                held.close()
            raise
        self._arenas.use(arena)
        if stand_in is not None:
            stand_in.close()
        before, self._held, self._session = self._held, held, session
        if before is not None:
            before.close()
        self._wake.set()

    def _tend(self) -> None:
        """Map and pin the server's arena, and release that of a session that is over."""
        settle_thread(near=node_cores(self.device.numa_node()))
        while not self._ended.is_set():
            try:
                self.device.enter()
                self._leave_if_over()
                self._arenas.tend(lambda: not self._ended.is_set())
            except Exception:  # noqa: BLE001 - thread boundary: without it no session is joined
                _log.exception("the server's memory could not be tended")
            self._wake.wait(TEND_S)
            self._wake.clear()

    def _leave_if_over(self) -> None:
        """Leave a session that is over for `KEPT_S`: its server needs the room."""
        with self._joining:
            held = self._held
            if held is None or not held.over:
                self._over_since = None
            elif self._over_since is None or self._over_since[0] is not held:
                self._over_since = held, time.monotonic()
            elif time.monotonic() - self._over_since[1] >= KEPT_S and not self.engine.in_flight:
                spare = HostArena(self._part.shape(self._shape), 1, huge_pages=False)
                self._swap(spare, spare.layout(), 0, None)
                _log.info("the session is over; its memory is given back")

    def close(self, *, timeout: float = 30.0) -> bool:
        """Finish what is in flight and leave the session; return whether everything has ended."""
        self._ended.set()
        self._wake.set()
        tended = self._tender.join(timeout)
        ended = super().close(timeout=timeout) and tended
        if ended:
            self._arenas.close()
        if ended and self._held is not None:  # else the lock says that memory is still in use
            self._held.close()
            self._held = None
        self._link.close()
        return ended
