"""The leader: decides what is loaded, saved and spilled, and keeps the index true.

    get_match ─▶ launch_load ─▶ graph ─▶ transport ─▶ workers
    put_match ─▶ launch_save ─▶ graph ─▶     │
                                             ▼
                 complete(op report) ◀── reports, one an op, once all ranks have ended it

Blocks are published when the op that fills them is reported, never before. While a graph is in
flight its source blocks are pinned and its targets are reserved, so neither can be handed out.

One thread owns a manager (the engine's scheduler). No call does I/O; ``wait`` blocks on the
transport, everything else returns at once.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from kvcore.breaker import Breaker
from kvcore.errors import CapacityError, KVCoreError
from kvcore.facade import (
    HOST,
    Backing,
    Event,
    Hit,
    Manager,
    Promise,
    Readiness,
    Room,
    Source,
    Transport,
    WritePolicy,
)
from kvcore.index import BlockIndex, Evicted, Eviction, Pin, Reservation
from kvcore.metrics import Metrics, SaveSkip
from kvcore.stores import StoreLookup
from kvcore.transfer.graph import (
    NO_PARENT,
    OpReport,
    Path,
    RowError,
    Span,
    TransferGraph,
    TransferOp,
    UnitTable,
)
from kvcore.transfer.plan import (
    Chain,
    TierRows,
    build_fetch,
    build_load,
    build_save,
    build_spill,
)

__all__ = [
    "HOST",
    "Backing",
    "Event",
    "Hit",
    "KVManager",
    "Manager",
    "Readiness",
    "Source",
    "Transport",
    "WritePolicy",
]

_log = logging.getLogger("kvcore.manager")

STALLED_S = 1.0
"""Seconds without any op's end after which nothing is waited for that others must end first."""
_GIVEN_UP = frozenset({RowError.CANCELLED, RowError.DEADLINE})


Spell = Callable[[Sequence[bytes], int, int, Sequence[int]], None]
"""Tells the tokens of blocks [start, stop) of a chain: its keys, both ends, its tokens."""


@dataclass
class _Flight:
    """A graph on its way. ``first_block`` is the chain position of row 0. ``given_up``: cancelled,
    or past its deadline; what of it is still running may take for ever."""

    graph: TransferGraph
    keys: Sequence[bytes]
    first_block: int
    targets: dict[int, Reservation]
    pins: list[Pin] = field(default_factory=list)
    holds: list[Reservation] = field(default_factory=list)
    staging: list[int] = field(default_factory=list)
    waiting: set[int] = field(default_factory=set)
    given_up: RowError | None = None
    on_end: list[Callable[[], object]] = field(default_factory=list)


