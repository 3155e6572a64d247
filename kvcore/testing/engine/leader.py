"""kvcore beside the reference engine's scheduler: what is looked up, loaded, blended and saved.

One request, from here:

    lookup     keys, what the tiers hold, what a blend could use     (nothing is promised yet)
    start      its pages are known: the load, or the blend's copies, begin
    settle     after the forward: loads that failed send their request back
    save       blocks whose KV the forward has completed
    forget     the request is gone

Graphs go straight to the workers (`DirectTransport`), so the order of calls is the order of copies.
Before a page changes hands the engine calls `fence`, which waits for the graphs that use it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvcore.config import Config
from kvcore.connector.disagg import accept, promised
from kvcore.connector.fusion_messages import BlendPlan
from kvcore.connector.page_table import PageUsers, Paging
from kvcore.errors import CapacityError, FormatError
from kvcore.explain import Cause
from kvcore.explain.recorder import Watch
from kvcore.manager import HOST, Hit, Manager, Readiness
from kvcore.manager.base import Promise
from kvcore.manager.load_advisor import LoadAdvisor, PlanMemo
from kvcore.manager.load_policy import Action
from kvcore.model.identity import Namespaces, lora_identity
from kvcore.model.keys import KeyChain, Namespace
from kvcore.model.spec import ModelDescription
from kvcore.telemetry.metrics import Metrics, MissReason
from kvcore.testing.engine.fusing import Order, ReferenceFusionScheduler
from kvcore.testing.engine.requests import Request, State
from kvcore.testing.engine.transport import DirectTransport
from kvcore.transfer.graph import OpReport, TransferGraph
from kvcore.transfer.plan import layer_steps

__all__ = ["NO_PAGE", "Leader", "Lookup"]

_log = logging.getLogger("kvcore.testing.engine")

NO_PAGE = -1
MAX_ATTEMPTS = 2
"""Loads tried for a request; then it is computed. The first may find a block corrupt, and what is
corrupt has left the index when the second is planned."""

REPORT_WAIT_S = 0.01
"""How long to block at a time for a report of copies that have ended."""


class Lookup(NamedTuple):
    """KV of [start, stop) of a request can be brought. ``wait``: ask again in the next step.

    ``deadline_s`` is the planner's; None leaves it to the config."""

    hit: Hit
    start: int
    stop: int
    plan: BlendPlan | None = None
    wait: bool = False
    deadline_s: float | None = None


@dataclass
class _Tracked:
    """A request as the leader knows it. ``fetching`` are loads of chunks into host memory, waited
    for until ``give_up_at``."""

    chain: KeyChain
    saved_blocks: int = 0
    attempts: int = 0
    fetched: bool = False
    fetching: set[int] = field(default_factory=set)
    give_up_at: float = 0.0
    memo: PlanMemo = field(default_factory=PlanMemo)
    new: bool = True


@dataclass
class _Load:
    """A load of [.., ``stop``) under way."""

    request: Request
    stop: int
    failed: bool = False


