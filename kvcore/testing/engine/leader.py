"""The leader beside the reference engine's scheduler: lookups, loads, blends and saves.

The life of a request:

    lookup     its keys, the blocks in the tiers, a plan of a blend     (nothing is promised yet)
    start      its pages are known: the load, or the blend's copies, begin
    settle     after the forward: requests whose load failed are returned to the engine
    save       the blocks whose KV the forward has completed
    forget     the request is over

Graphs go straight to the workers (`DirectTransport`), so the order of calls is the order of copies.
Before a page is given to another request the engine calls `fence`, which waits for the graphs that
use it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvcore.config import Config
from kvcore.connector.control import ControlReader, RequestControl
from kvcore.connector.disagg import accepted, promised
from kvcore.connector.fusion_messages import BlendPlan
from kvcore.connector.leader import LeaderCore, LeaderParts, LeaderTraits
from kvcore.connector.patience import Patience
from kvcore.errors import CapacityError, KVCoreError, TierUnavailable
from kvcore.manager import HOST, Hit, Readiness
from kvcore.manager.base import Promise
from kvcore.manager.load_advisor import PlanMemo
from kvcore.manager.load_policy import Action
from kvcore.model.identity import lora_identity
from kvcore.model.keys import KeyChain, Namespace
from kvcore.model.spec import ModelDescription
from kvcore.telemetry.metrics import MissReason
from kvcore.testing.engine.fusing import Order, ReferenceFusionScheduler
from kvcore.testing.engine.requests import Request, State
from kvcore.testing.engine.transport import DirectTransport
from kvcore.transfer.graph import OpReport, Span, TransferGraph

__all__ = ["NO_PAGE", "Leader", "Lookup"]

_log = logging.getLogger("kvcore.testing.engine")

NO_PAGE = -1
MAX_ATTEMPTS = 2
"""Loads to try before a request is computed. If the first one finds a corrupt block, that block has
left the index when the second is planned."""

REPORT_WAIT_S = 0.01
"""Seconds to block at a time for a report of copies that have ended."""


class Lookup(NamedTuple):
    """The result of a lookup: KV of [start, stop) can be loaded, or made by a blend.

    Attributes:
        plan: the blend that makes part of the KV; None without a blend.
        wait: nothing can be loaded yet; look up again in the next step.
        deadline_s: the planner's deadline for the load; None for the config's.
    """

    hit: Hit
    start: int
    stop: int
    plan: BlendPlan | None = None
    wait: bool = False
    deadline_s: float | None = None


@dataclass
class _Tracked:
    """A request as the leader knows it.

    Attributes:
        attempts: loads and blends of the request that failed.
        fetched: the loads of its chunks into host memory were launched.
        fetching: those loads that are in flight.
        new: the request has not been looked up yet.
        is_current: the tiers were not cleared since the request arrived. Otherwise it neither
            loads nor saves any more.
        control: what it asks of kvcore.
        patience: how long it has waited in kvcore, and still may.
    """

    chain: KeyChain
    control: RequestControl
    patience: Patience
    saved_blocks: int = 0
    attempts: int = 0
    fetched: bool = False
    fetching: set[int] = field(default_factory=set)
    memo: PlanMemo = field(default_factory=PlanMemo)
    new: bool = True
    is_current: bool = True

    @property
    def may_load(self) -> bool:
        return self.is_current and self.attempts < MAX_ATTEMPTS


@dataclass
class _Load:
    """A load in flight of a request's tokens up to ``stop``."""

    request: Request
    stop: int
    failed: bool = False


