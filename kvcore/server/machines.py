"""The other machines of a server: what their servers hold for it, and whether they are there.

    this server    index, sessions, plans; the memory and disks of machine 0
    each other     memory and disks of its machine (`kvcore.server.machine_server`)

All machines have the same slots. A block is in host memory, or on a disk, if every machine has its
part in that slot. So there is one index, one order of evictions and clears, and one answer to a
lookup: here. An op on tiers goes to every machine, and has ended when it has on all.

A machine whose server falls silent, or comes back, has lost its memory. To this server that is as
if it had been killed itself: the sessions of the models on that machine end, and their memory is
given back. What the disks of all machines still hold is found when the model is prepared anew.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvcore.config import Config
from kvcore.errors import FormatError
from kvcore.index.slots import SlotRun
from kvcore.manager.base import Lane
from kvcore.model.keys import KEY_BYTES
from kvcore.runtime.local_transport import LocalTransport
from kvcore.runtime.machines import differing, terms_of
from kvcore.server.errors import MachineAway, Misfit, NoSession
from kvcore.server.machine_messages import (
    BeginSession,
    CacheOpened,
    CachePrepared,
    CancelGraph,
    DropCache,
    EndSession,
    HeldBlocks,
    InvalidateSlots,
    JoinMachine,
    MachineBeat,
    MachineJoined,
    MachineReports,
    OpenCache,
    Order,
    PrepareCache,
    SessionBegun,
    SessionFreed,
    SubmitGraph,
)
from kvcore.server.wire import Model
from kvcore.tiers.held import MAX_TOLD, Held
from kvcore.transfer.graph import OpReport, TransferGraph
from kvcore.transfer.quorum import Quorum
from kvcore.worker import KVWorker

__all__ = ["Machines", "SharedCache", "SpreadTransport", "server_terms"]

_log = logging.getLogger("kvcore.server")

_SECTIONS = ("namespace", "host", "transfer")
"""The tables of settings by which the servers of all machines must go alike."""

Send = Callable[[bytes, Order], bool]
"""Sends an order to a connection; returns False if it cannot be sent."""
Then = Callable[[], object]


def server_terms(config: Config) -> dict[str, str]:
    """Return what the servers of all machines must have in common."""
    return terms_of(config, _SECTIONS, {"server.models": config.server.models})


class SharedCache:
    """What other machines have of one model's cache. Only the server's thread calls it.

    ``number`` tells the cache from others, and from earlier ones of the same model.
    """

    def __init__(self, number: int, tell: Callable[[Order], None], machines: Sequence[int]) -> None:
        self.number = number
        self.machines = machines
        self.lost = False
        """True if a machine has lost its part: nothing of this cache can be served any more."""
        self.why = ""
        """Why a machine cannot provide its part; empty if nothing is wrong."""
        self._tell = tell
        self._held: dict[int, dict[str, Held]] = {machine: {} for machine in machines}
        self._prepared: set[int] = set()
        self._opened: set[int] = set()
        self._begun: dict[int, _Awaited] = {}
        self._freed: dict[int, _Awaited] = {}
        self._reports: list[OpReport] = []

    # -- preparing ----------------------------------------------------------------------------

    def prepare(self, model: Model, slots: int) -> None:
        self._tell(PrepareCache(0, self.number, model, slots))

    @property
    def prepared(self) -> bool:
        """True if all machines have their memory, and have told what their disks hold."""
        return len(self._prepared) == len(self.machines)

    @property
    def elsewhere(self) -> list[Mapping[str, Held]]:
        """What the disks of each machine hold, in the order of the machines."""
        return [self._held[machine] for machine in self.machines]

    def open(self, tiers: dict[str, dict[str, Any]]) -> None:
        self._tell(OpenCache(0, self.number, tiers))

    @property
    def opened(self) -> bool:
        """True if all machines take graphs."""
        return len(self._opened) == len(self.machines)

    def note_held(self, machine: int, told: HeldBlocks) -> None:
        """Take in what a machine's disk holds, of which there may be more to come.

        Raises FormatError unless every slot has a key.
        """
        if len(told.slots) % 8 or len(told.slots) // 8 * KEY_BYTES != len(told.keys):
            raise FormatError(f"{len(told.slots)} bytes of slots, {len(told.keys)} bytes of keys")
        before = self._held[machine].get(told.tier, Held())
        if len(before.slots) + len(told.slots) > MAX_TOLD * 8:
            raise FormatError(f"machine {machine} tells of more than {MAX_TOLD} blocks")
        self._held[machine][told.tier] = Held(
            told.num_slots,
            told.rank_options,
            before.slots + told.slots,
            before.keys + told.keys,
            told.torn,
            told.why,
        )

    def note_prepared(self, machine: int, why: str) -> None:
        if why:
            self.why = f"machine {machine}: {why}"
        self._prepared.add(machine)

    def note_opened(self, machine: int) -> None:
        self._opened.add(machine)

    # -- sessions -----------------------------------------------------------------------------

    def begin_session(self, number: int, secret: bytes, then: Then) -> None:
        """Have a session begin on all machines; call ``then`` when it has."""
        self._begun[number] = _Awaited(set(self.machines), then)
        self._tell(BeginSession(0, self.number, number, secret))

    def end_session(self, number: int, then: Then) -> None:
        """Have a session end on all machines; call ``then`` when no process holds it there."""
        self._begun.pop(number, None)
        self._freed[number] = _Awaited(set(self.machines), then)
        self._tell(EndSession(0, number))

    def note_begun(self, machine: int, session: int) -> None:
        _note(self._begun, session, machine)

    def note_freed(self, machine: int, session: int) -> None:
        _note(self._freed, session, machine)

    # -- graphs -------------------------------------------------------------------------------

    def submit(self, graph: TransferGraph) -> None:
        self._tell(SubmitGraph(0, self.number, graph))

    def cancel(self, graph_id: int) -> None:
        self._tell(CancelGraph(0, self.number, graph_id))

    def invalidate(self, tier: str, slots: Sequence[SlotRun]) -> None:
        self._tell(InvalidateSlots(0, self.number, tier, list(slots)))

    def note_reports(self, reports: Sequence[OpReport]) -> None:
        self._reports += reports

    def take_reports(self) -> list[OpReport]:
        reports, self._reports = self._reports, []
        return reports


@dataclass
class _Awaited:
    """Machines that have not answered yet, and what is done when all have."""

    machines: set[int]
    then: Then


def _note(awaited: dict[int, _Awaited], session: int, machine: int) -> None:
    if (found := awaited.get(session)) is not None:
        found.machines.discard(machine)
        if not found.machines:
            del awaited[session]
            found.then()


class SpreadTransport(LocalTransport):
    """Hands graphs to the worker of this machine and to those of all others."""

    def __init__(self, worker: KVWorker, shared: SharedCache) -> None:
        super().__init__(worker)
        self._shared = shared
        self._quorum = Quorum(1 + len(shared.machines))

    def submit(self, graph: TransferGraph, lane: Lane | None = None) -> None:
        super().submit(graph, lane)
        if lane is None:
            self._shared.submit(graph)

    def cancel(self, graph_id: int) -> None:
        super().cancel(graph_id)
        self._shared.cancel(graph_id)

    def invalidate(self, tier: str, slots: Sequence[SlotRun]) -> None:
        super().invalidate(tier, slots)
        self._shared.invalidate(tier, slots)

    def poll(self) -> list[OpReport]:
        """Return the ops that have ended on all machines; a row failed if it did on any."""
        ended = [*super().poll(), *self._shared.take_reports()]
        return [whole for report in ended if (whole := self._quorum.add(report)) is not None]


@dataclass
class _Joined:
    """The server of a machine: its connection, its process, and when it was last heard."""

    client: bytes
    process: str
    heard: float
    caches: dict[int, SharedCache] = field(default_factory=dict)


class Machines:
    """The servers of the machines 1, 2 and so on. Only the server's thread calls it."""

    def __init__(
        self,
        config: Config,
        send: Send,
        name: Callable[[], str | None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``name`` returns whose CURVE key the current message came with; None without keys."""
        self._names = config.server.machines
        self._lease_s = config.server.lease_s
        self._terms = server_terms(config)
        self._send, self._name, self._clock = send, name, clock
        self._joined: dict[int, _Joined] = {}
        self._numbers = itertools.count(1)

    # -- who is there -------------------------------------------------------------------------

    def join(self, client: bytes, asked: JoinMachine) -> MachineJoined:
        """Admit the server of a machine. Raises Misfit if it is not the one, or goes otherwise.

        A server that has just started takes the place of an earlier one, which may be gone. The
        earlier one cannot take it back, or two servers would push each other out for ever.
        """
        machine, name = asked.machine, self._name()
        named = machine <= len(self._names)
        if not named or (name is not None and name != self._names[machine - 1]):
            raise Misfit(
                f"machine {machine} with the keys of {name or 'nobody'}; server.machines of the "
                f"first machine names {self._names}, in order from machine 1"
            )
        if other := differing(self._terms, asked.terms):
            raise Misfit(
                f"the server of machine {machine} goes by other settings than that of machine 0: "
                f"{', '.join(other)}. Give every machine the same ones"
            )
        held = self._joined.get(machine)
        if held is not None and held.process != asked.process and asked.again:
            raise Misfit(
                f"another kvcore server has joined as machine {machine} after this one: stop one "
                "of the two, or give each the --machine of its own machine"
            )
        self._lose(machine, "has started anew")
        self._joined[machine] = _Joined(client, asked.process, self._clock())
        _log.info("the server of machine %d has joined", machine)
        return MachineJoined(asked.ref, self._lease_s)

    def beat(self, client: bytes, beat: MachineBeat) -> MachineJoined:
        self._of(client)
        return MachineJoined(beat.ref, self._lease_s)

    def sweep(self) -> None:
        """Give up the machines whose servers have been silent for too long."""
        now = self._clock()
        for machine, joined in list(self._joined.items()):
            if now - joined.heard > self._lease_s:
                self._lose(machine, f"has been silent for {now - joined.heard:.1f} s")

    def status(self) -> list[dict[str, Any]]:
        """Return the other machines, whether they have joined or not, as plain data."""
        return [
            {"machine": machine, "name": name, "joined": machine in self._joined}
            for machine, name in enumerate(self._names, start=1)
        ]

    def _of(self, client: bytes) -> tuple[int, _Joined]:
        """Return the machine of a connection. Raises NoSession if it is nobody's."""
        for machine, joined in self._joined.items():
            if joined.client == client:
                joined.heard = self._clock()
                return machine, joined
        raise NoSession("the server of this machine is not joined: join anew")

    def _lose(self, machine: int, why: str) -> None:
        joined = self._joined.pop(machine, None)
        if joined is None:
            return
        _log.warning("the server of machine %d %s: its memory is lost", machine, why)
        for cache in joined.caches.values():
            cache.lost = True

    # -- caches -------------------------------------------------------------------------------

    def share(self, model: Model, slots: int) -> SharedCache:
        """Have the other machines of a model prepare their parts of ``slots`` slots.

        Raises MachineAway if one of them is not there.
        """
        needed = range(1, model.machines)
        if away := [machine for machine in needed if machine not in self._joined]:
            raise MachineAway(
                f"the engine has ranks on {model.machines} machines, and no kvcore server of "
                f"machine {', '.join(map(str, away))} has joined: start `kvcore server --machine "
                "NUMBER` there, with server.machines naming its keys"
            )
        number = next(self._numbers)
        cache = SharedCache(number, lambda order: self._tell(number, needed, order), needed)
        for machine in needed:
            self._joined[machine].caches[number] = cache
        cache.prepare(model, slots)
        return cache

    def drop(self, cache: SharedCache) -> None:
        """End a cache on the machines that still have it."""
        for joined in self._joined.values():
            if joined.caches.pop(cache.number, None) is not None:
                self._send(joined.client, DropCache(0, cache.number))

    def _tell(self, number: int, machines: Sequence[int], order: Order) -> None:
        """Send an order about a cache to the machines that still have it."""
        for machine in machines:
            joined = self._joined.get(machine)
            if joined is None or number not in joined.caches:
                continue
            if not self._send(joined.client, order):
                self._lose(machine, "takes no more orders")

    # -- what they tell -----------------------------------------------------------------------

    def held(self, client: bytes, told: HeldBlocks) -> None:
        machine, joined = self._of(client)
        if (cache := joined.caches.get(told.cache)) is not None:  # else it is over
            cache.note_held(machine, told)

    def prepared(self, client: bytes, told: CachePrepared) -> None:
        machine, joined = self._of(client)
        if (cache := joined.caches.get(told.cache)) is not None:
            cache.note_prepared(machine, told.why)

    def opened(self, client: bytes, told: CacheOpened) -> None:
        machine, joined = self._of(client)
        if (cache := joined.caches.get(told.cache)) is not None:
            cache.note_opened(machine)

    def reports(self, client: bytes, told: MachineReports) -> None:
        _, joined = self._of(client)
        if (cache := joined.caches.get(told.cache)) is not None:
            cache.note_reports(told.reports)

    def begun(self, client: bytes, told: SessionBegun) -> None:
        machine, joined = self._of(client)
        for cache in joined.caches.values():
            cache.note_begun(machine, told.session)

    def freed(self, client: bytes, told: SessionFreed) -> None:
        machine, joined = self._of(client)
        for cache in joined.caches.values():
            cache.note_freed(machine, told.session)
