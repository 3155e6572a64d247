"""The leader beside TensorRT-LLM's scheduler, on rank 0: decides, copies nothing.

The calls for one request:

    match        keys, lookup, a promise of n tokens        (pinned: it cannot be retracted)
    allocated    plans the load of a parked request
    build_plan   plans the other loads, saves of the blocks that this step completes, fences
    finished     saves the last blocks

If an error leaves any of this half done, no save is sent any more, and the next step waits for all
copies. `Promises` then tells what TensorRT-LLM counts on.

TensorRT-LLM cannot learn that a load failed, and cannot wait for one before it has an answer. The
leader therefore promises only blocks that are verified in every rank's host memory. Blocks on other
tiers are staged there first. Blocks that have arrived after `trtllm.stage_wait_s` are promised. The
rest serves the next request.

A page may be given to another request while a save still reads it. After an abort, which the engine
does not report, a load may still write it. The plan of such a step names the graph in its fence,
and the workers wait for it before the step touches the page.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from kvcore.config import Config
from kvcore.connector.control import ControlReader
from kvcore.connector.fusion_messages import BlendOrder, BlendPlan, BlendReport
from kvcore.connector.fusion_scheduler import FusionRequest
from kvcore.connector.guard import Guard, attempt
from kvcore.connector.leader import LeaderCore, LeaderParts, LeaderTraits
from kvcore.connector.page_table import PageTables, of_its_group
from kvcore.connector.step_transport import Outbox
from kvcore.manager import HOST, Hit
from kvcore.manager.base import Lane
from kvcore.model.keys import KeyChain
from kvcore.telemetry.metrics import Data, MissReason
from kvcore.transfer.graph import OpReport, RowError, TransferGraph
from kvcore.worker import refuse
from kvcore_trtllm.describe import Description
from kvcore_trtllm.fusion_scheduler import TrtllmFusionScheduler
from kvcore_trtllm.messages import News, StepPlan
from kvcore_trtllm.pages import NO_PAGE, check_pages, page_deltas, places
from kvcore_trtllm.promises import Promises
from kvcore_trtllm.requests import (
    Promise,
    RequestNamespaces,
    Tracked,
    Use,
    control_of,
    excluded,
    is_dummy,
    keep,
    wish_of,
)
from kvcore_trtllm.salt import Wish
from kvcore_trtllm.staging import Staging

_log = logging.getLogger("kvcore.trtllm.scheduler")

FORGET_AFTER = 512
"""Steps without news of a request after which it is treated as aborted. If it is alive after all,
it only loses its later saves."""

_Saves = list[tuple[int, TransferGraph]]
"""Saves of a step's plan, each with the id of the request whose pages it reads."""