class KVManager(Manager):
    """Index, slots and plans of one leader.

    ``staging_slots`` are slots of the host arena outside the index, for loads whose blocks cannot
    be kept in the host tier. ``on_event`` is told what each tier begins and ceases to hold, in the
    middle of calls: it must not call back (see `BlockIndex.watch`). ``spell`` is told the tokens of
    blocks that are being saved.

    ``ids`` number the graphs. With ``sink_saves`` off a save ends in host memory, and what tiers
    below get of it is written by graphs of their own: for workers that have no such tiers.
    """

    index: BlockIndex

    def __init__(
        self,
        index: BlockIndex,
        transport: Transport,
        *,
        backing: Sequence[Backing] = (),
        staging_slots: Iterable[int] = (),
        batch_blocks: int = 16,
        max_in_flight: int = 256,
        metrics: Metrics | None = None,
        on_event: Callable[[Event], None] | None = None,
        spell: Spell | None = None,
        ids: Iterator[int] | None = None,
        sink_saves: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.index = index
        self.transport = transport
        self.upkeep: list[Callable[[], object]] = []
        """What `maintain` calls too."""
        self.not_taken: dict[str, list[int]] = {}
        """By tier: slots of other engines' stores whose blocks did not fit into the index."""
        self._backing = {tier.name: tier for tier in backing}
        # What a medium does well says nothing of the rest: a full disk reads, and a store whose
        # reads hang may answer questions.
        self._breakers = {tier.name: Breaker(tier.name, clock=clock) for tier in backing}
        self._writers = {tier.name: Breaker(f"{tier.name} writes", clock=clock) for tier in backing}
        self._stores = {
            tier.name: StoreLookup(
                tier.name,
                index,
                Breaker(f"{tier.name} lookups", clock=clock),
                tier.finder,
                readable=self._breakers[tier.name].allows,
                clock=clock,
            )
            for tier in backing
            if tier.finder is not None
        }
        self._staging = list(staging_slots)
        # A read op must not name one staging slot twice.
        self._batch = min(batch_blocks, len(self._staging) or batch_blocks)
        self._max_in_flight = max_in_flight
        self._metrics = metrics or Metrics(enabled=False)
        self._spell = spell
        if on_event is not None:
            index.watch(on_event)
        self._clock = clock
        self._last_end = clock()
        self._flights: dict[int, _Flight] = {}
        self._ids = itertools.count(1) if ids is None else ids
        self._sink_saves = sink_saves
        self._demoting: set[str] = set()
        self._reads: dict[str, list[int]] = {}  # tier -> operations and blocks in flight

    # -- lookup -----------------------------------------------------------------------------

    @property
    def backings(self) -> tuple[Backing, ...]:
        """The tiers below the host arena, nearest first."""
        return tuple(self._backing.values())

    def get_match(self, keys: Sequence[bytes], namespace: bytes) -> Hit:
        """The longest prefix of ``keys`` that the tiers hold together. O(log n), no I/O."""
        self._settle_stores(keys, namespace)
        match = self.index.match(keys)
        sources, position = [], 0
        for tier, depth in zip([HOST, *self._backing], match.depths, strict=True):
            if depth > position and (tier == HOST or self._breakers[tier].allows()):
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
            store.ask(hit.keys, promise) for store in self._stores.values()
        ]  # every one of them
        return any(asking)

    def wait_stores(self, timeout: float) -> bool:
        """Block until a store has answered something, at most ``timeout`` seconds."""
        return any(store.wait(timeout) for store in self._stores.values())

    def put_match(self, keys: Sequence[bytes]) -> int:
        """How many leading blocks need no save: the host tier holds or is receiving them."""
        return self.index.held(HOST, keys)

    def can_load(self, hit: Hit, start: int, stop: int) -> Readiness:
        """Whether ``launch_load`` has slots for these blocks now, or will when others end."""
        below = sum(n for tier, n in hit.blocks_by_tier(start, stop).items() if tier != HOST)
        return self.room.admits(below)

    @property
    def room(self) -> Room:
        """What there is for the next load. A read that hangs keeps its staging slots for as long as
        it likes: those of a load that was given up are not counted on."""
        lent = any(flight.staging and flight.given_up is None for flight in self._flights.values())
        full = len(self._flights) >= self._max_in_flight
        moving = self._clock() - self._last_end < STALLED_S
        return Room(full, self.index.num_free(HOST), bool(self._staging), lent, moving)

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
    ) -> TransferGraph:
        """Load blocks [start, stop) of ``hit`` to the device places in ``units``.

        ``units`` has a row for each of the blocks. Blocks that come from a backing tier are kept
        in the host tier where there is room, else they pass through the staging slots.

        Raises CapacityError when there are neither, and another KVCoreError when ``hit`` is no
        longer true; nothing is pinned or reserved then.
        """
        flight = _Flight(_EMPTY, hit.keys, start, {})
        if on_end is not None:
            flight.on_end.append(on_end)
        try:
            graph = self._plan_load(flight, hit, Span(start, stop), units, layers, deadline_s)
        except KVCoreError:
            self._release(flight)
            raise
        self._launch(flight, graph)
        self._touch(hit, stop)
        return graph

    def launch_save(
        self,
        keys: Sequence[bytes],
        namespace: bytes,
        stop: int,
        units_of: Callable[[int, int], Sequence[UnitTable] | None],
        tokens: Sequence[int] | None = None,
    ) -> TransferGraph | None:
        """Save the blocks of ``keys[:stop]`` that the host tier lacks.

        ``units_of(start, stop)`` gives the device places of blocks [start, stop), or None when the
        engine no longer has them. ``tokens`` are those of the blocks, from the first on, where
        events may tell them. Returns None when there is nothing to save, or no room.
        """
        start = self.index.held(HOST, keys[:stop])
        if start >= stop:
            self._offer(keys, namespace, stop)
            return None
        if len(self._flights) >= self._max_in_flight:
            self._skip(SaveSkip.BUSY, stop - start)
            return None
        units = units_of(start, stop)
        if units is None:
            self._skip(SaveSkip.ABORTED, stop - start)
            return None
        reservation = self.index.reserve(HOST, keys, start, stop, namespace)
        self._left(HOST, reservation.evicted)
        if reservation.stop < stop:
            self._skip(SaveSkip.NO_ROOM, stop - reservation.stop)
        if not len(reservation):
            return None
        # No room for the last ones, or the first were on their way out and stay after all.
        if len(reservation) < stop - start:
            units = units_of(reservation.start, reservation.stop)
            assert units is not None
        if tokens is not None and self._spell is not None:
            self._spell(keys, reservation.start, reservation.stop, tokens)
        return self._save(keys, namespace, reservation, units)

    @property
    def wants_tokens(self) -> bool:
        return self._spell is not None

    def cancel(self, graph_id: int) -> None:
        """Ask the workers to drop what has not started; ``complete`` still sees every op end."""
        if graph_id in self._flights:
            self.transport.cancel(graph_id)

    # -- completion -------------------------------------------------------------------------

    def complete(self, report: OpReport) -> None:
        """Take in what became of one op on *all* workers: publish, quarantine, unpin."""
        flight = self._flights.get(report.graph_id)
        if flight is None or report.op_id not in flight.waiting:
            _log.warning("report of an unknown op graph=%d op=%d", report.graph_id, report.op_id)
            return
        flight.waiting.discard(report.op_id)
        self._last_end = self._clock()
        op = flight.graph.ops[report.op_id]
        self._count_read(op, -1)
        self._judge_tier(flight, op, report)
        if report.op_id in flight.targets:
            self._publish(flight, report)
        for row, error in report.failed.items():
            if error in (RowError.CORRUPT, RowError.MISSING):
                self._drop(op.tier, flight.graph.keys[row])
        if not flight.waiting:
            del self._flights[report.graph_id]
            self._release(flight)

    # -- upkeep -----------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Graphs launched and not ended."""
        return len(self._flights)

    @property
    def reads_in_flight(self) -> dict[str, tuple[int, int]]:
        """(operations, blocks) being read, or waiting for it, by the tier they come from."""
        return {tier: (reads[0], reads[1]) for tier, reads in self._reads.items() if reads[0]}

    def is_in_flight(self, graph_id: int) -> bool:
        """Whether the graph has not ended."""
        return graph_id in self._flights

    def maintain(self) -> None:
        """Keep room in the host tier for write-back tiers; call it once a step."""
        for tier in self._backing.values():
            if tier.write is WritePolicy.WRITE_BACK and tier.name not in self._demoting:
                self._demote(tier)
        for call in self.upkeep:
            call()

    def clear(self, namespace: bytes | None = None, tier: str | None = None) -> int:
        """Forget every block (of a namespace, of a tier), in flight or not; returns how many
        copies.

        Backing tiers are told to forget them too, and what may lie in slots that the index knows
        nothing of: nothing comes back with a restart. From a store those blocks are removed, for
        everyone, that this leader knew to be there.
        """
        gone = self.index.clear(namespace, tier)
        for name, blocks in gone.items():
            self._left(name, blocks)
            if name in self._stores:
                self._stores[name].delete([block.key for block in blocks])
        for name in self._backing.keys() - self._stores.keys():
            if tier in (None, name):
                slots = [block.slot for block in gone.get(name, ())]
                slots += self.index.free_slots(name) + self.not_taken.pop(name, [])
                self.transport.forget(name, sorted(set(slots)))
        count = sum(map(len, gone.values()))
        _log.info("cleared blocks=%d namespace=%s", count, namespace and namespace.hex())
        return count

    def check_integrity(self) -> None:
        """Check the index and that nothing is pinned, reserved or staged without a flight."""
        self.index.check_integrity()
        for flight in self._flights.values():
            assert flight.waiting, f"graph {flight.graph.graph_id} waits for nothing"
        if not self._flights:
            assert not self.reads_in_flight, "reads of no graph"
            assert not any(map(any, self._reads.values())), "reads of no graph"

    # -- for operators ----------------------------------------------------------------------

    @property
    def stores(self) -> frozenset[str]:
        """Tiers below the host that other hosts write to."""
        return frozenset(self._stores)

    def set_quota(
        self, tier: str, tenant: str, namespaces: Iterable[bytes], blocks: int | None
    ) -> int:
        """`BlockIndex.set_quota`; returns how many blocks it evicted. A store keeps them."""
        evicted = self.index.set_quota(tier, tenant, namespaces, blocks)
        self._left(tier, evicted)
        return len(evicted)

    def launch_fetch(
        self,
        keys: Sequence[bytes],
        namespace: bytes,
        *,
        deadline_s: float | None = None,
        on_end: Callable[[], object],
    ) -> bool:
        """Bring into the host tier what the tiers below hold of ``keys``, as far as it has room.

        False when nothing began: it is there, is nowhere, or there is no room; ``on_end`` is then
        never called.
        """
        hit = self.get_match(keys, namespace)
        start = self.index.held(HOST, keys)
        if start >= hit.depth or len(self._flights) >= self._max_in_flight:
            return False
        flight = _Flight(_EMPTY, keys, start, {})
        sources = [source for source in hit.sources if source.tier != HOST]
        flight.pins = [self.index.pin(tier, keys[stop - 1]) for tier, _, stop in sources]
        promoted = self._promote(hit, start, hit.depth)
        if not promoted:
            self._release(flight)
            return False
        flight.on_end.append(on_end)
        stop = promoted[-1].stop
        rows = []
        for tier, first, last in sources:
            a, b = max(first, start), min(last, stop)
            if a < b:
                slots = self.index.slots(tier, keys, a, b).tolist()
                span = Span(a - start, b - start)
                rows.append(TierRows(tier, self._backing[tier].read_path, span, slots))
        graph = build_fetch(
            next(self._ids),
            self._chain(keys, namespace, start, stop),
            [slot for reservation in promoted for slot in reservation.slots.tolist()],
            _split_rows(rows, [r.stop - start for r in promoted]),
            batch_rows=self._batch,
            deadline_s=deadline_s,
        )
        self._assign(flight, graph, promoted)
        self._launch(flight, graph)
        return True

    def launch_write(
        self, tier: str, keys: Sequence[bytes], namespace: bytes, *, on_end: Callable[[], object]
    ) -> bool:
        """Write to a tier below what the host tier holds of ``keys`` and it does not.

        False when nothing began, as for `launch_fetch`.
        """
        if len(self._flights) >= self._max_in_flight:
            return False
        graph = self._spill(self._backing[tier], keys, namespace, len(keys))
        if graph is None:
            return False
        self._flights[graph.graph_id].on_end.append(on_end)
        return True

    def discard(self, tier: str, keys: Sequence[bytes]) -> int:
        """Take blocks of a chain out of one tier, from its end on, as far as nothing else needs
        them (`BlockIndex.evict_blocks`); returns how many."""
        return self._let_go(tier, self.index.evict_blocks(tier, keys))

    def drop(self, tier: str, keys: Iterable[bytes]) -> int:
        """Take blocks, and all that stand on them, out of one tier; from a store for everyone.
        Returns how many."""
        return self._let_go(tier, self.index.drop_subtrees(tier, keys))

    def _let_go(self, tier: str, evicted: list[Evicted]) -> int:
        """What left a tier is not to come back from its medium."""
        self._left(tier, evicted)
        if tier in self._stores:
            self._stores[tier].delete([block.key for block in evicted])
        elif tier != HOST and evicted:
            self.transport.forget(tier, [block.slot for block in evicted])
        return len(evicted)

    # -- planning ---------------------------------------------------------------------------

    def _plan_load(
        self,
        flight: _Flight,
        hit: Hit,
        blocks: Span,
        units: Sequence[UnitTable],
        layers: Sequence[Span],
        deadline_s: float | None,
    ) -> TransferGraph:
        host_slots: list[int] = []
        rows: list[TierRows] = []
        for source in hit.sources:
            a, b = max(source.start, blocks.start), min(source.stop, blocks.stop)
            if a >= b:
                continue
            flight.pins.append(self.index.pin(source.tier, hit.keys[b - 1]))
            slots = self.index.slots(source.tier, hit.keys, a, b).tolist()
            if source.tier == HOST:
                host_slots += slots
                continue
            path = self._backing[source.tier].read_path
            span = Span(a - blocks.start, b - blocks.start)
            rows.append(TierRows(source.tier, path, span, slots))
        first = blocks.start + len(host_slots)
        promoted = self._promote(hit, first, blocks.stop) if rows else []
        for reservation in promoted:
            host_slots += reservation.slots.tolist()
        missing = blocks.size - len(host_slots)
        if missing:
            host_slots += self._stage(flight, missing, promoted)
        graph = build_load(
            next(self._ids),
            self._chain(hit.keys, hit.namespace, blocks.start, blocks.stop),
            host_slots,
            _split_rows(rows, [r.stop - blocks.start for r in promoted]),
            units,
            batch_rows=self._batch,
            layers=layers,
            deadline_s=deadline_s,
            nodes=self._nodes(hit, blocks),
        )
        self._assign(flight, graph, promoted)
        return graph

    def _nodes(self, hit: Hit, blocks: Span) -> tuple[str, ...]:
        """Who promised what a load reads of stores."""
        found: set[str] = set()
        for tier, first, last in hit.sources:
            a, b = max(first, blocks.start), min(last, blocks.stop)
            if a < b and tier in self._stores:
                found |= self._stores[tier].nodes(hit.keys[a:b])
        return tuple(sorted(found))

    def _promote(self, hit: Hit, start: int, stop: int) -> list[Reservation]:
        """Reserve host slots for blocks that come from below, one reservation a read op.

        Only what continues the host tier's own prefix can be kept there.
        """
        made: list[Reservation] = []
        if self.index.held(HOST, hit.keys[:stop]) != start:
            return made
        edges = sorted({start, stop, *(s.stop for s in hit.sources if start < s.stop < stop)})
        for a, b in itertools.pairwise(edges):
            for left in range(a, b, self._batch):
                right = min(left + self._batch, b)
                reservation = self.index.reserve(HOST, hit.keys, left, right, hit.namespace)
                self._left(HOST, reservation.evicted)
                if reservation.start != left:  # blocks on their way out stayed: plan around them
                    self.index.abort(reservation)
                    return made
                if len(reservation):
                    made.append(reservation)
                if len(reservation) < right - left:
                    return made
        return made

    def _stage(self, flight: _Flight, rows: int, promoted: list[Reservation]) -> list[int]:
        """Host slots for rows that cannot be kept: the staging slots, in a ring."""
        if not self._staging:
            for reservation in promoted:
                self.index.abort(reservation)
            raise CapacityError(
                f"no host slot for {rows} blocks and the staging slots are in use: "
                "raise host.capacity"
            )
        flight.staging, self._staging = self._staging, []
        return [slot for slot, _ in zip(itertools.cycle(flight.staging), range(rows), strict=False)]

    def _assign(
        self, flight: _Flight, graph: TransferGraph, promoted: Sequence[Reservation]
    ) -> None:
        """Tie each promotion to the read op that fills it."""
        by_row = {r.start - flight.first_block: r for r in promoted}
        for op in graph.ops:
            if op.path.reads_tier and op.rows[0] in by_row:
                flight.targets[op.op_id] = by_row.pop(op.rows[0])
        assert not by_row, "a reservation that no read op fills"

    def _save(
        self,
        keys: Sequence[bytes],
        namespace: bytes,
        reservation: Reservation,
        units: Sequence[UnitTable],
    ) -> TransferGraph:
        start, stop = reservation.start, reservation.stop
        through = [t for t in self._backing.values() if t.write is WritePolicy.WRITE_THROUGH]
        sink_tier = through[0] if through and self._sink_saves else None
        sink: TierRows | None = None
        written: list[Reservation] = []
        if sink_tier is not None and self._writers[sink_tier.name].allows():
            self._spill(sink_tier, keys, namespace, start)
            sink, written = self._reserve_sink(sink_tier, keys, namespace, start, stop)
        graph = build_save(
            next(self._ids),
            self._chain(keys, namespace, start, stop),
            reservation.slots.tolist(),
            units,
            sink,
            batch_rows=self._batch,
        )
        flight = _Flight(graph, keys, start, {0: reservation})
        self._assign_writes(flight, graph, written)
        flight.on_end.append(lambda: self._offer(keys, namespace, stop))
        for tier in through:
            if tier is not sink_tier:
                flight.on_end.append(
                    lambda tier=tier: self._spill(tier, keys, namespace, stop)  # type: ignore[misc]
                )
        self._launch(flight, graph)
        return graph

    def _reserve_sink(
        self, tier: Backing, keys: Sequence[bytes], namespace: bytes, first: int, stop: int
    ) -> tuple[TierRows | None, list[Reservation]]:
        """Reserve slots of ``tier`` for blocks up to ``stop``, one reservation a write op."""
        start = self.index.held(tier.name, keys[:stop])
        if start < first:
            return None, []
        made: list[Reservation] = []
        for left in range(start, stop, self._batch):
            right = min(left + self._batch, stop)
            reservation = self.index.reserve(tier.name, keys, left, right, namespace)
            self._left(tier.name, reservation.evicted)
            if len(reservation):
                made.append(reservation)
            if len(reservation) < right - left:
                break
        if not made:
            return None, []
        slots = [slot for reservation in made for slot in reservation.slots.tolist()]
        rows = Span(made[0].start - first, made[-1].stop - first)
        return TierRows(tier.name, tier.write_path, rows, slots), made

    def _assign_writes(
        self, flight: _Flight, graph: TransferGraph, written: Sequence[Reservation]
    ) -> None:
        writes = [op for op in graph.ops if op.path.writes_tier]
        assert len(writes) == len(written), "write ops and reservations differ"
        for op, reservation in zip(writes, written, strict=True):
            flight.targets[op.op_id] = reservation

    def _spill(
        self, tier: Backing, keys: Sequence[bytes], namespace: bytes, stop: int
    ) -> TransferGraph | None:
        """Write to ``tier`` what the host tier holds of ``keys[:stop]`` and it does not."""
        start = self.index.held(tier.name, keys[:stop])
        stop = min(stop, self.index.match(keys[:stop]).depths[0])
        if start >= stop or not self._writers[tier.name].allows():
            return None
        pin = self.index.pin(HOST, keys[stop - 1])
        sink, written = self._reserve_sink(tier, keys, namespace, start, stop)
        if sink is None:
            self.index.unpin(pin)
            self._skip(SaveSkip.NO_ROOM, stop - start)
            return None
        stop = written[-1].stop
        graph = build_spill(
            next(self._ids),
            self._chain(keys, namespace, start, stop),
            self.index.slots(HOST, keys, start, stop).tolist(),
            sink,
            batch_rows=self._batch,
        )
        flight = _Flight(graph, keys, start, {}, [pin])
        self._assign_writes(flight, graph, written)
        self._launch(flight, graph)
        return graph

    def _offer(self, keys: Sequence[bytes], namespace: bytes, stop: int) -> None:
        """Blocks were used again: selective tiers may take them now."""
        for tier in self._backing.values():
            if tier.write is not WritePolicy.SELECTIVE or not stop:
                continue
            held = self.index.held(tier.name, keys[:stop])
            # Every block counts its use; what is written must be a prefix.
            taken = [tier.admission.admit(key) for key in keys[held:stop]]
            admitted = held + (taken.index(False) if False in taken else len(taken))
            if admitted > held:
                self._spill(tier, keys, namespace, admitted)

    def _demote(self, tier: Backing) -> None:
        """Start moving the host tier's oldest blocks down when less than an eighth is free."""
        total = self.index.num_free(HOST) + self.index.num_used(HOST)
        short = total // 8 - self.index.num_free(HOST)
        if short <= 0 or not self._writers[tier.name].allows():
            return
        eviction = self.index.begin_eviction(HOST, short)
        if not eviction.blocks:
            return
        self._demoting.add(tier.name)
        left = self._write_back(tier, eviction)
        if not left:
            self._demoted(tier, eviction)

    def _write_back(self, tier: Backing, eviction: Eviction) -> set[int]:
        """Spill the chains that end in the blocks of ``eviction``; returns the graphs launched."""
        leaving = {block.key: block for block in eviction.blocks}
        inner = {block.parent for block in eviction.blocks}
        graphs: set[int] = set()
        for block in eviction.blocks:
            if block.key not in inner:
                graph = self._spill_leaving(tier, leaving, block)
                if graph is not None:
                    graphs.add(graph.graph_id)
        for graph_id in graphs:
            self._flights[graph_id].on_end.append(
                lambda graph_id=graph_id: self._one_demoted(tier, eviction, graphs, graph_id)  # type: ignore[misc]
            )
        return graphs

    def _spill_leaving(
        self, tier: Backing, leaving: dict[bytes, Evicted], last: Evicted
    ) -> TransferGraph | None:
        """Like ``_spill`` for the chain that ends in ``last``: its tail is leaving host memory."""
        tail, block = [last], last
        while block.parent in leaving:
            block = leaving[block.parent]
            tail.append(block)
        tail.reverse()
        kept = self.index.path(block.parent) if block.parent in self.index else []
        chain = [*kept, *(b.key for b in tail)]
        start = self.index.held(tier.name, chain)
        sink, written = self._reserve_sink(tier, chain, last.namespace, start, len(chain))
        if sink is None:
            return None
        slots = [*self.index.slots(HOST, kept, 0, len(kept)).tolist(), *(b.slot for b in tail)]
        stop = written[-1].stop
        graph = build_spill(
            next(self._ids),
            self._chain(chain, last.namespace, start, stop),
            slots[start:stop],
            sink,
            batch_rows=self._batch,
        )
        pins = [self.index.pin(HOST, kept[-1])] if kept else []
        flight = _Flight(graph, chain, start, {}, pins)
        self._assign_writes(flight, graph, written)
        self._launch(flight, graph)
        return graph

    def _one_demoted(
        self, tier: Backing, eviction: Eviction, graphs: set[int], graph_id: int
    ) -> None:
        graphs.discard(graph_id)
        if not graphs:
            self._demoted(tier, eviction)

    def _demoted(self, tier: Backing, eviction: Eviction) -> None:
        self._demoting.discard(tier.name)
        self._left(HOST, self.index.finish_eviction(eviction))

    # -- flights ----------------------------------------------------------------------------

    def _chain(self, keys: Sequence[bytes], namespace: bytes, start: int, stop: int) -> Chain:
        parent = keys[start - 1] if start else NO_PARENT
        return Chain(namespace, parent, tuple(keys[start:stop]))

    def _launch(self, flight: _Flight, graph: TransferGraph) -> None:
        flight.graph = graph
        flight.waiting = {op.op_id for op in graph.ops}
        if not self._flights:
            self._last_end = self._clock()  # nothing could end before
        self._flights[graph.graph_id] = flight
        for reservation in flight.targets.values():
            if reservation.tier == HOST and len(graph.ops) > 1:  # what it fills is read on
                self.index.hold(reservation)
                flight.holds.append(reservation)
        for op in graph.ops:
            self._count_read(op, 1)
        for tier, writes in {(op.tier, op.path.writes_tier) for op in graph.ops if op.tier}:
            self._breaker(tier, writes).started()
        self.transport.submit(graph)

    def _count_read(self, op: TransferOp, sign: int) -> None:
        """Blocks of a load by layers count once, with its first layers."""
        if op.path is Path.H2D or op.path.reads_tier:
            reads = self._reads.setdefault(op.tier or HOST, [0, 0])
            reads[0] += sign
            reads[1] += sign * op.rows.size if op.layers is None or not op.layers[0] else 0

    def _publish(self, flight: _Flight, report: OpReport) -> None:
        reservation = flight.targets.pop(report.op_id)
        self._forget_dropped(reservation)
        failed_from = flight.first_block + min(report.failed) if report.failed else None
        self.index.commit(reservation, failed_from)

    def _forget_dropped(self, reservation: Reservation) -> None:
        """Blocks that were cleared or dropped while they were written have just been written."""
        tier, live = reservation.tier, reservation.live
        if tier == HOST or live == len(reservation):
            return
        if tier in self._stores:
            self._stores[tier].delete(reservation.keys[live:])
        else:
            self.transport.forget(tier, reservation.slots[live:].tolist())

    def _release(self, flight: _Flight) -> None:
        for pin in flight.pins:
            self.index.unpin(pin)
        for reservation in flight.holds:
            self.index.let_go(reservation)
        self._staging += flight.staging
        flight.staging = []
        for call in flight.on_end:
            call()

    def _touch(self, hit: Hit, stop: int) -> None:
        self.index.touch(self.index.match(hit.keys[:stop]))
        host = next((s.stop for s in hit.sources if s.tier == HOST), 0)
        self._offer(hit.keys, hit.namespace, min(host, stop))

    def _judge_tier(self, flight: _Flight, op: TransferOp, report: OpReport) -> None:
        for error in set(report.failed.values()):
            blocks = sum(1 for e in report.failed.values() if e is error)
            self._metrics.failed(op.path.value, error.value, blocks)
            if error is RowError.CORRUPT:
                self._metrics.corrupt(op.tier, blocks)
        errors = set(report.failed.values())
        self._judge_late(flight, op, errors)
        if not op.tier:
            return
        breaker = self._breaker(op.tier, op.path.writes_tier)
        if errors & {RowError.IO, RowError.DEADLINE}:
            breaker.failed()
        elif flight.given_up is RowError.DEADLINE:
            breaker.undecided()  # it was too slow, and that is counted
        elif errors <= {RowError.CORRUPT, RowError.MISSING}:
            breaker.succeeded()  # the medium works, whatever lies there
        else:
            breaker.undecided()

    def _judge_late(self, flight: _Flight, op: TransferOp, errors: set[RowError]) -> None:
        """A load is given up: reads that were running then are to blame, whenever they end."""
        why = errors & _GIVEN_UP
        if flight.given_up is not None or not why or not op.path.touches_device:
            return
        flight.given_up = why.pop()
        if flight.given_up is RowError.DEADLINE:
            running = (flight.graph.ops[op_id] for op_id in flight.waiting)
            for tier in {op.tier for op in running if op.path.reads_tier}:
                self._breakers[tier].failed()

    def _breaker(self, tier: str, writes: bool) -> Breaker:
        return (self._writers if writes else self._breakers)[tier]

    def _drop(self, tier: str, key: bytes) -> None:
        """A block that could not be had as it was written, and all that stand on it, are gone."""
        self._left(tier, self.index.drop_subtree(tier, key))
        if tier in self._stores:
            self._stores[tier].absent(key)

    def _settle_stores(self, keys: Sequence[bytes], namespace: bytes) -> None:
        for tier, store in self._stores.items():
            believed = store.settle(keys, namespace)
            if believed is not None:
                self._metrics.asked_store(tier, believed.outcome)
                self._left(tier, believed.evicted)

    def _skip(self, reason: SaveSkip, blocks: int) -> None:
        self._metrics.save_skipped(reason, blocks)

    def _left(self, tier: str, evicted: Sequence[Evicted]) -> None:
        if evicted:
            self._metrics.evicted(tier, len(evicted))


_EMPTY = TransferGraph(0, 0, b"", b"", (), (), (), (), ())  # type: ignore[arg-type]


def _split_rows(rows: Sequence[TierRows], edges: Iterable[int]) -> list[TierRows]:
    """Cut tier rows where a reservation ends, so that every read op fills one reservation."""
    cuts = sorted(set(edges))
    parts: list[TierRows] = []
    for source in rows:
        inner = [c for c in cuts if source.rows.start < c < source.rows.stop]
        for a, b in itertools.pairwise([source.rows.start, *inner, source.rows.stop]):
            offset = a - source.rows.start
            slots = list(source.slots)[offset : offset + b - a]
            parts.append(TierRows(source.tier, source.path, Span(a, b), slots))
    return parts
