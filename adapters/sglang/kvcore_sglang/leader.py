"""The leader, beside the scheduler of rank 0: decides what is loaded and saved, copies nothing.

    lookup    keys, match; blocks of lower tiers are staged in host memory first
    load      the match again: True only for what lies verified in host memory now
    inserted  saves of what the tree has and no tier does; offers wait for them
    pump      reports in, spills out

SGLang counts on what a lookup answered and aborts a request whose load fails, so only blocks that
lie verified in every rank's host memory are answered. For the others a request stays in the
scheduler's queue (`holds`): no call waits for a disk. A load that is refused is computed by the
engine as if nothing had been found. Between lookup and load nothing is pinned: an aborted request
leaves nothing behind.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcore.config import Config
from kvcore.connector.build import LeaderParts
from kvcore.connector.fusion_messages import BlendPlan
from kvcore.connector.page_table import Paging
from kvcore.connector.step_transport import Outbox
from kvcore.errors import KVCoreError
from kvcore.explain import Cause
from kvcore.explain.recorder import Watch
from kvcore.manager.base import HOST, Hit, Lane, Manager, PreparedLoad, Source
from kvcore.model.identity import Namespaces
from kvcore.model.keys import KeyChain, Namespace
from kvcore.model.spec import ModelDescription
from kvcore.telemetry.metrics import Data, Metrics, MissReason
from kvcore.transfer.graph import OpReport, RowError, TransferGraph
from kvcore.transfer.plan import layer_steps
from kvcore_sglang.books import Asked, Offer, Tokens
from kvcore_sglang.fusion_scheduler import Asking, SglangFusionScheduler
from kvcore_sglang.messages import Order
from kvcore_sglang.ranks import RankLinks
from kvcore_sglang.staging import Staging
from kvcore_sglang.worker import WorkerConnector

_log = logging.getLogger("kvcore.sglang.leader")

NO_PAGE = -1
ASKED_KEPT = 1024
"""Requests whose last lookup is remembered: more than wait in any queue that is scanned."""
SERVED_KEPT = 1024
"""Requests of which it can be asked what they reused."""
REST_S = 0.005
"""How long an engine that has nothing else to do rests before it asks again whether KV is there,
and whether another request has come. Each look takes a millisecond from the threads that read."""
PUBLISH_S = 1.0
"""How often counts are handed to the engine's metrics."""


def _below(blocks: Mapping[str, int]) -> int:
    """Blocks that lie below host memory, of those counted by tier."""
    return sum(count for tier, count in blocks.items() if tier != HOST)


