"""Plans of loads from the tiers to the device, and of fetches to host memory alone.

    tiers below ──▶ host slots ──▶ device             plan
    one of them ──▶ staging on the device ──▶ device  plan, if the tier is set up for it
    tiers below ──▶ host slots                        plan_fetch

A block from a lower tier is kept in the host tier if there is room and the block continues the
prefix that is there. Otherwise it passes through the staging slots. Blocks that go past host memory
are not kept there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from kvcore.errors import KVCoreError, TransferError
from kvcore.index import BlockIndex, Reservation
from kvcore.manager.base import HOST, Hit, Planned
from kvcore.manager.inflight import Flight, Flights, Target
from kvcore.manager.invalidation import Invalidation
from kvcore.manager.lower_tiers import LowerTiers
from kvcore.transfer.graph import Priority, Span, TransferGraph
from kvcore.transfer.plan import Chain, TierRows, build_fetch, build_load

__all__ = ["Loader"]


class Loader:
    """Plans loads and fetches. The manager's thread only; no call does I/O."""

    def __init__(
        self,
        index: BlockIndex,
        flights: Flights,
        invalidation: Invalidation,
        tiers: LowerTiers,
    ) -> None:
        self._index = index
        self._flights = flights
        self._invalidation = invalidation
        self._backing = tiers.bindings
        self._lookups = tiers.lookups

    def plan(
        self,
        hit: Hit,
        blocks: Span,
        *,
        layers: Sequence[Span] = (),
        deadline_s: float | None = None,
    ) -> Planned:
        """Plan a load of ``blocks`` of ``hit`` to the device; see `Manager.plan_load`."""
        if not 0 <= blocks.start < blocks.stop <= hit.depth:
            raise TransferError(f"a load of blocks {blocks.start}..{blocks.stop} of {hit.depth}")
        if hit.point and not (blocks.start <= hit.blocks and blocks.stop == hit.depth):
            raise TransferError(
                f"a load of blocks {blocks.start}..{blocks.stop} without all of the resume point, "
                f"rows {hit.blocks}..{hit.depth}"
            )
        flight = Flight(hit.keys, blocks.start)
        try:
            graph = self._load(flight, hit, blocks, layers, deadline_s)
        except KVCoreError:
            self._flights.release(flight)
            raise
        return self._planned(flight, hit, blocks, graph)

    def plan_fetch(
        self,
        hit: Hit,
        stop: int | None = None,
        *,
        deadline_s: float | None = None,
        background: bool = False,
    ) -> Planned | None:
        """Plan a load of blocks into host memory alone; see `Manager.plan_fetch`."""
        stop = hit.depth if stop is None else stop
        start = self._index.held(HOST, hit.keys[:stop])
        if start >= stop or self._flights.full:
            return None
        flight = Flight(hit.keys, start)
        try:
            self._promote(flight, hit, Span(start, stop))
            if not flight.reserved:
                return None
            blocks = Span(start, flight.reserved[-1].stop)
            _, rows = self._sources(flight, hit, blocks)
        except KVCoreError:
            self._flights.release(flight)
            raise
        graph = build_fetch(
            next(self._flights.ids),
            Chain.of(hit.keys, hit.namespace, blocks),
            _slots(flight.reserved),
            _split_rows(rows, [r.stop - start for r in flight.reserved]),
            batch_rows=self._flights.batch,
            priority=Priority.SPILL if background else Priority.LOAD,
            deadline_s=deadline_s,
            nodes=self._nodes(hit, blocks),
        )
        return self._planned(flight, hit, blocks, graph)

    def _planned(self, flight: Flight, hit: Hit, blocks: Span, graph: TransferGraph) -> Planned:
        _assign(flight, graph)
        self._flights.plan(flight, graph)
        return Planned(graph, hit.keys, blocks)

    def _load(
        self,
        flight: Flight,
        hit: Hit,
        blocks: Span,
        layers: Sequence[Span],
        deadline_s: float | None,
    ) -> TransferGraph:
        """Find a place for every row, and return the graph. ``flight`` gets what it keeps."""
        host_slots, rows = self._sources(flight, hit, blocks)
        below = Span(blocks.start + len(host_slots), blocks.stop)
        staged, batch = self._past_host(flight, rows), self._flights.batch
        if staged:
            rows = [source._replace(path=self._backing[source.tier].load_path) for source in rows]
            batch = self._flights.staged_batch(flight, below.size)
            staged = [-1] * len(host_slots) + staged
            host_slots += [-1] * below.size
        elif rows:
            host_slots += self._through_host(flight, hit, below)
        return build_load(
            next(self._flights.ids),
            Chain.of(hit.keys, hit.namespace, blocks),
            host_slots,
            _split_rows(rows, [r.stop - blocks.start for r in flight.reserved]),
            batch_rows=batch,
            copy_rows=self._flights.copied,
            layers=layers,
            deadline_s=deadline_s,
            nodes=self._nodes(hit, blocks),
            staged=staged,
            point=hit.blocks - blocks.start if hit.point else None,
        )

    def _sources(self, flight: Flight, hit: Hit, blocks: Span) -> tuple[list[int], list[TierRows]]:
        """Pin ``blocks`` where they are. Return the host slots of the first, and the others' rows.

        Row 0 is the first of ``blocks``. Raises KVCoreError if a tier no longer holds its blocks.
        """
        host_slots: list[int] = []
        rows: list[TierRows] = []
        for tier, first, last in hit.sources:
            a, b = max(first, blocks.start), min(last, blocks.stop)
            if a >= b:
                continue
            flight.pins.append(self._index.pin(tier, hit.keys[b - 1]))
            slots = self._index.slots(tier, hit.keys, a, b).tolist()
            if tier == HOST:
                host_slots += slots
            else:
                span = Span(a - blocks.start, b - blocks.start)
                rows.append(TierRows(tier, self._backing[tier].read_path, span, slots))
        return host_slots, rows

    def _through_host(self, flight: Flight, hit: Hit, below: Span) -> list[int]:
        """Return a host slot for each block of ``below``: kept as far as there is room."""
        self._promote(flight, hit, below)
        slots = _slots(flight.reserved)
        missing = below.size - len(slots)
        return slots + self._flights.stage(flight, missing) if missing else slots

    def _past_host(self, flight: Flight, rows: Sequence[TierRows]) -> list[int]:
        """Return places on the device for ``rows``; an empty list if they go through host memory.

        Rows go through host memory in these cases:

        - They come from several tiers: a remote tier's blocks are worth keeping.
        - They lie in another engine's store.
        - Other loads have all the places.
        """
        if len(rows) != 1:
            return []
        [source] = rows
        if not self._backing[source.tier].to_device:
            return []
        if max(source.slots) >= self._index.num_slots(source.tier):
            return []
        return self._flights.stage_on_device(flight, source.rows.size)

    def _nodes(self, hit: Hit, blocks: Span) -> tuple[str, ...]:
        """Return the names of the nodes that promised the remote blocks of this load."""
        found: set[str] = set()
        for tier, first, last in hit.sources:
            a, b = max(first, blocks.start), min(last, blocks.stop)
            if a < b and tier in self._lookups:
                found |= self._lookups[tier].nodes(hit.keys[a:b])
        return tuple(sorted(found))

    def _promote(self, flight: Flight, hit: Hit, blocks: Span) -> None:
        """Reserve host slots for blocks from lower tiers, one reservation a read op.

        Only blocks that continue the host tier's own prefix can be kept there.
        """
        start, stop = blocks
        if self._index.held(HOST, hit.keys[:stop]) != start:
            return
        edges = sorted({start, stop, *(s.stop for s in hit.sources if start < s.stop < stop)})
        for a, b in itertools.pairwise(edges):
            for left in range(a, b, self._flights.batch):
                right = min(left + self._flights.batch, b)
                reservation = self._index.lifecycle.reserve(
                    HOST, hit.keys, left, right, hit.namespace
                )
                self._invalidation.count_evicted(HOST, reservation.evicted)
                if reservation.start != left:  # it kept blocks that were being evicted: stop here
                    self._index.lifecycle.abort(reservation)
                    return
                if len(reservation):
                    flight.reserved.append(reservation)
                if len(reservation) < right - left:
                    return


def _slots(reservations: Iterable[Reservation]) -> list[int]:
    return [slot for reservation in reservations for slot in reservation.slots.tolist()]


def _assign(flight: Flight, graph: TransferGraph) -> None:
    """Tie each reservation to the read op that fills it."""
    by_row = {r.start - flight.first_block: r for r in flight.reserved}
    for op in graph.ops:
        if op.path.reads_tier and op.rows[0] in by_row:
            flight.targets[op.op_id] = Target(by_row.pop(op.rows[0]))
    flight.reserved = list(by_row.values())


def _split_rows(rows: Sequence[TierRows], edges: Iterable[int]) -> list[TierRows]:
    """Split tier rows where a reservation ends, so that every read op fills one reservation."""
    cuts = sorted(set(edges))
    parts: list[TierRows] = []
    for source in rows:
        inner = [c for c in cuts if source.rows.start < c < source.rows.stop]
        for a, b in itertools.pairwise([source.rows.start, *inner, source.rows.stop]):
            offset = a - source.rows.start
            slots = list(source.slots)[offset : offset + b - a]
            parts.append(TierRows(source.tier, source.path, Span(a, b), slots))
    return parts
