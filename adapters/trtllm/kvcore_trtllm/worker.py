"""The data plane inside a TensorRT-LLM rank: it carries out step plans around the model's forward.

    start_load_kv         starts early saves and loads, follows fences, makes blends
    wait_for_layer_load   follows the sync loads' copies of a layer
    end of the forward    starts late saves
    get_finished          returns requests whose saves or loads have ended, each once

Every rank sees the same plans and the same reports, so all ranks agree on which ops are open. While
any op is open, get_finished gathers the reports of all ranks. The engine calls it on every rank.

After an error no copy of the rank touches the engine's pages any more (`RankGuard`). A step that
counts on KV then fails with `StepBroken`, on all ranks and at the end of the forward. Requests that
wait for copies are returned at once: the leader lets none answer of whose KV it has not heard.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from kvcore.connector.fusion_messages import BlendReport
from kvcore.connector.fusion_worker import PromisedFusionWorker, RefusingFusionWorker
from kvcore.connector.guard import attempt
from kvcore.connector.messages import StepReport
from kvcore.connector.rank_guard import RankGuard
from kvcore.connector.worker import ATTEMPTS, IDLE_WAIT_S, Load, StepWorker
from kvcore.errors import EngineMustEnd, RankLostError, StepBroken, TransferError
from kvcore.memory.device import Event, Stream
from kvcore.transfer.graph import OpReport, RowError, TransferGraph
from kvcore.transfer.quorum import Quorum
from kvcore.worker.lifecycle import RankParts
from kvcore_trtllm.messages import REPORTS, KVCoreMetadata, News, StepPlan

_STREAMS_KNOWN = 8
"""The most streams of the engine that are kept in mind."""

Allgather = Callable[[bytes], list[bytes]]
"""Returns the bytes that each rank passed, in order of rank. A collective."""

Listener = Callable[[News], None]
"""Takes what all ranks have reported."""

_UNTOLD = REPORTS.encode(StepReport(stopped="a rank cannot encode its reports"))


class _Poll(NamedTuple):
    """The arguments of a call of `finished`, as the same objects, and its answer."""

    saving: object
    loading: object
    answer: tuple[list[int], list[int]]

    def is_of(self, saving: object, loading: object) -> bool:
        return self.saving is saving and self.loading is loading


class Tally:
    """The ops that have not ended on all ranks yet. Every rank keeps the same tally."""

    def __init__(self, ranks: int, allgather: Allgather) -> None:
        self.ranks = ranks
        self._allgather = allgather
        self._open: set[tuple[int, int]] = set()
        self._quorum = Quorum(ranks)

    @property
    def open(self) -> bool:
        """True if an op has not ended on all ranks, as far as they have told."""
        return bool(self._open)

    def expect(self, graph: TransferGraph) -> None:
        """Count the ops of ``graph`` as open from now on. Call on all ranks."""
        for op in graph.ops:
            self._open.add((graph.graph_id, op.op_id))

    def exchange(self, encoded: bytes) -> News:
        """Gather the encoded reports of all ranks. A collective: call it only if ops are `open`."""
        everyone = self._allgather(encoded) if self.ranks > 1 else [encoded]
        news = News([], [])
        for payload in everyone:
            theirs = REPORTS.decode(payload)
            news.counted.append(theirs.counted)
            whole = (self._quorum.add(report) for report in theirs.reports)
            news.ended.extend(report for report in whole if report is not None)
            news = news._replace(stopped=news.stopped or theirs.stopped)
        self._open.difference_update((report.graph_id, report.op_id) for report in news.ended)
        return news

    def first(self, word: str) -> str:
        """Return the first word that is not empty of all ranks' words, else "". A collective."""
        own = word.encode()
        words = self._allgather(own) if self.ranks > 1 else [own]
        return next(filter(None, words), b"").decode()


