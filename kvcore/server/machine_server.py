"""The server of another machine than an engine's first: memory and disks for the first's server.

    first machine's server ── orders ──▶ this loop ──▶ a worker for each model ──▶ disk, stores
            ▲                                │
            └────── ops that have ended ─────┘        the engine's ranks here map the memory

It decides nothing: slots, evictions and clears are the first server's. The ranks of this machine
find the memory and their sessions in this server's folder, and speak with the first server.

If the first server falls silent, or comes back, what it knew of this memory is gone. All sessions
here then end, the memory is given back, and this server joins anew.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from kvcore.admin.messages import Refused
from kvcore.config import Config
from kvcore.config.paths import folder_of, memory_of
from kvcore.errors import ConfigError, KVCoreError
from kvcore.model.keys import KEY_BYTES
from kvcore.runtime.build import geometry, hold_tiers, load_plugins
from kvcore.runtime.tiers import BackingOpener
from kvcore.server import machine_messages as m
from kvcore.server.exporter import show
from kvcore.server.machines import server_terms
from kvcore.server.messages import ServerReply
from kvcore.server.rpc import Link
from kvcore.server.runtime_dir import RuntimeDir, SessionFile
from kvcore.server.tier_worker import map_metadata, model_config, tier_worker
from kvcore.server.wire import MAX_REPORTS
from kvcore.telemetry.metrics import Metrics
from kvcore.tiers.held import Held
from kvcore.transfer.graph import OpReport
from kvcore.worker.lifecycle import close_worker, open_tiers

__all__ = ["MachineServer"]

_log = logging.getLogger("kvcore.server")

BUSY_WAIT_S, IDLE_WAIT_S = 0.001, 0.1
SWEEP_S = 0.2
"""Seconds between two checks whether the processes of sessions are gone."""
JOIN_WAIT_S = 1.0
MISFIT_RETRY_S = 5.0


class _Cache:
    """The part of one model here. One thread makes, opens and closes it, another uses it."""

    def __init__(
        self, config: Config, machine: int, asked: m.PrepareCache, folder: RuntimeDir
    ) -> None:
        """Allocate the memory and scan the disks. Blocks for seconds.

        Raises KVCoreError if the model cannot be served with these settings.
        """
        described = asked.model.described
        config = model_config(config, described)
        self._arena, self._folder, self._model = f"arena-{asked.cache}", folder, asked.model
        self.metrics = Metrics(f"{self._arena}-io", enabled=config.metrics.enabled)
        self.worker = tier_worker(
            config, asked.model, machine, asked.slots, folder, self._arena, self.metrics
        )
        try:
            self.held, self._release = hold_tiers(config, described, machine)
        except BaseException:
            close_worker(self.worker)
            folder.remove_arena(self._arena)
            raise
        plugins = load_plugins(config)
        self._opener = BackingOpener(config, geometry(described, machine), machine, plugins)

    @property
    def metadata(self) -> dict[str, Any]:
        return map_metadata(self.worker, self._model, self._arena)

    def open(self, tiers: Mapping[str, dict[str, Any]]) -> None:
        """Open the tiers that the first server names. Does I/O."""
        open_tiers(self.worker, self._opener, tiers)

    def close(self) -> None:
        """Finish what is being written, and give the memory back. Blocks."""
        close_worker(self.worker)
        self._folder.remove_arena(self._arena)
        self._release()


@dataclass
class _Part:
    """A cache by its number, from the order to prepare it on.

    ``cache`` is None until it was told as prepared, ``opening`` until its tiers are to be opened.
    """

    made: Future[_Cache]
    cache: _Cache | None = None
    opening: Future[None] | None = None


@dataclass
class _Session:
    """A session's file here. ``ends``: nobody needs it any more."""

    cache: int
    file: SessionFile
    ends: bool = False


