"""The leader beside the scheduler of rank 0: decides what is loaded and saved, copies nothing.

    lookup    keys, match, plan; blocks on lower tiers are staged in host memory first
    load      looks up again, and loads only if all blocks are still verified in host memory
    inserted  saves the blocks that the tree has and no tier holds; offers wait for the saves
    _pump     handles reports, sends graphs that do not touch the engine's pages

SGLang relies on the result of a lookup and aborts a request whose load fails. A lookup therefore
counts only blocks that are verified in every rank's host memory. For other blocks the request stays
in the scheduler's queue (`holds`), so no call waits for a disk. If a load is refused, the engine
computes the tokens as if nothing had been found. Nothing is pinned between lookup and load, so an
aborted request leaves nothing to release.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcore.config import Config
from kvcore.connector.control import FREE, RequestControl
from kvcore.connector.fusion_messages import BlendPlan
from kvcore.connector.leader import LeaderCore, LeaderParts, LeaderTraits
from kvcore.connector.step_transport import Outbox
from kvcore.errors import KVCoreError
from kvcore.manager.base import HOST, Hit, Lane, Planned, Source
from kvcore.manager.load_policy import Action, Plan
from kvcore.model.keys import KeyChain, Namespace
from kvcore.model.spec import ModelDescription
from kvcore.telemetry.metrics import Data
from kvcore.transfer.graph import OpReport, RowError, Span, TransferGraph
from kvcore.worker import refuse
from kvcore_sglang.books import Asked, Offer, Tokens
from kvcore_sglang.fusion_scheduler import Asking, SglangFusionScheduler
from kvcore_sglang.messages import Order
from kvcore_sglang.ranks import RankLinks
from kvcore_sglang.staging import Staging
from kvcore_sglang.worker import WorkerConnector

_log = logging.getLogger("kvcore.sglang.leader")

NO_PAGE = -1
ASKED_KEPT = 1024
"""The number of requests whose last lookup is remembered, more than any scanned queue holds."""
SERVED_KEPT = 1024
"""The number of requests whose reused tokens are remembered."""
REST_S = 0.005
"""Seconds that an idle engine rests before it checks again for arrived KV and new requests. Each
check takes a millisecond from the threads that read."""
PUBLISH_S = 1.0
"""Seconds between two updates of the engine's metrics."""


def _below(blocks: Mapping[str, int]) -> int:
    """Return how many of the blocks, counted by tier, are on tiers below host memory."""
    return sum(count for tier, count in blocks.items() if tier != HOST)