class WorkerConnector(StepWorker[int]):
    """The worker half of one rank. Called from the executor's thread only.

    ``layers`` is the number of decoder layers whose hooks call `wait_for_layer`. If ``layerwise``,
    the forward may begin while loads are in flight. ``blends`` is None if there is no fusion, and
    ``no_fusion`` says why. On the leader's rank ``listener`` is called with the ops that have ended
    on all ranks, ``on_blends`` with the results of blends, and ``on_broken`` if a step has failed;
    they are None elsewhere.
    """

    attempts = ATTEMPTS

    def __init__(
        self,
        parts: RankParts,
        tally: Tally,
        *,
        layers: int,
        layerwise: bool,
        blends: PromisedFusionWorker | None = None,
        no_fusion: str = "",
    ) -> None:
        super().__init__(parts, blends)
        self.no_fusion = no_fusion
        self._rank = RankGuard(self, self.open_loads)
        self.on_blends: Callable[[list[BlendReport]], None] | None = None
        self.on_broken: Callable[[], None] | None = None
        self.listener: Listener | None = None
        self._tally = tally
        self._layers = layers
        self._layerwise = layerwise
        self._plan = StepPlan()
        self._in_step = False
        self._taken = False  # a plan's graphs are taken on, since the last poll
        self._sync: list[Load[int]] = []
        self._waited: set[int] = set()  # layers of this step that the hooks have waited for
        self._saving: dict[int, set[int]] = {}  # request -> saves that read its pages
        self._saver: dict[int, tuple[int, set[int]]] = {}  # save -> request, copies not ended
        self._loaded: set[int] = set()  # have ended and were not returned yet
        self._failed: set[int] = set()  # loads that have failed, and were not cancelled
        self._loads_asked: set[int] = set()
        self._saves_asked: set[int] = set()
        self._worked = False
        self._streams: dict[int, tuple[Any, Stream]] = {}
        self._poll: _Poll | None = None  # the last one that has returned
        self._met = False  # the poll that goes on has exchanged reports

    # -- streams ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def on(self, engine_stream: Any) -> Iterator[None]:
        """Make a stream that the engine has passed the current one in this block.

        Every later copy runs after what such streams were given before it: TensorRT-LLM runs its
        forwards on a stream of their own. If the stream cannot be had, the rank stops, and does no
        work in the block.
        """
        with contextlib.ExitStack() as stack:

            def issue() -> None:
                stack.enter_context(self._known(engine_stream).issuing())

            self._rank.run("a call with a stream", issue, None)
            yield

    def _known(self, engine_stream: Any) -> Stream:
        known = self._streams.get(id(engine_stream))
        if known is None:
            if len(self._streams) == _STREAMS_KNOWN:
                self._streams.pop(next(iter(self._streams)))
            known = engine_stream, self._worker.stream_of(engine_stream)
            self._streams[id(engine_stream)] = known
        return known[1]

    def _mark(self) -> Event | None:
        return self._worker.mark(*(stream for _, stream in self._streams.values()))

    # -- before the forward -----------------------------------------------------------------

    def read(self, metadata: KVCoreMetadata) -> StepPlan:
        """Return the plan in a step's metadata, for `begin`.

        Stops the rank if the leader has stopped, or if the plan cannot be read. Other ranks would
        wait for what it asks for: RankLostError is raised then.
        """
        if metadata.stopped:
            self._rank.halt(f"the scheduler half has stopped ({metadata.stopped})")
            return StepPlan(broken=metadata.broken)
        plan = self._rank.run("start_load_kv", metadata.plan, None, always=True)
        if plan is None:
            self._alone("this rank cannot read its plan")
            plan = StepPlan(broken="kvcore cannot read a plan" if metadata.counts else "")
        return plan

    def begin(self, plan: StepPlan) -> None:
        """Start the work that precedes this step's forward, and carry out its blends.

        What the step does waits for fences, and for sync loads unless they are waited for layer by
        layer. Blocks the host while blends are launched. A collective if there are blends.

        The engine would leave the other ranks alone with the forward if this raised. So whatever
        fails here fails the step, in `end_forward`. After an error of kvcore this rank does no more
        work: it refuses what it is given, and the leader stops. Call `begin_in_error` if this
        raises all the same.
        """
        self._accept(plan)
        self._rank.expect(plan.blends)
        self._rank.run("start_load_kv", lambda: self.tend_tiers(plan), None, always=True)
        self._rank.run("start_load_kv", lambda: self._start(plan), None)
        self._rank.meet()
        if self._rank.stopped:
            self._refuse_plan(plan)

    def _accept(self, plan: StepPlan) -> None:
        """Take a plan for the step that begins, and expect its reports. May be called again."""
        attempt("the refusal of saves", self._drop_late_saves, None)  # if the last forward failed
        self._sync.clear()
        self._plan, self._in_step, self._worked = plan, True, True
        self._waited.clear()
        self._loaded.update(plan.lost_loads)
        self._take_on(plan)
        self._taken = True

    def _take_on(self, plan: StepPlan) -> None:
        """Expect the reports of all graphs of a plan, as all ranks do."""
        saves = [*plan.early_saves, *plan.late_saves]
        loads = [*plan.sync_loads, *(graph for _, graph in plan.async_loads)]
        graphs = [*(graph for _, graph in saves), *loads, *plan.spills]
        self.take_on(graphs, plan.blends)
        for graph in self._todo.values():
            self._tally.expect(graph)
        for request_id, graph in saves:
            self._saving.setdefault(request_id, set()).add(graph.graph_id)
            copies = {op.op_id for op in graph.ops if op.path.touches_device}
            self._saver[graph.graph_id] = request_id, copies
        self._sync += [self._expect(graph) for graph in plan.sync_loads]
        for request_id, graph in plan.async_loads:
            self._expect(graph, request_id)

    def _start(self, plan: StepPlan) -> None:
        self._submit_saves(graph for _, graph in plan.early_saves)
        self._cancel(plan.cancel)
        self._pass(plan.fence)
        together = self._worker.wave()
        for graph in plan.sync_loads:
            self._submit(graph, together)
        for graph in (*(graph for _, graph in plan.async_loads), *plan.spills):
            self._submit(graph)
        if plan.blends or not self._layerwise:
            self._follow_loads()
        if plan.blends:
            self._blend(plan)

    def _refuse_plan(self, plan: StepPlan) -> None:
        """Refuse the work of a plan that was not begun, and break the step if it counts on that."""
        plan.late_saves = []
        attempt("the refusal of work", self.refuse_rest, None)
        shared = set(plan.fence) & (self._failed | self._loads.keys()) - set(plan.cancel)
        if plan.sync_loads or plan.blends or shared:
            plan.broken = plan.broken or f"kvcore stands aside on a rank: {self._rank.stopped}"

    def begin_in_error(self, metadata: KVCoreMetadata, why: str, error: Exception) -> None:
        """Begin a step without its work, after an error in `read` or `begin`.

        Raises RankLostError if other ranks may wait for what this one does not know, or for blends.
        """
        self._rank.halt(why, error)
        try:
            if not self._taken:
                self._accept(self.read(metadata))
                attempt("the upkeep of tiers", lambda: self.tend_tiers(self._plan), None)
        except EngineMustEnd:
            raise
        except Exception as second:  # noqa: BLE001 - nobody else waits
            self._alone(why, second)
            self._plan = StepPlan(broken=why if metadata.counts else metadata.broken)
        if self._plan.blends:
            self._alone(why, error)
        self._in_step = True
        self._refuse_plan(self._plan)

    def _alone(self, why: str, error: Exception | None = None) -> None:
        """Raise RankLostError if there are other ranks."""
        if self._tally.ranks > 1:
            raise RankLostError(f"other ranks may wait for this one: {why}") from error

    def start(self, graph: TransferGraph) -> None:
        """Start a graph that touches none of the engine's pages. Call on all ranks."""
        self._tally.expect(graph)
        self._submit(graph)

    def _drop_late_saves(self) -> None:
        saves, self._plan.late_saves = self._plan.late_saves, []
        self._refuse(graph for _, graph in saves)

    # -- blends -----------------------------------------------------------------------------

    @property
    def blends(self) -> PromisedFusionWorker | None:
        """What carries out blends; None if there is no fusion."""
        return self._blends if isinstance(self._blends, PromisedFusionWorker) else None

    def refuse_blends(self, why: str) -> None:
        """Make no blends on this rank, because another one cannot. Call before the first step."""
        self._blends, self.no_fusion = RefusingFusionWorker(1), why

    def _blend(self, plan: StepPlan) -> None:
        """Carry out the step's blends. Blocks. If one cannot be made, the whole step fails."""
        blends = self.blends
        if blends is None:
            plan.broken = plan.broken or f"a blend was promised: {self.no_fusion}"
        elif plan.broken:  # on this rank perhaps only
            self.decline_blends(plan.blends)
        else:
            self._begin_blends(blends, plan.blends)
            try:
                blends.carry_out(self._arrived)
            except RankLostError:
                raise
            except TransferError as error:
                plan.broken = str(error)
            self._chunks.clear()
            reports = blends.take_reports()
            if self.on_blends is not None:
                self.on_blends(reports)
        self.refuse_rest(plan.blends, RowError.UPSTREAM)

    # -- sync loads -------------------------------------------------------------------------

    def wait_for_layer(self, layer: int) -> None:
        """Let the forward wait until every sync load has copied ``layer``.

        If a load has finally failed, the forward goes on, because it is a collective, and
        `end_forward` fails the step.
        """
        self._waited.add(layer)

        def wait() -> None:
            self._wait_layer(self._sync, layer)
            for load in self._sync:
                if load.failed:  # a later layer's copy perhaps, which may still be repeated
                    self._settle(load)

        if self._sync and not self._plan.broken:
            self._rank.run("wait_for_layer_load", wait, None)
            if self._rank.stopped:
                self._refuse_plan(self._plan)
            self._plan.broken = self._plan.broken or self._failure(self._sync)

    def halt(self, why: str, error: Exception | None = None) -> None:
        """Stop the rank after an error, and let the step fail if it has loads. Never a collective.

        Raises PagesInUse if a copy may still touch the engine's pages.
        """
        self._rank.halt(why, error)
        if self._in_step:
            self._refuse_plan(self._plan)

    def _follow_loads(self) -> None:
        """Follow every sync load. If one has finally failed, the step is broken."""
        self._wait_loads(self._sync)
        self._plan.broken = self._plan.broken or self._failure(self._sync)

    @staticmethod
    def _failure(loads: Sequence[Load[int]]) -> str:
        """Return what to say if one of the loads has failed in its last attempt, else nothing."""
        for load in loads:
            if load.failed:
                return (
                    f"KV in host memory could not be copied to the device in {ATTEMPTS} attempts: "
                    f"{[report.failed for report in load.reports if report.failed][:1]}; the "
                    "step's requests fail, because a wrong answer would be worse"
                )
        return ""

    def _pass(self, fence: Iterable[int]) -> None:
        """Let the step's work wait until graphs no longer use pages that it gives to others.

        Saves are issued together. A load that failed is tried again, and then writes to its pages
        again. If it finally fails and was not cancelled, the step is broken: another request in it
        may count on its pages.
        """
        graphs = set(fence)
        self._worker.follow(*sorted(graphs - self._loads.keys()))  # or they have ended here
        self._wait_loads([self._loads[graph_id] for graph_id in graphs & self._loads.keys()])
        if graphs & self._failed - set(self._plan.cancel):
            self._plan.broken = self._plan.broken or (
                "KV that this step shares with a request that loads it did not arrive"
            )

    # -- after the forward ------------------------------------------------------------------

    def end_forward(self) -> None:
        """Start the saves of what the forward computed. Does nothing the second time in a step.

        Raises StepBroken, on every rank, if the forward of one computed on KV that had not arrived.
        TensorRT-LLM then answers its requests with an error. A collective if the step counts on KV.
        """
        if not self._in_step:
            return
        self._check_step()
        self._sync.clear()
        saves, self._plan.late_saves = self._plan.late_saves, []

        self._rank.run(
            "wait_for_save", lambda: self._submit_saves(graph for _, graph in saves), None
        )
        if self._rank.stopped:
            attempt("the refusal of work", self.refuse_rest, None)

    def end_in_error(self, why: str, error: Exception) -> None:
        """End a step after an error in `end_forward`. Raises as that does."""
        self._rank.halt(why, error)
        if self._in_step:
            self._refuse_plan(self._plan)
            self._agree(self._plan)

    def _check_step(self) -> None:
        plan = self._plan
        if self._sync and not plan.broken:
            self._rank.run("wait_for_save", self._follow_loads, None)
            if self._rank.stopped:
                self._refuse_plan(plan)
        if self._layerwise and self._sync and len(self._waited) < self._layers:
            plan.broken = plan.broken or (
                "the engine ran its forward without calling the layers' hooks (a CUDA graph, or "
                "compiled code): set trtllm.layerwise = false"
            )
        self._agree(plan)

    def _agree(self, plan: StepPlan) -> None:
        """Raise StepBroken, on every rank, if the step's results must not be used.

        A collective if the step counts on KV: the engine would use the results of a rank that does
        not raise. Once this has returned or raised StepBroken, the step has ended.
        """
        if plan.sync_loads or plan.blends or plan.fence:  # on all ranks alike
            try:
                plan.broken = self._tally.first(plan.broken)
            except Exception as error:  # noqa: BLE001 - a step of which the others do not know fails
                self._alone("the ranks cannot agree on a step", error)
                self._rank.halt("it is not known whether KV has arrived", error)
                plan.broken = plan.broken or f"kvcore cannot tell whether KV has arrived: {error}"
        self._in_step = False
        if plan.broken:
            self._sync.clear()
            attempt("the refusal of saves", self._drop_late_saves, None)
            if self.on_broken is not None:
                attempt("the end of a step that has failed", self.on_broken, None)
            raise StepBroken(plan.broken)

    # -- polling ----------------------------------------------------------------------------

    def finished(
        self, saving: Iterable[int], loading: Iterable[int]
    ) -> tuple[list[int], list[int]]:
        """Take in ids that wait for saves or loads; return (saved, loaded), each id once.

        A collective while any op is open. If nothing was begun since the last call, blocks up to
        `IDLE_WAIT_S` for a report.
        """
        self._ask(saving, loading)
        idle, self._worked = not self._worked, False

        def look() -> None:
            if idle and (self._saves_asked or self._loads_asked):
                self._worker.wait_report(IDLE_WAIT_S)
            self._collect()

        self._rank.run("get_finished", look, None, always=True)
        self._exchange()
        answer = self._answer()
        self._poll, self._met = _Poll(saving, loading, answer), False
        return answer

    def _ask(self, saving: Iterable[int], loading: Iterable[int]) -> None:
        self._saves_asked.update(saving)
        self._loads_asked.update(loading)
        self._taken = False

    def _answer(self) -> tuple[list[int], list[int]]:
        """Return the ids whose saves, and those whose loads, have ended, and forget them.

        All of them if the rank has stopped: it makes no copies any more.
        """
        stopped = bool(self._rank.stopped)
        saved = sorted(i for i in self._saves_asked if stopped or not self._saving.get(i))
        loaded = sorted(i for i in self._loads_asked if stopped or i in self._loaded)
        self._saves_asked.difference_update(saved)
        self._loads_asked.difference_update(loaded)
        self._loaded.difference_update(loaded)
        return saved, loaded

    def finish_in_error(
        self, saving: Iterable[int], loading: Iterable[int], why: str, error: Exception
    ) -> tuple[list[int], list[int]]:
        """Return what a call of `finished` with the same objects should have, after an error in it.

        Raises RankLostError if other ranks may wait for this one's reports.
        """
        self._rank.halt(why, error)
        if self._poll is not None and self._poll.is_of(saving, loading):
            return self._poll.answer  # nobody has it
        self._ask(saving, loading)
        try:
            if not self._met:
                self._exchange()
        except EngineMustEnd:
            raise
        except Exception as second:  # noqa: BLE001 - nobody else waits
            self._alone(why, second)
            self._tell(News([], [], why))
        self._met = False
        return self._answer()

    def pump(self, timeout: float) -> None:
        """Wait up to ``timeout`` seconds for a report, and pass on what ended.

        Only for a rank that is alone: it is called between two steps.
        """
        self._worker.wait_report(timeout)
        self._collect()
        self._exchange()

    def _exchange(self) -> None:
        """Exchange reports with the other ranks, and pass on what has ended on all of them.

        A collective if any op is open: the rank takes part whatever fails in it.
        """
        if not self._tally.open:
            if self._rank.stopped:  # the leader on this rank learns of it; others tell with reports
                self._tell(News([], [], self._rank.stopped))
            return
        encoded = self._rank.run("get_finished", self._encoded, b"")
        if self._rank.stopped:
            encoded = attempt("the report of a rank", self._encoded, _UNTOLD)
        try:
            news = self._tally.exchange(encoded)
            self._met = True
        except Exception as error:  # noqa: BLE001 - nobody else waits, and the leader stops
            self._alone("the ranks' reports could not be exchanged", error)
            self._rank.halt("its reports could not be read", error)
            news = News([], [], self._rank.stopped)
        if encoded is not _UNTOLD:
            self._reports = []
        ended = {report.graph_id for report in news.ended}
        self._failed -= ended - self._loads.keys()  # the leader knows, and makes other plans
        self._tell(news)

    def _tell(self, news: News) -> None:
        listener = self.listener
        if listener is not None:
            self._rank.run("get_finished", lambda: listener(news), None, always=True)

    def _encoded(self) -> bytes:
        counted = self.metrics.delta() if self._reports else {}
        return REPORTS.encode(StepReport(self._reports, counted, stopped=self._rank.stopped))

    def _take(self, report: OpReport) -> None:
        super()._take(report)
        request_id, copies = self._saver.get(report.graph_id, (0, set()))
        copies.discard(report.op_id)
        if not copies and self._saver.pop(report.graph_id, None) is not None:
            self._saving[request_id].discard(report.graph_id)
            if not self._saving[request_id]:
                del self._saving[request_id]

    def _ended(self, load: Load[int]) -> None:
        if load.failed and not load.cancelled:
            self._failed.add(load.graph_id)
        if load.request_id is not None:
            self._loaded.add(load.request_id)