class Leader(LeaderCore[TrtllmFusionScheduler]):
    """The leader of one engine, on rank 0. Called from the executor's thread only.

    If there is only one rank, ``lane`` hands a graph to it at once. Otherwise ``lane`` is None.
    ``layerwise`` is True if the forward waits for loads layer by layer. ``on_reuse`` receives the
    id of a request and its reused tokens by tier.
    """

    def __init__(
        self,
        config: Config,
        model: Description,
        parts: LeaderParts[TrtllmFusionScheduler],
        outbox: Outbox,
        open_tiers: dict[str, dict[str, Any]],
        lane: Lane | None = None,
        layerwise: bool = True,
    ) -> None:
        settings = config.trtllm
        traits = LeaderTraits(
            no_page=NO_PAGE,
            min_load_tokens=max(settings.min_load_tokens, 1),
            layerwise=layerwise,
            place=of_its_group,
            host_only=True,
        )
        super().__init__(config, model, parts, traits)
        self.on_reuse: Callable[[int, dict[str, int]], None] | None = None
        self._page_tokens = model.facts.page_tokens
        self._outbox = outbox
        self._staging = Staging(
            self.manager, self._paging, len(model.groups), lane,
            left_s=self._wait_s, deadline_s=self._deadline_s,
        )  # fmt: skip
        self._identity = RequestNamespaces(
            self.namespaces, min(settings.stage_wait_s, self._deadline_s)
        )
        self._wait_until = 0.0  # the monotonic time at which the last lookup has waited enough
        self._controls = ControlReader(self.metrics)
        self._requests: dict[int, Tracked] = {}
        self._plan = StepPlan(open_tiers=open_tiers)
        self._using: dict[int, Use] = {}  # the purpose of each graph in ``_users``
        self._fresh: set[int] = set()  # pages this step may write to
        self._shared: set[int] = set()  # pages with others' KV that this step reads
        self._asked: dict[int, int] = {}  # requests matched in this step: tokens on the device
        self.promises = Promises()
        self._scheduled: list[int] = []  # the requests of the last plan
        self._unsure = False  # an error may have left the books of pages or a plan half done
        self._guard = Guard(self.stop)
        self._step = 0

    # -- a request comes --------------------------------------------------------------------

    def match(self, request: Any, computed: int) -> tuple[int, bool]:
        """Promise tokens beyond ``computed``. Return how many, and True if the request parks.

        If this raises, nothing is promised.
        """
        self._drop(request.request_id)
        self._asked[request.request_id] = computed
        self._wait_until = time.monotonic() + self._deadline_s
        try:
            matched, parks = self._match(request, computed)
        except Exception:
            self._drop(request.request_id)
            raise
        if matched:
            self.promises.offer(request.request_id, parks=parks)
        return matched, parks

    def _match(self, request: Any, computed: int) -> tuple[int, bool]:
        if self.disabled or is_dummy(request):
            return 0, False
        tokens = request.get_tokens(0)
        if excluded(request):
            return self._leave(request, MissReason.UNSUPPORTED, len(tokens) - computed)
        control = control_of(request, self._controls)
        wish = None if control.error else wish_of(request, len(tokens))
        namespace = self._identity.of(request, wish)
        if isinstance(namespace, MissReason):
            return self._leave(request, namespace, len(tokens) - computed)
        chain = KeyChain(namespace, self._block)
        chain.extend(tokens)
        tracked = Tracked(request.request_id, chain, len(tokens), computed, self._step)
        tracked.control = control
        self._requests[request.request_id] = tracked
        if self._fusion is not None or self.manager.wants_tokens:
            tracked.tokens = list(tokens)
        if wish is not None and wish.options is not None and computed:
            tracked.approximate_from = 0  # its salt was used before, perhaps by a blend
            return 0, False
        if not control.load:
            return self._compute_all(tracked, tokens)
        if computed % self._page_tokens:
            return 0, False  # the engine copies a partly used page in its own way
        # The last token is always computed: its logits are needed.
        most = len(tokens) - 1
        hit = self._hit(tracked, tokens, most)
        held = hit.in_host
        stop = min(held * self._block, most)
        if wish is not None and (until := self._blend(tracked, wish, stop)):
            return until, False
        return self._promise(tracked, stop, hit)

    def _compute_all(self, tracked: Tracked, tokens: Sequence[int]) -> tuple[int, bool]:
        """Count a request that asks for no load. Return as `match` does."""
        chain, computed, control = tracked.chain, tracked.device_tokens, tracked.control
        hit = self.manager.get_match(chain.keys, chain.namespace.digest)
        name, space = str(tracked.request_id), chain.namespace
        self.recorder.looked_up(name, tokens, computed, hit, space, self._block, control.shown())
        self.recorder.missed(name, control.why_no_load, len(tokens) - computed)
        return 0, False

    def _leave(self, request: Any, reason: MissReason, missed: int) -> tuple[int, bool]:
        """Count a request that is computed without kvcore. Return as `match` does."""
        self.recorder.missed(str(request.request_id), reason, missed)
        return 0, False

    def _promise(self, tracked: Tracked, stop: int, hit: Hit) -> tuple[int, bool]:
        """Promise tokens [device_tokens, stop) if they are worth a load. Return as `match` does."""
        computed, chain = tracked.device_tokens, tracked.chain
        gain = stop - computed
        if gain < self._traits.min_load_tokens:
            tokens = tracked.prompt_tokens
            self._missed_little(str(tracked.request_id), hit, gain, computed, tokens)
            return 0, False
        blocks = self._blocks(computed, stop)
        parks = (blocks[1] - blocks[0]) * self._model.shape.nbytes > (
            self._config.transfer.sync_load_max
        )
        load = keep(self.manager, chain, blocks, () if parks else self._layer_steps)
        if load is None:
            name = str(tracked.request_id)
            self.recorder.missed(name, MissReason.PENDING, tracked.prompt_tokens - computed)
            return 0, False
        tracked.promise = Promise(computed, stop, parks, load)
        tracked.reused = self._by_first_tier(tracked.sources, gain)
        return gain, parks

    # -- fusion -----------------------------------------------------------------------------

    def _blend(self, tracked: Tracked, wish: Wish, exact: int) -> int:
        """Promise a blend of a prompt if one is worth it.

        The engine holds none of the prompt, and host memory holds ``exact`` tokens. Returns the
        token up to which KV is promised, 0 without a blend.
        """
        if self._fusion is None or tracked.tokens is None or wish.options is None:
            return 0
        request = FusionRequest(str(tracked.request_id), wish.options)
        plan = self._fusion.plan(request, tracked.tokens, tracked.chain.namespace, exact)
        if plan is None:
            return 0
        if exact:  # pinned first: fetching the chunks may evict from host memory
            blocks = self._blocks(0, exact)
            load = keep(self.manager, tracked.chain, blocks, self._layer_steps)
            if load is None:
                return 0
            tracked.promise = Promise(0, exact, False, load)
        plan = self._fusion.fetched(plan, self._bring)
        if plan is not None:
            request.plan = plan
            return self._promise_blend(tracked, request, plan)
        if tracked.promise is not None:
            self.manager.drop(tracked.promise.load)
            tracked.promise = None
        return 0

    def _promise_blend(self, tracked: Tracked, request: FusionRequest, plan: BlendPlan) -> int:
        """Promise [0, plan.stop): an exact prefix to load, and a blend behind it."""
        assert not tracked.device_tokens
        tracked.blend = request
        tracked.approximate_from = plan.chunks[0].prompt_start
        tracked.reused = self._by_first_tier(tracked.sources, plan.exact)
        tracked.reused["blend"] = plan.reused
        return plan.stop

    def _order(self, tracked: Tracked) -> BlendOrder:
        assert self._fusion is not None
        assert tracked.blend is not None
        assert tracked.tokens is not None
        request, plan = tracked.blend, tracked.blend.plan
        assert plan is not None
        check_pages(self._model.groups, plan.exact, plan.stop, tracked.pages)
        tracked.blend = None
        prompt = tracked.tokens[: tracked.prompt_tokens]
        return self._fusion.order(request, prompt, plan, tracked.pages[0])

    # -- staging in host memory ---------------------------------------------------------------

    def _wait_s(self) -> float:
        """Return the seconds that the lookup may wait for what it waits for next.

        The executor waits meanwhile. All waits of a lookup together end at the deadline of loads.
        """
        left_s = self._wait_until - time.monotonic()
        return max(min(self._config.trtllm.stage_wait_s, left_s), 0.0)

    def _hit(self, tracked: Tracked, tokens: Sequence[int], most: int) -> Hit:
        """Match the chain after its blocks were staged in host memory as far as possible."""
        chain, computed = tracked.chain, tracked.device_tokens
        digest = chain.namespace.digest
        hit = self.manager.get_match(chain.keys, digest)
        if self.manager.ask_stores(hit, computed // self._block):
            # The engine cannot ask again: a late answer serves the next request with this prompt.
            self.manager.wait_stores(self._wait_s())
            hit = self.manager.get_match(chain.keys, digest)
        name = str(tracked.request_id)
        shown = tracked.control.shown()
        self.recorder.looked_up(name, tokens, computed, hit, chain.namespace, self._block, shown)
        first, last = self._blocks(computed, min(hit.depth * self._block, most))
        if first >= last or self._traits.min_load_tokens > most - computed:
            return hit
        tracked.sources = hit.blocks_by_tier(first, last)
        if set(tracked.sources) <= {HOST} and self.manager.certain:
            return hit
        waited = self._bring([(hit, last)])
        return self.manager.get_match(chain.keys, digest) if waited else hit

    def _bring(self, wanted: Iterable[tuple[Hit, int]]) -> bool:
        """Load each hit's blocks up to the given one into host memory; see `Staging.bring`."""
        return self._staging.bring(wanted, self._plan.spills.append)

    def allocated(self, request: Any, pages: PageTables) -> None:
        """Note the allocated pages of a request, and plan its load if it parks."""
        computed = self._asked.get(request.request_id, 0)
        held = computed // self._page_tokens
        for group, table in enumerate(pages):
            self._shared.update(places(group, table[:held]))
            self._fresh.update(places(group, table[held:]))
        tracked = self._requests.get(request.request_id)
        if tracked is not None and self.promises.parks(tracked.request_id):
            parked, name = self._plan.async_loads, tracked.request_id
            graph = self._load(tracked, pages, lambda graph: parked.append((name, graph)))
            tracked.load = graph.graph_id
            self._guard.run("the count of a load", partial(self._count, tracked), None)

    def lose(self, request_id: int) -> None:
        """Mark a request whose promise, if there is one, cannot be kept: it must not answer."""
        if not self.promises.owes(request_id):
            return
        made = self._plan
        if self.promises.parks(request_id):
            made.lost_loads.append(request_id)
        self.promises.lose(request_id)
        half = [graph for name, graph in made.async_loads if name == request_id]
        made.async_loads = [load for load in made.async_loads if load[0] != request_id]
        self._mark_lost(request_id)
        self._end_unsent(half)

    def _mark_lost(self, request_id: int) -> None:
        """Note that promised KV of a request will not come. It is counted once.

        Does nothing for a request that is gone: no step will have it.
        """
        tracked = self._requests.get(request_id)
        if tracked is not None and not tracked.lost:
            tracked.lost = True
            self.promises.lose(request_id)
            self._failed(str(request_id), tracked.reused)

    def _load(self, tracked: Tracked, pages: PageTables, lane: Lane) -> TransferGraph:
        promise = tracked.promise
        assert promise is not None
        check_pages(self._model.groups, promise.start_token, promise.stop_token, pages)
        first, last = self._blocks(promise.start_token, promise.stop_token)
        units = self._paging.units(pages, first, last, promise.start_token)
        tracked.promise = None  # its plan is used up, even if the launch fails
        graph = self.manager.launch(promise.load, units, lane=lane)
        self._use(graph)
        self._using[graph.graph_id] = Use(tracked.request_id, writes=True)
        _log.debug(
            "load request=%s tokens=%d..%d parked=%s",
            tracked.request_id,
            promise.start_token,
            promise.stop_token,
            promise.parked,
        )
        return graph

    def _count(self, tracked: Tracked) -> None:
        """Count the lookup by the promised tokens."""
        missed = tracked.prompt_tokens - tracked.device_tokens - sum(tracked.reused.values())
        self.recorder.loaded(str(tracked.request_id), tracked.reused, missed)
        if self.on_reuse is not None:
            self.on_reuse(tracked.request_id, tracked.reused)

    # -- a step is planned ------------------------------------------------------------------

    def build_plan(self, output: Any) -> StepPlan:
        """Plan this step: promised loads, saves of the blocks it completes, fences."""
        self._step += 1
        self._guard.run("the upkeep of the index", self.manager.maintain, None)
        for data in output.new_requests:
            self._guard.run("the plan of a request", partial(self._begin, data), None)
        for data in output.cached_requests:
            self._guard.run("the plan of a request", partial(self._go_on, data), None)
        plan = self._plan
        graphs, plan.cancel, plan.invalidate = self._outbox.take()
        plan.spills += graphs
        if self._unsure:
            return self.last_plan(output)
        self._fence(plan)
        self._guard.run("the end of a step", self._end_step, None)
        return self._planned(plan, output)

    def _planned(self, plan: StepPlan, output: Any) -> StepPlan:
        """Return the plan of a step, and begin the next one."""
        plan.broken = self.why_broken(output)
        self._scheduled = _scheduled(output)
        self._plan = StepPlan()
        self._fresh.clear()
        self._shared.clear()
        self._asked.clear()
        return plan

    def _end_step(self) -> None:
        if self._step % (FORGET_AFTER // 8) == 0:
            self._collect()

    def _begin(self, data: Any) -> None:
        """Handle a request that joins a batch, also after it was parked."""
        tracked = self._requests.get(data.request_id)
        if tracked is None:
            return
        tracked.pages = [[] for _ in self._model.groups]
        tracked.received = 0
        self._take(tracked, data)
        if tracked.promise is not None or tracked.blend is not None:
            self._keep_promise(tracked)
        self._save_computed(tracked)

    def _keep_promise(self, tracked: Tracked) -> None:
        """Plan the load in the step and the blend that were promised, unless they are lost."""
        if not self.promises.owes(tracked.request_id) or self.promises.lost(tracked.request_id):
            return
        if tracked.promise is not None:
            self._load(tracked, tracked.pages, self._plan.sync_loads.append)
        if tracked.blend is not None:
            self._plan.blends.append(self._order(tracked))
        self.promises.planned(tracked.request_id)
        self._guard.run("the count of a load", partial(self._count, tracked), None)

    def _go_on(self, data: Any) -> None:
        """Handle a request that stays in the batch."""
        for group, pages in enumerate(page_deltas(data)):
            self._fresh.update(places(group, pages))
        tracked = self._requests.get(data.request_id)
        if tracked is None:
            return
        if not tracked.pages:  # its start was not reported: its page table is not known
            if tracked.promise is not None or tracked.blend is not None:
                self._mark_lost(data.request_id)
            return
        self._take(tracked, data)
        self._save_computed(tracked)

    def _take(self, tracked: Tracked, data: Any) -> None:
        tracked.seen = self._step
        tracked.receive(data.new_tokens)
        for table, pages in zip(tracked.pages, page_deltas(data), strict=True):
            table.extend(pages)
        # Positions computed when this step ends. The first report of a request leaves out the
        # tokens loaded in its step. With overlap the newest token is not reported. Both are too
        # low, which is safe.
        tracked.bound = data.computed_position + data.num_scheduled_tokens

    def _save_computed(self, tracked: Tracked) -> None:
        computed = min(tracked.bound, tracked.chain.num_tokens)
        if not self._config.trtllm.save_decode and computed > tracked.prompt_tokens:
            return
        saves = self._plan.late_saves
        self._save_blocks(tracked, computed // self._block, tracked.pages, saves)

    def _save_blocks(self, tracked: Tracked, blocks: int, pages: PageTables, saves: _Saves) -> None:
        chain = tracked.chain
        blocks = min(tracked.savable_tokens(blocks * self._block) // self._block, len(chain.keys))
        if self.disabled or blocks <= 0:
            return
        name = tracked.request_id
        graph = self._save(
            chain,
            blocks,
            pages,
            tracked.tokens,
            lambda graph: saves.append((name, graph)),
            known=tracked.learned,
        )
        tracked.learned = max(tracked.learned, blocks)
        if graph is not None:
            self._using[graph.graph_id] = Use(name, writes=False)

    def _fence(self, plan: StepPlan) -> None:
        """Fence the graphs that use pages which this step gives to other requests.

        A load into a page that is given away to be overwritten is cancelled too.
        """
        if not self._using:
            return
        here = {graph.graph_id for _, graph in (*plan.async_loads, *plan.late_saves)}
        here |= {graph.graph_id for graph in plan.sync_loads}
        fence: set[int] = set()
        for page, users in self._users.among(self._fresh | self._shared):
            for graph_id in users - here:
                writes = self._using[graph_id].writes
                if page in self._fresh or writes:
                    fence.add(graph_id)
                if page in self._fresh and writes and graph_id not in plan.cancel:
                    plan.cancel.append(graph_id)
        plan.fence = sorted(fence)

    def why_broken(self, output: Any) -> str:
        """Return why the step must fail: it schedules requests whose promised KV did not arrive.

        Returns "" if it must not fail.
        """
        if bad := self.promises.unkept(_scheduled(output)):
            return f"KV promised to requests {bad} did not arrive"
        return ""

    # -- reports ----------------------------------------------------------------------------

    def hear(self, news: News) -> None:
        """Handle what all ranks have reported. An error does not stop this rank's worker."""
        self._guard.run("take_news", lambda: self.promises.take(news.ended), None)
        if news.stopped:
            self.disable(f"a rank does no more work: {news.stopped}")
        self._guard.run("take_news", lambda: self.take_news(news.ended, news.counted), None)

    def hear_broken(self) -> None:
        """Save no KV of the last step's requests from now on: the step has failed."""
        for request_id in self._scheduled:
            if (tracked := self._requests.get(request_id)) is not None:
                tracked.approximate_from = 0

    def hear_blends(self, blends: Iterable[BlendReport]) -> None:
        """Handle the results of blends of rank 0's worker, which is in this process.

        An error does not stop that worker: the KV of the step is there.
        """
        for report in blends:
            self._guard.run("the end of a blend", partial(self._take_blend, report), None)

    def _take_blend(self, report: BlendReport) -> None:
        if self._fusion is not None:
            self._fusion.take_report(report)
        tracked = self._requests.get(int(report.request_id))
        if tracked is not None and not report.ok:
            tracked.reused.pop("blend", None)

    def take_news(self, reports: Iterable[OpReport], counted: Iterable[Data]) -> None:
        """Handle the reports and the counters of all ranks."""
        for delta in counted:
            self.metrics.absorb(delta)
            self.recorder.learn(delta)
        for report in reports:
            self._outbox.deliver(report)
        for report in self._outbox.poll():
            self._guard.run("the end of an op", partial(self._take_report, report), None)

    def _take_report(self, report: OpReport) -> None:
        """Handle the end of an op, and release its graph after its last device op."""
        released = self._complete(report)
        use = self._using.get(report.graph_id)
        if use is None:
            return
        if use.writes and report.failed:
            self._load_failed(use.request_id, report)
        if not released:
            return
        del self._using[report.graph_id]
        tracked = self._requests.get(use.request_id)
        if use.writes:
            self.recorder.arrived(str(use.request_id))
        if tracked is not None and tracked.load == report.graph_id:
            tracked.load = None
            tracked.seen = self._step

    def _load_failed(self, request_id: int, report: OpReport) -> None:
        if set(report.failed.values()) == {RowError.CANCELLED}:
            return  # the request was aborted
        self._mark_lost(request_id)
        _log.error("a promised load failed request=%s: %s", request_id, report.failed)

    def stop(self, why: str, error: BaseException | None = None) -> None:
        """Disable kvcore after an error. The next plan saves nothing, and fences all copies."""
        self._unsure = True
        try:
            self.disable(why, error)
        finally:
            self.disabled = self.disabled or why

    def _end_unsent(self, graphs: Iterable[TransferGraph]) -> None:
        for graph in graphs:
            for report in refuse(graph, RowError.UPSTREAM):
                self._take_report(report)

    def last_plan(self, output: Any) -> StepPlan:
        """Return a plan in which nothing is sent that an error may have left half done.

        It has the loads whose pages are known, and no saves. Its fence names every other graph that
        uses pages.
        """
        made = self._plan
        graphs = [graph for _, graph in (*made.early_saves, *made.late_saves)]
        graphs += [*made.sync_loads, *(graph for _, graph in made.async_loads)]
        made.early_saves, made.late_saves = [], []
        made.sync_loads = [graph for graph in made.sync_loads if graph.graph_id in self._using]
        made.async_loads = [load for load in made.async_loads if load[1].graph_id in self._using]
        loads = [*made.sync_loads, *(graph for _, graph in made.async_loads)]
        sent = {graph.graph_id for graph in loads}
        made.fence = sorted(self._using.keys() - {graph.graph_id for graph in graphs})
        attempt(
            "the end of what is not sent",
            lambda: self._end_unsent(g for g in graphs if g.graph_id not in sent),
            None,
        )
        self._unsure = False
        return self._planned(made, output)

    # -- a request goes ---------------------------------------------------------------------

    def finished(self, request: Any, pages: PageTables) -> bool:
        """Save the last blocks. Return True if saves in flight still read the request's pages."""
        self.recorder.ended(str(request.request_id), "done")
        tracked = self._requests.get(request.request_id)
        if tracked is None or self.disabled:
            self._drop(request.request_id)
            return False
        tokens = request.get_tokens(0)
        if len(tokens) > tracked.chain.num_tokens:
            tracked.extend(tokens[tracked.chain.num_tokens :])
        computed = tracked.bound
        if computed >= tracked.prompt_tokens:
            # All but the last sampled token; the bound may lag one behind with overlap.
            computed = min(len(tokens) - 1, computed + 1)
        if not self._config.trtllm.save_decode:
            computed = min(computed, tracked.prompt_tokens)
        sent = any(
            use.request_id == request.request_id and not use.writes for use in self._using.values()
        )
        if tracked.load is None:
            self._save_blocks(tracked, computed // self._block, pages, self._plan.early_saves)
        self._drop(request.request_id)
        return sent

    def forget(self, request_id: int) -> None:
        """Forget a request whose pages the engine took back."""
        self._drop(request_id)

    def _drop(self, request_id: int) -> None:
        tracked = self._requests.pop(request_id, None)
        self.promises.forget(request_id)
        if tracked is not None and tracked.promise is not None:
            self.manager.drop(tracked.promise.load)

    def _collect(self) -> None:
        """Drop requests without news for `FORGET_AFTER` steps: aborts are not reported."""
        for request_id, tracked in list(self._requests.items()):
            silent = self._step - tracked.seen > FORGET_AFTER
            if silent and tracked.load is None and not self.promises.lost(request_id):
                self.recorder.ended(str(request_id), "no more heard of")
                self._drop(request_id)

    # -- upkeep -----------------------------------------------------------------------------

    def _stop_running(self) -> None:
        for tracked in self._requests.values():
            tracked.approximate_from = 0

    @property
    def tracked(self) -> int:
        """The number of known requests."""
        return len(self._requests)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the index, graphs in flight and pages in use agree."""
        super().check_integrity()
        assert self._users.graphs == self._using.keys(), "graphs in use and their pages differ"


def _scheduled(output: Any) -> list[int]:
    """Return the ids of a step's requests."""
    return [data.request_id for data in (*output.new_requests, *output.cached_requests)]