class Leader(LeaderCore[ReferenceFusionScheduler]):
    """One per engine. Engine thread only. No call waits but `fence` and `abort`."""

    def __init__(
        self,
        config: Config,
        model: ModelDescription,
        parts: LeaderParts[ReferenceFusionScheduler],
        transport: DirectTransport,
        *,
        min_load_tokens: int,
        produces: bool,
        promise_s: float,
    ) -> None:
        traits = LeaderTraits(
            no_page=NO_PAGE, min_load_tokens=max(min_load_tokens, 1), layerwise=True
        )
        super().__init__(config, model, parts, traits)
        self.orders: list[Order] = []
        self.sync: dict[int, TransferGraph] = {}
        """The loads that the next forward waits for, layer by layer."""
        self._copies = transport
        self._controls = ControlReader(self.metrics)
        self._produces = produces
        self._promise_s = promise_s
        self._tracked: dict[int, _Tracked] = {}
        self._loads: dict[int, _Load] = {}
        self._chunks: dict[int, Request] = {}  # copies for this step's blends

    # -- a request comes --------------------------------------------------------------------

    def lookup(self, request: Request, computed: int) -> Lookup | None:
        """Look up the tokens beyond the ``computed`` ones that the engine holds itself.

        Returns None if there is nothing to load.
        """
        tracked = self._track(request)
        if self.disabled or not tracked.may_load:
            return None
        tracked.patience.end(now := time.monotonic())
        found = self._look_up(request, tracked, computed, now)
        if found is not None and found.wait:
            tracked.patience.begin(now)
        return found

    def _look_up(
        self, request: Request, tracked: _Tracked, computed: int, now: float
    ) -> Lookup | None:
        """Look a request up, as `lookup` does. It does not wait ``now``."""
        tokens = len(request.tokens)
        control = tracked.control
        hit = self.manager.get_match(tracked.chain.keys, tracked.chain.namespace.digest)
        promise = self._promise(request, tracked)
        patience = tracked.patience
        if control.load and self._asks_stores(patience, hit, computed, promise, now):
            return Lookup(hit, computed, computed, wait=True)
        name, space, shown = str(request.request_id), tracked.chain.namespace, control.shown()
        self.recorder.looked_up(name, request.tokens, computed, hit, space, self._block, shown)
        if not control.load:
            self.recorder.missed(name, control.why_no_load, tokens - computed)
            return None
        # The last token is always computed: its logits are wanted.
        stop = min(hit.depth * self._block, tokens - 1)
        if self._fusion is not None:
            blend = self._blend(self._fusion, request, tracked, hit, computed)
            if blend is not None:
                return blend
        gain = stop - computed
        if gain < self._traits.min_load_tokens:
            self._missed_little(name, hit, gain, computed, tokens)
            return None
        if self._planning is not None:
            plan = self._planning.plan(tracked.memo, hit, tokens, computed)
            self.recorder.planned(name, plan, tokens - computed)
            if plan.action is Action.RECOMPUTE:
                return None
            stop = plan.stop
        stop, ready = self._admitted(patience, hit, computed, stop)
        if ready is Readiness.NEVER:
            if not tracked.attempts:  # else the failed load was counted
                self.recorder.missed(name, MissReason.BUSY, tokens - computed)
            return None
        deadline_s = min(tracked.memo.deadline_s(patience.left_s), patience.left_s)
        return Lookup(hit, computed, stop, wait=ready is Readiness.LATER, deadline_s=deadline_s)

    def _promise(self, request: Request, tracked: _Tracked) -> Promise | None:
        """Return another engine's promise at the request's first lookup, else None."""
        new, tracked.new = tracked.new, False
        promise = request.promise if new else None
        chain, name = tracked.chain, request.request_id
        return accepted(promise, chain, self._promise_s, name, self.metrics)

    def _track(self, request: Request) -> _Tracked:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            chain = KeyChain(self.namespace_of(request), self._block)
            control = self._controls.read(request.request_id, request.asked)
            tracked = self._tracked[request.request_id] = _Tracked(
                chain, control, Patience(self._deadline_s)
            )
        tracked.chain.extend(request.tokens[tracked.chain.num_tokens :])
        return tracked

    def namespace_of(self, request: Request) -> Namespace:
        """Return the namespace of the KV that the request may share."""
        lora = request.lora
        name = "" if lora is None else lora_identity(lora.name, str(lora))
        return self.namespaces.of(name, request.salt)

    def _blend(
        self,
        fusion: ReferenceFusionScheduler,
        request: Request,
        tracked: _Tracked,
        hit: Hit,
        computed: int,
    ) -> Lookup | None:
        """Return a blend of the request, or None if none is worth it.

        Chunks on slower tiers are fetched into host memory once; the lookup waits for them.
        """
        if tracked.attempts:
            return None
        exact = max(computed, min(hit.depth * self._block, len(request.tokens) - 1))
        plan = fusion.plan_blend(request, tracked.chain, exact)
        if plan is None:
            return None
        if not tracked.fetched and tracked.patience.may_begin:
            tracked.fetched = True
            wanted = [(hit, *self._blocks(computed, exact))]
            wanted += [source for _, source in fusion.chunks.sources(plan)]
            for source, start, stop in wanted:
                self._fetch(tracked, source, start, stop)
        if tracked.fetching and not tracked.patience.is_over:
            return Lookup(hit, computed, computed, wait=True)
        in_host = fusion.chunks.in_host(plan)
        first, last = self._blocks(computed, exact)
        if in_host is None or not set(hit.blocks_by_tier(first, last)) <= {HOST}:
            return None
        return Lookup(hit, computed, in_host.stop, in_host)

    def _fetch(self, tracked: _Tracked, hit: Hit, start: int, stop: int) -> None:
        """Launch a load of blocks into host memory.

        Host memory keeps a block only behind all blocks before it, so these are loaded too.
        """
        if set(hit.blocks_by_tier(start, stop)) <= {HOST}:
            return
        ended: list[int] = []
        try:
            planned = self.manager.plan_fetch(hit, stop, deadline_s=tracked.patience.left_s)
        except KVCoreError:  # an earlier fetch evicted its blocks
            return
        if planned is not None:
            graph = self.manager.launch(
                planned, on_end=lambda: tracked.fetching.difference_update(ended)
            )
            ended.append(graph.graph_id)
            tracked.fetching.add(graph.graph_id)

    def start(self, request: Request, found: Lookup) -> None:
        """Launch the load into the request's allocated pages, or order the blend that fills them.

        Sets the number of computed tokens, or the state LOADING if the request must wait for the
        load.
        """
        stop = found.stop if found.plan is None else found.plan.exact
        if stop > found.start:
            self._load(request, found, stop, in_step=found.plan is not None)
        if found.plan is not None:
            assert self._fusion is not None
            order = self._fusion.order_blend(request, found.plan)
            self.orders.append(order)
            self._chunks.update(dict.fromkeys(order.graphs, request))
            for graph in order.graphs.values():
                self._use(graph)
            request.computed = found.plan.stop
            request.reused["blend"] = found.plan.reused
        missed = len(request.tokens) - found.start - sum(request.reused.values())
        self.recorder.loaded(str(request.request_id), request.reused, missed)

    def _load(self, request: Request, found: Lookup, stop: int, in_step: bool) -> None:
        hit, start = found.hit, found.start
        first, last = self._blocks(start, stop)
        tiers = set(hit.blocks_by_tier(first, last))
        small = (last - first) * self._model.shape.nbytes <= self._config.transfer.sync_load_max
        in_step = in_step or (tiers <= {HOST} and small)
        try:
            planned = self.manager.plan_load(
                hit,
                Span(first, last),
                layers=self._layer_steps if in_step else (),
                deadline_s=None if in_step else found.deadline_s or self._deadline_s,
            )
        except CapacityError:  # no host slots to load through: the engine computes
            assert not in_step, "a load from host memory needs no slots"
            return
        except TierUnavailable:  # the server is gone, or lost the blocks
            return
        units = self._paging.units([request.pages], first, last, start)
        graph = self.manager.launch(planned, units)
        self._use(graph)
        self._loads[graph.graph_id] = _Load(request, stop)
        request.reused = self._by_tier(hit, start, stop)
        if in_step:
            self.sync[graph.graph_id] = graph
            request.computed = stop
        else:
            request.state = State.LOADING
            self._tracked[request.request_id].patience.begin(time.monotonic())

    # -- a step ends ------------------------------------------------------------------------

    def settle(self) -> list[Request]:
        """Wait for the loads of the step and return the requests whose load failed.

        The tokens that the step computed for them are invalid. Blocks until every load is reported:
        the bytes of a failed load may be in place before its report comes.
        """
        for graph_id in self.sync:
            self._copies.wait_device(graph_id)
        failed = self.pump()
        while (self.sync.keys() | self._chunks.keys()) & self._users.graphs:
            self._copies.wait_report(REPORT_WAIT_S)
            failed += self.pump(failed)
        self.sync.clear()
        self.orders.clear()
        self._chunks.clear()
        return failed

    def pump(self, known: Sequence[Request] = ()) -> list[Request]:
        """Handle the ops that have ended; requests whose load arrived go on.

        Returns the requests whose load or blend failed, except those in ``known``.
        """
        self.manager.maintain()
        failed: list[Request] = []
        for report in self._copies.poll():
            request = self._take(report)
            if request is not None and request not in failed and request not in known:
                failed.append(request)
                self.failed(request)
        return failed

    def _take(self, report: OpReport) -> Request | None:
        """Handle the end of an op.

        Returns the request whose KV did not arrive, if the op was the last of its load or a copy
        for a blend.
        """
        spoilt = self._chunks.get(report.graph_id) if report.failed else None
        load = self._loads.get(report.graph_id)
        if load is not None:  # a failed read from a tier fails the load too
            load.failed = load.failed or bool(report.failed)
        if not self._complete(report) or load is None:
            return spoilt
        return self._arrived(report.graph_id, self._loads.pop(report.graph_id))

    def _arrived(self, graph_id: int, load: _Load) -> Request | None:
        request = load.request
        tracked = self._tracked.get(request.request_id)
        if request.state.ended or tracked is None:
            return None
        tracked.patience.end(time.monotonic())
        if load.failed:
            if graph_id in self._late:
                tracked.patience.spend()
            return request
        tracked.patience.renew()
        if request.state is State.LOADING:
            request.state, request.computed = State.RUNNING, load.stop
            self.recorder.arrived(str(request.request_id))
        return None

    def wait(self, timeout: float) -> bool:
        """Block for at most ``timeout`` seconds for an op, or a store's answer, to end.

        Returns True if there is one.
        """
        if not self.manager.in_flight:
            return self.manager.wait_stores(timeout)
        return self._copies.wait_report(timeout)

    def failed(self, request: Request) -> None:
        """Record that a load or a blend failed: it is tried once more, then computed."""
        if (tracked := self._tracked.get(request.request_id)) is not None:
            tracked.attempts += 1
            tracked.memo = PlanMemo()  # the next attempt is planned afresh
            self._failed(str(request.request_id), request.reused)

    def save(self, request: Request) -> None:
        """Save the computed blocks. Call after the forward that computed them has ended."""
        if len(request.answer) == 1:
            self.recorder.step(str(request.request_id), "prefill")
        tracked = self._track(request)
        blocks = tracked.control.savable(min(request.exact, len(request.tokens))) // self._block
        if blocks <= tracked.saved_blocks or self.disabled or not tracked.is_current:
            return
        pages, known = [request.pages], tracked.saved_blocks
        tracked.saved_blocks = blocks
        self._save(tracked.chain, blocks, pages, request.tokens, known=known)

    # -- pages change hands -----------------------------------------------------------------

    def fence(self, pages: Sequence[int]) -> None:
        """Block until no graph uses ``pages``, which the engine gives to another request."""
        for _, graphs in list(self._users.among(set(pages))):
            for graph_id in set(graphs):
                self._copies.wait_device(graph_id)

    def abort(self, request: Request) -> None:
        """Cancel the request's loads, and block until the copies that had begun have ended."""
        for graph_id, load in self._loads.items():
            if load.request is request:
                self.manager.cancel(graph_id)
                self._copies.wait_device(graph_id)
        self.forget(request)

    def preempted(self, request: Request) -> None:
        """Start over with a request that lost its pages and will be looked up again."""
        tracked = self._tracked[request.request_id]
        tracked.saved_blocks = 0
        tracked.patience.renew()

    def forget(self, request: Request) -> None:
        """Forget a request that is over, and promise its blocks if this engine is a producer."""
        self.recorder.ended(str(request.request_id), request.state.value)
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is not None and self._produces and request.state is State.DONE:
            blocks = min(tracked.saved_blocks, request.prompt_len // self._block)
            request.promised = promised(tracked.chain, blocks, self.manager)

    # -- upkeep -----------------------------------------------------------------------------

    def _stop_running(self) -> None:
        for tracked in self._tracked.values():
            tracked.is_current = False

    @property
    def leftovers(self) -> list[str]:
        """Lines on what is still held or in flight. Empty when the engine is idle and settled."""
        what = {
            "graphs in flight": self.manager.in_flight,
            "loads": len(self._loads),
            "requests": len(self._tracked),
            "graphs that use pages": len(self._users.graphs),
            "blends": len(self.orders),
        }
        return [f"{count} {name}" for name, count in what.items() if count]

    def close(self) -> None:
        """Release the leader's resources. Blocks. Call after the workers have closed."""
        self.pump()
        super().close()