class MachineServer:
    """The server of machine ``machine``, from 1 on. All methods but `stop` are for one thread."""

    def __init__(
        self, config: Config, machine: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config = config
        self._machine = machine
        self._clock = clock
        self._stop = False
        self._lease_s = 0.0  # 0 while the first server has not admitted this one
        self._beaten = self._swept = 0.0
        self._lost = ""  # why the first server is to be left
        self._refusal = ""
        self._process = secrets.token_hex(8)
        self._admitted = False
        self._parts: dict[int, _Part] = {}
        self._sessions: dict[int, _Session] = {}
        self._refused: list[tuple[int, OpReport]] = []
        self._metrics = Metrics(f"machine{machine}", enabled=config.metrics.enabled)
        self._close_exporter: Callable[[], None] = lambda: None
        self._orders: dict[type, Callable[[Any], None]] = {
            m.PrepareCache: self._prepare,
            m.OpenCache: self._open,
            m.DropCache: lambda order: self._drop(order.cache),
            m.BeginSession: self._begin,
            m.EndSession: self._end,
            m.SubmitGraph: self._submit,
            m.CancelGraph: self._cancel,
            m.InvalidateSlots: self._invalidate,
        }

    # -- life ---------------------------------------------------------------------------------

    def open(self) -> str:
        """Take the folder, and return the address of the first server, which need not be there.

        Raises ConfigError if another server has the folder, or if the settings cannot be used.
        """
        server = self._config.server
        if server.address in (None, "local"):
            raise ConfigError(
                f"--machine {self._machine} with server.address {server.address!r}, which is on "
                "this machine; supported is the address of machine 0's server, "
                '"tcp://HOST:PORT"'
            )
        folder, memory = folder_of(server), memory_of(server)
        self._folder = RuntimeDir(folder, None if memory == folder else memory)
        try:
            if server.metrics is not None:
                self._close_exporter = show(self._metrics, server.metrics)
            self._link = Link(server, self._obey)
        except BaseException:
            self._close_exporter()
            self._folder.close()
            raise
        self._thread = ThreadPoolExecutor(1, "kvcore-prepare")
        _log.info("machine %d waits for the server of machine 0", self._machine)
        return str(server.address)

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
        """Carry out the orders that wait, and tell what has ended.

        Waits for a first order: 1 ms while transfers run, else 100 ms.
        """
        if not self._lease_s:
            self._join()
            return
        self._link.drain(BUSY_WAIT_S if self._busy else IDLE_WAIT_S)
        self._tell_prepared()
        self._tell_reports()
        self._sweep()
        self._beat()
        if self._lost:
            _log.warning("the server of machine 0 %s: its sessions here are over", self._lost)
            self._forget()
            self._link.renew()

    @property
    def _busy(self) -> bool:
        return any(
            part.cache is None or part.opening or part.cache.worker.engine.in_flight
            for part in self._parts.values()
        )

    def close(self) -> None:
        """Finish the writes, and give everything back. Blocks."""
        self._close_exporter()
        self._forget()
        self._thread.shutdown(wait=True)
        self._link.close()
        self._folder.close()
        _log.info("the kvcore server of machine %d ends", self._machine)

    # -- the first server ---------------------------------------------------------------------

    def _join(self) -> None:
        """Ask the first server to be admitted, once."""
        asked = m.JoinMachine(
            self._link.ref(),
            self._machine,
            server_terms(self._config),
            self._process,
            self._admitted,
        )
        reply = self._link.ask(asked, JOIN_WAIT_S, alive=lambda: not self._stop)
        if isinstance(reply, m.MachineJoined):
            self._lease_s, self._refusal, self._admitted = reply.lease_s, "", True
            self._beaten = self._clock()
            _log.info("machine %d has joined the server of machine 0", self._machine)
            return
        refused = reply if isinstance(reply, Refused) else self._link.refused
        why = self._link.distrusted or (refused.message if refused is not None else "")
        if why and why != self._refusal:
            self._refusal = why
            _log.error("the server of machine 0 refuses this one: %s", why)
        if why:
            until = self._clock() + MISFIT_RETRY_S
            while not self._stop and self._clock() < until:
                time.sleep(IDLE_WAIT_S)
        self._link.renew()

    def _beat(self) -> None:
        """Tell the first server that this one is alive, and note if that one is gone.

        A refusal says that the connection is not the one that was admitted, or that the two do not
        understand each other: orders may be lost.
        """
        now, silent = self._clock(), time.monotonic() - self._link.heard
        if now - self._beaten > self._lease_s / 4:
            self._beaten = now
            self._tell(m.MachineBeat(self._link.ref()))
        if silent > self._lease_s:
            self._lost = f"has been silent for {silent:.1f} s"
        elif (refused := self._link.refused) is not None:
            self._lost = f"refuses this one: {refused.message}"

    def _tell(self, request: m.Request) -> None:
        if not self._lost and not self._link.tell(request):
            self._lost = "takes no more messages"

    def _forget(self) -> None:
        """Give up all that the first server ordered."""
        self._lease_s, self._lost = 0.0, ""
        for session in self._sessions.values():
            session.file.close()
        self._sessions.clear()
        for number in list(self._parts):
            self._drop(number)
        self._refused.clear()

    # -- orders -------------------------------------------------------------------------------

    def _obey(self, order: ServerReply) -> None:
        carry_out = self._orders.get(type(order))
        if carry_out is None or not self._lease_s or self._lost:
            return
        try:
            carry_out(order)
        except Exception as error:  # noqa: BLE001 - the first server must not rely on this one now
            _log.exception("an order failed kind=%s", type(order).__name__)
            self._lost = f"gives an order that fails here: {error}"

    def _prepare(self, order: m.PrepareCache) -> None:
        made = self._thread.submit(_Cache, self._config, self._machine, order, self._folder)
        self._parts[order.cache] = _Part(made)

    def _open(self, order: m.OpenCache) -> None:
        part = self._parts[order.cache]
        assert part.cache is not None
        part.opening = self._thread.submit(part.cache.open, order.tiers)

    def _drop(self, number: int) -> None:
        """End a cache. Processes may go on to use its memory."""
        part = self._parts.pop(number, None)
        for session, found in list(self._sessions.items()):
            if found.cache == number:
                found.file.close()
                del self._sessions[session]
        if part is not None:
            self._thread.submit(_close, part.made)

    def _begin(self, order: m.BeginSession) -> None:
        cache = self._cache(order.cache)
        file = SessionFile(self._folder, order.session, cache.metadata, order.secret)
        self._sessions[order.session] = _Session(order.cache, file)
        self._tell(m.SessionBegun(self._link.ref(), order.session))

    def _end(self, order: m.EndSession) -> None:
        if (session := self._sessions.get(order.session)) is not None:
            session.ends = True
        else:
            self._tell(m.SessionFreed(self._link.ref(), order.session))

    def _submit(self, order: m.SubmitGraph) -> None:
        refused = self._cache(order.cache).worker.submit(order.graph)
        self._refused += [(order.cache, report) for report in refused]

    def _cancel(self, order: m.CancelGraph) -> None:
        self._cache(order.cache).worker.cancel(order.graph_id)

    def _invalidate(self, order: m.InvalidateSlots) -> None:
        self._cache(order.cache).worker.invalidate(order.tier, order.slots)

    def _cache(self, number: int) -> _Cache:
        cache = self._parts[number].cache
        assert cache is not None, "an order about a cache that is not prepared"
        return cache

    # -- what is told -------------------------------------------------------------------------

    def _tell_prepared(self) -> None:
        for number, part in list(self._parts.items()):
            if part.cache is None and part.made.done():
                self._tell_made(number, part)
            elif part.opening is not None and part.opening.done():
                if (error := part.opening.exception()) is not None:
                    self._lost = f"names tiers that cannot be opened here: {error}"
                part.opening = None
                self._tell(m.CacheOpened(self._link.ref(), number))

    def _tell_made(self, number: int, part: _Part) -> None:
        try:
            part.cache = part.made.result()
        except Exception as error:  # noqa: BLE001 - the engine is refused, and this server goes on
            if not isinstance(error, KVCoreError):
                _log.exception("a model cannot be prepared")
            del self._parts[number]
            self._tell(m.CachePrepared(self._link.ref(), number, str(error)[:1000] or "it failed"))
            return
        for tier, held in part.cache.held.items():
            for slots, keys in _pieces(held):
                options, why = dict(held.rank_options), held.why[:1000]
                told = held.num_slots, options, slots, keys, held.torn, why
                self._tell(m.HeldBlocks(self._link.ref(), number, tier, *told))
        self._tell(m.CachePrepared(self._link.ref(), number))

    def _tell_reports(self) -> None:
        ended: dict[int, list[OpReport]] = {}
        refused, self._refused = self._refused, []
        for number, report in refused:
            ended.setdefault(number, []).append(report)
        for number, part in self._parts.items():
            if part.cache is not None and (reports := part.cache.worker.poll()):
                ended.setdefault(number, []).extend(reports)
        for number, reports in ended.items():
            for start in range(0, len(reports), MAX_REPORTS):
                some = reports[start : start + MAX_REPORTS]
                self._tell(m.MachineReports(self._link.ref(), number, some))

    def _sweep(self) -> None:
        """Count what was moved, and tell which sessions no process holds any more."""
        now = self._clock()
        if now - self._swept < SWEEP_S:
            return
        self._swept = now
        for part in self._parts.values():
            if part.cache is not None:
                self._metrics.absorb(part.cache.metrics.delta())
        for number, session in list(self._sessions.items()):
            if session.ends and session.file.ended():
                del self._sessions[number]
                self._tell(m.SessionFreed(self._link.ref(), number))


def _pieces(held: Held) -> Iterator[tuple[bytes, bytes]]:
    """Yield the slots and keys that a disk holds, in pieces that fit a message, at least one."""
    count = len(held.slots) // 8
    for start in range(0, max(count, 1), m.MAX_HELD):
        stop = min(start + m.MAX_HELD, count)
        yield held.slots[8 * start : 8 * stop], held.keys[KEY_BYTES * start : KEY_BYTES * stop]


def _close(made: Future[_Cache]) -> None:
    """Close a cache that is over. For the thread that made it."""
    try:
        made.result().close()
    except KVCoreError as error:
        _log.debug("a cache that was not made: %s", error)
    except Exception:  # noqa: BLE001 - thread boundary: the next cache is prepared all the same
        _log.exception("a cache was not closed as it should be")
