"""Saves of blocks from the device to host memory, and from there to the tiers below.

    device ──▶ host ──▶ a write-through tier, after the save           plan
               host ──▶ a selective tier, when blocks are used again   offer
               host ──▶ a write-back tier, before blocks are evicted   keep_room
               host ──▶ any tier, when an operator orders it           write

A write from host memory to a tier below is called a spill.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvcore.errors import KVCoreError
from kvcore.index import BlockIndex, Evicted, Eviction, Reservation
from kvcore.manager.base import HOST, Backing, Planned, WritePolicy
from kvcore.manager.inflight import Flight, Flights, Target
from kvcore.manager.invalidation import Invalidation
from kvcore.manager.lower_tiers import LowerTiers
from kvcore.model.points import PointRows
from kvcore.telemetry.metrics import Metrics, SaveSkip
from kvcore.transfer.graph import Span, TransferGraph
from kvcore.transfer.plan import Chain, TierRows, build_save, build_spill

__all__ = ["Offloader", "TokenPublisher"]

TokenPublisher = Callable[[Sequence[bytes], int, int, Sequence[int]], None]
"""Publishes the tokens of blocks [start, stop) of a chain.

Its arguments are the chain's keys, ``start``, ``stop``, and the chain's tokens from its start.
"""


class Offloader:
    """Plans saves, and plans and launches spills. The manager's thread only; no call does I/O.

    ``write_through_in_save`` is as in `TransferOptions`, ``publish_tokens`` as in `KVManager`.
    """

    def __init__(
        self,
        index: BlockIndex,
        flights: Flights,
        invalidation: Invalidation,
        tiers: LowerTiers,
        metrics: Metrics,
        *,
        write_through_in_save: bool = True,
        publish_tokens: TokenPublisher | None = None,
        points: PointRows | None = None,
    ) -> None:
        self._index = index
        self._flights = flights
        self._invalidation = invalidation
        self._backing = tiers.bindings
        self._breakers = tiers.breakers
        self._metrics = metrics
        self._write_through_in_save = write_through_in_save
        self.publish_tokens = publish_tokens
        self._points = points
        self._demoting: set[str] = set()

    # -- off the device ---------------------------------------------------------------------

    def plan(
        self,
        keys: Sequence[bytes],
        namespace: bytes,
        stop: int,
        tokens: Sequence[int] | None = None,
        *,
        point: bool = False,
    ) -> Planned | None:
        """Reserve room for blocks of ``keys[:stop]`` that the host tier lacks.

        See `Manager.plan_save`.
        """
        edge: int | None = None  # the row of the chain at which the point begins
        if point:
            assert self._points is not None, "a resume point of a model that has none"
            edge, keys = stop, self._points.chain(keys, stop)
            stop = len(keys)
        start = self._index.held(HOST, keys[:stop])
        if start >= stop:
            self.offer(keys, namespace, stop)
            return None
        if self._flights.full:
            self._metrics.save_skipped(SaveSkip.BUSY, stop - start)
            return None
        if edge is not None and stop > self._index.most(HOST, namespace):  # then evict nothing
            self._metrics.save_skipped(SaveSkip.NO_ROOM, stop - start)
            return None
        reservation = self._index.lifecycle.reserve(HOST, keys, start, stop, namespace)
        self._invalidation.count_evicted(HOST, reservation.evicted)
        if reservation.stop < stop:
            self._metrics.save_skipped(SaveSkip.NO_ROOM, stop - reservation.stop)
            if edge is not None and len(reservation):
                self._index.lifecycle.abort(reservation)
            if edge is not None:
                return None
        if not len(reservation):
            return None
        # There was no room for the last blocks, or the first were being evicted and were kept.
        blocks = Span(reservation.start, reservation.stop)
        flight = Flight(keys, blocks.start)
        graph = self._save(flight, reservation, keys, namespace, edge)
        self._flights.plan(flight, graph)
        return Planned(graph, keys, blocks, tokens)

    def publish(self, planned: Planned) -> None:
        """Publish the tokens of a plan that is being launched, if anybody is to know them."""
        if planned.tokens is not None and self.publish_tokens is not None:
            (start, stop), point = planned.blocks, planned.graph.point
            if point is not None:
                stop = start + point
            if start < stop:
                self.publish_tokens(planned.keys, start, stop, planned.tokens)

    def _save(
        self,
        flight: Flight,
        into: Reservation,
        keys: Sequence[bytes],
        namespace: bytes,
        edge: int | None,
    ) -> TransferGraph:
        """Return the graph of a save whose copies from the device fill ``into``.

        A resume point begins at row ``edge`` of the chain.
        """
        blocks = Span(into.start, into.stop)
        through = [t for t in self._backing.values() if t.write is WritePolicy.WRITE_THROUGH]
        sink_tier = through[0] if through and self._write_through_in_save else None
        sink: TierRows | None = None
        if sink_tier is not None and self._breakers.writes[sink_tier.name].allows():
            self._spill(sink_tier, keys, namespace, blocks.start)
            sink, flight.reserved = self._reserve_sink(sink_tier, keys, namespace, *blocks)
        graph = build_save(
            next(self._flights.ids),
            Chain.of(keys, namespace, blocks),
            into.slots.tolist(),
            sink,
            batch_rows=self._flights.batch,
            copy_rows=self._flights.copied,
            point=None if edge is None else edge - blocks.start,
        )
        _assign(flight, graph)
        copies = [op.op_id for op in graph.ops if op.path.touches_device]
        flight.targets.update(dict.fromkeys(copies, Target(into, len(copies))))
        flight.on_end.append(lambda: self.offer(keys, namespace, blocks.stop))
        for tier in through:
            if tier is not sink_tier:
                flight.on_end.append(
                    lambda tier=tier: self._spill(tier, keys, namespace, blocks.stop)  # type: ignore[misc]
                )
        return graph

    # -- from host memory to a tier below -----------------------------------------------------

    def write(
        self, tier: str, keys: Sequence[bytes], namespace: bytes, *, on_end: Callable[[], object]
    ) -> int | None:
        """Write to a lower tier the blocks of ``keys`` that the host tier holds and it lacks.

        Returns the id of the graph. If nothing is to do, returns None and never calls ``on_end``.
        """
        if self._flights.full:
            return None
        graph = self._spill(self._backing[tier], keys, namespace, len(keys))
        if graph is None:
            return None
        self._flights.when_ended(graph.graph_id, on_end)
        return graph.graph_id

    def offer(self, keys: Sequence[bytes], namespace: bytes, stop: int) -> None:
        """Count a use of ``keys[:stop]``, and write to each selective tier what it now admits."""
        for tier in self._backing.values():
            if tier.write is not WritePolicy.SELECTIVE or not stop:
                continue
            held = self._index.held(tier.name, keys[:stop])
            # Every block counts its use, but only a prefix can be written.
            taken = [tier.admission.admit(key) for key in keys[held:stop]]
            admitted = held + (taken.index(False) if False in taken else len(taken))
            if admitted > held:
                self._spill(tier, keys, namespace, admitted)

    def _spill(
        self, tier: Backing, keys: Sequence[bytes], namespace: bytes, stop: int
    ) -> TransferGraph | None:
        """Write the blocks of ``keys[:stop]`` that the host tier holds and ``tier`` lacks."""
        start = self._index.held(tier.name, keys[:stop])
        stop = min(stop, self._index.match(keys[:stop]).depths[0])
        if start >= stop or not self._breakers.writes[tier.name].allows():
            return None
        pin = self._index.pin(HOST, keys[stop - 1])
        sink, written = self._reserve_sink(tier, keys, namespace, start, stop)
        if sink is None:
            self._index.unpin(pin)
            self._metrics.save_skipped(SaveSkip.NO_ROOM, stop - start)
            return None
        flight, stop = Flight(keys, start, written, pins=[pin]), written[-1].stop
        try:
            slots = self._index.slots(HOST, keys, start, stop).tolist()
        except KVCoreError:  # a session of a server has saved some of them on other blocks since
            self._flights.release(flight)
            return None
        graph = build_spill(
            next(self._flights.ids),
            Chain.of(keys, namespace, Span(start, stop)),
            slots,
            sink,
            batch_rows=self._flights.batch,
        )
        self._send(flight, graph)
        return graph

    def _reserve_sink(
        self, tier: Backing, keys: Sequence[bytes], namespace: bytes, first: int, stop: int
    ) -> tuple[TierRows | None, list[Reservation]]:
        """Reserve slots of ``tier`` for blocks up to ``stop``, one reservation a write op."""
        start = self._index.held(tier.name, keys[:stop])
        if start < first:
            return None, []
        made: list[Reservation] = []
        for left in range(start, stop, self._flights.batch):
            right = min(left + self._flights.batch, stop)
            reservation = self._index.lifecycle.reserve(tier.name, keys, left, right, namespace)
            self._invalidation.count_evicted(tier.name, reservation.evicted)
            if len(reservation):
                made.append(reservation)
            if len(reservation) < right - left:
                break
        if not made:
            return None, []
        slots = [slot for reservation in made for slot in reservation.slots.tolist()]
        rows = Span(made[0].start - first, made[-1].stop - first)
        return TierRows(tier.name, tier.write_path, rows, slots), made

    def _send(self, flight: Flight, graph: TransferGraph) -> None:
        """Launch a graph that does not touch the device."""
        _assign(flight, graph)
        graph.check()
        self._flights.plan(flight, graph)
        self._flights.launch(graph)

    # -- before host memory is full ---------------------------------------------------------

    def keep_room(self) -> None:
        """Start demoting old host blocks to write-back tiers if the host tier runs short."""
        for tier in self._backing.values():
            if tier.write is WritePolicy.WRITE_BACK and tier.name not in self._demoting:
                self._demote(tier)

    def _demote(self, tier: Backing) -> None:
        """Start demoting the host tier's eviction victims if less than an eighth of it is free."""
        total = self._index.num_free(HOST) + self._index.num_used(HOST)
        short = total // 8 - self._index.num_free(HOST)
        if short <= 0 or not self._breakers.writes[tier.name].allows():
            return
        eviction = self._index.evictions.begin(HOST, short)
        if not eviction.blocks:
            return
        self._demoting.add(tier.name)
        left = self._write_back(tier, eviction)
        if not left:
            self._demoted(tier, eviction)

    def _write_back(self, tier: Backing, eviction: Eviction) -> set[int]:
        """Spill the chains that end in blocks of ``eviction``; return the ids of the graphs."""
        leaving = {block.key: block for block in eviction.blocks}
        inner = {block.parent for block in eviction.blocks}
        graphs: set[int] = set()
        for block in eviction.blocks:
            if block.key not in inner:
                graph = self._spill_leaving(tier, leaving, block)
                if graph is not None:
                    graphs.add(graph.graph_id)
        for graph_id in graphs:
            self._flights.when_ended(
                graph_id,
                lambda graph_id=graph_id: self._one_demoted(tier, eviction, graphs, graph_id),  # type: ignore[misc]
            )
        return graphs

    def _spill_leaving(
        self, tier: Backing, leaving: dict[bytes, Evicted], last: Evicted
    ) -> TransferGraph | None:
        """Spill the chain that ends in ``last``, whose tail is being evicted from host memory."""
        tail, block = [last], last
        while block.parent in leaving:
            block = leaving[block.parent]
            tail.append(block)
        tail.reverse()
        kept = self._index.path(block.parent) if block.parent in self._index else []
        chain = [*kept, *(b.key for b in tail)]
        start = self._index.held(tier.name, chain)
        sink, written = self._reserve_sink(tier, chain, last.namespace, start, len(chain))
        if sink is None:
            return None
        slots = [*self._index.slots(HOST, kept, 0, len(kept)).tolist(), *(b.slot for b in tail)]
        stop = written[-1].stop
        graph = build_spill(
            next(self._flights.ids),
            Chain.of(chain, last.namespace, Span(start, stop)),
            slots[start:stop],
            sink,
            batch_rows=self._flights.batch,
        )
        pins = [self._index.pin(HOST, kept[-1])] if kept else []
        self._send(Flight(chain, start, written, pins=pins), graph)
        return graph

    def _one_demoted(
        self, tier: Backing, eviction: Eviction, graphs: set[int], graph_id: int
    ) -> None:
        graphs.discard(graph_id)
        if not graphs:
            self._demoted(tier, eviction)

    def _demoted(self, tier: Backing, eviction: Eviction) -> None:
        self._demoting.discard(tier.name)
        self._invalidation.count_evicted(HOST, self._index.evictions.finish(eviction))


def _assign(flight: Flight, graph: TransferGraph) -> None:
    """Tie each write op to the reservation that it fills."""
    writes = [op.op_id for op in graph.ops if op.path.writes_tier]
    targets = map(Target, flight.reserved)
    flight.targets.update(zip(writes, targets, strict=True))
    flight.reserved = []
