"""The graphs planned and in flight: which blocks and slots they keep, and how their ops end.

    plan ──▶ launch ──▶ transport ──▶ workers ──report, one an op──▶ complete ──all ops──▶ released
     │ sources pinned, targets reserved                     published              unpinned
     └────▶ drop: released, nothing published

While a graph is planned or in flight, its source blocks are pinned and its targets are reserved. A
target is published when the last op that fills it is reported, never before.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvcore._util.circuit_breaker import TierBreakers
from kvcore.errors import CapacityError
from kvcore.index import BlockIndex, Pin, Reservation
from kvcore.manager.base import HOST, Lane, Room, TransferOptions, Transport
from kvcore.manager.invalidation import Invalidation
from kvcore.telemetry.metrics import Metrics
from kvcore.transfer.graph import OpReport, Path, RowError, TransferGraph, TransferOp

__all__ = ["STALLED_S", "Flight", "Flights", "Target"]

_log = logging.getLogger("kvcore.manager")

STALLED_S = 1.0
"""Seconds without the end of any op after which no load waits for others to end."""
_GIVEN_UP = frozenset({RowError.CANCELLED, RowError.DEADLINE})
_EMPTY = TransferGraph(0, 0, b"", b"", (), (), (), (), ())  # type: ignore[arg-type]


@dataclass(eq=False)
class Target:
    """A reservation to publish once all ops that fill it have been reported.

    ``ops`` is the number of those that have not been. ``failed`` are the rows of the others that
    could not be filled.
    """

    reservation: Reservation
    ops: int = 1
    failed: set[int] = field(default_factory=set)


@dataclass
class Flight:
    """A graph in flight or being planned, with what it keeps until it ends.

    Args:
        keys: the chain of its prompt, from the first block.
        first_block: the position in the chain of row 0.
        reserved: reservations whose ops are not planned yet.
        targets: what is to be published, by each op that fills it.
        pins: pins on its source blocks.
        holds: reservations whose slots other ops of the graph read after they are published.
        staging: staging slots in host memory that it has.
        staged: places in the staging on the device that it has.
        waiting: ops that have not been reported.
        reads: operations and blocks that are left to read, by the tier that they come from.
        given_up: why it was given up: cancelled, or past its deadline. Ops that still run may
            never end.
        expires: when a fetch is given up: a time of the manager's clock, or None. A worker reports
            a load's deadline, but not that of a read which hangs alone.
        on_end: called when it has ended.
    """

    keys: Sequence[bytes]
    first_block: int
    reserved: list[Reservation] = field(default_factory=list)
    targets: dict[int, Target] = field(default_factory=dict)
    pins: list[Pin] = field(default_factory=list)
    holds: list[Reservation] = field(default_factory=list)
    staging: list[int] = field(default_factory=list)
    staged: list[int] = field(default_factory=list)
    waiting: set[int] = field(default_factory=set)
    reads: dict[str, list[int]] = field(default_factory=dict)
    given_up: RowError | None = None
    expires: float | None = None
    on_end: list[Callable[[], object]] = field(default_factory=list)
    graph: TransferGraph = _EMPTY

    @property
    def unpublished(self) -> list[Reservation]:
        """The reservations of the targets, each once."""
        return [target.reservation for target in dict.fromkeys(self.targets.values())]


class Flights:
    """The graphs of one manager, planned and in flight. Its thread only; no call blocks."""

    def __init__(
        self,
        index: BlockIndex,
        transport: Transport,
        invalidation: Invalidation,
        breakers: TierBreakers,
        metrics: Metrics,
        options: TransferOptions,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._index = index
        self._transport = transport
        self._invalidation = invalidation
        self._breakers = breakers
        self._metrics = metrics
        self.staging = list(options.staging_slots)
        """Staging slots in host memory that are free."""
        self.device = list(range(options.device_slots))
        """Places in the staging on the device that are free."""
        self._share = -(-options.device_slots // 2)
        # A read op must not name a staging slot twice.
        self.batch = min(options.batch_blocks, len(self.staging) or options.batch_blocks)
        """The most blocks of one op."""
        self.copied = options.copy_blocks
        """The most blocks of one copy from the device, or of one to it that no step waits for.

        None for any number."""
        self.ids = itertools.count(1)
        """Numbers the graphs, for whoever plans them."""
        self._max_in_flight = options.max_in_flight
        self._clock = clock
        self._last_end = clock()
        self._planned: dict[int, Flight] = {}
        self._flights: dict[int, Flight] = {}

    def __len__(self) -> int:
        return len(self._flights)

    def __contains__(self, graph_id: int) -> bool:
        return graph_id in self._flights

    @property
    def full(self) -> bool:
        """True if no more graphs may be launched now."""
        return len(self._flights) >= self._max_in_flight

    @property
    def room(self) -> Room:
        """The room for the next load.

        Staging slots of a load that was given up do not count as lent: a read that hangs may keep
        them forever.
        """
        flights = itertools.chain(self._planned.values(), self._flights.values())
        lent = any(flight.staging and flight.given_up is None for flight in flights)
        moving = self._clock() - self._last_end < STALLED_S
        return Room(self.full, self._index.num_free(HOST), bool(self.staging), lent, moving)

    @property
    def awaited(self) -> bool:
        """True if the end of a graph is to be expected; see `Manager.awaited`."""
        moving = self._clock() - self._last_end < STALLED_S
        return any(
            flight.given_up is None
            and (moving or any(flight.graph.ops[i].path.touches_device for i in flight.waiting))
            for flight in self._flights.values()
        )

    def reads_before(self, blocks: int | None) -> dict[str, tuple[int, int]]:
        """See `Manager.reads_before`."""
        found: dict[str, tuple[int, int]] = {}
        for flight in self._flights.values():
            for tier, (operations, left) in flight.reads.items():
                counted = left if blocks is None else min(left, blocks)
                share = -(-operations * counted // left) if left else operations
                before = found.get(tier, (0, 0))
                found[tier] = before[0] + share, before[1] + counted
        return found

    def num_ops(self, graph_ids: Iterable[int]) -> int:
        """Return how many ops of these graphs have not ended. Graphs that have ended have none."""
        found = (self._flights.get(graph_id) for graph_id in graph_ids)
        return sum(len(flight.waiting) for flight in found if flight is not None)

    # -- staging ----------------------------------------------------------------------------

    def stage(self, flight: Flight, rows: int) -> list[int]:
        """Give a flight all free staging slots; return one for each row, reused in a ring.

        For rows that the host tier cannot keep. Raises CapacityError if no staging slot is free.
        """
        if not self.staging:
            raise CapacityError(
                f"no host slot for {rows} blocks and the staging slots are in use: "
                "raise host.capacity"
            )
        flight.staging, self.staging = self.staging, []
        return [slot for slot, _ in zip(itertools.cycle(flight.staging), range(rows), strict=False)]

    def stage_on_device(self, flight: Flight, rows: int) -> list[int]:
        """Give a flight places in the staging on the device; return one for each row, in a ring.

        For rows that go past host memory. A flight gets at most half of all places, so that another
        flight finds some. Returns an empty list if none is free.
        """
        count = min(rows, self._share, len(self.device))
        flight.staged, self.device = self.device[:count], self.device[count:]
        return [slot for slot, _ in zip(itertools.cycle(flight.staged), range(rows), strict=False)]

    def staged_batch(self, flight: Flight, rows: int) -> int:
        """Return the most blocks of one op of a flight of ``rows`` with places on the device.

        If the flight reuses its places, an op takes half of them at most: the flight then reads
        into some while it copies out of others.
        """
        places = len(flight.staged)
        return max(1, min(self.batch, places if rows <= places else places // 2))

    # -- from plan to end -------------------------------------------------------------------

    def plan(self, flight: Flight, graph: TransferGraph) -> None:
        """Keep what ``flight`` has until `launch` or `drop`, one of which follows exactly once."""
        assert not flight.reserved, "a reservation that no op fills"
        flight.graph = graph
        self._planned[graph.graph_id] = flight

    def drop(self, graph_id: int) -> None:
        """Give back what a planned graph keeps. It will not be launched."""
        self.release(self._planned.pop(graph_id))

    def launch(
        self,
        graph: TransferGraph,
        lane: Lane | None = None,
        on_end: Callable[[], object] | None = None,
        *,
        lent: bool = False,
    ) -> None:
        """Send a planned graph to the workers, or to ``lane`` if it is given.

        From here on it keeps its reservations and pins until it has ended on all workers.
        ``on_end`` is called then. The deadline of a ``lent`` graph is another process's word, and
        blames no tier: whoever carries out its reads calls `blame`.
        """
        flight = self._planned.pop(graph.graph_id)
        flight.graph = graph
        flight.waiting = {op.op_id for op in graph.ops}
        if on_end is not None:
            flight.on_end.append(on_end)
        if graph.deadline_s is not None and not graph.touches_device and not lent:
            flight.expires = self._clock() + graph.deadline_s
        if not self._flights:
            self._last_end = self._clock()  # no graph was in flight that could have ended
        self._flights[graph.graph_id] = flight
        for reservation in flight.unpublished:
            if reservation.tier == HOST and len(graph.ops) > 1:  # later ops read these slots
                self._index.lifecycle.hold(reservation)
                flight.holds.append(reservation)
        for op in graph.ops:
            self._count_read(flight, op, 1)
        for tier, writes in {(op.tier, op.path.writes_tier) for op in graph.ops if op.tier}:
            self._breakers.of(tier, writes).started()
        self._transport.submit(graph, lane)

    def when_ended(self, graph_id: int, call: Callable[[], object]) -> None:
        """Have ``call`` called when a graph in flight has ended on all workers."""
        self._flights[graph_id].on_end.append(call)

    def cancel(self, graph_id: int) -> None:
        """Ask the workers to drop what they have not started of a graph; see `Manager.cancel`."""
        if graph_id in self._flights:
            self._transport.cancel(graph_id)

    def complete(self, report: OpReport) -> None:
        """Apply the outcome of one op on *all* workers; see `Manager.complete`."""
        flight = self._flights.get(report.graph_id)
        if flight is None or report.op_id not in flight.waiting:
            _log.warning(
                "ignored the report of an unknown op graph=%d op=%d", report.graph_id, report.op_id
            )
            return
        flight.waiting.discard(report.op_id)
        self._last_end = self._clock()
        op = flight.graph.ops[report.op_id]
        self._count_read(flight, op, -1)
        self._judge_tier(flight, op, report)
        if report.op_id in flight.targets:
            self._publish(flight, report)
        for row, error in report.failed.items():
            if error in (RowError.CORRUPT, RowError.MISSING):
                self._invalidation.invalidate(op.tier, flight.graph.keys[row])
        if not flight.waiting:
            del self._flights[report.graph_id]
            self.release(flight)
            for call in flight.on_end:
                call()

    def expire(self) -> None:
        """Give up fetches that are past their deadline, and blame the tiers that they read."""
        for flight in self._flights.values():
            late = flight.expires is not None and self._clock() >= flight.expires
            if late and flight.given_up is None:
                self._give_up(flight, RowError.DEADLINE)

    def blame(self, graph_id: int, tier: str) -> None:
        """Give up a flight whose read from ``tier`` is late, and blame the tier."""
        self._flights[graph_id].given_up = RowError.DEADLINE
        self._breakers.reads[tier].failed()

    def release(self, flight: Flight) -> None:
        """Give back what a flight keeps, once it has ended or will not be launched.

        What it was to fill is reserved no more, and not published.
        """
        for reservation in (*flight.reserved, *flight.unpublished):
            self._invalidation.invalidate_removed(reservation)
            self._index.lifecycle.abort(reservation)
        for pin in flight.pins:
            self._index.unpin(pin)
        for reservation in flight.holds:
            self._index.lifecycle.release(reservation)
        self.staging += flight.staging
        flight.staging = []
        self.device += flight.staged
        flight.staged = []

    def check_integrity(self) -> None:
        """Assert that every flight waits for an op, and that no read counts without a flight."""
        for flight in self._flights.values():
            assert flight.waiting, f"graph {flight.graph.graph_id} waits for nothing"

    def _publish(self, flight: Flight, report: OpReport) -> None:
        """Publish what an op has filled, if it was the last one: up to the first failed row."""
        target = flight.targets.pop(report.op_id)
        target.ops -= 1
        target.failed.update(report.failed)
        if target.ops:
            return
        self._invalidation.invalidate_removed(target.reservation)
        failed_from = flight.first_block + min(target.failed) if target.failed else None
        self._index.lifecycle.commit(target.reservation, failed_from)

    def _count_read(self, flight: Flight, op: TransferOp, sign: int) -> None:
        """Add an op's read to what is left of a flight, or subtract it.

        A load in steps of layers counts its blocks once, with its first layers.
        """
        if op.path is Path.H2D or op.path.reads_tier:
            reads = flight.reads.setdefault(op.tier or HOST, [0, 0])
            reads[0] += sign
            reads[1] += sign * op.rows.size if op.layers is None or not op.layers[0] else 0
            if not reads[0]:
                del flight.reads[op.tier or HOST]

    # -- health of the tiers ------------------------------------------------------------------

    def _judge_tier(self, flight: Flight, op: TransferOp, report: OpReport) -> None:
        """Count an op's failures, and tell the tier's circuit breaker about its outcome."""
        for error in set(report.failed.values()):
            blocks = sum(1 for e in report.failed.values() if e is error)
            self._metrics.failed(op.path.value, error.value, blocks)
            if error is RowError.CORRUPT:
                self._metrics.corrupt(op.tier, blocks)
        errors = set(report.failed.values())
        self._judge_late(flight, op, errors)
        if not op.tier:
            return
        breaker = self._breakers.of(op.tier, op.path.writes_tier)
        if errors & {RowError.IO, RowError.DEADLINE}:
            breaker.failed()
        elif flight.given_up is RowError.DEADLINE:
            breaker.undecided()  # it was too slow, which `_judge_late` has counted
        elif errors <= {RowError.CORRUPT, RowError.MISSING}:
            breaker.succeeded()  # the medium answers, even if its blocks are bad
        else:
            breaker.undecided()

    def _judge_late(self, flight: Flight, op: TransferOp, errors: set[RowError]) -> None:
        """Note that a load was given up, and blame the tiers whose reads were still running.

        They are blamed now, because a read that hangs may never end.
        """
        why = errors & _GIVEN_UP
        if flight.given_up is not None or not why or not op.path.touches_device:
            return
        self._give_up(flight, why.pop())

    def _give_up(self, flight: Flight, why: RowError) -> None:
        flight.given_up = why
        if why is RowError.DEADLINE:
            running = (flight.graph.ops[op_id] for op_id in flight.waiting)
            for tier in {op.tier for op in running if op.path.reads_tier}:
                self._breakers.reads[tier].failed()
