"""An engine's own pages in a server, in place of a backing tier of its own.

    put   plan a save ──▶ a page ──▶ staging ──▶ host memory of the server ──▶ its tiers
    get   plan a load ──▶ its tiers ──▶ host memory of the server ──▶ staging ──▶ a page
    ask   match ──▶ what the server holds, or finds in its stores

To the server this is an engine whose prompts have one block each (`kvcore.server.page_model`). The
session, the shared memory, the copies and all that may fail between them are those of engines:
`RemoteManager` plans and `ServedWorker` copies, here from and to a staging of this process. A copy
between the staging and a page begins when the graph has ended, so nothing of the server's ever
touches the engine's pages.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvcore._util.circuit_breaker import Breaker
from kvcore._util.threads import GuardedThread
from kvcore.config import Config
from kvcore.errors import CapacityError, ConfigError, KVCoreError
from kvcore.manager.base import HOST, Hit, Planned, Source
from kvcore.memory.buffers import Buffers
from kvcore.memory.layout import KVView, arena_layout
from kvcore.model.keys import KEY_BYTES
from kvcore.runtime.build import build_worker
from kvcore.runtime.local_transport import LocalTransport
from kvcore.runtime.page_store import (
    PageCounts,
    Pages,
    named_backings,
    page_key,
    page_space,
    renewed,
)
from kvcore.server.client import RemoteManager, join_server
from kvcore.server.page_model import page_model
from kvcore.server.worker import ServedWorker
from kvcore.telemetry.metrics import Metrics
from kvcore.transfer.graph import RowError, Span, UnitTable
from kvcore.worker.lifecycle import close_worker

__all__ = ["ServedPages", "join_pages"]

_log = logging.getLogger("kvcore.pages")

STAGING_NBYTES = 16 << 20
"""Bytes of the staging; of `LEAST_STAGED` pages, if they are larger."""
LEAST_STAGED = 2
LOOKUP_S = 2.0
"""Longest time for which a lookup waits for the server and its stores."""
ABSENT_S = 1.0
"""Seconds for which the server is not asked again about a page that it lacks."""
KNOWN_S = 10.0
"""Seconds for which a page is believed to be held. The server tells nobody what it evicts."""
KEPT = 1 << 16
"""Most pages that are known to be held."""
POLL_S = 0.002
"""Seconds between two questions about a page that the server looks for in a store."""
_OF_THE_PAGE = (RowError.CORRUPT, RowError.MISSING, RowError.CANCELLED)
"""Failures that say nothing about the medium."""


class _Known(NamedTuple):
    """Where the server had a page, in which session, and until when that is believed."""

    hit: Hit
    session: int
    until: float


@dataclass(eq=False)
class _Flight:
    """The graph of one page, the ``at``-th of a call, in a place of the staging."""

    at: int
    place: int
    error: RowError | None = None
    ended: bool = False


class ServedPages(Pages):
    """Pages of one size in the server that ``manager`` has joined. Thread-safe.

    `holds`, `use`, `renew`, `late` and `counts` wait for bookkeeping only. While no server answers,
    nothing is found and nothing is stored.

    Args:
        manager: the session, of one page size. Closed by `close`.
        transport: hands graphs to the worker that copies. Its worker is closed by `close`.
        staging: uint8, [places, bytes of a page]; the worker's only pages.
        identity: as in `PageStore`.
        deadline_s: seconds after which a load is given up.
    """

    def __init__(
        self,
        manager: RemoteManager,
        transport: LocalTransport,
        staging: npt.NDArray[np.uint8],
        identity: bytes,
        deadline_s: float,
    ) -> None:
        self._manager = manager
        self._transport = transport
        self._staging = staging
        self._first_space = self._space = page_space(identity)
        self._deadline_s = deadline_s
        self._leading = threading.Lock()
        """Held in every call of the manager, which is for one thread: the longest wait is one
        answer of the server."""
        self._books = threading.Condition()
        """Guards what follows. Nobody waits for the server under it."""
        self._known: OrderedDict[bytes, _Known] = OrderedDict()
        self._flights: dict[int, _Flight] = {}
        self._free = list(range(len(staging)))
        self._breaker = Breaker("server")
        self._written = self._read = self._corrupt = 0
        self._stopped = self._closed = False
        self._thread = GuardedThread("kvcore-pages-ends", self._take_ends, self._die)
        self._thread.start()

    # -- bookkeeping ----------------------------------------------------------------------------

    @property
    def shared(self) -> bool:
        return True

    @property
    def lookup_s(self) -> float:
        return LOOKUP_S

    @property
    def absent_s(self) -> float:
        return ABSENT_S

    @property
    def space(self) -> bytes:
        with self._books:
            return self._space

    def holds(self, key: str) -> bool:
        with self._books:
            return self._serves and self._where(page_key(key, self._space)) is not None

    def use(self, keys: Sequence[str]) -> None:
        """Do nothing: the server counts loads and saves, and is not asked for more."""

    def renew(self) -> None:
        with self._books:
            self._space = renewed(self._space)

    def late(self) -> None:
        with self._books:
            self._breaker.failed()

    def counts(self) -> PageCounts:
        """Return what was counted; ``held`` are the pages of this size of all clients."""
        held = max((used for used, _ in self._manager.counts.values()), default=0)
        with self._books:
            return PageCounts(held, self._written, self._read, self._corrupt)

    @property
    def _serves(self) -> bool:
        return not self._stopped and not self._closed and self._breaker.allows()

    def _where(self, block: bytes) -> Hit | None:
        """Return where the server has a page, as far as that is known and believed."""
        member, known = self._manager.keeper.member, self._known.get(block)
        if known is None or member is None or self._manager.keeper.waiting:
            return None
        if known.session != member.number or time.monotonic() >= known.until:
            del self._known[block]
            return None
        return known.hit

    def _know(self, block: bytes, hit: Hit) -> None:
        member = self._manager.keeper.member
        if member is None:
            return
        self._known[block] = _Known(hit, member.number, time.monotonic() + KNOWN_S)
        self._known.move_to_end(block)
        if len(self._known) > KEPT:
            self._known.popitem(last=False)

    # -- the server -----------------------------------------------------------------------------

    def ask(self, keys: Sequence[str], space: bytes = b"") -> list[bool]:
        """Return what `Pages.ask` does. Blocks for a round trip a page, `LOOKUP_S` at most."""
        with self._books:
            if not self._serves:
                return [False] * len(keys)
            space = space or self._space
        blocks = [page_key(key, space) for key in keys]
        left, until = list(dict.fromkeys(blocks)), time.monotonic() + LOOKUP_S
        found: set[bytes] = set()
        while left and time.monotonic() < until:
            asked = {block: self._look(block, space[:KEY_BYTES], until) for block in left}
            found |= {block for block, there in asked.items() if there}
            left = [block for block, there in asked.items() if there is None]
            if left:
                time.sleep(POLL_S)
        return [block in found for block in blocks]

    def _look(self, block: bytes, space: bytes, until: float) -> bool | None:
        """Return whether the server has a page; None if one of its stores is being asked."""
        with self._books:
            if self._where(block) is not None:
                return True
        if time.monotonic() >= until:
            return False
        with self._leading:
            hit = self._manager.get_match((block,), space)
            asking = not hit.depth and self._manager.ask_stores(hit)
        if not hit.depth:
            return None if asking else False
        with self._books:
            self._know(block, hit)
        return True

    def leading(self, keys: Sequence[str]) -> int:
        return [*self.ask(keys), False].index(False)

    def clear(self) -> None:
        """Forget every page of this identity, for all clients of the server.

        Nothing is found until the server has done it.
        """
        with self._books:
            spaces = {self._first_space[:KEY_BYTES], self._space[:KEY_BYTES]}
            self._known.clear()
        with self._leading:
            for space in spaces:
                self._manager.clear(space)

    # -- pages ----------------------------------------------------------------------------------

    def put(self, keys: Sequence[str], pages: Sequence[Buffers], space: bytes = b"") -> list[bool]:
        """Store pages as `Pages.put` does, in the server's host memory.

        All its clients find them once this returns.
        """
        with self._books:
            if not self._serves:
                return [False] * len(keys)
            space = space or self._space
        blocks, done = [page_key(key, space) for key in keys], [False] * len(keys)

        def plan(at: int, place: int) -> Planned | None:
            _copy(self._staging[place], pages[at], to_pages=False)
            with self._leading:
                return self._manager.plan_save((blocks[at],), space[:KEY_BYTES], 1)

        def ended(flight: _Flight) -> None:
            done[flight.at] = flight.error is None
            with self._books:
                if flight.error is None:
                    self._written += 1
                    at_once = Source(HOST, 0, 1)
                    self._know(
                        blocks[flight.at], Hit((blocks[flight.at],), space[:KEY_BYTES], (at_once,))
                    )

        without = self._move(len(keys), plan, ended)  # held already, or no room
        if any(done):
            self._pass_reports(blocks[0], space[:KEY_BYTES])
        for at in without:
            done[at] = bool(self._look(blocks[at], space[:KEY_BYTES], time.monotonic() + LOOKUP_S))
        return done

    def _pass_reports(self, block: bytes, space: bytes) -> None:
        """Wait until the server has read this client's reports: others then find what it stored.

        They are on their way to it when a save has ended here. It answers what comes after them.
        """
        with self._leading:
            self._manager.get_match((block,), space)

    def get(self, keys: Sequence[str], pages: Sequence[Buffers], space: bytes = b"") -> list[bool]:
        """Read pages as `Pages.get` does. Each load ends after ``deadline_s`` at most."""
        with self._books:
            if not self._serves:
                return [False] * len(keys)
            space = space or self._space
            self._breaker.started()
        blocks, done = [page_key(key, space) for key in keys], [False] * len(keys)
        failures: list[RowError | None] = []

        def plan(at: int, place: int) -> Planned | None:
            with self._books:
                hit = self._where(blocks[at])
            with self._leading:
                planned = None if hit is None else self._plan_load(hit)
                if planned is None:  # what was known has gone stale, or nothing was
                    hit = self._manager.get_match((blocks[at],), space[:KEY_BYTES])
                    planned = self._plan_load(hit) if hit.depth else None
            return planned

        def ended(flight: _Flight) -> None:
            failures.append(flight.error)
            if flight.error is None:
                _copy(self._staging[flight.place], pages[flight.at], to_pages=True)
                done[flight.at] = True
            with self._books:
                self._read += flight.error is None
                self._corrupt += flight.error is RowError.CORRUPT
                if flight.error is not None:
                    self._known.pop(blocks[flight.at], None)

        lacking = self._move(len(keys), plan, ended)
        with self._books:
            for at in lacking:
                self._known.pop(blocks[at], None)
            self._heed(failures)
        return done

    def _plan_load(self, hit: Hit) -> Planned | None:
        try:
            return self._manager.plan_load(hit, Span(0, 1), deadline_s=self._deadline_s)
        except CapacityError:
            return None
        except KVCoreError as error:
            _log.debug("a page is not loaded: %s", error)
            return None

    def _move(
        self,
        count: int,
        plan: Callable[[int, int], Planned | None],
        ended: Callable[[_Flight], None],
    ) -> list[int]:
        """Move pages through the staging, as many at a time as it has places.

        ``plan`` plans a page in a place. ``ended`` is told each that has ended, while the place is
        still its own. Returns the pages that were not planned although no other of this call
        was under way: these may hold the room that a page needs.
        """
        todo: deque[int] = deque(reversed(range(count)))  # the first is to be evicted last
        without: list[int] = []
        while todo:
            flights: list[_Flight] = []
            try:
                while todo and (place := self._take_place(wait=not flights)) is not None:
                    planned = None
                    try:
                        planned = plan(todo[0], place)
                    finally:
                        if planned is None:
                            self._give_place(place)
                    if planned is not None:
                        flights.append(self._launch(planned, _Flight(todo.popleft(), place)))
                    elif flights:
                        break
                    else:
                        without.append(todo.popleft())
                if not self._wait(flights):
                    return [*without, *todo]
                for flight in flights:
                    ended(flight)
            finally:
                if self._wait(flights):  # after an error too, copies may go on until then
                    for flight in flights:
                        self._give_place(flight.place)
        return without

    def _wait(self, flights: Sequence[_Flight]) -> bool:
        """Wait until flights have ended. Return False if that will not be known.

        Copies may then go on, so their places are given to nobody.
        """
        with self._books:
            self._books.wait_for(lambda: self._stopped or all(each.ended for each in flights))
            return not self._stopped

    def _take_place(self, *, wait: bool) -> int | None:
        """Return a free place. None if there is none now, or with ``wait`` none any more."""
        with self._books:
            if wait:
                self._books.wait_for(lambda: self._free or self._stopped)
            return self._free.pop() if self._free and not self._stopped else None

    def _give_place(self, place: int) -> None:
        with self._books:
            self._free.append(place)
            self._books.notify_all()

    def _launch(self, planned: Planned, flight: _Flight) -> _Flight:
        number = planned.graph.graph_id
        units = UnitTable.of(np.array([[flight.place]], np.int64), 1)
        with self._leading:
            with self._books:
                self._flights[number] = flight
            self._manager.launch(planned, (units,), on_end=partial(self._end, number))
            self._take_reports()  # a graph that the worker refuses has ended
        return flight

    def _take_ends(self) -> None:
        while not self._closed:
            if self._transport.wait_report(0.2):
                with self._leading:
                    self._take_reports()

    def _take_reports(self) -> None:
        """Pass reports of the worker on to the manager. Call with `_leading` held."""
        for report in self._transport.poll():
            with self._books:
                flight = self._flights.get(report.graph_id)
                if flight is not None and report.failed:
                    flight.error = _first(flight.error, report.failed.values())
            self._manager.complete(report)

    def _end(self, number: int) -> None:
        with self._books:
            self._flights.pop(number).ended = True
            self._books.notify_all()

    def _die(self, error: BaseException) -> None:
        """Find and store nothing any more: no end of a graph would be noticed."""
        with self._books:
            self._stopped = True
            self._books.notify_all()

    def _heed(self, failures: Sequence[RowError | None]) -> None:
        """Tell the circuit breaker how loads went. Call with `_books` held."""
        told = [error for error in failures if error not in _OF_THE_PAGE]
        if any(error is not None for error in told):
            self._breaker.failed()
        elif told:
            self._breaker.succeeded()
        else:
            self._breaker.undecided()

    def close(self) -> None:
        """Leave the server. Blocks for a moment. No `put` or `get` may be in flight. Idempotent."""
        with self._books:
            if self._closed:
                return
            self._closed = True
        self._thread.join(5.0)
        close_worker(self._transport.worker)
        self._manager.close()


def _first(before: RowError | None, errors: Iterable[RowError]) -> RowError | None:
    """Return the error that says the most: what came first, unless a read was only cancelled."""
    for error in errors:
        if before is None or before in (RowError.UPSTREAM, RowError.CANCELLED):
            before = error
    return before


def _copy(row: npt.NDArray[np.uint8], buffers: Buffers, *, to_pages: bool) -> None:
    """Copy a page between its place in the staging and the engine's buffers of it."""
    start = 0
    for part in buffers:
        piece = np.frombuffer(part, dtype=np.uint8)[: len(row) - start]
        place = row[start : start + len(piece)]
        if to_pages:
            piece[:] = place
        else:
            place[:] = piece
        start += len(piece)
    assert start == len(row), f"a page of {start} bytes, and not of {len(row)}"


def join_pages(config: Config, nbytes: int, identity: bytes) -> ServedPages:
    """Keep pages of ``nbytes`` bytes in the server of ``config``.

    Blocks while the server prepares them. Raises ConfigError if a backing tier is set beside the
    server, and UnsupportedError if the server refuses this client.
    """
    if named := named_backings(config):
        raise ConfigError(
            f"given server.address and {', '.join(named)}; supported is exactly one of them: the "
            "tiers of a server are those of its own settings"
        )
    import torch

    model = page_model(nbytes)
    places = max(LEAST_STAGED, STAGING_NBYTES // nbytes)
    memory = torch.empty(places * nbytes, dtype=torch.uint8)
    view = KVView(arena_layout(model.shape, places), [memory])
    served = partial(ServedWorker, served=config, model=model, rank=0)
    worker = build_worker(config, model, 0, [view], served=served).worker
    transport = LocalTransport(worker)
    try:
        metrics = Metrics("pages", enabled=config.metrics.enabled)
        manager = join_server(config, model, transport, metrics)
    except BaseException:
        close_worker(worker)
        raise
    staging = memory.numpy().reshape(places, nbytes)
    return ServedPages(manager, transport, staging, identity, config.transfer.load_deadline_s)
