"""The leader's half of fusion: decides which requests are blended and writes the orders.

    prompt  ├── exact prefix ──┼─ gap ─┼── chunk ──┼── chunk ──┼─ question ─┤
            0               exact                           stop
                               └── made by the blend ──────────┘ └ by the engine's own forward

    plan           finds chunks and decides whether a blend of them is worth it
    order          the request has its pages: launches the chunks' loads, orders the blend
    take_report    updates metrics, learned rates and what the client is shown

The engine treats [0, stop) as computed externally. The KV of [exact, stop) is approximate
from the first chunk on, so it must not be stored or shared under any key. How an engine ensures
that, and how it fetches chunks from lower tiers, is in its adapter's subclass.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, replace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvcore._util.outside import printable
from kvcore.config import Config
from kvcore.connector.fusion_chunks import ChunkPlanner
from kvcore.connector.fusion_messages import BlendOrder, BlendPlan, BlendReport, blend_summary
from kvcore.connector.fusion_policy import FusionPolicy
from kvcore.errors import ConfigError
from kvcore.fusion.controller import Decision, Mode
from kvcore.fusion.options import FusionOptions
from kvcore.fusion.segments import Reusable, SegmentBook
from kvcore.manager import Manager
from kvcore.model.keys import Namespace, pack_tokens
from kvcore.telemetry.metrics import Metrics
from kvcore.transfer.graph import Span

__all__ = ["FusionRequest", "FusionScheduler", "FusionTraits"]

_log = logging.getLogger("kvcore.fusion")

Tokens = Sequence[int] | npt.NDArray[np.int64]

REQUESTS_KEPT = 1024
"""The number of requests whose outcome is remembered."""


@dataclass(frozen=True)
class FusionTraits:
    """The properties of one engine that matter to fusion.

    Attributes:
        page_tokens: the engine's page in tokens.
        ends_at_page: a blend must end at the border of a page.
    """

    page_tokens: int
    ends_at_page: bool = False


@dataclass
class FusionRequest:
    """A request as fusion sees it.

    Attributes:
        found: the chunks of its prompt; None until the prompt was searched.
        decision: the policy's decision, once it was asked.
        plan: the last plan that was ordered, or is about to be.
        approximate_from: the first position whose KV may be approximate; None if all is exact.
        report: the result of the last blend.
        void: another load of the request failed, so the engine computes it whatever the report.
        fetched: its chunks were requested from their tiers.
        error: why the request is answered without fusion although it was to be blended.
    """

    request_id: str
    options: FusionOptions
    found: list[Reusable] | None = None
    decision: Decision | None = None
    plan: BlendPlan | None = None
    approximate_from: int | None = None
    report: BlendReport | None = None
    void: bool = False
    fetched: bool = False
    error: str = ""

    @property
    def declined(self) -> str | None:
        """Why the policy found a blend not worth it; None if it did not, or was not asked."""
        found = self.decision
        return found.reason if found is not None and found.mode is Mode.PREFIX else None

    def exact_tokens(self, tokens: int) -> int:
        """Return how many of the first ``tokens`` have exact KV."""
        known = self.approximate_from
        return tokens if known is None else min(tokens, known)

    def result(self) -> dict[str, Any]:
        """Return what the client is shown."""
        if self.error:
            return {"error": self.error}
        if self.plan is None or self.approximate_from is None:
            return {} if self.declined is None else {"declined": self.declined}
        return blend_summary(self.plan, self.report)


@dataclass(eq=False)
class FusionScheduler:
    """Plans and orders the blends of one engine. Leader's thread only; no call does I/O or waits.

    Args:
        block_nbytes: bytes of a block over all ranks.
        layer_steps: the layer steps in which chunks arrive.
        policy: decides whether a blend is worth it; None blends every prompt with chunks.
    """

    config: Config
    block_nbytes: int
    manager: Manager
    segments: InitVar[SegmentBook]
    layer_steps: Sequence[Span]
    metrics: Metrics
    traits: FusionTraits
    policy: FusionPolicy | None = None

    def __post_init__(self, segments: SegmentBook) -> None:
        self.chunks = ChunkPlanner(
            self.config.fusion, self.config.block.tokens, self.block_nbytes, self.manager, segments
        )
        self._known: OrderedDict[str, FusionRequest] = OrderedDict()

    # -- a request comes --------------------------------------------------------------------

    def read_options(
        self, request_id: str, read: Callable[[], FusionOptions]
    ) -> tuple[FusionOptions, str]:
        """Return the options that ``read`` gives and "", or no fusion and why it gives none.

        A request's own text decides what ``read`` raises, so no error of it may go further.
        """
        try:
            return read(), ""
        except Exception as error:  # noqa: BLE001 - one request must not cost the others theirs
            self.metrics.ignored_option("fusion")
            why = str(error) if isinstance(error, ConfigError) else printable(error)
            _log.warning("request=%s is answered without fusion: %s", request_id, why)
            return FusionOptions(enabled=False), why

    def plan(
        self,
        request: FusionRequest,
        tokens: Tokens,
        namespace: Namespace,
        exact: int,
        limit: int | None = None,
        loads: Mapping[str, int] | None = None,
    ) -> BlendPlan | None:
        """Plan a blend of a prompt whose first ``exact`` tokens have exact KV.

        The engine computes from ``limit`` on by itself, by default the last token only: its logits
        are needed. ``loads`` are the bytes of the exact prefix to load, by tier. Returns None if a
        blend is impossible or not worth it.
        """
        if not request.options.enabled or self.chunks.given_up:
            return None
        if request.report is not None and not request.report.ok:
            return None
        if request.found is None:
            prompt = tokens.tolist() if isinstance(tokens, np.ndarray) else tokens
            request.found = self.chunks.find(prompt, request.options, namespace, exact)
        limit = len(tokens) - 1 if limit is None else limit
        plan = self._whole_pages(request.found, exact, limit, self.config.fusion.ratio)
        if plan is None:
            return None
        if request.options.ratio is not None:  # the client's choice, whatever it costs
            return replace(plan, ratio=request.options.ratio)
        if self.policy is None:
            return plan
        if request.decision is None:
            request.decision = self._decide(self.policy, request, len(tokens), plan, loads or {})
        if request.decision.mode is Mode.PREFIX:
            return None
        return replace(plan, ratio=request.decision.ratio)

    def _decide(
        self,
        policy: FusionPolicy,
        request: FusionRequest,
        tokens: int,
        plan: BlendPlan,
        loads: Mapping[str, int],
    ) -> Decision:
        chunks = self.chunks.nbytes(plan)
        decision = policy.decide(tokens, plan.exact, plan.reused, loads, chunks)
        _log.debug("request=%s %s: %s", request.request_id, decision.mode.value, decision.reason)
        if decision.mode is Mode.PREFIX:
            self.metrics.blend("declined")
            self.remember(request)
        return decision

    def _whole_pages(
        self, found: Sequence[Reusable], exact: int, limit: int, ratio: float
    ) -> BlendPlan | None:
        """Plan the longest blend of these chunks that ends where the engine lets a blend end."""
        page = self.traits.page_tokens if self.traits.ends_at_page else 1
        plan = self.chunks.plan(found, exact, limit, ratio)
        while plan is not None and plan.stop % page:
            border = plan.stop // page * page
            plan = self.chunks.plan(found, exact, border, ratio)
        return plan

    def in_host(self, plan: BlendPlan) -> BlendPlan | None:
        """Return the plan reduced to chunks in host memory, or None if too few tokens are left."""
        here = self.chunks.in_host(plan)
        if here is None:
            return None
        return self._whole_pages(here.chunks, plan.exact, here.stop, plan.ratio)

    # -- a request is scheduled -------------------------------------------------------------

    def order(
        self,
        request: FusionRequest,
        tokens: Tokens,
        plan: BlendPlan,
        pages: Sequence[int],
        lora: int = 0,
    ) -> BlendOrder:
        """Launch the loads of a plan whose pages are allocated and return the order for the ranks.

        The order carries the graph of each chunk, so no graph goes through the transport's queue.
        The engine counts on the tokens, so a chunk that is no longer cached is computed with the
        fresh tokens.
        """
        chunks = self.chunks.launch(plan, self.layer_steps)
        first, known = plan.chunks[0].prompt_start, request.approximate_from
        request.plan, request.report, request.void = plan, None, False
        request.approximate_from = first if known is None else min(known, first)
        self.remember(request)
        return BlendOrder(
            request.request_id,
            pack_tokens(tokens),
            plan.exact,
            plan.exact,
            plan.stop,
            list(pages),
            plan.ratio,
            chunks,
            lora,
        )

    # -- results ----------------------------------------------------------------------------

    def take_report(self, report: BlendReport) -> None:
        """Handle the result of a blend.

        The metrics count each blend once, and leave out blends of forgotten requests.
        """
        request = self._known.get(report.request_id)
        if request is not None and request.plan is not None:
            if request.report is not None:
                return
            if request.void:
                arrived = report.arrived and not report.ok
                report = msgspec.structs.replace(report, ok=False, arrived=arrived)
            request.report = report
            self._count(request.plan, report)
        self.chunks.judge(report)

    def _count(self, plan: BlendPlan, report: BlendReport) -> None:
        self.metrics.blend("blended" if report.ok else "failed")
        for verdict in report.verdicts:
            self.metrics.judged(verdict)
        if report.ratio > plan.ratio:
            _log.info(
                "gate request=%s ratio=%s: %s", report.request_id, report.ratio, report.reason
            )
        if report.ok:
            seconds = {"wait": report.wait_s, "compute": report.compute_s, "look": report.look_s}
            self.metrics.blended(plan.reused, report.ratio, seconds)

    def remember(self, request: FusionRequest) -> None:
        """Keep a request whose outcome may be asked for, or whose report is to come."""
        self._known[request.request_id] = request
        self._known.move_to_end(request.request_id)
        if len(self._known) > REQUESTS_KEPT:
            self._known.popitem(last=False)

    def refuse(self, request_id: str) -> None:
        """Ignore the result of the request's blend: the engine computes it from its start."""
        request = self._known.get(request_id)
        if request is None or request.plan is None:
            return
        request.void = True
        if request.report is not None and request.report.ok:
            request.error = "a load failed: the engine computed the prompt"

    def forget(self, request_id: str) -> None:
        """Forget a request. A report of its blend still counts towards consecutive failures."""
        self._known.pop(request_id, None)

    @property
    def results(self) -> dict[str, dict[str, Any]]:
        """The results that clients of recent requests are shown, by request id."""
        return {request_id: request.result() for request_id, request in self._known.items()}