class Leader:
    """One per engine. Engine thread only. No call waits but `fence` and `abort`."""

    def __init__(
        self,
        config: Config,
        model: ModelDescription,
        manager: Manager,
        transport: DirectTransport,
        metrics: Metrics,
        *,
        min_load_tokens: int,
        produces: bool,
        promise_s: float,
        fusion: ReferenceFusionScheduler | None,
        watch: Watch,
        planning: LoadAdvisor | None = None,
        on_close: Sequence[Callable[[], None]] = (),
    ) -> None:
        self.manager = manager
        self.metrics = metrics
        self.watch = watch
        self.orders: list[Order] = []
        self.sync: dict[int, TransferGraph] = {}
        """Loads that the coming forward waits for layer by layer."""
        self._config = config
        self._model = model
        self._transport = transport
        self._min_load = min_load_tokens
        self._produces = produces
        self._promise_s = promise_s
        self._fusion = fusion
        self._planning = planning
        self._on_close = on_close
        self._block = config.block.tokens
        self._paging = Paging(model.groups, self._block, no_page=NO_PAGE)
        self._namespaces = Namespaces(config.namespace, model.fingerprint)
        self._tracked: dict[int, _Tracked] = {}
        self._loads: dict[int, _Load] = {}
        self._using = PageUsers()
        self._copying: dict[int, set[int]] = {}  # graph -> its ops that use pages, not ended
        self._chunks: dict[int, Request] = {}  # copies into the staging of this step's blends
        self._learning: dict[int, tuple[KeyChain, int, int, list[int]]] = {}
        self._layer_steps = tuple(layer_steps(model.shape.layers))
        self._deadline_s = config.transfer.load_deadline_s

    # -- a request comes --------------------------------------------------------------------

    def lookup(self, request: Request, computed: int) -> Lookup | None:
        """What can be brought beyond the ``computed`` tokens that the engine holds itself."""
        tracked = self._track(request)
        tokens = len(request.tokens)
        hit = self.manager.get_match(tracked.chain.keys, tracked.chain.namespace.digest)
        promise = self._accepted(request, tracked.chain) if tracked.new else None
        tracked.new = False
        if self.manager.ask_stores(hit, computed // self._block, promise):
            return Lookup(hit, computed, computed, wait=True)
        name, space = str(request.request_id), tracked.chain.namespace
        self.watch.looked_up(name, request.tokens, computed, hit, space, self._block)
        # The last token is always computed: its logits are wanted.
        stop = min(hit.depth * self._block, tokens - 1)
        if self._fusion is not None:
            blend = self._blend(self._fusion, request, tracked, hit, computed)
            if blend is not None:
                return blend
        if tracked.attempts >= MAX_ATTEMPTS:
            self.metrics.looked_up({}, tokens, MissReason.LOAD_FAILED)
            return None
        if stop - computed < max(self._min_load, 1):
            self._missed_little(name, hit, computed, tokens)
            return None
        if self._planning is not None:
            plan = self._planning.plan(tracked.memo, hit, tokens, computed)
            self.watch.planned(name, plan)
            if plan.action is Action.RECOMPUTE:
                self.metrics.looked_up({}, tokens, MissReason.PLANNED)
                return None
            stop = plan.stop
        ready = self.manager.can_load(hit, *self._blocks(computed, stop))
        if ready is Readiness.NEVER:
            self.watch.missed(name, Cause.BUSY)
            self.metrics.looked_up({}, tokens, MissReason.BUSY)
            return None
        deadline_s = tracked.memo.deadline_s(self._deadline_s)
        return Lookup(hit, computed, stop, wait=ready is Readiness.LATER, deadline_s=deadline_s)

    def _accepted(self, request: Request, chain: KeyChain) -> Promise | None:
        """What another engine has promised of the request's prompt."""
        if request.promise is None:
            return None
        try:
            return accept(request.promise, chain, self._promise_s)
        except FormatError as error:
            _log.warning("promise refused request=%d: %s", request.request_id, error)
            return None

    def _missed_little(self, name: str, hit: Hit, computed: int, tokens: int) -> None:
        """Nothing is held beyond what the engine holds itself, or too little for a load."""
        if hit.depth:
            self.watch.missed(name, Cause.TOO_SHORT)
        if not computed:
            reason = MissReason.TOO_SHORT if hit.depth else MissReason.NOT_CACHED
            self.metrics.looked_up({}, tokens, reason)

    def _track(self, request: Request) -> _Tracked:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            chain = KeyChain(self.namespace_of(request), self._block)
            tracked = self._tracked[request.request_id] = _Tracked(chain)
        tracked.chain.extend(request.tokens[tracked.chain.num_tokens :])
        return tracked

    def namespace_of(self, request: Request) -> Namespace:
        """Whose KV the request may share."""
        lora = request.lora
        name = "" if lora is None else lora_identity(lora.name, str(lora))
        return self._namespaces.of(name, request.salt)

    def _blocks(self, start_token: int, stop_token: int) -> tuple[int, int]:
        return start_token // self._block, -(-stop_token // self._block)

    def _blend(
        self,
        fusion: ReferenceFusionScheduler,
        request: Request,
        tracked: _Tracked,
        hit: Hit,
        computed: int,
    ) -> Lookup | None:
        """A blend of the request, if one is worth it; chunks on slower tiers are fetched once."""
        if tracked.attempts:
            return None
        exact = max(computed, min(hit.depth * self._block, len(request.tokens) - 1))
        plan = fusion.plan_blend(request, tracked.chain, exact)
        if plan is None:
            return None
        if not tracked.fetched:
            tracked.fetched = True
            tracked.give_up_at = time.monotonic() + self._deadline_s
            wanted = [(hit, *self._blocks(computed, exact))]
            wanted += [source for _, source in fusion.chunks.sources(plan)]
            for source, start, stop in wanted:
                self._fetch(tracked, source, start, stop)
        if tracked.fetching and time.monotonic() < tracked.give_up_at:
            return Lookup(hit, computed, computed, wait=True)
        in_host = fusion.chunks.in_host(plan)
        first, last = self._blocks(computed, exact)
        if in_host is None or not set(hit.blocks_by_tier(first, last)) <= {HOST}:
            return None
        return Lookup(hit, computed, in_host.stop, in_host)

    def _fetch(self, tracked: _Tracked, hit: Hit, start: int, stop: int) -> None:
        """Bring blocks into host memory, with those before them, behind which alone they stay."""
        if set(hit.blocks_by_tier(start, stop)) <= {HOST}:
            return
        start = hit.in_host
        ended: list[int] = []
        try:
            graph = self.manager.launch_load(
                hit,
                start,
                stop,
                self._paging.no_units(start, stop),
                deadline_s=self._deadline_s,
                on_end=lambda: tracked.fetching.difference_update(ended),
            )
        except CapacityError:
            return
        ended.append(graph.graph_id)
        tracked.fetching.add(graph.graph_id)

    def start(self, request: Request, found: Lookup) -> None:
        """The request has its pages: load into them, or order the blend that fills them.

        Sets what of the request counts as computed, or LOADING where it must wait for that.
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
                self._follow(graph, ())
            request.computed = found.plan.stop
            request.reused["blend"] = found.plan.reused
        self.watch.loaded(str(request.request_id), request.reused)
        missed = len(request.tokens) - found.start - sum(request.reused.values())
        self.metrics.looked_up(request.reused, missed)

    def _load(self, request: Request, found: Lookup, stop: int, in_step: bool) -> None:
        hit, start = found.hit, found.start
        first, last = self._blocks(start, stop)
        tiers = set(hit.blocks_by_tier(first, last))
        small = (last - first) * self._model.shape.nbytes <= self._config.transfer.sync_load_max
        in_step = in_step or (tiers <= {HOST} and small)
        try:
            graph = self.manager.launch_load(
                hit,
                first,
                last,
                self._paging.units([request.pages], first, last, start),
                layers=self._layer_steps if in_step else (),
                deadline_s=None if in_step else found.deadline_s or self._deadline_s,
            )
        except CapacityError:  # no room to pass it through: it is computed
            assert not in_step, "a load from host memory needs no slots"
            return
        self._use(graph)
        self._loads[graph.graph_id] = _Load(request, stop)
        request.reused = self._by_tier(hit, start, stop)
        if in_step:
            self.sync[graph.graph_id] = graph
            request.computed = stop
        else:
            request.state = State.LOADING

    def _by_tier(self, hit: Hit, start: int, stop: int) -> dict[str, int]:
        """Tokens of [start, stop) by the tier they come from."""
        found = {}
        for source in hit.sources:
            a, b = max(source.start * self._block, start), min(source.stop * self._block, stop)
            if b > a:
                found[source.tier] = b - a
        return found

    # -- a step ends ------------------------------------------------------------------------

    def settle(self) -> list[Request]:
        """Take in the loads of the step. Returns the requests whose load failed: what was computed
        for them is worth nothing. Blocks until all of them are reported: bytes that are there may
        be the wrong ones, and a report may come behind them."""
        for graph_id in self.sync:
            self._transport.wait_device(graph_id)
        failed = self.pump()
        while (self.sync.keys() | self._chunks.keys()) & self._copying.keys():
            self._transport.wait_report(REPORT_WAIT_S)
            failed += [request for request in self.pump() if request not in failed]
        self.sync.clear()
        self.orders.clear()
        self._chunks.clear()
        if self._fusion is not None:
            self._fusion.end_step()
        return failed

    def pump(self) -> list[Request]:
        """Take in what has ended; requests whose load arrived run. Returns those of failed ones."""
        self.manager.maintain()
        failed = []
        for report in self._transport.poll():
            self.manager.complete(report)
            request = self._take(report)
            if request is not None and request not in failed:
                failed.append(request)
                self.failed(request)
        return failed

    def _take(self, report: OpReport) -> Request | None:
        """Let go of pages when a graph uses them no more; the request whose KV did not come."""
        spoilt = self._chunks.get(report.graph_id) if report.failed else None
        left = self._copying.get(report.graph_id, set())
        load = self._loads.get(report.graph_id)
        if report.op_id not in left:
            return spoilt
        left.discard(report.op_id)
        if load is not None:  # what failed on the way from a tier fails here too
            load.failed = load.failed or bool(report.failed)
        if left:
            return spoilt
        del self._copying[report.graph_id]
        self._using.drop(report.graph_id)
        if (saved := self._learning.pop(report.graph_id, None)) is not None:
            self._learn(*saved)
        return spoilt if load is None else self._arrived(self._loads.pop(report.graph_id))

    def _arrived(self, load: _Load) -> Request | None:
        request = load.request
        if request.state.ended:
            return None
        if load.failed:
            return request
        if request.state is State.LOADING:
            request.state, request.computed = State.RUNNING, load.stop
            self.watch.arrived(str(request.request_id))
        return None

    def wait(self, timeout: float) -> bool:
        """Block until something has ended, at most ``timeout`` seconds."""
        if not self.manager.in_flight:
            return self.manager.wait_stores(timeout)
        return self._transport.wait_report(timeout)

    def failed(self, request: Request) -> None:
        """A load or a blend of the request failed: it is tried once more, then computed."""
        if (tracked := self._tracked.get(request.request_id)) is not None:
            tracked.attempts += 1
            tracked.memo = PlanMemo()  # what is in its way by now is weighed afresh
            self.watch.failed(str(request.request_id))

    def save(self, request: Request) -> None:
        """Save the blocks that are computed now. The forward that computed them has ended."""
        if len(request.answer) == 1:
            self.watch.step(str(request.request_id), "prefill")
        tracked = self._track(request)
        blocks = min(request.exact, len(request.tokens)) // self._block
        if blocks <= tracked.saved_blocks:
            return
        pages = [request.pages]
        graph = self.manager.launch_save(
            tracked.chain.keys,
            tracked.chain.namespace.digest,
            blocks,
            lambda start, stop: self._paging.whole_units(pages, start, stop),
            request.tokens if tracked.chain.plain else None,
        )
        learned = (tracked.chain, tracked.saved_blocks, blocks, list(request.tokens))
        tracked.saved_blocks = blocks
        if graph is None:
            self._learn(*learned)
        else:
            self._use(graph)
            self._learning[graph.graph_id] = learned

    def _learn(self, chain: KeyChain, start: int, stop: int, tokens: list[int]) -> None:
        if self._fusion is not None:
            self._fusion.chunks.learn(chain, start, stop, tokens)

    # -- pages change hands -----------------------------------------------------------------

    def _use(self, graph: TransferGraph) -> None:
        self._follow(graph, self._paging.pages_of(graph.units))

    def _follow(self, graph: TransferGraph, pages: Sequence[int]) -> None:
        """Note the copies of a graph until they are reported; they use ``pages`` of the engine."""
        self._using.add(graph.graph_id, pages)
        self._copying[graph.graph_id] = {op.op_id for op in graph.ops if op.path.touches_device}

    def fence(self, pages: Sequence[int]) -> None:
        """Block until no graph uses ``pages``: the engine gives them to another request."""
        for _, graphs in list(self._using.among(set(pages))):
            for graph_id in set(graphs):
                self._transport.wait_device(graph_id)

    def abort(self, request: Request) -> None:
        """Drop what loads of the request have not begun; block until the rest is done."""
        for graph_id, load in self._loads.items():
            if load.request is request:
                self.manager.cancel(graph_id)
                self._transport.wait_device(graph_id)
        self.forget(request)

    def preempted(self, request: Request) -> None:
        """The request lost its pages and will be looked up again."""
        self._tracked[request.request_id].saved_blocks = 0

    def forget(self, request: Request) -> None:
        """The request is over."""
        self.watch.ended(str(request.request_id), request.state.value)
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is not None and self._produces and request.state is State.DONE:
            blocks = min(tracked.saved_blocks, request.prompt_len // self._block)
            request.promised = promised(tracked.chain, blocks, self.manager)

    # -- upkeep -----------------------------------------------------------------------------

    def clear(self) -> None:
        """Forget every block of every tier."""
        self.manager.clear()
        if self._fusion is not None:
            self._fusion.chunks.forget()

    def check_integrity(self) -> None:
        """Index, flights and pages in use agree with each other."""
        self.manager.check_integrity()
        self._using.check_integrity()
        assert self._using.graphs == self._copying.keys(), "graphs that use pages differ"

    @property
    def leftovers(self) -> list[str]:
        """What is still held or under way; empty when the engine is idle and all has settled."""
        what = {
            "graphs in flight": self.manager.in_flight,
            "loads": len(self._loads),
            "requests": len(self._tracked),
            "graphs that use pages": len(self._using.graphs),
            "blends": len(self.orders),
        }
        return [f"{count} {name}" for name, count in what.items() if count]

    def close(self) -> None:
        """Let go of what the leader holds. The workers have closed before."""
        self.pump()
        if self._fusion is not None:
            self._fusion.chunks.close()
        self.watch.close()
        for release in self._on_close:
            release()
