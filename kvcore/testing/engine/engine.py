"""`ReferenceEngine`: a serving engine small enough to read, with or without kvcore.

One step:

    take in finished loads; admit requests while pages last ──▶ look up; start loads and blends
    allocate pages for the next tokens; preempt the newest request if none are left
    blend, then run one forward within a token budget: decodes, and pieces of prompts
    restart requests whose KV did not arrive; append tokens to the others, and save blocks

Decoding is greedy. One thread drives the engine. Each rank is a thread of its own with its part of
the heads and layers, its pages and its kvcore worker. Pipeline stages run one after another.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from kvcore.config import Config
from kvcore.connector.build import (
    ManagerParts,
    WorkerParts,
    build_leader,
    build_planner,
    build_worker,
    fusion_parts,
    leader_parts,
)
from kvcore.connector.fusion_scheduler import FusionTraits
from kvcore.errors import CapacityError, ConfigError, TransferError
from kvcore.explain.recorder import RequestRecorder
from kvcore.fusion.options import FusionOptions
from kvcore.fusion.segments import Segments
from kvcore.manager.load_advisor import OTHER_TIER, guess_compute, learn_loads, tier_priors
from kvcore.memory.layout import KVView
from kvcore.model.spec import LayerGroup, ModelDescription, even_stages, head_range
from kvcore.telemetry.metrics import Metrics
from kvcore.telemetry.rates import ForwardPart, Rates, TierRates
from kvcore.testing.engine.fusing import RankBlender, ReferenceFusionScheduler
from kvcore.testing.engine.leader import Leader
from kvcore.testing.engine.model import Llama, RankModel, Rows
from kvcore.testing.engine.requests import Request, State
from kvcore.testing.engine.transport import DirectTransport
from kvcore.testing.page_table import PageTable
from kvcore.testing.ranks import Ranks
from kvcore.transfer.plan import layer_steps
from kvcore.worker.lifecycle import close_worker, open_tiers

__all__ = ["EngineArgs", "ReferenceEngine"]

IDLE_WAIT_S = 0.002
"""Seconds that a step without tokens waits for a transfer to end, so that it does not spin."""


HUNG_STEPS = 2000


@dataclass(frozen=True)
class EngineArgs:
    """The size and the limits of a reference engine.

    Args:
        ranks: tensor-parallel ranks of each stage, which share its KV heads.
        stages: pipeline stages, which share the layers.
        machines: machines that hold equally many ranks each. All ranks run in this process; behind
            servers, each copies to and from the memory of its own machine's.
        num_pages: pages of the engine's KV memory.
        page_tokens: tokens of a page.
        max_num_tokens: token budget of a step. Longer prompts are cut.
        max_batch: most requests that run at once.
        prefix_cache: True to keep the pages of finished requests for reuse.
        min_load_tokens: fewest tokens to load beyond those in the engine's own prefix cache.
        produces: True if the engine offers the KV of its prompts to the engines that answer them.
        promise_s: seconds to wait for KV that another engine has offered.
    """

    ranks: int = 1
    stages: int = 1
    machines: int = 1
    num_pages: int = 256
    page_tokens: int = 16
    max_num_tokens: int = 1024
    max_batch: int = 8
    prefix_cache: bool = True
    min_load_tokens: int = 1
    produces: bool = False
    promise_s: float = 5.0


class ReferenceEngine(AbstractContextManager["ReferenceEngine"]):
    """A serving engine over ``model``, without kvcore if ``config`` is None. Close it when done.

    The class attributes are the parts of its adapter. Tests of the conformance kit replace them
    with broken ones.

    Raises ConfigError if the ranks or stages do not fit the model, or if fusion is on with several
    stages.
    """

    transport_type: ClassVar[type[DirectTransport]] = DirectTransport
    leader_type: ClassVar[type[Leader]] = Leader
    blender_type: ClassVar[type[RankBlender]] = RankBlender

    def __init__(
        self, model: Llama, args: EngineArgs | None = None, config: Config | None = None
    ) -> None:
        self.args = args = args or EngineArgs()
        if model.spec.kv_heads % args.ranks:
            raise ConfigError(
                f"given {args.ranks} ranks for {model.spec.kv_heads} KV heads; give a divisor"
            )
        if not 1 <= args.stages <= model.spec.layers:
            raise ConfigError(
                f"given {args.stages} stages for {model.spec.layers} layers; give at least one "
                "stage and at most one per layer"
            )
        if config is not None and config.fusion.enabled and args.stages > 1:
            raise ConfigError(
                f"given fusion with {args.stages} pipeline stages, but a blend needs all layers; "
                "give 1 stage, or fusion.enabled = false"
            )
        self.model = model
        self.preemptions = 0
        self.table = PageTable(args.num_pages, args.page_tokens)
        self._ids = itertools.count(1)
        self._queue: list[Request] = []
        self._running: list[Request] = []
        self._stages = [Ranks(args.ranks) for _ in range(args.stages)]
        self._parts = [self._rank_model(*place) for place in self._places()]
        self.leader: Leader | None = None
        self.workers: list[WorkerParts] = []
        self.priors: dict[str, TierRates] = {}
        self.rates: Rates | None = None
        """The rates behind the planner's decisions and estimates; None without kvcore."""
        self._blenders: list[RankBlender] = []
        try:
            if config is not None:
                self._connect(config)
        except BaseException:
            self._end_ranks()
            raise

    # -- construction -----------------------------------------------------------------------

    def _places(self) -> Iterator[tuple[int, int]]:
        """Yield the stage of each rank, and its number in that stage."""
        return itertools.product(range(self.args.stages), range(self.args.ranks))

    def _layers(self) -> tuple[tuple[int, int], ...]:
        """Range of layers of each stage."""
        return even_stages(self.model.spec.layers, self.args.stages)

    def _rank_model(self, stage: int, number: int) -> RankModel:
        args, spec = self.args, self.model.spec
        heads = range(*head_range(spec.kv_heads, args.ranks, number))
        layers = range(*self._layers()[stage])

        def reduce(part: Tensor) -> Tensor:
            if args.ranks == 1:
                return part
            first, *others = self._stages[stage].gather(number, part)
            total: Tensor = sum(others, first)
            return total

        return RankModel(self.model, args.num_pages, args.page_tokens, heads, reduce, layers)

    def describe(self, block_tokens: int) -> ModelDescription:
        """Return the model as kvcore sees it."""
        layers = tuple(range(self.model.spec.layers))
        return ModelDescription(
            self.model.block_shape(block_tokens),
            (LayerGroup(0, self.args.page_tokens, layers),),
            self.model.fingerprint,
            self.args.ranks * self.args.stages,
            stages=self._layers(),
            machines=self.args.machines,
        )

    def settings_on(self, config: Config, machine: int) -> Config:
        """Return the settings of the ranks on a machine; ``config`` are those of the leader."""
        return config

    def view(self, part: RankModel) -> KVView:
        """Return the view of a rank's pages that is given to kvcore."""
        return part.view()

    def _connect(self, config: Config) -> None:
        """Create a kvcore worker for each rank, and a leader that passes them graphs directly."""
        described = self.describe(config.block.tokens)
        self.workers = [
            build_worker(
                self.settings_on(config, rank // described.firsts.step),
                described,
                rank,
                [self.view(part)],
            )
            for rank, part in enumerate(self._parts)
        ]
        transport = self.transport_type([made.worker for made in self.workers])
        recorder = RequestRecorder.of(config, always=True)
        built = build_leader(config, described, transport, recorder)
        for made in self.workers:
            open_tiers(made.worker, made.open_tier, built.open_tiers)
        fusion = None
        if config.fusion.enabled:
            fusion = self._fusion(config, described, built.manager, transport, built.metrics)
        self.rates = self._guess(built)
        planning = build_planner(
            config,
            described,
            built,
            self.rates,
            recorder,
            min_load_tokens=self.args.min_load_tokens,
            layerwise=True,
        )
        self.leader = self.leader_type(
            config,
            described,
            leader_parts(built, transport, recorder, fusion, planning),
            transport,
            min_load_tokens=self.args.min_load_tokens,
            produces=self.args.produces,
            promise_s=self.args.promise_s,
        )

    def _guess(self, built: ManagerParts) -> Rates:
        """Return what to expect of compute and tiers before anything is measured."""
        spec = self.model.spec
        compute = guess_compute(spec.hidden, spec.layers, self.args.ranks, self.model.device.type)
        self._paths = built.read_paths
        self.priors = tier_priors(self._paths)
        return Rates(spec.layers, compute, self.priors, otherwise=OTHER_TIER)

    def _fusion(
        self,
        config: Config,
        described: ModelDescription,
        manager: Any,
        transport: DirectTransport,
        metrics: Metrics,
    ) -> ReferenceFusionScheduler:
        for rank, (part, made) in enumerate(zip(self._parts, self.workers, strict=True)):
            selector, ops = fusion_parts(config, made)
            self._blenders.append(self.blender_type(config, rank, part, made.worker, selector, ops))
        return ReferenceFusionScheduler(
            config,
            sum(described.rank_shape(rank).nbytes for rank in range(described.world_size)),
            manager,
            manager.segments or Segments(config.block.tokens, min_tokens=config.fusion.min_tokens),
            layer_steps(described.shape.layers),
            metrics,
            FusionTraits(self.args.page_tokens),
            transport=transport,
        )

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Finish all saves, flush the tiers, and release everything."""
        for made in self.workers:
            close_worker(made.worker)
        if self.leader is not None:
            self.leader.close()
        self.workers, self.leader = [], None
        self._end_ranks()

    def _end_ranks(self) -> None:
        for ranks in self._stages:
            ranks.close()

    def explain(self, request: Request) -> dict[str, Any]:
        """Return why a recent request was served as it was. It is empty for older requests."""
        journal = None if self.leader is None else self.leader.recorder.journal
        record = None if journal is None else journal.get(str(request.request_id))
        return {} if record is None else record.as_dict()

    # -- requests ---------------------------------------------------------------------------

    def submit(
        self,
        tokens: Sequence[int],
        max_tokens: int = 8,
        *,
        salt: str = "",
        fusion: FusionOptions | None = None,
        lora: Path | None = None,
        promise: dict[str, Any] | None = None,
        asked: Any = None,
    ) -> Request:
        """Queue a request and return it.

        ``lora`` is a folder of LoRA weights in PEFT's format. ``promise`` is what another engine
        offered for the prompt (`Request.promised`). ``asked`` is what the client has for kvcore
        (`kvcore.connector.control`). Raises CapacityError if the request can never run.
        """
        needed = self.table.pages_for(len(tokens) + max_tokens)
        if needed > self.table.num_pages:
            raise CapacityError(
                f"a request needs {needed} pages, but there are {self.table.num_pages}; give more"
            )
        request = Request(
            next(self._ids),
            list(tokens),
            max_tokens,
            salt,
            lora=lora,
            promise=promise,
            asked=asked,
        )
        if fusion is not None:
            request.fusion = fusion
        self._queue.append(request)
        return request

    def abort(self, request: Request) -> None:
        """Abort a request at once. Blocks while its pages are being copied."""
        if request.state.ended:
            return
        (self._queue if request in self._queue else self._running).remove(request)
        request.state = State.ABORTED
        if self.leader is not None:
            self.leader.abort(request)
        self._release(request)

    @property
    def idle(self) -> bool:
        """True if no request is queued or running."""
        return not self._queue and not self._running

    def run(self, timeout_s: float = 120.0) -> None:
        """Step until the engine is idle.

        Raises TransferError after ``timeout_s`` seconds and `HUNG_STEPS` steps. Time alone does not
        count, because the machine may have been suspended.
        """
        limit, steps = time.monotonic() + timeout_s, 0
        while not self.idle:
            steps += 1
            if time.monotonic() > limit and steps > HUNG_STEPS:
                states = [request.state.value for request in (*self._running, *self._queue)]
                raise TransferError(f"requests did not end within {timeout_s} s: {states}")
            self.step()

    def generate(
        self, prompts: Sequence[Sequence[int]], max_tokens: int = 8, **options: Any
    ) -> list[list[int]]:
        """Answer all prompts at once, greedily. ``options`` are those of `submit`."""
        requests = [self.submit(prompt, max_tokens, **options) for prompt in prompts]
        self.run()
        return [request.answer for request in requests]

    def settle(self, timeout_s: float = 60.0) -> None:
        """Block until all saves are published. Raises TransferError after ``timeout_s`` seconds."""
        limit, polls = time.monotonic() + timeout_s, 0
        while self.leader is not None and self.leader.manager.in_flight:
            polls += 1
            if time.monotonic() > limit and polls > HUNG_STEPS:
                raise TransferError(
                    f"saves did not end within {timeout_s} s: {self.leader.leftovers}"
                )
            self.leader.wait(IDLE_WAIT_S)
            self._restart(self.leader.pump())

    @property
    def implementations(self) -> dict[str, str]:
        """Return the names of the implementations for "copies" and "blends".

        An entry is missing without kvcore or without fusion.
        """
        copies = [made.worker.ops.name for made in self.workers[:1]]
        blends = [type(blender.ops).__name__ for blender in self._blenders[:1]]
        return dict(zip(("copies", "blends"), copies + blends, strict=False))

    def forget(self) -> None:
        """Empty the engine's own prefix cache."""
        self.table.forget()

    def check_integrity(self) -> None:
        """Assert that pages, index and transfers are consistent; if idle, that nothing leaked."""
        self.table.check_integrity()
        if self.leader is None:
            return
        self.leader.check_integrity()
        if self.idle and not self.leader.manager.in_flight:
            assert not self.leader.leftovers, self.leader.leftovers
            assert self.table.available == self.table.num_pages, (
                "pages are in use without a request"
            )

    # -- a step -----------------------------------------------------------------------------

    def step(self) -> None:
        """Advance every request that can advance."""
        if self.leader is not None:
            self._restart(self.leader.pump())
        self._admit()
        self._grow()
        batch = self._schedule()
        self._blend()
        if not batch and self.leader is not None:
            self.leader.wait(IDLE_WAIT_S)
        sampled = self._timed_forward([rows for _, rows in batch]) if batch else []
        if self.leader is not None:
            self._restart(self.leader.settle())
        for (request, rows), token in zip(batch, sampled, strict=True):
            if request.state is State.RUNNING:
                self._advance(request, rows, token)

    # -- scheduling -------------------------------------------------------------------------

    def _admit(self) -> None:
        for request in list(self._queue):
            if len(self._running) >= self.args.max_batch or not self._begin(request):
                return

    def _begin(self, request: Request) -> bool:
        """Allocate pages for a request and start to fill them. Return False if too few are left."""
        claimed = []
        if self.args.prefix_cache:
            claimed = self.table.claim(request.tokens, request.family)
        computed = len(claimed) * self.args.page_tokens
        fresh = self.table.pages_for(len(request.tokens)) - len(claimed)
        if fresh > self.table.available:  # looked up once it has pages: each lookup is counted
            self.table.release(claimed)
            return False
        found = None if self.leader is None else self.leader.lookup(request, computed)
        if found is not None and found.wait:
            self.table.release(claimed)
            return True
        request.pages = claimed + self._allocate(fresh)
        request.computed = request.cached_tokens = computed
        request.state = State.RUNNING
        self._queue.remove(request)
        self._running.append(request)
        if self.leader is not None and found is not None:
            self.leader.start(request, found)
        return True

    def _allocate(self, count: int) -> list[int]:
        """Allocate pages that no transfer in flight reads or writes."""
        pages = self.table.allocate(count)
        if self.leader is not None:
            self.leader.fence(pages)
        return pages

    def _grow(self) -> None:
        """Allocate a page for each request's next token; preempt the newest if none is left."""
        for request in list(self._running):
            missing = self.table.pages_for(len(request.tokens)) - len(request.pages)
            while request.state is State.RUNNING and missing > self.table.available:
                victims = [other for other in self._running if other.state is State.RUNNING]
                self._preempt(victims[-1])
            if request.state is State.RUNNING and missing > 0:
                request.pages += self._allocate(missing)

    def _preempt(self, request: Request) -> None:
        self.preemptions += 1
        self._requeue(request)
        if self.leader is not None:
            self.leader.preempted(request)

    def _restart(self, requests: Sequence[Request]) -> None:
        """Restart requests whose KV did not arrive."""
        for request in requests:
            if request in self._running:
                self._requeue(request)

    def _requeue(self, request: Request) -> None:
        self._running.remove(request)
        self._release(request)
        request.restart()
        self._queue.insert(0, request)

    def _release(self, request: Request) -> None:
        self.table.release(request.pages)
        request.pages = []

    def _schedule(self) -> list[tuple[Request, Rows]]:
        """Return the rows of a step: one per decoding request, then pieces of prompts."""
        ready = [request for request in self._running if request.state is State.RUNNING]
        ready.sort(key=lambda request: not request.decoding)
        batch, budget = [], self.args.max_num_tokens
        for request in ready:
            start = request.computed
            tokens = request.tokens[start : start + budget]
            if tokens:
                batch.append((request, Rows(tokens, start, request.pages, request.lora)))
                budget -= len(tokens)
        return batch

    # -- computing --------------------------------------------------------------------------

    def _blend(self) -> None:
        if self.leader is None:
            return
        for order in self.leader.orders:
            if order.request.state is not State.RUNNING:  # preempted since
                continue
            done = self._stages[0].each(
                lambda rank, order=order: self._blenders[rank].blend(  # type: ignore[misc]
                    order, lambda layer: self._wait_for(rank, layer)
                )
            )
            if not all(done):
                self.leader.failed(order.request)
                self._restart([order.request])

    def _timed_forward(self, batch: Sequence[Rows]) -> list[int]:
        """Run `_forward`, and let the planner learn from its time and from completed loads.

        A forward that waits for a load is not counted.
        """
        started = time.perf_counter()
        sampled = self._forward(batch)
        if self.rates is not None and self.leader is not None:
            if not self.leader.sync:
                parts = [ForwardPart(len(rows.tokens), rows.start) for rows in batch]
                self.rates.prefilled(parts, time.perf_counter() - started)
            for made in self.workers:
                learn_loads(self.rates, self._paths, made.metrics.delta())
        return sampled

    def _forward(self, batch: Sequence[Rows]) -> list[int]:
        hidden: Tensor | None = None
        for stage, ranks in enumerate(self._stages):
            first = stage * self.args.ranks

            def run(number: int, first: int = first, given: Tensor | None = hidden) -> Tensor:
                rank = first + number
                return self._parts[rank].forward(
                    batch, lambda layer: self._wait_for(rank, layer), given
                )

            hidden = ranks.each(run)[0]
        assert hidden is not None
        return self._parts[-1].choose(batch, hidden)

    def _wait_for(self, rank: int, layer: int) -> None:
        """Block until the step's loads have brought a layer to this rank."""
        if self.leader is not None:
            for graph_id in self.leader.sync:
                self.workers[rank].worker.wait_layer(graph_id, layer)

    def _advance(self, request: Request, rows: Rows, token: int) -> None:
        request.computed = rows.stop
        if rows.stop == len(request.tokens):
            request.tokens.append(token)
        page = self.args.page_tokens
        if self.args.prefix_cache and rows.stop // page > rows.start // page:
            self.table.store(request.tokens[: request.exact], request.family, request.pages)
        if self.leader is not None:
            self.leader.save(request)
        if len(request.answer) >= request.max_tokens:
            self._finish(request)

    def _finish(self, request: Request) -> None:
        request.state = State.DONE
        self._running.remove(request)
        if self.leader is not None:
            self.leader.forget(request)
        self._release(request)
