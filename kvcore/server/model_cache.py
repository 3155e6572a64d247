"""One model on the server: its index, arena and tiers, and the transfers of every session.

    session    LoadRequest, SaveRequest ──▶ KVManager ──▶ graph ─┬─ page copies: its workers
                                                                 └─ tier reads: here, once every
                                                                    rank is ready
    server     write-behind, prefetch ──────────────────────────────▶ here

An op of a session's graph ends when the session reports it, and a read not before it has ended
here: a slot is given to nobody else while anything may still write to it. Only the server says how
a read ended.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvcore.admin.audit import AuditLog
from kvcore.admin.open import make_admin
from kvcore.config import Config
from kvcore.errors import BlockMissing, FormatError
from kvcore.manager import HOST, KVManager
from kvcore.manager.base import Hit, Planned, Promise, Source
from kvcore.runtime.build import (
    build_manager,
    build_segments,
    enter_directory,
    geometry,
    host_slots,
)
from kvcore.runtime.local_transport import LocalTransport
from kvcore.runtime.tiers import BackingOpener
from kvcore.server.machines import SharedCache, SpreadTransport
from kvcore.server.messages import (
    HeldRequest,
    LaunchReply,
    LearnTokens,
    LoadRequest,
    MatchReply,
    MatchRequest,
    Model,
    PathReply,
    PathRequest,
    PublishTokens,
    SaveRequest,
    SearchReply,
    SearchRequest,
    SourceSpan,
    join,
    split,
)
from kvcore.server.pending_prefills import PendingPrefills
from kvcore.server.runtime_dir import RuntimeDir, graph_number
from kvcore.server.segments import learn, search
from kvcore.server.tier_worker import map_metadata, model_config, tier_worker
from kvcore.telemetry.metrics import Data, Metrics, merge
from kvcore.transfer.graph import OpReport, RowError, Span, TransferGraph, TransferOp
from kvcore.worker.lifecycle import close_worker, open_tiers

_log = logging.getLogger("kvcore.server")

ReadReplyTo = Callable[[dict[int, RowError]], None]
"""Sends a rank the rows of its read that failed."""


@dataclass
class _ReadOp:
    """A read that a session's graph waits for.

    ``asked`` are the ranks that are ready for it. ``failed`` is how it ended here, ``reported`` how
    the session says that it ended.
    """

    asked: dict[int, ReadReplyTo] = field(default_factory=dict)
    running: bool = False
    failed: dict[int, RowError] | None = None
    reported: dict[int, RowError] | None = None


@dataclass
class _Reading:
    """A read of a session that the server has begun, at ``since``. ``late``: its tier is blamed."""

    claim: _Claim
    op_id: int
    since: float
    late: bool = False


@dataclass
class _Claim:
    """A session's graph; ``left`` are the ops that have not ended.

    ``number`` is its id in the session, which `kvcore.server.runtime_dir.session_of` reads.
    ``graph`` has the manager's.
    """

    number: int
    graph: TransferGraph
    session: int
    ranks: int
    left: set[int]
    reads: dict[int, _ReadOp]

    def op(self, op_id: int) -> TransferOp:
        return self.graph.ops[op_id]

    def all_rows(self, op_id: int, why: RowError) -> dict[int, RowError]:
        return dict.fromkeys(range(*self.op(op_id).rows), why)


class ModelCache:
    """One model's KV. Any thread may build it; then only the server's thread uses it."""

    def __init__(
        self,
        config: Config,
        model: Model,
        folder: RuntimeDir,
        arena: str,
        audit: AuditLog | None = None,
        shared: SharedCache | None = None,
    ) -> None:
        """Allocate the host tier and restore the other tiers. Blocks for seconds.

        ``shared`` is what other machines have prepared, if the model has ranks there. Raises
        KVCoreError if the model cannot be served with these settings.
        """
        described, self._points = model.described, model.point_rows
        self.model = model
        self.arena = arena
        self.shared = shared
        self._folder = folder
        config = model_config(config, described)
        self._claims: dict[int, _Claim] = {}
        self._reading: dict[int, _Reading] = {}
        self._late_s, self._clock = config.transfer.load_deadline_s, time.monotonic
        self._moved = Metrics(f"{arena}-io", enabled=config.metrics.enabled)
        slots = host_slots(config, described).total
        worker = tier_worker(config, model, 0, slots, folder, arena, self._moved)
        self._transport = (
            LocalTransport(worker) if shared is None else SpreadTransport(worker, shared)
        )
        try:
            parts = build_manager(
                config,
                described,
                self._transport,
                write_through_in_save=False,
                points=self._points,
                elsewhere=() if shared is None else shared.elsewhere,
            )
            if config.cluster.etcd:  # a static list of nodes needs no registration
                parts = enter_directory(config, described, parts, "server")
        except BaseException:
            close_worker(self._transport.worker)
            folder.remove_arena(arena)
            raise
        assert isinstance(parts.manager, KVManager)
        self.manager, self._releases = parts.manager, parts.releases
        self._pending = PendingPrefills(parts.manager.index, self._points)
        self._metrics, self._events = parts.metrics, parts.events
        self._metrics.source = arena  # another than that of the server's other models
        assert parts.tenants is not None
        self.admin = make_admin(
            config, described, parts.manager, parts.tenants, parts.metrics, audit or AuditLog()
        )
        self._segments = build_segments(config, described) if config.fusion.enabled else None
        opener = BackingOpener(config, geometry(described), 0, parts.plugins)
        self.open_tiers = parts.open_tiers
        open_tiers(self._transport.worker, opener, self.open_tiers)

    @property
    def lost(self) -> bool:
        """True if another machine has lost its part of this cache."""
        return self.shared is not None and self.shared.lost

    def take_metrics(self) -> Data:
        """Return what was counted since the last call."""
        nbytes = self.model.shape.nbytes
        for tier, (used, slots) in self.used.items():
            self._metrics.tier(tier, used * nbytes, slots * nbytes)
        return merge(merge({}, self._metrics.delta()), self._moved.delta())

    @property
    def metadata(self) -> dict[str, Any]:
        """Return what a worker needs to map the arena."""
        return map_metadata(self._transport.worker, self.model, self.arena)

    @property
    def used(self) -> dict[str, tuple[int, int]]:
        """Return blocks used and slots, by tier."""
        index = self.manager.index
        return {tier: (index.num_used(tier), index.num_slots(tier)) for tier in index.tiers}

    @property
    def background(self) -> int:
        """Return how many graphs of the server's own are in flight."""
        return self.manager.in_flight - len(self._claims)

    @property
    def busy(self) -> bool:
        """Return True if the server's own threads may report something."""
        return bool(self.background or self._reading or self.admin.busy)

    def claims(self, session: int) -> int:
        """Return how many graphs of a session have not ended."""
        return sum(claim.session == session for claim in self._claims.values())

    # -- questions ----------------------------------------------------------------------------

    def match(self, asked: MatchRequest) -> MatchReply:
        hit = self.manager.get_match(split(asked.keys), asked.namespace)
        held = hit.held
        if asked.ask and held.depth:  # the index will take in what a store reports
            self._check_chain(held.keys, held.depth, asked.namespace)
        asking = asked.ask and self._ask_stores(hit, asked)
        asking |= self._pending.coming(held.keys, max(hit.blocks, asked.computed))
        found = MatchReply(asked.ref, _spans(hit), asking, *self.manager.flights.room)
        if self._points is None:
            return found
        return msgspec.structs.replace(found, blocks=hit.blocks, beside=_spans(held))

    def _ask_stores(self, hit: Hit, asked: MatchRequest) -> bool:
        """Ask the stores for more blocks; return True if some may come.

        No store is asked to wait for blocks that are promised at this server's own node: only a
        session of this server saves those.
        """
        promise, keys = None if asked.promise is None else Promise(*asked.promise), hit.held.keys
        if promise is not None and keys:
            self._pending.expect(keys, promise)
            if promise.node and promise.node == self.manager.node:
                promise = None
        return self.manager.ask_stores(hit, asked.computed, promise)

    def held(self, asked: HeldRequest) -> int:
        if asked.tier not in self.manager.index.tiers:
            raise FormatError(f"tier {asked.tier!r}; this model has {self.manager.index.tiers}")
        keys = split(asked.keys)
        if asked.point:
            return self.manager.expected_in(asked.tier, keys)
        return self.manager.index.held(asked.tier, keys)

    def clear(self, namespace: bytes | None) -> int:
        """Forget every block (of one namespace) with its tokens; return the number of copies."""
        if self._segments is not None:
            self._segments.clear(namespace)
        return self.manager.clear(namespace)

    @property
    def keeps_tokens(self) -> bool:
        """Return True if tokens of stored blocks are kept, for fusion."""
        return self._segments is not None

    def learn(self, told: LearnTokens) -> None:
        if self._segments is not None:
            learn(self._segments, told)

    @property
    def wants_tokens(self) -> bool:
        """Return True if block events carry tokens."""
        return self._events is not None and self._events.feed.wants_tokens

    def publish_tokens(self, told: PublishTokens) -> None:
        """Pass tokens of blocks to the events. Raises FormatError for malformed keys."""
        if self._events is not None:
            self._events.feed.publish_tokens(split(told.keys), told.tokens)

    def search(self, asked: SearchRequest) -> SearchReply:
        """Return the stored runs of a prompt. Raises FormatError for malformed tokens."""
        if self._segments is None:
            return SearchReply(asked.ref, [])
        return search(self._segments, asked, self.manager.index.__contains__)

    def path(self, asked: PathRequest) -> PathReply:
        """Return the chain that ends with a block.

        Raises BlockMissing if no tier holds the block.
        """
        index = self.manager.index
        if asked.key not in index:
            raise BlockMissing("no tier holds the block any more")
        return PathReply(asked.ref, join(index.path(asked.key)), index.namespace_of(asked.key))

    # -- launching ----------------------------------------------------------------------------

    def load(self, asked: LoadRequest, ranks: int) -> LaunchReply:
        """Plan a load of a session.

        Raises CapacityError if there are no slots, FormatError if the sources cannot be a match,
        and another KVCoreError if the match has become stale.
        """
        keys = split(asked.keys)
        sources = self._sources(asked, len(keys))
        self._check_point(asked, keys)
        hit = Hit(keys, asked.namespace, sources, asked.point)
        layers = [Span(*span) for span in asked.layers]
        if any(not 0 <= a < b <= self.model.layers for a, b in layers):
            raise FormatError(f"layers {layers} of {self.model.layers}")
        if keys[asked.stop - 1] in self.manager.index:
            self._check_chain(keys[: asked.stop], asked.stop, asked.namespace)
        elif asked.fetch:  # it would reserve keys that nobody has checked
            raise BlockMissing("no tier holds the last block any more: match again")
        if asked.fetch:
            planned = self.manager.plan_fetch(hit, asked.stop, deadline_s=asked.deadline_s)
        else:
            planned = self.manager.plan_load(
                hit, Span(asked.start, asked.stop), layers=layers, deadline_s=asked.deadline_s
            )
        return self._lend(planned, asked, ranks)

    def _sources(self, asked: LoadRequest, blocks: int) -> tuple[Source, ...]:
        """Return the sources of a request.

        Raises FormatError unless they are adjacent, in the order of the tiers, and cover what is
        loaded.
        """
        tiers = list(self.manager.index.tiers)
        end, last = 0, -1
        for tier, start, stop in asked.sources:
            at = tiers.index(tier) if tier in tiers else -1
            if at <= last or start != end or stop <= start:
                raise FormatError(f"{asked.sources} are no sources in tiers {tiers}")
            end, last = stop, at
        if not 0 <= asked.start < asked.stop <= min(end, blocks):
            raise FormatError(
                f"blocks {asked.start}..{asked.stop} of {min(end, blocks)} that are held"
            )
        return tuple(Source(*source) for source in asked.sources)

    def _check_point(self, asked: LoadRequest, keys: Sequence[bytes]) -> None:
        """Raise FormatError unless the chain of a request ends in the resume point that it names.

        A load needs one if the model has points. A fetch may be of the first blocks alone.
        """
        points, blocks = self._points, len(keys) - asked.point
        if not asked.point and (asked.fetch or points is None):
            return
        if (
            points is None
            or blocks < 1
            or not asked.point
            or points.chain(keys, blocks) != (*keys,)
        ):
            raise FormatError(f"{len(keys)} keys do not end in a resume point of this model")

    def _check_chain(self, keys: Sequence[bytes], held: int, namespace: bytes) -> None:
        """Raise FormatError if the keys are no prompt's chain: all sessions share the index."""
        if not self.manager.index.is_chain(keys, held, namespace):
            raise FormatError(
                f"{len(keys)} keys are not a chain of one namespace: some of them come twice, or "
                "are held with other parents"
            )

    def save(self, asked: SaveRequest, ranks: int) -> LaunchReply:
        """Plan a save of a session. Raises FormatError if the keys are not a chain."""
        keys = split(asked.keys)
        blocks = len(keys)
        if asked.point:
            if self._points is None or not self._points.has(keys, blocks):
                raise FormatError(f"this model has no resume points behind {blocks} blocks")
            keys = [*self._points.chain(keys, blocks)]
        self._check_chain(keys, self.manager.index.held(HOST, keys), asked.namespace)
        planned = self.manager.plan_save(keys[:blocks], asked.namespace, blocks, point=asked.point)
        return self._lend(planned, asked, ranks)

    def _lend(
        self, planned: Planned | None, asked: LoadRequest | SaveRequest, ranks: int
    ) -> LaunchReply:
        """Record whose graph it is, and return it in the form that goes to the session."""
        if planned is None:
            return LaunchReply(asked.ref, None)
        graph = planned.graph
        self.manager.lend(planned)
        number = graph_number(asked.session, graph.graph_id)
        reads = {op.op_id: _ReadOp() for op in graph.ops if op.path.reads_tier}
        ops = {op.op_id for op in graph.ops}
        self._claims[number] = _Claim(number, graph, asked.session, ranks, ops, reads)
        theirs = msgspec.structs.replace(graph, graph_id=number)
        return LaunchReply(asked.ref, theirs, planned.blocks.start)

    # -- what ends ----------------------------------------------------------------------------

    def ops_ended(self, session: int, reports: Iterable[OpReport]) -> None:
        """Take in the ops that a session's ranks have ended. Ignores graphs of other sessions."""
        for report in reports:
            claim = self._claims.get(report.graph_id)
            if claim is not None and claim.session == session and report.op_id in claim.left:
                rows = range(*claim.op(report.op_id).rows)
                failed = {row: why for row, why in report.failed.items() if row in rows}
                self._done(claim, report.op_id, failed)

    def _done(self, claim: _Claim, op_id: int, failed: dict[int, RowError]) -> None:
        read = claim.reads.get(op_id)
        if read is None:  # a copy: only the session knows, but it cannot judge what a tier holds
            self._finish(claim, op_id, dict.fromkeys(failed, RowError.CANCELLED))
        elif read.running:
            read.reported = failed
        elif read.failed is None:  # it never began: nothing has come
            self._finish(claim, op_id, claim.all_rows(op_id, RowError.CANCELLED))
        else:
            self._finish(claim, op_id, dict.fromkeys(failed, RowError.CANCELLED) | read.failed)

    def _finish(self, claim: _Claim, op_id: int, failed: dict[int, RowError]) -> None:
        claim.left.discard(op_id)
        if not claim.left:
            del self._claims[claim.number]
        self.manager.complete(OpReport(claim.graph.graph_id, op_id, failed))

    def read(self, session: int, graph_id: int, op_id: int, rank: int, tell: ReadReplyTo) -> None:
        """Note that a rank is ready for a read, and begin the read once all ranks are.

        A slot of the staging may be read into again only after the last copy out of it has ended,
        which each rank says this way. Raises FormatError if the session has no such read.
        """
        claim = self._claims.get(graph_id)
        read = None if claim is None else claim.reads.get(op_id)
        theirs = claim is not None and claim.session == session and rank < claim.ranks
        if claim is None or read is None or not theirs:
            raise FormatError(f"graph {graph_id} has no read {op_id} of this session")
        if op_id not in claim.left:
            raise FormatError(f"graph {graph_id}: read {op_id} has ended; its slots may be others'")
        if read.failed is not None:
            tell(read.failed)
            return
        read.asked[rank] = tell
        if len(read.asked) == claim.ranks and not read.running:
            self._begin(claim, op_id, read)

    def _begin(self, claim: _Claim, op_id: int, read: _ReadOp) -> None:
        op = msgspec.structs.replace(claim.op(op_id), op_id=0, deps=())
        number = next(self.manager.flights.ids)
        longest = min(claim.graph.deadline_s or self._late_s, self._late_s)
        alone = msgspec.structs.replace(claim.graph, graph_id=number, ops=(op,), deadline_s=longest)
        read.running = True
        self._transport.submit(alone)
        self._reading[alone.graph_id] = _Reading(claim, op_id, self._clock())

    def _read_ended(self, claim: _Claim, op_id: int, failed: dict[int, RowError]) -> None:
        read = claim.reads[op_id]
        read.running = False
        for tell in read.asked.values():
            tell(failed)
        # What was dropped at the session's deadline had not begun: it says nothing of the tier.
        dropped = {row for row, why in failed.items() if why is RowError.DEADLINE}
        read.failed = failed | dict.fromkeys(dropped, RowError.CANCELLED)
        read.asked.clear()
        if read.reported is not None:
            self._done(claim, op_id, read.reported)

    def withdraw(self, session: int, graph_id: int) -> None:
        """Fail the reads of a graph that have not begun, so that no rank waits for the others.

        A rank that asks later is told at once.
        """
        claim = self._claims.get(graph_id)
        if claim is None or claim.session != session:
            return
        for op_id, read in claim.reads.items():
            if not read.running and read.failed is None:
                self._read_ended(claim, op_id, claim.all_rows(op_id, RowError.CANCELLED))

    def begin(self, session: int, secret: bytes, then: Callable[[], object]) -> None:
        """Let a session's ranks join it on every machine; call ``then`` when they may."""
        if self.shared is None:
            then()
        else:
            self.shared.begin_session(session, secret, then)

    def leave(self, session: int) -> None:
        """End a session that no process of this machine holds, once none of the others does."""
        if self.shared is None:
            self.end(session)
        else:
            self.shared.end_session(session, lambda: self.end(session))

    def end(self, session: int) -> int:
        """End a session whose slots no process touches any more; return how many graphs it left."""
        left = [claim for claim in self._claims.values() if claim.session == session]
        for claim in left:
            for op_id in sorted(claim.left):
                if op_id in claim.left:
                    self._done(claim, op_id, claim.all_rows(op_id, RowError.CANCELLED))
        _log.info("session ends session=%d graphs_left=%d", session, len(left))
        return len(left)

    def tick(self) -> None:
        """Take in what the server's own threads have ended, and keep room in the host tier."""
        now = self._clock()  # first: what has waited for too long by now is dropped, and reported
        for report in self._transport.poll():
            reading = self._reading.pop(report.graph_id, None)
            if reading is None:
                self.manager.complete(report)
            else:
                self._read_ended(reading.claim, reading.op_id, report.failed)
        self._blame_late(now)
        self.manager.maintain()
        self.admin.step()

    def _blame_late(self, now: float) -> None:
        """Blame the tiers whose reads have begun and are late by the server's own deadline.

        A session gives its reads up at a deadline that it chose, so that proves nothing. Reads that
        wait behind others were dropped by then (`_begin`).
        """
        for reading in self._reading.values():
            if not reading.late and now - reading.since >= self._late_s:
                reading.late = True
                op = reading.claim.op(reading.op_id)
                self.manager.flights.blame(reading.claim.graph.graph_id, op.tier)

    def check_integrity(self) -> None:
        """Assert that the index is consistent and that a session owns every graph in flight."""
        self.manager.check_integrity()
        for claim in self._claims.values():
            assert claim.left, "a graph that has ended is claimed"
            assert self.manager.is_in_flight(claim.graph.graph_id), "a claim without a flight"

    def close(self) -> None:
        """Finish the server's writes, flush the tiers and give the memory back. Blocks.

        What other machines have to write they do by themselves.
        """
        self.admin.close()
        close_worker(self._transport.worker)
        self.tick()
        self._folder.remove_arena(self.arena)
        if self._segments is not None:
            self._segments.close()
        for release in self._releases:
            release()


def _spans(hit: Hit) -> list[SourceSpan]:
    return [(source.tier, source.start, source.stop) for source in hit.sources]
