"""The leader inside vLLM's scheduler: decides, never copies.

The calls for one request:

    get_num_new_matched_tokens ─▶ keys, match            (no side effect except hashing)
    update_state_after_alloc   ─▶ load graph, or blend   (part of the step, or between steps)
    build_connector_meta       ─▶ save graphs of the blocks that this step completes, fences, plan
    update_connector_output    ─▶ publish ended transfers; after a failed load, one more lookup
    request_finished           ─▶ save of the last full blocks

vLLM recovers from a failed load between steps in every configuration: the request is scheduled only
when the load has ended. It recovers from a failed load that is part of a step only if no further
step was planned on top of it. Blends, and every load that vLLM could not recover from, therefore
run between steps.

The scheduler may give a page to another request while a save still reads it. The plan of such a
step names the save in its fence, and the worker waits for it before anything writes to the page.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from kvcore.config import Config
from kvcore.connector.clients import Clients
from kvcore.connector.control import ControlReader
from kvcore.connector.fusion_messages import pages_made
from kvcore.connector.fusion_policy import FusionPolicy, is_prefill
from kvcore.connector.leader import LeaderCore, LeaderParts, LeaderTraits
from kvcore.connector.messages import StepReport
from kvcore.connector.page_table import PageTables, PointPages
from kvcore.connector.step_transport import Outbox
from kvcore.errors import KVCoreError, TransferError
from kvcore.manager import HOST, Event, Hit, Readiness
from kvcore.manager.base import Lane
from kvcore.manager.load_advisor import PlanMemo
from kvcore.manager.load_policy import Action
from kvcore.model.ingredients import MediaIdentity
from kvcore.model.spec import ModelDescription
from kvcore.telemetry.metrics import Data, MissReason
from kvcore.transfer.graph import Span, TransferGraph
from kvcore_vllm.fences import readers_of
from kvcore_vllm.fusion_scheduler import VllmFusionRequest, VllmFusionScheduler, limit_reading
from kvcore_vllm.handover import Handover
from kvcore_vllm.messages import KVCoreMetadata, KVCoreWorkerMetadata, StepPlan
from kvcore_vllm.pacing import outcome, parts_of
from kvcore_vllm.points import NULL_PAGE, ask_for_junction, states_page_tokens
from kvcore_vllm.prefix_cache import PrefixCacheAge
from kvcore_vllm.request_identity import RequestIdentities
from kvcore_vllm.requests import TrackedRequests
from kvcore_vllm.saves import Saves
from kvcore_vllm.tracked import Offer, Tracked
from kvcore_vllm.unsent import failing_plan, take_saves, withdraw

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

_log = logging.getLogger("kvcore.vllm.scheduler")


class Leader(LeaderCore[VllmFusionScheduler]):
    """The leader of one engine core. Called from vLLM's scheduling loop only.

    No call does I/O.

    ``in_step`` is True if vLLM recovers from a failed load that is part of a step, and
    ``layerwise`` if a forward waits for such a load layer by layer. ``media`` is
    what shapes the KV of media, or the reason why requests with media are left alone. ``lookahead``
    is the number of tokens after a position that shape a draft model's KV of it: so many of a hit
    are computed again, because other tokens may have followed them.
    """

    def __init__(
        self,
        config: Config,
        model: ModelDescription,
        parts: LeaderParts[VllmFusionScheduler],
        outbox: Outbox,
        open_tiers: dict[str, dict[str, Any]],
        policy: FusionPolicy | None = None,
        handover: Handover | None = None,
        in_step: bool = True,
        layerwise: bool = True,
        media: MediaIdentity | str = "no media here",
        lookahead: int = 0,
    ) -> None:
        settings = config.vllm
        traits = LeaderTraits(
            no_page=NULL_PAGE,
            min_load_tokens=settings.min_load_tokens,
            layerwise=layerwise,
        )
        self._in_step = in_step
        # A state is of one token, so the draft's KV before it is taken as it is.
        self._lookahead = lookahead if model.point is None else min(lookahead, model.point.spare)
        self._states_page = states_page_tokens(model.groups)
        super().__init__(config, model, parts, traits)
        self._outbox = outbox
        self._events: list[Event] = []
        identities = RequestIdentities(self.namespaces, media, self._deadline_s)
        controls = ControlReader(self.metrics)
        self._requests = TrackedRequests(
            identities, self._block, self._fusion, controls, self._deadline_s
        )
        self._unserved: dict[str, tuple[MissReason, int]] = {}  # looked up, and not scheduled yet
        self._saves = Saves(
            model, settings, self._block, self._paging, self._requests, self._save,
            self._wanted_points, drafts=lookahead > 0,
        )  # fmt: skip
        self._plan = StepPlan(open_tiers=open_tiers)
        self._load_pages: list[int] = []
        self._number = 0  # of the last plan
        self._weights = 0  # the first plan with these weights, if they were changed in place
        self._prefixes = PrefixCacheAge()
        self._policy = policy
        self._handover = handover or Handover(
            None, settings.promise_s, self.manager, Clients(config), self.metrics
        )

    # -- a request comes --------------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: Request, computed: int
    ) -> tuple[int | None, bool]:
        """Return the tokens beyond ``computed`` to load, and True if they load between steps.

        The number is None if vLLM must ask again in a later step.
        """
        if self.disabled:
            return 0, False
        tracked = self._requests.track(request)
        if tracked is None:
            return None, False
        if isinstance(tracked, MissReason):
            self._unserved[request.request_id] = tracked, request.num_tokens - computed
            return 0, False
        tracked.patience.end(now := time.monotonic())
        found = self._look_up(tracked, computed, now)
        if found[0] is None:
            tracked.patience.begin(now)
        return found

    def _look_up(self, tracked: Tracked, computed: int, now: float) -> tuple[int | None, bool]:
        """Look a request up, as `get_num_new_matched_tokens` does. It does not wait ``now``."""
        request = tracked.request
        tracked.offer = tracked.count_miss = None
        if computed and self._prefixes.since(self._number + 1) < self._weights:
            tracked.may_save = False  # it goes on from KV of earlier weights
        if not tracked.may_load or request.skip_reading_prefix_cache:
            return 0, False
        tracked.make_keys()
        most = self._most_blocks(request.num_tokens)
        hit = self.manager.get_match(tracked.chain.keys, tracked.chain.namespace.digest, most)
        control = tracked.control
        promise = self._handover.accepted(request, tracked.chain) if tracked.new else None
        tracked.new = False
        if control.load and self._asks_stores(tracked.patience, hit, computed, promise, now):
            return None, False
        name, tokens, space = request.request_id, request._all_token_ids, tracked.chain.namespace
        self.recorder.looked_up(name, tokens, computed, hit, space, self._block, control.shown())
        if not control.load:
            missed = len(tokens) - computed
            tracked.count_miss = partial(self.recorder.missed, name, control.why_no_load, missed)
            return 0, False
        tracked.hit = hit
        most = control.savable(request.num_prompt_tokens) if tracked.may_save else 0
        ask_for_junction(request, hit, self._block, self._states_page, most)
        if self._fusion is not None and tracked.fusing is not None:
            blended = self._plan_blend(self._fusion, tracked, tracked.fusing, computed)
            if blended is not False:
                return blended, blended is not None
        return self._offer(tracked, hit, computed)

    def _offer(self, tracked: Tracked, hit: Hit, computed: int) -> tuple[int | None, bool]:
        """Return what to load of ``hit``, as `get_num_new_matched_tokens` does, and remember it."""
        name, tokens = tracked.request.request_id, tracked.request.num_tokens
        stop = min(hit.blocks * self._block - self._lookahead, tokens - 1)
        gain = stop - computed
        if gain < self._traits.min_load_tokens:
            tracked.count_miss = partial(self._missed_little, name, hit, gain, computed, tokens)
            return 0, False
        if self._planning is not None:
            plan = self._planning.plan(tracked.memo, hit, tokens, computed)
            if plan.action is Action.RECOMPUTE:
                tracked.count_miss = partial(self.recorder.planned, name, plan, tokens - computed)
                return 0, False
            self.recorder.planned(name, plan, tokens - computed)
            if not hit.point:  # else there is nothing between all of it and none
                stop = min(stop, plan.stop)
        if self._joins(tracked, hit, self._rows(hit, computed, stop)):
            _log.debug("lookup request=%s waits for another's load", name)
            return None, False
        stop, ready = self._admitted(tracked.patience, hit, computed, stop)
        if ready is Readiness.LATER:
            _log.debug("lookup request=%s waits for slots", name)
            return None, False
        if ready is Readiness.NEVER:
            missed = tokens - computed
            tracked.count_miss = partial(self.recorder.missed, name, MissReason.BUSY, missed)
            return 0, False
        in_step = self._loads_in_step(hit, *self._rows(hit, computed, stop))
        tracked.offer = Offer(computed, stop, stop, in_step)
        return stop - computed, not in_step

    def _most_blocks(self, tokens: int) -> int:
        """Return the most blocks of a hit. The last token is always computed, for its logits."""
        point = self._model.point
        return (tokens - (0 if point and point.spare else 1)) // self._block

    def _joins(self, tracked: Tracked, hit: Hit, rows: tuple[int, int]) -> bool:
        """Return True if the request waits for another's load of the same rows.

        They are not read a second time.
        """
        if tracked.patience.is_over or set(hit.blocks_by_tier(*rows)) <= {HOST}:
            return False
        return self.manager.coming(hit, rows[1])

    def _plan_blend(
        self,
        fusion: VllmFusionScheduler,
        tracked: Tracked,
        fusing: VllmFusionRequest,
        computed: int,
    ) -> int | Literal[False] | None:
        """Return the tokens beyond ``computed`` that a blend makes, and mark the request for it.

        Returns None if vLLM must ask again, and False if there is no blend.
        """
        assert tracked.hit is not None
        fusing.due = False
        if fusion.waits(fusing):
            return None
        exact = max(computed, tracked.hit.depth * self._block)
        loads = {t: n * self._model.shape.nbytes for t, n in tracked.hit.blocks_by_tier().items()}
        tokens, space = tracked.request._all_token_ids, tracked.chain.namespace
        plan = fusion.plan(fusing, tokens, space, exact, loads=loads)
        if plan is None:
            return False
        lane = self._plan.fetches.append
        if tracked.patience.may_begin:
            fusion.fetch(fusing, plan, tracked.hit, computed, tracked.patience.left_s, lane)
        if fusion.waits(fusing):
            return None
        plan = fusion.in_host(plan)
        first, last = self._blocks(computed, exact)
        if plan is None or not set(tracked.hit.blocks_by_tier(first, last)) <= {HOST}:
            return False
        tracked.offer = Offer(computed, plan.stop, exact, blend=plan)
        fusion.mark(tracked.request, fusing, plan)
        return plan.stop - computed

    def _loads_in_step(self, hit: Hit, first: int, last: int) -> bool:
        """Return True if the load is part of the step: it is short, and vLLM recovers from it.

        Blocks on a medium that can fail are loaded between steps. vLLM then recomputes the blocks
        that did not arrive, before another request can share their pages.
        """
        if not self._in_step or not self._model.single_group:
            return False  # vLLM accepts failed pages of one group only
        from_host = set(hit.blocks_by_tier(first, last)) <= {HOST}
        nbytes = (last - first) * self._model.shape.nbytes
        return from_host and nbytes <= self._config.transfer.sync_load_max

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, external: int
    ) -> None:
        """Plan the load of ``external`` tokens into the pages that vLLM has allocated.

        vLLM may take fewer tokens than were offered, and may take an offer up in a later step. A
        load that cannot be planned is told as failed, and vLLM computes its tokens.
        """
        tracked = self._requests.get(request.request_id)
        self._count_miss(request.request_id, tracked)
        offer = None
        if tracked is not None:
            offer, tracked.offer = tracked.offer, None
        if external == 0:
            if tracked is not None:
                tracked.patience.renew()
            return
        try:
            if tracked is None or offer is None or external > offer.stop - offer.start:
                raise TransferError(f"vLLM counts on {external} tokens, and was offered {offer}")
            self._take_up(tracked, offer, blocks.get_block_ids(), external)
        except KVCoreError as error:
            _log.warning("load refused request=%s: %s", request.request_id, error)
            if offer is None and self._in_step:
                raise  # it is not known how vLLM waits for them
            start = 0 if offer is None else offer.start
            self.lose(request, blocks, external, start, in_step=offer is not None and offer.in_step)

    def _count_miss(self, request_id: str, tracked: Tracked | None) -> None:
        """Count why a request that is scheduled now has found nothing, if it has."""
        if (unserved := self._unserved.pop(request_id, None)) is not None:
            self.recorder.missed(request_id, *unserved)
        if tracked is not None and tracked.count_miss is not None:
            if not tracked.load_attempts:  # else its failed load is the miss
                tracked.count_miss()
            tracked.count_miss = None

    def _take_up(self, tracked: Tracked, offer: Offer, pages: PageTables, external: int) -> None:
        """Launch the load or the blend of the first ``external`` tokens of an offer.

        Raises KVCoreError if it cannot be planned.
        """
        tracked.waits = not offer.in_step
        tracked.load_tokens = min(external, offer.exact - offer.start)
        if offer.blend is None:
            self._launch_load(tracked, offer, pages, external)
        elif tracked.fusing is not None and tracked.fusing.due:
            self._launch_blend(tracked, tracked.fusing, offer, pages, external)
        else:
            raise TransferError("the blend was offered in an earlier step")

    def lose(
        self, request: Request, blocks: KVCacheBlocks, external: int, start: int, *, in_step: bool
    ) -> None:
        """Report ``external`` tokens from ``start`` on, which no worker loads, as lost."""
        request_id, tracked = request.request_id, self._requests.get(request.request_id)
        missed = request.num_tokens - start
        if tracked is not None:
            tracked.may_load, tracked.waits, tracked.reused = False, not in_step, {}
            tracked.load_tokens = missed
        if in_step:  # a graph that was planned may fill the pages all the same
            [pages], size = blocks.get_block_ids(), self._model.groups[0].page_tokens
            self._plan.unfilled += pages[start // size : -(-(start + external) // size)]
            self.recorder.failed(request_id, missed)
            return
        gone = withdraw(self._plan, request_id)
        self._plan.failed_loads.append(request_id)
        self._end_unsent(gone)

    def _launch_load(
        self, tracked: Tracked, offer: Offer, pages: PageTables, external: int
    ) -> None:
        """Launch the load of the first ``external`` tokens of the offer into their pages."""
        assert tracked.hit is not None
        request_id, stop = tracked.request.request_id, offer.start + external
        hit, point = tracked.hit, None
        first, last = self._rows(hit, offer.start, stop)
        if hit.point:
            point = self._point_pages(hit, pages, offer.start, stop)
        units = self._paging.units(pages, first, last - hit.point, offer.start, point)
        lane: Lane = self._plan.sync_loads.append
        layers, deadline_s = self._layer_steps, None
        if not offer.in_step:
            left_s = tracked.patience.left_s
            layers, deadline_s = (), min(tracked.memo.deadline_s(left_s), left_s)
            lane = self._lane_of(request_id, self._plan.async_loads)
        planned = self.manager.plan_load(
            hit, Span(first, last), layers=layers, deadline_s=deadline_s
        )
        graph = self.manager.launch(planned, units, lane=lane)
        if offer.in_step:
            tracked.patience.renew()
        else:
            tracked.load = graph.graph_id
            tracked.load_attempts += 1
            tracked.patience.begin(time.monotonic())
        self._load_pages += self._paging.pages_of(units)
        tracked.reused = self._by_tier(hit, offer.start, stop)
        self.recorder.loaded(request_id, tracked.reused, tracked.request.num_tokens - stop)
        _log.debug(
            "load request=%s tokens=%d..%d tiers=%s", request_id, offer.start, stop, tracked.reused
        )

    def _point_pages(self, hit: Hit, pages: PageTables, start: int, stop: int) -> PointPages:
        """Return where the resume point of a hit goes, with which the model goes on at ``stop``.

        Raises TransferError if vLLM cannot go on there, or lacks a page.
        """
        point = self._model.point
        assert point is not None
        boundary = hit.blocks * self._block
        if not boundary - point.spare <= stop <= boundary:
            raise TransferError(f"vLLM goes on at token {stop}: the resume point is at {boundary}")
        if not self._paging.sees(pages, hit.blocks, start, stop):
            raise TransferError(f"vLLM has no page for what windows see at token {stop}")
        return PointPages(hit.point, hit.blocks, self._state_pages(pages, boundary))

    def _state_pages(self, pages: PageTables, boundary: int) -> dict[int, int]:
        """Return the page of each group of states that vLLM made for the states at ``boundary``.

        Raises TransferError if it has made none.
        """
        found: dict[int, int] = {}
        for group in self._model.groups:
            if group.of == "states":
                place, own = (boundary - 1) // group.page_tokens, pages[group.index]
                page = own[place] if place < len(own) else NULL_PAGE
                if page == NULL_PAGE:
                    raise TransferError(f"vLLM has no page for the states at token {boundary}")
                found[group.index] = page
        return found

    def _launch_blend(
        self,
        tracked: Tracked,
        fusing: VllmFusionRequest,
        offer: Offer,
        pages: PageTables,
        external: int,
    ) -> None:
        """Order the blend and the load of the exact tokens before it."""
        [group], plan, fusion = self._model.groups, offer.blend, self._fusion
        assert plan is not None
        assert fusion is not None
        assert tracked.hit is not None
        if external < offer.stop - offer.start:
            raise TransferError(f"vLLM takes {external} tokens of a blend, which ends at {offer}")
        tracked.reused = {"blend": plan.reused}
        if offer.exact > offer.start:
            first, last = self._blocks(offer.start, offer.exact)
            units = self._paging.units(pages, first, last, offer.start)
            lane = self._lane_of(tracked.request.request_id, self._plan.blend_loads)
            blocks = Span(first, last)
            planned = self.manager.plan_load(tracked.hit, blocks, layers=fusion.layer_steps)
            self.manager.launch(planned, units, lane=lane)
            self._load_pages += self._paging.pages_of(units)
            tracked.reused[HOST] = tracked.load_tokens
        order = fusion.order_marked(tracked.request, fusing, pages[group.index])
        self._plan.blends.append(order)
        self._load_pages += pages_made(order, group.page_tokens)
        missed = tracked.request.num_tokens - offer.start - sum(tracked.reused.values())
        self.recorder.loaded(tracked.request.request_id, tracked.reused, missed)

    @staticmethod
    def _lane_of(request_id: str, queue: list[tuple[str, TransferGraph]]) -> Lane:
        """Return a lane that queues graphs with the request that waits for them."""
        return lambda graph: queue.append((request_id, graph))

    def hit_sources(self, request_id: str, external: int) -> dict[str, int]:
        """Return where the ``external`` tokens of the request's last load come from, by tier.

        Tokens that a blend computes, or that are not loaded after all, are of the source "none".
        """
        tracked = self._requests.get(request_id)
        found = {} if tracked is None else dict(tracked.reused)
        rest = external - sum(found.values())
        return {**found, "none": rest} if rest else found

    # -- a step is planned ------------------------------------------------------------------

    def build_connector_meta(self, output: SchedulerOutput) -> KVCoreMetadata:
        """Plan this step: saves of the blocks it completes, and fences for pages it reassigns."""
        self.manager.maintain()
        plan = self._plan
        if not self.disabled:
            self._saves.of_step(output, plan.late_saves.append)
        self._stamp(plan)
        spills, plan.cancel, plan.invalidate = self._outbox.take()
        plan.spills += spills
        plan.fence = self._fences(plan, output)
        if self._fusion is not None:
            page_tokens = self._model.groups[0].page_tokens
            limit_reading(plan.blends, output, page_tokens, self._requests.computed_tokens)
            self._fusion.end_step()
        prefills = is_prefill(output.num_scheduled_tokens.values())
        if self._policy is not None and prefills and not plan.blends:
            plan.timed = self._policy.time(parts_of(self._requests.scheduled(output)))
        plan.empty_step = not output.num_scheduled_tokens
        metadata = KVCoreMetadata.of(plan)
        self._plan = StepPlan()
        return metadata

    def last_plan(self) -> KVCoreMetadata:
        """Return a plan in place of one that could not be made. It fails what was promised."""
        self._stamp(self._plan)
        plan, unsent = failing_plan(self._plan, self._users.graphs, self._paging.pages_of)
        self._plan = StepPlan()
        metadata = KVCoreMetadata.of(plan)
        with contextlib.suppress(KVCoreError):  # kvcore has stopped: its books serve nobody
            self._end_unsent(unsent)
        return metadata

    def _stamp(self, plan: StepPlan) -> None:
        self._number += 1
        plan.number, plan.weights = self._number, self._weights
        self._prefixes.since(self._number)

    def _fences(self, plan: StepPlan, output: SchedulerOutput) -> list[int]:
        """Return the saves that read a page to which this step, or a load in it, may write."""
        loaded, self._load_pages = self._load_pages, []
        own = {graph.graph_id for graph in plan.late_saves}
        return sorted(readers_of(self._users, output, loaded) - own)

    # -- a step has ended -------------------------------------------------------------------

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """Handle the reports of the workers.

        The end of an asynchronous load comes twice: in kvcore's own reports, which publish blocks
        and free slots, and in vLLM's lists of requests, by which vLLM schedules. The two may come
        in different steps, so the state of a waiting request follows vLLM's lists only. A failed
        load is in both of vLLM's lists.
        """
        meta = output.kv_connector_worker_meta
        if isinstance(meta, KVCoreWorkerMetadata):
            self._take_report(meta.merged())
        failed = output.failed_recving or set()
        for request_id in (output.finished_recving or set()) - failed:
            self._load_ended(request_id)
        for request_id in failed:
            self._load_failed(request_id)

    def _take_report(self, ranks: StepReport) -> None:
        if ranks.stopped:
            self.disable(f"a worker has stopped: {ranks.stopped}")
        self.metrics.absorb(ranks.counted)
        if ranks.weights > self._weights:
            _log.warning("weights were changed in place: KV from before is not found any more")
            self._weights = ranks.weights
            self.renew()
        if self._policy is not None:
            self._policy.learn(ranks.profile, ranks.forwards, ranks.counted, ranks.blend_times)
        for blend in ranks.blends:
            if self._fusion is not None:
                self._fusion.take_report(blend)
            tracked = self._requests.get(blend.request_id)
            if tracked is not None and not blend.ok:
                tracked.reused.pop("blend", None)
        for report in ranks.reports:
            self._outbox.deliver(report)
        for report in self._outbox.poll():
            self._complete(report)

    def _load_ended(self, request_id: str) -> None:
        tracked = self._requests.get(request_id)
        if tracked is not None:
            tracked.load, tracked.waits, tracked.load_attempts = None, False, 0
            tracked.patience.renew()
            self.recorder.arrived(request_id)

    def _load_failed(self, request_id: str) -> None:
        tracked = self._requests.get(request_id)
        if tracked is None:
            return
        # A corrupt block has left the index: one more lookup may find a shorter prefix or
        # another tier. After a load that was late it finds what host memory has. After that the
        # request is computed.
        tracked.patience.end(time.monotonic())
        late = tracked.load in self._late
        if late:
            tracked.patience.spend()
        tracked.may_load = tracked.may_load and tracked.load_attempts < 2
        self.recorder.failed(request_id, tracked.load_tokens, late=late)
        tracked.load, tracked.waits, tracked.reused, tracked.hit = None, False, {}, None
        tracked.memo = PlanMemo()
        _log.warning(
            "load failed, computing instead request=%s attempt=%d retry=%s",
            request_id,
            tracked.load_attempts,
            tracked.may_load,
        )

    def request_finished(
        self, request: Request, pages: Sequence[Sequence[int]]
    ) -> dict[str, Any] | None:
        """Save the last full blocks. Returns the reply for the client, if it asked for one."""
        tracked = self._requests.end(request)
        self._unserved.pop(request.request_id, None)
        self._saves.forget(request.request_id)
        if self._fusion is not None:
            self._fusion.forget(request.request_id)
        if tracked is None:
            return None
        record = self.recorder.ended(
            request.request_id, outcome(request), getattr(request, "trace_headers", None)
        )
        if tracked.waits:  # aborted before its load or blend has ended
            if tracked.load is not None:
                self.manager.cancel(tracked.load)
            return None
        if not self.disabled:
            self._saves.rest(tracked, pages, self._plan.early_saves.append)
        fusion = tracked.fusing.result() if tracked.fusing is not None else {}
        saved = tracked.saved_blocks
        if self._model.point is not None:  # who answers the prompt can go on no later
            saved = min(saved, self._most_blocks(request.num_prompt_tokens))
        return self._handover.reply(
            request,
            tracked.chain,
            saved,
            tracked.reused,
            fusion,
            record,
            tracked.control,
        )

    # -- upkeep -----------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """True if vLLM must go on with its steps: a plan or a report is outstanding."""
        return not self.disabled and bool(self._outbox.graphs or self.manager.awaited)

    def stop(self, why: str, error: BaseException) -> None:
        """Stop kvcore after an error. No planned save goes out: fences may be missing."""
        self.disable(why, error)
        with contextlib.suppress(KVCoreError):
            self._end_unsent(take_saves(self._plan))

    def watch(self, pool: BlockPool) -> None:
        """Learn from ``pool``, vLLM's pages, whether its prefix cache was emptied."""
        self._prefixes = PrefixCacheAge(pool)

    def reset(self) -> None:
        """Follow a reset of vLLM's cache, as ``vllm.keep_on_reset`` and ``weights_change`` say."""
        self._end_unsent(take_saves(self._plan))  # vLLM may take the pages' memory away
        if not self._config.vllm.keep_on_reset:
            self.clear()
        elif self._config.namespace.weights_change != "never":
            self.renew()

    def _stop_running(self) -> None:
        self._end_unsent(take_saves(self._plan))  # of KV that may be of both weights
        self._requests.stop()

    def take_stats(self) -> Data:
        """Return the increase of the counters of all ranks and the leader since the last call."""
        self._show_tiers()
        return self.metrics.delta()

    def take_events(self) -> list[Event]:
        """Return the events of blocks stored in and removed from tiers since the last call."""
        events, self._events = self._events, []
        return events

    def note_event(self, event: Event) -> None:
        """Queue an event of the manager for `take_events`."""
        self._events.append(event)
