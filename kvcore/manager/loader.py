"""Loads of blocks from the tiers to the device, and prefetches to host memory alone.

    tiers below ──▶ host slots ──▶ device             launch
    one of them ──▶ staging on the device ──▶ device  launch, if the tier is set up for it
    tiers below ──▶ host slots                        prefetch

A block from a lower tier is kept in the host tier if there is room and the block continues the
prefix that is there. Otherwise it passes through the staging slots. Blocks that go past host memory
are not kept there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

from kvcore.errors import KVCoreError
from kvcore.index import BlockIndex, Reservation
from kvcore.manager.base import HOST, Hit, Lane
from kvcore.manager.inflight import Flight, Flights
from kvcore.manager.invalidation import Invalidation
from kvcore.manager.lower_tiers import LowerTiers
from kvcore.transfer.graph import SKIP, Span, TransferGraph, UnitTable
from kvcore.transfer.plan import Chain, TierRows, build_fetch, build_load

__all__ = ["Loader"]


class Loader:
    """Plans loads and launches them. The manager's thread only; no call does I/O."""

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

    def launch(
        self,
        hit: Hit,
        blocks: Span,
        units: Sequence[UnitTable],
        *,
        layers: Sequence[Span] = (),
        deadline_s: float | None = None,
        on_end: Callable[[], object] | None = None,
        lane: Lane | None = None,
    ) -> TransferGraph:
        """Load ``blocks`` of ``hit`` to the device; see `Manager.launch_load`."""
        flight = Flight(hit.keys, blocks.start)
        if on_end is not None:
            flight.on_end.append(on_end)
        try:
            graph = self._plan(flight, hit, blocks, units, layers, deadline_s)
        except KVCoreError:
            self._flights.release(flight)
            raise
        self._flights.launch(flight, graph, lane)
        return graph

    def prefetch(
        self, hit: Hit, *, deadline_s: float | None = None, on_end: Callable[[], object]
    ) -> int | None:
        """Load what lower tiers hold of ``hit`` into the host tier, as far as it has room.

        Returns the id of the graph. Returns None if nothing was launched: the blocks are in the
        host tier already or in no tier, or there is no room. ``on_end`` is then never called.
        """
        start = self._index.held(HOST, hit.keys)
        if start >= hit.depth or self._flights.full:
            return None
        flight = Flight(hit.keys, start)
        sources = [source for source in hit.sources if source.tier != HOST]
        flight.pins = [self._index.pin(tier, hit.keys[stop - 1]) for tier, _, stop in sources]
        promoted = self._promote(hit, start, hit.depth)
        if not promoted:
            self._flights.release(flight)
            return None
        flight.on_end.append(on_end)
        blocks = Span(start, promoted[-1].stop)
        rows = []
        for tier, first, last in sources:
            a, b = max(first, blocks.start), min(last, blocks.stop)
            if a < b:
                rows.append(self._rows(hit, tier, Span(a, b), start))
        graph = build_fetch(
            next(self._flights.ids),
            Chain.of(hit.keys, hit.namespace, blocks),
            [slot for reservation in promoted for slot in reservation.slots.tolist()],
            _split_rows(rows, [r.stop - start for r in promoted]),
            batch_rows=self._flights.batch,
            deadline_s=deadline_s,
            nodes=self._nodes(hit, blocks),
        )
        _assign(flight, graph, promoted)
        self._flights.launch(flight, graph)
        return graph.graph_id

    def _plan(
        self,
        flight: Flight,
        hit: Hit,
        blocks: Span,
        units: Sequence[UnitTable],
        layers: Sequence[Span],
        deadline_s: float | None,
    ) -> TransferGraph:
        host_slots: list[int] = []
        rows: list[TierRows] = []
        for tier, first, last in hit.sources:
            a, b = max(first, blocks.start), min(last, blocks.stop)
            if a >= b:
                continue
            flight.pins.append(self._index.pin(tier, hit.keys[b - 1]))
            if tier == HOST:
                host_slots += self._index.slots(tier, hit.keys, a, b).tolist()
            else:
                rows.append(self._rows(hit, tier, Span(a, b), blocks.start))
        below = blocks.start + len(host_slots)
        missing = blocks.stop - below
        staged = self._past_host(flight, rows, units)
        promoted: list[Reservation] = []
        batch = self._flights.batch
        if staged:
            rows = [source._replace(path=self._backing[source.tier].load_path) for source in rows]
            batch = self._flights.staged_batch(flight, missing)
            staged = [-1] * len(host_slots) + staged
            host_slots += [-1] * missing
        elif rows:
            promoted = self._promote(hit, below, blocks.stop)
        for reservation in promoted:
            host_slots += reservation.slots.tolist()
        missing = blocks.size - len(host_slots)
        try:
            if missing:
                host_slots += self._flights.stage(flight, missing)
            graph = build_load(
                next(self._flights.ids),
                Chain.of(hit.keys, hit.namespace, blocks),
                host_slots,
                _split_rows(rows, [r.stop - blocks.start for r in promoted]),
                units,
                batch_rows=batch,
                layers=layers,
                deadline_s=deadline_s,
                nodes=self._nodes(hit, blocks),
                staged=staged,
            )
        except KVCoreError:
            for reservation in promoted:
                self._index.lifecycle.abort(reservation)
            raise
        _assign(flight, graph, promoted)
        return graph

    def _past_host(
        self, flight: Flight, rows: Sequence[TierRows], units: Sequence[UnitTable]
    ) -> list[int]:
        """Return places on the device for ``rows``; an empty list if they go through host memory.

        Rows go through host memory in these cases:

        - They come from several tiers: a remote tier's blocks are worth keeping.
        - They lie in another engine's store.
        - They have no place in the engine's pages, and are loaded to be kept.
        - Other loads have all the places.
        """
        if len(rows) != 1:
            return []
        [source] = rows
        if not self._backing[source.tier].to_device:
            return []
        if max(source.slots) >= self._index.num_slots(source.tier):
            return []
        wanted = [table.array()[slice(*source.rows)] for table in units]
        if not any((table != SKIP).any() for table in wanted):
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

    def _rows(self, hit: Hit, tier: str, blocks: Span, first: int) -> TierRows:
        """Return blocks of a lower tier as rows of a graph whose row 0 is block ``first``."""
        slots = self._index.slots(tier, hit.keys, blocks.start, blocks.stop).tolist()
        rows = Span(blocks.start - first, blocks.stop - first)
        return TierRows(tier, self._backing[tier].read_path, rows, slots)

    def _promote(self, hit: Hit, start: int, stop: int) -> list[Reservation]:
        """Reserve host slots for blocks from lower tiers, one reservation a read op.

        Only blocks that continue the host tier's own prefix can be kept there.
        """
        made: list[Reservation] = []
        if self._index.held(HOST, hit.keys[:stop]) != start:
            return made
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
                    return made
                if len(reservation):
                    made.append(reservation)
                if len(reservation) < right - left:
                    return made
        return made


def _assign(flight: Flight, graph: TransferGraph, promoted: Sequence[Reservation]) -> None:
    """Tie each promotion to the read op that fills it."""
    by_row = {r.start - flight.first_block: r for r in promoted}
    for op in graph.ops:
        if op.path.reads_tier and op.rows[0] in by_row:
            flight.targets[op.op_id] = by_row.pop(op.rows[0])
    assert not by_row, "a reservation that no read op fills"


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