class Leader:
    """One per engine. Called from the scheduler's thread only.

    ``local`` is this rank's own worker, which counts in ``counted_here``; ``links`` reach the
    others. ``publish`` takes what was counted since the last time, now and then. ``fusion`` makes
    what blends need from the parts that ``build`` made; None where there are none. ``watch`` keeps
    what `kvcore explain` tells of requests.
    """

    def __init__(
        self,
        config: Config,
        model: ModelDescription,
        local: WorkerConnector,
        links: RankLinks,
        build: Callable[[Outbox], LeaderParts],
        counted_here: Metrics,
        publish: Callable[[Data], None] | None = None,
        fusion: Callable[[LeaderParts], SglangFusionScheduler] | None = None,
        watch: Watch | None = None,
    ) -> None:
        self._config = config
        self._settings = config.sglang
        self._model = model
        self._local = local
        self._counted_here = counted_here
        self._publish = publish
        self._publish_at = 0.0
        self._links = links
        self._outbox = Outbox(model.world_size, self._work)
        parts = build(self._outbox)
        self.manager: Manager = parts.manager
        self.metrics: Metrics = parts.metrics
        self._releases = parts.releases
        self._fusion = None if fusion is None else fusion(parts)
        self._watch = watch or Watch()
        self._watch.weigh_alone(
            config,
            model,
            parts.manager,
            parts.metrics,
            parts.read_paths,
            min_load_tokens=self._settings.min_load_tokens,
            layerwise=self._settings.layerwise,
            times_forwards=local.times_forwards,
        )
        self._learning: dict[int, tuple[KeyChain, Tokens]] = {}  # by the graph of their save
        self._block = config.block.tokens
        self._page = model.groups[0].page_tokens
        self._paging = Paging(model.groups, self._block, no_page=NO_PAGE)
        self._staging = Staging(config, self.manager, self._paging, lambda: self._tell(self._now()))
        self._namespaces = Namespaces(config.namespace, model.fingerprint)
        self._steps = layer_steps(model.shape.layers) if self._settings.layerwise else []
        self._asked: OrderedDict[str, Asked] = OrderedDict()
        self._refused: OrderedDict[str, None] = OrderedDict()
        self._served: OrderedDict[str, dict[str, int]] = OrderedDict()
        self._offers: deque[Offer] = deque()
        self._reading: dict[int, list[Offer]] = {}  # save -> offers that wait for its copy
        self._loading: dict[int, str] = {}
        self._aside = ""
        self._tell(Order(now=True, open_tiers=parts.open_tiers))

    # -- a request waits --------------------------------------------------------------------

    def namespace(self, lora: str, salt: str | None) -> Namespace:
        return self._namespaces.of(lora, salt)

    def lookup(
        self,
        rid: str,
        tokens: Tokens,
        device_tokens: int,
        namespace: Namespace,
        asking: Asking | None = None,
        *,
        resumed: bool = False,
    ) -> int:
        """Tokens beyond ``device_tokens`` that can be loaded now, a multiple of the page.

        ``tokens`` are those the engine would reuse, so at least one more is computed. Where the
        prompt in ``asking`` is one to be blended, what the blend makes is counted too. What lies
        below host memory is on its way from then on, and `holds` says whether to wait for it.
        ``resumed`` is what `is_resumed` says of the request until it is loaded.
        """
        if self._aside or rid in self._refused:
            return 0
        self._pump()
        asked = self._ask(rid, tokens, device_tokens, namespace)
        asked.resumed = resumed
        hit = self._hit(asked)
        self._tell_of(rid, asked, tokens, hit)
        asked.take(asking)
        asked.plan, asked.held = None, self._staging.waits(asked.wait)
        if asked.held:
            return 0
        stop = min(hit.in_host * self._block, len(tokens)) // self._page * self._page
        asked.plan = self._blend(rid, asked, namespace, max(stop, device_tokens))
        if asked.held:
            return 0
        if asked.plan is not None:
            asked.stop = asked.plan.stop
            return asked.stop - device_tokens
        gain = stop - device_tokens
        if gain < max(self._settings.min_load_tokens, self._page):
            self._staging.leave(asked.wait)
            self._count_miss(rid, asked, gain, hit)
            return 0
        asked.stop = stop
        return gain

    def _tell_of(self, rid: str, asked: Asked, tokens: Tokens, hit: Hit) -> None:
        """Write down what a lookup found. A request is looked up again and again while it waits,
        and goes on after its load: what matters is where its KV lay when it first asked."""
        found = asked.device_tokens, hit.depth
        if not self._watch.listens or asked.told == found or self._watch.has_loaded(rid):
            return
        asked.told = found
        space, first = asked.chain.namespace, asked.device_tokens
        self._watch.looked_up(rid, tokens.data, first, hit, space, self._block)

    def holds(self, rid: str, *, resting: bool = False) -> bool:
        """Whether the request is to stay in the queue until it is looked up again: KV of its was on
        the way at its last lookup.

        Where the engine is ``resting``, having nothing to compute until then, this blocks a moment
        for what is under way.
        """
        asked = self._asked.get(rid)
        if self._aside or asked is None or not asked.held:
            return False
        if resting:
            self._local.wait_graph(REST_S)
            self._gather()
        return self._staging.in_time(asked.wait)

    def ask_anew(self, rid: str) -> None:
        """The request is about to be matched: what the last lookup said of it is old."""
        if rid in self._asked:
            self._asked[rid].held = False

    def _ask(self, rid: str, tokens: Tokens, device_tokens: int, namespace: Namespace) -> Asked:
        """The request's keys; hashed once however often it is looked up."""
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
        """What the last lookup said of a request that waits no more."""
        asked = self._asked.pop(rid, None)
        if asked is not None:
            self._staging.leave(asked.wait)
        return asked

    def _hit(self, asked: Asked) -> Hit:
        """What is held; what of it is below host memory is on its way from then on."""
        keys, digest = asked.chain.keys, asked.chain.namespace.digest
        hit = self.manager.get_match(keys, digest)
        first, last = asked.device_tokens // self._block, -(-asked.tokens // self._block)
        last = min(hit.depth, last)
        found = hit.blocks_by_tier(first, last) if first < last else {}
        if _below(found) >= _below(asked.sources):  # what came up meanwhile came from there
            asked.sources = found
        self._staging.bring(asked.wait, hit, first, last)
        return hit

    def _blend(self, rid: str, asked: Asked, namespace: Namespace, exact: int) -> BlendPlan | None:
        """What to blend of a prompt held exactly up to ``exact``, out of host memory."""
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

    def _count_miss(self, rid: str, asked: Asked, gain: int, hit: Hit) -> None:
        if asked.counted:  # a request is looked up again and again while it waits
            return
        asked.counted = True
        tokens = asked.tokens - asked.device_tokens
        if gain > 0 or tokens < self._block:
            self.metrics.looked_up({}, tokens, MissReason.TOO_SHORT)
            self._watch.missed(rid, Cause.TOO_SHORT)
        elif any(source.tier != HOST for source in hit.sources):
            self.metrics.looked_up({}, tokens, MissReason.PENDING)
            self._watch.missed(rid, Cause.LATE)
        else:
            self.metrics.looked_up({}, tokens, MissReason.NOT_CACHED)

    # -- a request is scheduled -------------------------------------------------------------

    def is_resumed(self, rid: str) -> bool:
        """Whether the last lookup of ``rid`` was of a request that had been answered in part."""
        asked = self._asked.get(rid)
        return asked is not None and asked.resumed

    def load(self, rid: str, slots: npt.NDArray[np.int64]) -> Order:
        """The order for what the last lookup of ``rid`` answered, into ``slots``, one a token.

        Empty where it is not in host memory any more: the engine then computes the tokens.
        """
        order = Order()
        asked = self._take(rid)
        if self._aside or asked is None or asked.stop != asked.device_tokens + len(slots):
            return order
        exact = asked.exact - asked.device_tokens
        prepared = None
        try:
            if exact > 0:
                prepared = self._prepare(asked)
        except KVCoreError as error:
            _log.debug("request=%s is computed: %s", rid, error)
            self.metrics.looked_up({}, len(slots), MissReason.LOAD_FAILED)
            self._watch.failed(rid)
            return order
        if not self._chunks_are_there(asked):
            if prepared is not None:
                self.manager.drop_prepared(prepared)
            self.metrics.looked_up({}, len(slots), MissReason.LOAD_FAILED)
            self._watch.failed(rid)
            return order
        if prepared is not None:
            self._load(rid, asked, prepared, slots[:exact], order.graphs.append)
        if asked.plan is not None:
            assert self._fusion is not None
            assert asked.asking is not None
            assert asked.wanted is not None
            tokens = asked.asking.tokens
            order.blends.append(self._fusion.order(asked.wanted, tokens, asked.plan, ()))
            self._tell(self._now())
        self._count_hit(rid, asked, exact)
        return order

    def _prepare(self, asked: Asked) -> PreparedLoad:
        """Raises a KVCoreError where what a lookup answered is not in host memory any more."""
        keys, digest = asked.chain.keys, asked.chain.namespace.digest
        first, last = asked.device_tokens // self._block, -(-asked.exact // self._block)
        hit = Hit(keys[:last], digest, (Source(HOST, 0, last),))
        return self.manager.prepare_load(hit, first, last, layers=self._steps)

    def _chunks_are_there(self, asked: Asked) -> bool:
        """Whether the chunks of what a lookup answered are in host memory still."""
        if asked.plan is None:
            return True
        return self._fusion is not None and self._fusion.in_host(asked.plan) == asked.plan

    def _load(
        self,
        rid: str,
        asked: Asked,
        prepared: PreparedLoad,
        slots: npt.NDArray[np.int64],
        lane: Lane,
    ) -> None:
        before = np.full(asked.device_tokens // self._page, NO_PAGE, dtype=np.int64)
        pages = np.concatenate([before, slots[:: self._page] // self._page]).tolist()
        units = self._paging.units([pages], prepared.start, prepared.stop, asked.device_tokens)
        graph = self.manager.launch_prepared(
            prepared, units, on_end=lambda: self._loaded(graph), lane=lane
        )
        self._tell(self._now())
        self._loading[graph.graph_id] = rid

    def _loaded(self, graph: TransferGraph) -> None:
        if (rid := self._loading.pop(graph.graph_id, None)) is not None:
            self._watch.arrived(rid)

    def _count_hit(self, rid: str, asked: Asked, tokens: int) -> None:
        """Tokens by the tier that held them when the request first asked."""
        reused, left = {}, tokens
        for tier, blocks in reversed(asked.sources.items()):
            if tier != HOST:
                reused[tier] = min(left, blocks * self._block)
                left -= reused[tier]
        if left:
            reused[HOST] = left
        if asked.plan is not None:
            reused["blend"] = asked.plan.reused
        missed = asked.tokens - asked.device_tokens - sum(reused.values())
        self.metrics.looked_up(reused, missed)
        self._watch.loaded(rid, reused)
        self._served[rid] = reused
        if len(self._served) > SERVED_KEPT:
            self._served.popitem(last=False)
        _log.debug("load request=%s tokens=%d..%d", rid, asked.device_tokens, asked.stop)

    def drop(self, order: Order) -> None:
        """A planned load that no rank has started will not be."""
        chunks = [chunk.graph for blend in order.blends for chunk in blend.chunks]
        for graph in (*order.graphs, *chunks):
            for op in graph.ops:
                rows = dict.fromkeys(range(*op.rows), RowError.CANCELLED)
                self._complete(OpReport(graph.graph_id, op.op_id, rows))
        if self._fusion is not None:
            for blend in order.blends:
                self._fusion.forget(blend.request_id)

    def begin_batch(self) -> None:
        """What was ordered since the last call goes with one batch."""
        if self._fusion is not None:
            self._fusion.end_step()

    def refuse(self, rids: Iterable[str]) -> None:
        """These requests' loads failed: they are computed, and not looked up again."""
        for rid in rids:
            self._served.pop(rid, None)
            self._refused[rid] = None
            self._watch.failed(rid)
            if self._fusion is not None:
                self._fusion.refuse(rid)
            self.metrics.looked_up({}, 0, MissReason.LOAD_FAILED)
        while len(self._refused) > SERVED_KEPT:
            self._refused.popitem(last=False)

    def ended(self, rid: str, outcome: str, headers: Mapping[str, str] | None = None) -> None:
        """The request was answered or aborted; ``headers`` are its W3C trace context."""
        self._take(rid)
        self._watch.ended(rid, outcome, headers)

    # -- the tree grows ---------------------------------------------------------------------

    def offer(self) -> Offer:
        """A node is offered: it stays locked until `done_offers` counts it."""
        offer = Offer()
        self._offers.append(offer)
        return offer

    def inserted(
        self,
        tokens: Tokens,
        namespace: Namespace,
        slots: npt.NDArray[np.int64],
        offers: list[Offer],
    ) -> Order:
        """Save the blocks of ``tokens`` that are not held; ``slots`` are theirs, one a token.

        Returns the order for all ranks. ``offers`` end when the copies have.
        """
        order = Order()
        if not self._aside and len(tokens) >= self._block:
            self._save(tokens, namespace, slots, order.graphs.append)
        for graph in order.graphs:
            self._reading[graph.graph_id] = list(offers)
        for offer in offers:
            offer.graphs.update(graph.graph_id for graph in order.graphs)
            offer.open = False
        return order

    def _save(
        self, tokens: Tokens, namespace: Namespace, slots: npt.NDArray[np.int64], lane: Lane
    ) -> None:
        chain = KeyChain(namespace, self._block)
        chain.extend(tokens)
        pages = [(slots[:: self._page] // self._page).tolist()]
        graph = self.manager.launch_save(
            chain.keys,
            namespace.digest,
            len(chain.keys),
            lambda start, stop: self._paging.whole_units(pages, start, stop),
            tokens.tolist() if chain.plain and self.manager.wants_tokens else None,
            lane=lane,
        )
        if graph is not None:
            self._learning[graph.graph_id] = chain, tokens
        elif self._fusion is not None:
            self._fusion.learn(chain, tokens)
        self._tell(self._now())

    def done_offers(self) -> int:
        """How many of the oldest offers have ended."""
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
        """What waits in the outbox, of which nothing touches a page of the engine's."""
        graphs, cancelled, forgotten = self._outbox.take()
        return Order(forget=forgotten, cancel=cancelled, now=True, graphs=graphs)

    def _tell(self, order: Order) -> None:
        """Have every rank carry out a `now` order."""
        if not order.empty:
            self._links.send(order)
            self._local.carry_out(order)

    def _work(self, timeout: float) -> None:
        """Let workers work for some seconds, and deliver what they report."""
        if timeout > 0:
            self._local.wait_report(timeout)
        self._gather()

    def _gather(self) -> None:
        for report in self._local.poll():
            self._outbox.deliver(report)
        if self._fusion is not None:
            for blended in self._local.take_blends():
                self._fusion.take_report(blended)
        counted = self._counted_here.delta()
        profile, forwards = self._local.take_profile(), self._local.take_forwards()
        self._watch.learn(counted, profile, forwards)
        if self._fusion is not None:
            self._fusion.learn_times(profile, forwards, counted)
        self.metrics.absorb(counted)
        for ranks in self._links.take_reports():
            self.metrics.absorb(ranks.counted)
            for report in ranks.reports:
                self._outbox.deliver(report)

    def _pump(self) -> None:
        """Take in what ended, and start what follows from it."""
        self._gather()
        for report in self._outbox.poll():
            self._complete(report)
        self.manager.maintain()
        self._tell(self._now())
        if (now := time.monotonic()) >= self._publish_at:
            self._publish_at = now + PUBLISH_S
            self._show()

    def _show(self) -> None:
        """Bring the gauges up to date, and hand the counts to the engine."""
        index, nbytes = self.manager.index, self._model.shape.nbytes
        for tier in index.tiers:
            self.metrics.tier(tier, index.num_used(tier) * nbytes, index.num_slots(tier) * nbytes)
        if self._publish is not None:
            self._publish(self.metrics.delta())

    def _complete(self, report: OpReport) -> None:
        self.manager.complete(report)
        if report.op_id == 0:  # the device copy of a save is its first op
            learnt = self._learning.pop(report.graph_id, None)
            if learnt is not None and self._fusion is not None:
                self._fusion.learn(*learnt)
            for offer in self._reading.pop(report.graph_id, ()):
                offer.graphs.discard(report.graph_id)
        if RowError.REFUSED in report.failed.values():
            self.stand_aside("a worker refused its work")

    def forget_all(self) -> None:
        """Drop every block in every tier; KV made from now on is kept apart from all before."""
        self.manager.clear()
        self._namespaces.renew()
        if self._fusion is not None:
            self._fusion.chunks.forget()
        self._tell(self._now())

    def forget_requests(self) -> None:
        """The engine's tree is empty: what was looked up and offered is void."""
        self._asked.clear()
        self._staging.clear()
        self._offers.clear()
        self._reading.clear()

    def stand_aside(self, why: str) -> None:
        """Answer and keep nothing more, until the engine restarts."""
        if not self._aside:
            self._aside = why
            _log.warning("%s: kvcore stands aside until the engine restarts", why)

    @property
    def state(self) -> dict[str, Any]:
        """What can be asked of kvcore through the engine: plain data."""
        self._pump()
        self._show()
        return {
            "aside": self._aside,
            "in_flight": self.manager.in_flight,
            "requests": {rid: dict(reused) for rid, reused in self._served.items()},
            "fusion": {} if self._fusion is None else self._fusion.results,
            "metrics": self.metrics.snapshot(),
        }

    def check_integrity(self) -> None:
        """Index, flights and offers are sound."""
        self.manager.check_integrity()
        waiting = {graph_id for offer in self._offers for graph_id in offer.graphs}
        assert waiting <= set(self._reading), "an offer waits for a save that is not under way"

    def close(self) -> None:
        """Let go of the tiers, once every rank has closed its own."""
        self._links.close()
        self._watch.close()
        if self._fusion is not None:
            self._fusion.chunks.close()
        for release in self._releases:
            release()
