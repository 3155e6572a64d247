"""The leader: decides what is loaded, saved and spilled, and keeps the index true.

    get_match ─▶ launch_load ─▶ graph ─▶ transport ─▶ workers
    put_match ─▶ launch_save ─▶ graph ─▶     │
                                             ▼
                 complete(op report) ◀── reports, one an op, once all ranks have ended it

    KVManager ─┬─ loads      up: to the device, or to host memory alone
               ├─ saves      down: to host memory, and to the tiers below
               ├─ invalidation   out: pushed out, cleared, dropped
               └─ flights    graphs on their way, what they keep, what becomes of them

Operators reach the same parts (`kvcore.control.operations`).

One thread owns a manager (the engine's scheduler). No call does I/O; ``wait`` blocks on the
transport, everything else returns at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from kvcore.index import BlockIndex
from kvcore.manager.base import (
    HOST,
    Backing,
    Event,
    Hit,
    Lane,
    Manager,
    Promise,
    Readiness,
    Room,
    Source,
    TransferOptions,
    Transport,
    WritePolicy,
)
from kvcore.manager.inflight import Flights
from kvcore.manager.invalidation import Invalidation
from kvcore.manager.loader import Loader
from kvcore.manager.lower_tiers import LowerTiers
from kvcore.manager.offloader import Offloader, TokenPublisher
from kvcore.telemetry.metrics import Metrics
from kvcore.transfer.graph import OpReport, Span, TransferGraph, UnitTable

__all__ = [
    "HOST",
    "Backing",
    "Event",
    "Hit",
    "KVManager",
    "Manager",
    "Readiness",
    "Source",
    "TokenPublisher",
    "Transport",
    "WritePolicy",
]


_DEFAULTS = TransferOptions()


class KVManager(Manager):
    """Index, slots and plans of one leader.

    Args:
        index: the blocks of the host tier and of every backing tier, in that order.
        transport: carries graphs to the workers.
        backing: the tiers below host memory, nearest first.
        options: how transfers are planned, and what they may occupy.
        metrics: where removals, failures and skipped saves are counted; None counts nothing.
        publish_tokens: receives the tokens of blocks that are being saved.
        ids: numbers the graphs; by default from 1.
        clock: seconds, monotonic.
    """

    index: BlockIndex

    def __init__(
        self,
        index: BlockIndex,
        transport: Transport,
        *,
        backing: Sequence[Backing] = (),
        options: TransferOptions = _DEFAULTS,
        metrics: Metrics | None = None,
        publish_tokens: TokenPublisher | None = None,
        ids: Iterator[int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.index = index
        self.transport = transport
        self.upkeep: list[Callable[[], object]] = []
        """What `maintain` calls too."""
        self._metrics = metrics = metrics or Metrics(enabled=False)
        self.tiers = tiers = LowerTiers.of(backing, index, clock)
        self.invalidation = Invalidation(index, transport, tiers, metrics)
        self.flights = Flights(
            index,
            transport,
            self.invalidation,
            tiers.breakers,
            metrics,
            options,
            ids=ids,
            clock=clock,
        )
        self.loader = Loader(index, self.flights, self.invalidation, tiers)
        self.offloader = Offloader(
            index,
            self.flights,
            self.invalidation,
            tiers,
            metrics,
            write_through_in_save=options.write_through_in_save,
            publish_tokens=publish_tokens,
        )

    # -- lookup -----------------------------------------------------------------------------

    @property
    def backings(self) -> tuple[Backing, ...]:
        """The tiers below the host arena, nearest first."""
        return tuple(self.tiers.bindings.values())

    def get_match(self, keys: Sequence[bytes], namespace: bytes) -> Hit:
        """The longest prefix of ``keys`` that the tiers hold together. O(log n), no I/O."""
        self._settle_stores(keys, namespace)
        match = self.index.match(keys)
        sources, position = [], 0
        for tier, depth in zip([HOST, *self.tiers.bindings], match.depths, strict=True):
            if depth > position and (tier == HOST or self.tiers.breakers.reads[tier].allows()):
                sources.append(Source(tier, position, depth))
                position = depth
        return Hit(keys, namespace, tuple(sources))

    def ask_stores(self, hit: Hit, computed: int = 0, promise: Promise | None = None) -> bool:
        """Whether a store may hold more of the prompt than ``hit`` and is being asked: look it up
        again then, instead of computing it.

        ``computed`` leading blocks are there without any tier. An answer is waited for as long as
        the store's ``lookup_s`` says, one about blocks of a ``promise`` as long as that says; give
        it with a prompt's first lookup alone. No I/O is done here.
        """
        if max(hit.depth, computed) >= len(hit.keys):
            return False
        asking = [
            store.ask(hit.keys, promise) for store in self.tiers.lookups.values()
        ]  # every one of them
        return any(asking)

    def wait_stores(self, timeout: float) -> bool:
        """Block until a store has answered something, at most ``timeout`` seconds."""
        return any(store.wait(timeout) for store in self.tiers.lookups.values())

    def put_match(self, keys: Sequence[bytes]) -> int:
        """How many leading blocks need no save: the host tier holds or is receiving them."""
        return self.index.held(HOST, keys)

    def can_load(self, hit: Hit, start: int, stop: int) -> Readiness:
        """Whether ``launch_load`` has slots for these blocks now, or will when others end."""
        below = sum(n for tier, n in hit.blocks_by_tier(start, stop).items() if tier != HOST)
        return self.room.admits(below)

    @property
    def room(self) -> Room:
        """What there is for the next load."""
        return self.flights.room

    def _settle_stores(self, keys: Sequence[bytes], namespace: bytes) -> None:
        for tier, store in self.tiers.lookups.items():
            believed = store.settle(keys, namespace)
            if believed is not None:
                self._metrics.asked_store(tier, believed.outcome)
                self.invalidation.count_evicted(tier, believed.evicted)

    # -- launching --------------------------------------------------------------------------

    def launch_load(
        self,
        hit: Hit,
        start: int,
        stop: int,
        units: Sequence[UnitTable],
        *,
        layers: Sequence[Span] = (),
        deadline_s: float | None = None,
        on_end: Callable[[], object] | None = None,
        lane: Lane | None = None,
    ) -> TransferGraph:
        """Load blocks [start, stop) of ``hit`` to the device places in ``units``.

        ``units`` has a row for each of the blocks. Blocks that come from a backing tier are kept
        in the host tier where there is room, else they pass through the staging slots; or they go
        past host memory, where their tier is set up so. ``on_end`` is called when the graph has
        ended on all workers. ``lane`` takes the graph in place of the transport's own queue.

        Raises CapacityError when there are neither, and another KVCoreError when ``hit`` is no
        longer true; nothing is pinned or reserved then.
        """
        graph = self.loader.launch(
            hit,
            Span(start, stop),
            units,
            layers=layers,
            deadline_s=deadline_s,
            on_end=on_end,
            lane=lane,
        )
        self.index.touch(self.index.match(hit.keys[:stop]))
        self.offloader.offer(hit.keys, hit.namespace, min(hit.in_host, stop))
        return graph

    def launch_save(
        self,
        keys: Sequence[bytes],
        namespace: bytes,
        stop: int,
        units_of: Callable[[int, int], Sequence[UnitTable] | None],
        tokens: Sequence[int] | None = None,
        *,
        lane: Lane | None = None,
    ) -> TransferGraph | None:
        """Save the blocks of ``keys[:stop]`` that the host tier lacks.

        ``units_of(start, stop)`` gives the device places of blocks [start, stop), or None when the
        engine no longer has them. ``tokens`` are those of the blocks, from the first on, where
        events may tell them. ``lane`` takes the graph in place of the transport's own queue; graphs
        that only write to the tiers below are not given to it. Returns None when there is nothing
        to save, or no room.
        """
        return self.offloader.launch(keys, namespace, stop, units_of, tokens, lane)

    @property
    def wants_tokens(self) -> bool:
        return self.offloader.publish_tokens is not None

    def cancel(self, graph_id: int) -> None:
        """Ask the workers to drop what has not started; ``complete`` still sees every op end."""
        self.flights.cancel(graph_id)

    # -- completion and upkeep ----------------------------------------------------------------

    def complete(self, report: OpReport) -> None:
        """Take in what became of one op on *all* workers: publish, quarantine, unpin."""
        self.flights.complete(report)

    @property
    def in_flight(self) -> int:
        """Graphs launched and not ended."""
        return len(self.flights)

    @property
    def reads_in_flight(self) -> dict[str, tuple[int, int]]:
        """(operations, blocks) being read, or waiting for it, by the tier they come from."""
        return self.flights.reads

    def is_in_flight(self, graph_id: int) -> bool:
        """Whether the graph has not ended."""
        return graph_id in self.flights

    def maintain(self) -> None:
        """Keep room in the host tier for write-back tiers; call it once a step."""
        self.offloader.keep_room()
        for call in self.upkeep:
            call()

    def clear(self, namespace: bytes | None = None, tier: str | None = None) -> int:
        """Forget every block (of a namespace, of a tier), in flight or not; returns how many
        copies.

        Backing tiers are told to forget them too, and what may lie in slots that the index knows
        nothing of: nothing comes back with a restart. From a store those blocks are removed, for
        everyone, that this leader knew to be there.
        """
        return self.invalidation.clear(namespace, tier)

    def check_integrity(self) -> None:
        """Check the index and that nothing is pinned, reserved or staged without a flight."""
        self.index.check_integrity()
        self.flights.check_integrity()
