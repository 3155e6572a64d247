"""The manager of a leader: decides what is loaded, saved and evicted, and keeps the index true.

    get_match ─▶ plan_load  ─┐
                 plan_fetch ─┼─▶ planned ─▶ launch ─▶ transport ─▶ workers
                 plan_save  ─┘      └─────▶ drop          │
                                                          ▼
                 complete(op report) ◀── reports, one an op, once all ranks have ended it

    KVManager ─┬─ loader        up: to the device, or to host memory alone
               ├─ offloader     down: to host memory, and to the tiers below
               ├─ invalidation  out: cleared, dropped, lost; counts evictions
               ├─ flights       graphs planned and in flight, what they keep, how their ops end
               └─ tiers         the tiers below: how each is read, its breakers, its lookups

`Manager` is what an engine's leader calls, because a server may answer it. What only operators do
(`kvcore.admin`) has no counterpart there: they call the parts, which are public for that.

One thread owns a manager (the engine's scheduler). No call does I/O. ``wait`` and ``wait_stores``
block; everything else returns at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kvcore.errors import TransferError
from kvcore.index import BlockIndex
from kvcore.manager.base import (
    HOST,
    Backing,
    Hit,
    Lane,
    Manager,
    Planned,
    Promise,
    Readiness,
    Source,
    TransferOptions,
    Transport,
)
from kvcore.manager.inflight import Flights
from kvcore.manager.invalidation import Invalidation
from kvcore.manager.loader import Loader
from kvcore.manager.lower_tiers import LowerTiers
from kvcore.manager.offloader import Offloader, TokenPublisher
from kvcore.model.points import PointRows
from kvcore.telemetry.metrics import Metrics, SaveSkip
from kvcore.transfer.graph import OpReport, Priority, Span, TransferGraph, UnitTable

__all__ = ["KVManager"]

_DEFAULTS = TransferOptions()


class KVManager(Manager):
    """The manager of one model in the process of its leader.

    It looks blocks up itself, and delegates loads, saves, removal and completion to its parts. The
    loader and the offloader do not know each other: both plan graphs for ``flights``, and what one
    implies for the other happens here. `Manager` documents the methods.

    Args:
        index: the blocks of the host tier and of every backing tier, in that order.
        transport: carries graphs to the workers.
        backing: the tiers below host memory, nearest first.
        options: how transfers are planned, and what they may occupy.
        metrics: counts removals, failures and skipped saves; None counts nothing.
        publish_tokens: receives the tokens of blocks that are being saved.
        points: the resume points of the model; None if it goes on behind any block.
        clock: returns seconds, monotonic.
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
        points: PointRows | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.index = index
        self.transport = transport
        self.upkeep: list[Callable[[], object]] = []
        """Called by every `maintain`."""
        self._metrics = metrics = metrics or Metrics(enabled=False)
        self.points = points
        self.tiers = tiers = LowerTiers.of(backing, index, clock, points)
        self.invalidation = Invalidation(index, transport, tiers, metrics)
        self.flights = Flights(
            index,
            transport,
            self.invalidation,
            tiers.breakers,
            metrics,
            options,
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
            points=points,
        )

    # -- lookup -----------------------------------------------------------------------------

    @property
    def backings(self) -> tuple[Backing, ...]:
        return tuple(self.tiers.bindings.values())

    def get_match(self, keys: Sequence[bytes], namespace: bytes, limit: int | None = None) -> Hit:
        if self.points is not None:
            keys = keys[:limit]
        self._settle_stores(keys, namespace)
        hit = Hit(keys, namespace, self._sources(keys))
        return hit if self.points is None else self._resumable(self.points, hit)

    def _sources(self, keys: Sequence[bytes]) -> tuple[Source, ...]:
        match = self.index.match(keys)
        sources, position = [], 0
        for tier, depth in zip([HOST, *self.tiers.bindings], match.depths, strict=True):
            if depth > position and (tier == HOST or self.tiers.breakers.reads[tier].allows()):
                sources.append(Source(tier, position, depth))
                position = depth
        return tuple(sources)

    def _resumable(self, points: PointRows, hit: Hit) -> Hit:
        """Return the longest hit within ``hit`` that ends in a resume point."""
        for blocks in range(points.boundary(hit.depth), 0, -points.every):
            if points.last_row(hit.keys, blocks) not in self.index:
                continue
            chain = points.chain(hit.keys, blocks)
            sources = self._sources(chain)
            if sources and sources[-1].stop == len(chain):  # else its tier is not read now
                return Hit(chain, hit.namespace, sources, len(chain) - blocks, hit)
        return Hit(hit.keys, hit.namespace, (), beside=hit)

    def expected_in(self, tier: str, keys: Sequence[bytes]) -> int:
        most = self.index.held(tier, keys)
        if (points := self.points) is None:
            return most
        ends = range(points.boundary(most), 0, -points.every)
        there = (end for end in ends if self.index.held(tier, [points.last_row(keys, end)]))
        return next(there, 0)

    def ask_stores(self, hit: Hit, computed: int = 0, promise: Promise | None = None) -> bool:
        keys, beyond = hit.held.keys, max(hit.blocks, computed)
        if beyond >= len(keys):
            return False
        # A list, because every store is to be asked: `any` stops at the first that is.
        stores = self.tiers.lookups.values()
        asking = [store.ask(keys, promise, hit.namespace, beyond) for store in stores]
        return any(asking)

    def wait_stores(self, timeout: float) -> bool:
        limit = time.monotonic() + timeout
        lookups = self.tiers.lookups.values()
        return any(store.wait(max(limit - time.monotonic(), 0.0)) for store in lookups)

    def can_load(self, hit: Hit, start: int, stop: int) -> Readiness:
        below = sum(n for tier, n in hit.blocks_by_tier(start, stop).items() if tier != HOST)
        return self.flights.room.admits(below)

    def _settle_stores(self, keys: Sequence[bytes], namespace: bytes) -> None:
        for tier, store in self.tiers.lookups.items():
            believed = store.settle(keys, namespace)
            if believed is not None:
                self._metrics.asked_store(tier, believed.outcome)
                self.invalidation.count_evicted(tier, believed.evicted)

    # -- plans ------------------------------------------------------------------------------

    def plan_load(
        self,
        hit: Hit,
        blocks: Span,
        *,
        layers: Sequence[Span] = (),
        deadline_s: float | None = None,
    ) -> Planned:
        return self.loader.plan(hit, blocks, layers=layers, deadline_s=deadline_s)

    def plan_fetch(
        self,
        hit: Hit,
        stop: int | None = None,
        *,
        deadline_s: float | None = None,
        background: bool = False,
    ) -> Planned | None:
        return self.loader.plan_fetch(hit, stop, deadline_s=deadline_s, background=background)

    def plan_save(
        self,
        keys: Sequence[bytes],
        namespace: bytes,
        stop: int,
        tokens: Sequence[int] | None = None,
        *,
        point: bool = False,
    ) -> Planned | None:
        return self.offloader.plan(keys, namespace, stop, tokens, point=point)

    def launch(
        self,
        planned: Planned,
        units: Sequence[UnitTable] = (),
        *,
        lane: Lane | None = None,
        on_end: Callable[[], object] | None = None,
    ) -> TransferGraph:
        try:
            graph = planned.graph.bind(units)
        except TransferError:
            self.drop(planned)
            raise
        self._start(planned, graph, lane, on_end)
        return graph

    def lend(self, planned: Planned) -> None:
        """Count a plan as launched that a server's session binds to its pages and sends itself."""
        self._start(planned, planned.graph, lambda graph: None, None, lent=True)

    def _start(
        self,
        planned: Planned,
        graph: TransferGraph,
        lane: Lane | None,
        on_end: Callable[[], object] | None,
        *,
        lent: bool = False,
    ) -> None:
        self.offloader.publish(planned)
        self.flights.launch(graph, lane, on_end, lent=lent)
        if graph.priority is Priority.LOAD and graph.ops[-1].path.touches_device:  # not a fetch
            used = self.index.match(planned.keys[: planned.blocks.stop])
            self.index.touch(used)
            self.offloader.offer(planned.keys, graph.namespace, used.depths[0])

    def drop(self, planned: Planned) -> None:
        if planned.graph.priority is Priority.SAVE:
            self._metrics.save_skipped(SaveSkip.ABORTED, planned.blocks.size)
        self.flights.drop(planned.graph.graph_id)

    @property
    def wants_tokens(self) -> bool:
        return self.offloader.publish_tokens is not None

    # -- graphs in flight ---------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        return len(self.flights)

    @property
    def awaited(self) -> bool:
        return self.flights.awaited

    def reads_before(self, blocks: int | None = None) -> dict[str, tuple[int, int]]:
        return self.flights.reads_before(blocks)

    def is_in_flight(self, graph_id: int) -> bool:
        return graph_id in self.flights

    def cancel(self, graph_id: int) -> None:
        self.flights.cancel(graph_id)

    def complete(self, report: OpReport) -> None:
        self.flights.complete(report)

    # -- upkeep -------------------------------------------------------------------------------

    def maintain(self) -> None:
        self.flights.expire()
        self.offloader.keep_room()
        for call in self.upkeep:
            call()

    def clear(self, namespace: bytes | None = None, tier: str | None = None) -> int:
        """Remove every block as `Manager.clear` does, if ``tier`` is given from that tier only."""
        return self.invalidation.clear(namespace, tier)

    def check_integrity(self) -> None:
        self.index.check_integrity()
        self.flights.check_integrity()