class Leader(LeaderCore[SglangFusionScheduler]):
    """The leader of one engine. Called from the scheduler's thread only.

    ``local`` is the worker of the leader's own rank. ``links`` reach the other ranks. ``publish``
    receives the increase of the counters about every `PUBLISH_S` seconds.
    """

    def __init__(
        self,
        config: Config,
        model: ModelDescription,
        parts: LeaderParts[SglangFusionScheduler],
        outbox: Outbox,
        local: WorkerConnector,
        links: RankLinks,
        open_tiers: dict[str, dict[str, Any]],
        publish: Callable[[Data], None] | None = None,
    ) -> None:
        self._settings = settings = config.sglang
        self._page = model.groups[0].page_tokens
        traits = LeaderTraits(
            no_page=NO_PAGE,
            min_load_tokens=max(settings.min_load_tokens, self._page),
            layerwise=settings.layerwise,
            host_only=True,
        )
        super().__init__(config, model, parts, traits)
        self._outbox = outbox
        outbox.pump = self._work
        self._local = local
        self._links = links
        self._publish = publish
        self._publish_at = 0.0
        self._staging = Staging(config, self.manager, self._paging, self._send)
        self._asked: OrderedDict[str, Asked] = OrderedDict()
        self._refused: OrderedDict[str, None] = OrderedDict()
        self._served: OrderedDict[str, dict[str, int]] = OrderedDict()
        self._offers: deque[Offer] = deque()
        self._reading: dict[int, list[Offer]] = {}  # save -> offers that wait for its copy
        self._loading: dict[int, str] = {}
        self._broadcast(Order(now=True, open_tiers=open_tiers))

    # -- a request waits --------------------------------------------------------------------

    def lookup(
        self,
        rid: str,
        tokens: Tokens,
        device_tokens: int,
        namespace: Namespace,
        asking: Asking | None = None,
        *,
        resumed: bool = False,
        control: RequestControl = FREE,
    ) -> int:
        """Return how many tokens beyond ``device_tokens`` can be loaded now: whole pages.

        ``tokens`` are those that the engine would reuse, so it computes at least one more. If the
        prompt in ``asking`` is to be blended, the tokens that the blend makes count too. Blocks on
        tiers below host memory start to load, and `holds` says whether to wait for them.
        ``resumed`` is the result of `is_resumed` for the request until it is loaded. ``control`` is
        what it asks of kvcore.
        """
        if self.disabled or rid in self._refused:
            return 0
        self._pump()
        asked = self._ask(rid, tokens, device_tokens, namespace)
        asked.resumed, asked.control = resumed, control
        if not control.load:
            return self._compute_all(rid, asked, tokens)
        hit = self.manager.get_match(asked.chain.keys, asked.chain.namespace.digest)
        self._record_lookup(rid, asked, tokens, hit)
        asked.take(asking)
        plan = self._weigh(asked, hit)
        worth = asked.tokens if plan is None else plan.stop
        self._bring(asked, hit, worth)
        asked.plan, asked.held = None, self._staging.waits(asked.wait)
        if asked.held:
            return 0
        stop = min(hit.in_host * self._block, worth) // self._page * self._page
        asked.plan = self._blend(rid, asked, namespace, max(stop, device_tokens))
        if asked.held:
            return 0
        if asked.plan is not None:
            asked.stop = asked.plan.stop
            return asked.stop - device_tokens
        gain = stop - device_tokens
        if gain < self._traits.min_load_tokens:
            self._staging.leave(asked.wait)
            if not asked.counted:  # a request is looked up again and again while it waits
                asked.counted = True
                self._count_miss(rid, asked, hit, gain, plan)
            return 0
        if plan is not None:
            self.recorder.planned(rid, plan, asked.tokens - device_tokens)
        asked.stop = stop
        return gain

    def _weigh(self, asked: Asked, hit: Hit) -> Plan | None:
        """Return what the planner expects to be fastest; None if nobody asks it.

        It is not asked if there is little to load, or about a prompt that fusion may blend.
        """
        planning, asked.wait.most_s = self._planning, math.inf
        gain = min(hit.depth * self._block, asked.tokens) - asked.device_tokens
        blends = self._fusion is not None and asked.asking is not None
        if planning is None or blends or gain < self._traits.min_load_tokens:
            return None
        plan = planning.plan(asked.memo, hit, asked.tokens + 1, asked.device_tokens)
        asked.wait.most_s = asked.memo.deadline_s(math.inf)
        return plan

    def _count_miss(self, rid: str, asked: Asked, hit: Hit, gain: int, plan: Plan | None) -> None:
        """Count a lookup that loads nothing, though ``gain`` tokens of ``hit`` could be loaded."""
        if plan is not None and plan.action is Action.RECOMPUTE:
            self.recorder.planned(rid, plan, asked.tokens - asked.device_tokens)
        else:
            self._missed_little(rid, hit, gain, asked.device_tokens, asked.tokens)

    def _compute_all(self, rid: str, asked: Asked, tokens: Tokens) -> int:
        """Count a request that asks for no load, once. Return 0: it loads nothing."""
        hit = self.manager.get_match(asked.chain.keys, asked.chain.namespace.digest)
        self._record_lookup(rid, asked, tokens, hit)
        asked.plan, asked.held = None, False
        if not asked.counted:
            asked.counted = True
            missed = asked.tokens - asked.device_tokens
            self.recorder.missed(rid, asked.control.why_no_load, missed)
        return 0

    def _record_lookup(self, rid: str, asked: Asked, tokens: Tokens, hit: Hit) -> None:
        """Record the result of a lookup, unless it is recorded already.

        A request is looked up again and again while it waits, and again after its load. The lookups
        that matter are those before the load, if they found something new.
        """
        found = asked.device_tokens, hit.depth
        if not self.recorder.wants_lookups or asked.noted == found or self.recorder.has_loaded(rid):
            return
        asked.noted = found
        space, first, shown = asked.chain.namespace, asked.device_tokens, asked.control.shown()
        self.recorder.looked_up(rid, tokens.data, first, hit, space, self._block, shown)

    def holds(self, rid: str, *, resting: bool = False) -> bool:
        """Return True if the request should stay in the queue until its next lookup.

        That is so if KV was being loaded for it at its last lookup. If the engine is ``resting``,
        because it has nothing to compute, the call blocks up to `REST_S` for a graph to end.
        """
        asked = self._asked.get(rid)
        if self.disabled or asked is None or not asked.held:
            return False
        if resting:
            self._local.wait_graph(REST_S)
            self._gather()
        return self._staging.in_time(asked.wait)

    def ask_anew(self, rid: str) -> None:
        """Drop the hold of a request that is about to be matched again."""
        if rid in self._asked:
            self._asked[rid].held = False

    def _ask(self, rid: str, tokens: Tokens, device_tokens: int, namespace: Namespace) -> Asked:
        """Return the state of a request's lookups. Its tokens are hashed into keys once only."""
        text = hashlib.blake2b(tokens.data, digest_size=16).digest()
        before = self._asked.pop(rid, None)
        same = before is not None and before.text == text
        if before is not None and same and before.chain.namespace is namespace:
            asked = before
            asked.device_tokens, asked.stop = device_tokens, 0
        else:
            chain = KeyChain(namespace, self._block)
            chain.extend(tokens)
            asked = Asked(chain, device_tokens, len(tokens), text)
            if before is not None:
                self._staging.leave(before.wait)
        self._asked[rid] = asked
        if len(self._asked) > ASKED_KEPT:
            self._staging.leave(self._asked.popitem(last=False)[1].wait)
        return asked

    def _take(self, rid: str) -> Asked | None:
        """Remove and return the last lookup of a request, which no longer waits."""
        asked = self._asked.pop(rid, None)
        if asked is not None:
            self._staging.leave(asked.wait)
        return asked

    def _bring(self, asked: Asked, hit: Hit, stop: int) -> None:
        """Start to load blocks of ``hit`` up to token ``stop`` from lower tiers to host memory."""
        first, last = self._blocks(asked.device_tokens, stop)
        last = min(hit.depth, last) if stop > asked.device_tokens else first
        found = hit.blocks_by_tier(first, last) if first < last else {}
        if _below(found) >= _below(asked.sources):  # blocks staged since then came from these tiers
            asked.sources = found
        self._staging.bring(asked.wait, hit, first, last)

    def _blend(self, rid: str, asked: Asked, namespace: Namespace, exact: int) -> BlendPlan | None:
        """Plan a blend from host memory of a prompt with exact KV up to ``exact``, or None."""
        fusion, asking = self._fusion, asked.asking
        if fusion is None or asking is None:
            return None
        if asked.wanted is None:
            asked.wanted = fusion.track(rid, asking)
        nbytes = self._model.shape.nbytes
        loads = {tier: blocks * nbytes for tier, blocks in asked.sources.items()}
        plan = fusion.plan(asked.wanted, asking.tokens, namespace, exact, asked.tokens, loads)
        if plan is None:
            return None
        if not asked.wanted.fetched:
            asked.wanted.fetched = self._staging.fetch(asked.wait, fusion.chunks, plan)
            asked.held = self._staging.waits(asked.wait)
        return fusion.in_host(plan)

    # -- a request is scheduled -------------------------------------------------------------

    def is_resumed(self, rid: str) -> bool:
        """Return True if the last lookup of ``rid`` was of a request with part of its answer."""
        asked = self._asked.get(rid)
        return asked is not None and asked.resumed

    def load(self, rid: str, slots: npt.NDArray[np.int64]) -> Order:
        """Return the order to load the result of ``rid``'s last lookup into ``slots``, one a token.

        The order is empty if the blocks are no longer in host memory. The engine then computes the
        tokens.
        """
        order = Order()
        asked = self._take(rid)
        if self.disabled or asked is None or asked.stop != asked.device_tokens + len(slots):
            return order
        exact = asked.exact - asked.device_tokens
        planned = None
        try:
            if exact > 0:
                planned = self._plan_exact(asked)
        except KVCoreError as error:
            _log.debug("request=%s is computed: %s", rid, error)
            self.recorder.failed(rid, asked.tokens - asked.device_tokens)
            return order
        if not self._chunks_are_there(asked):
            if planned is not None:
                self.manager.drop(planned)
            self.recorder.failed(rid, asked.tokens - asked.device_tokens)
            return order
        if planned is not None:
            self._load(rid, asked, planned, slots[:exact], order.graphs.append)
        if asked.plan is not None:
            assert self._fusion is not None
            assert asked.asking is not None
            assert asked.wanted is not None
            tokens = asked.asking.tokens
            order.blends.append(self._fusion.order(asked.wanted, tokens, asked.plan, ()))
            self._send()
        self._count_hit(rid, asked, exact)
        return order

    def _plan_exact(self, asked: Asked) -> Planned:
        """Plan the load of the exact blocks of the last lookup.

        Raises KVCoreError if they are no longer in host memory.
        """
        keys, digest = asked.chain.keys, asked.chain.namespace.digest
        first, last = self._blocks(asked.device_tokens, asked.exact)
        hit = Hit(keys[:last], digest, (Source(HOST, 0, last),))
        return self.manager.plan_load(hit, Span(first, last), layers=self._layer_steps)

    def _chunks_are_there(self, asked: Asked) -> bool:
        """Return True if the chunks of the last lookup's blend are still in host memory."""
        if asked.plan is None:
            return True
        return self._fusion is not None and self._fusion.in_host(asked.plan) == asked.plan

    def _load(
        self,
        rid: str,
        asked: Asked,
        planned: Planned,
        slots: npt.NDArray[np.int64],
        lane: Lane,
    ) -> None:
        before = np.full(asked.device_tokens // self._page, NO_PAGE, dtype=np.int64)
        pages = np.concatenate([before, slots[:: self._page] // self._page]).tolist()
        units = self._paging.units([pages], *planned.blocks, asked.device_tokens)
        graph = self.manager.launch(planned, units, on_end=lambda: self._loaded(graph), lane=lane)
        self._send()
        self._loading[graph.graph_id] = rid

    def _loaded(self, graph: TransferGraph) -> None:
        if (rid := self._loading.pop(graph.graph_id, None)) is not None:
            self.recorder.arrived(rid)

    def _count_hit(self, rid: str, asked: Asked, tokens: int) -> None:
        """Count the loaded tokens by the tier that held them at the request's first lookup."""
        reused = self._by_first_tier(asked.sources, tokens)
        if asked.plan is not None:
            reused["blend"] = asked.plan.reused
        missed = asked.tokens - asked.device_tokens - sum(reused.values())
        self.recorder.loaded(rid, reused, missed)
        self._served[rid] = reused
        if len(self._served) > SERVED_KEPT:
            self._served.popitem(last=False)
        _log.debug("load request=%s tokens=%d..%d", rid, asked.device_tokens, asked.stop)

    def drop(self, rid: str, order: Order) -> None:
        """Cancel the order of a request that no rank has started. Its tokens count as missed."""
        self._failed(rid, self._served.pop(rid, {}))
        chunks = [chunk.graph for blend in order.blends for chunk in blend.chunks]
        for graph in (*order.graphs, *chunks):
            self._loading.pop(graph.graph_id, None)
            for report in refuse(graph, RowError.CANCELLED):
                self._complete(report)
        if self._fusion is not None:
            for blend in order.blends:
                self._fusion.forget(blend.request_id)

    def refuse(self, rids: Iterable[str]) -> None:
        """Handle failed loads of requests: they are computed and not looked up again."""
        for rid in rids:
            self._refused[rid] = None
            self._failed(rid, self._served.pop(rid, {}))
            if self._fusion is not None:
                self._fusion.refuse(rid)
        while len(self._refused) > SERVED_KEPT:
            self._refused.popitem(last=False)

    def ended(self, rid: str, outcome: str, headers: Mapping[str, str] | None = None) -> None:
        """Forget an answered or aborted request; ``headers`` are its W3C trace context."""
        self._take(rid)
        self._refused.pop(rid, None)  # a client may use the name again
        self.recorder.ended(rid, outcome, headers)

    # -- the tree grows ---------------------------------------------------------------------

    def offer(self) -> Offer:
        """Add an offer for a node, which stays locked until `done_offers` counts the offer."""
        offer = Offer()
        self._offers.append(offer)
        return offer

    def inserted(
        self,
        tokens: Tokens,
        namespace: Namespace,
        slots: npt.NDArray[np.int64],
        offers: list[Offer],
        control: RequestControl = FREE,
    ) -> Order:
        """Save the blocks of ``tokens`` that no tier holds. ``slots`` has one slot a token.

        ``control`` is what the request asks of kvcore whose KV the tree takes. Returns the order
        for all ranks. ``offers`` end when the copies have ended.
        """
        order = Order()
        tokens = tokens[: control.savable(len(tokens))]
        if not self.disabled and len(tokens) >= self._block:
            chain = KeyChain(namespace, self._block)
            chain.extend(tokens)
            pages = [(slots[:: self._page] // self._page).tolist()]
            self._save(chain, len(chain.keys), pages, tokens, order.graphs.append)
            self._send()
        for graph in order.graphs:
            self._reading[graph.graph_id] = list(offers)
        for offer in offers:
            offer.graphs.update(graph.graph_id for graph in order.graphs)
            offer.open = False
        return order

    def done_offers(self) -> int:
        """Return how many offers, counted from the oldest, have ended."""
        self._pump()
        count = 0
        for offer in self._offers:
            if not offer.done:
                break
            count += 1
        return count

    def take_offer(self) -> None:
        """Forget the oldest offer."""
        self._offers.popleft()

    # -- upkeep -----------------------------------------------------------------------------

    def _now(self) -> Order:
        """Return the queued work of the outbox. None of it touches the engine's pages."""
        graphs, cancelled, invalidated = self._outbox.take()
        return Order(invalidate=invalidated, cancel=cancelled, now=True, graphs=graphs)

    def _send(self) -> None:
        """Let every rank carry out the queued work of the outbox."""
        self._broadcast(self._now())

    def _broadcast(self, order: Order) -> None:
        """Let every rank carry out an order with ``now``, if it is not empty."""
        if not order.empty:
            self._links.send(order)
            self._local.carry_out(order)

    def _work(self, timeout: float) -> None:
        """Wait up to ``timeout`` seconds for a local report, and deliver all reports."""
        if timeout > 0:
            self._local.wait_report(timeout)
        self._gather()

    def _gather(self) -> None:
        for report in self._local.poll():
            self._outbox.deliver(report)
        if self._fusion is not None:
            for blended in self._local.take_blends():
                self._fusion.take_report(blended)
        counted = self._local.metrics.delta()
        profile, forwards = self._local.take_profile(), self._local.take_forwards()
        self.recorder.learn(counted, profile, forwards)
        if self._fusion is not None:
            times = self._local.take_blend_times()
            self._fusion.learn_times(profile, forwards, counted, times)
        self.metrics.absorb(counted)
        for ranks in self._links.take_reports():
            self.metrics.absorb(ranks.counted)
            if ranks.stopped:
                self.disable(f"a rank does no more work: {ranks.stopped}")
            for report in ranks.reports:
                self._outbox.deliver(report)

    def _pump(self) -> None:
        """Handle the ops that ended, and send the graphs that follow from them."""
        self._gather()
        for report in self._outbox.poll():
            self._complete(report)
        self.manager.maintain()
        self._send()
        if (now := time.monotonic()) >= self._publish_at:
            self._publish_at = now + PUBLISH_S
            self._show()

    def _show(self) -> None:
        """Update the gauges, and publish the counters to the engine."""
        self._show_tiers()
        if self._publish is None:
            return
        try:
            self._publish(self.metrics.delta())
        except Exception:  # noqa: BLE001 - it costs the engine's metrics only
            self._publish = None
            _log.exception("the engine's metrics can no longer be told what kvcore counts")

    def _complete(self, report: OpReport) -> bool:
        released = super()._complete(report)
        if released:
            for offer in self._reading.pop(report.graph_id, ()):
                offer.graphs.discard(report.graph_id)
        return released

    def clear(self) -> None:
        super().clear()
        self._send()

    def _stop_running(self) -> None:
        """Look requests up again. Their pages are the engine's, which keeps or empties its tree."""
        self._asked.clear()
        self._staging.clear()

    def forget_requests(self) -> None:
        """Forget all lookups and offers, because the engine has emptied its tree."""
        self._asked.clear()
        self._staging.clear()
        self._offers.clear()
        self._reading.clear()

    @property
    def state(self) -> dict[str, Any]:
        """The state of kvcore that the engine shows on request, as plain data.

        Every client may ask, so the requests are in it only with ``sglang.list_requests``.
        """
        self._pump()
        self._show()
        state = {
            "aside": self.disabled,
            "in_flight": self.manager.in_flight,
            "metrics": self.metrics.snapshot(),
        }
        if self._settings.list_requests:
            state["requests"] = {rid: dict(reused) for rid, reused in self._served.items()}
            state["fusion"] = {} if self._fusion is None else self._fusion.results
        return state

    def check_integrity(self) -> None:
        """Raise AssertionError unless the index, graphs in flight and offers agree."""
        super().check_integrity()
        waiting = {graph_id for offer in self._offers for graph_id in offer.graphs}
        assert waiting <= set(self._reading), "an offer waits for a save that is not under way"

    def close(self) -> None:
        """Close the links and release the tiers. Blocks. Call after every rank has closed."""
        self._links.close()
        super().close()
