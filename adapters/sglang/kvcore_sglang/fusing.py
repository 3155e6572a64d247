"""Fusion in SGLang's leader: what a request wishes, what of its prompt is reused, what came of it.

    prompt  ├── exact prefix ──┼─ gap ─┼── chunk ──┼── chunk ──┼─ question ─┤
            0               exact                           stop
                               └── made by the blend ──────────┘ └ by SGLang's own forward

A lookup answers with [0, stop) as if all of it were stored. A request that is blended is barred
from SGLang's tree (`kvcore_sglang.hooks`), so its KV, approximate from the first chunk on, is found
by nobody, and nothing of it is offered to kvcore. SGLang counts in pages: the exact prefix and the
blend end at a page's border.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from kvcore.config import Config
from kvcore.connector.fusion_messages import BlendOrder, BlendReport, told
from kvcore.connector.fusion_policy import Pace
from kvcore.connector.fusion_scheduler import BlendPlan, Chunks
from kvcore.errors import ConfigError
from kvcore.fusion.controller import Decision, Mode
from kvcore.fusion.options import FusionOptions, fusion_options
from kvcore.fusion.segments import Reusable, SegmentBook
from kvcore.manager import Manager
from kvcore.model.keys import KeyChain, Namespace, pack_tokens
from kvcore.model.shape import BlockShape
from kvcore.telemetry.metrics import Data, Metrics
from kvcore.telemetry.rates import Part
from kvcore.transfer.graph import Span, TransferGraph

_log = logging.getLogger("kvcore.sglang.fusion")

TOLD_KEPT = 1024
"""Requests of which it can be asked what was blended."""

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Asking:
    """A request as fusion sees it: its whole prompt and its wishes, None where it made none.

    ``fresh`` says that it has no answer yet and no KV of its own: others are computed exactly.
    """

    tokens: Tokens
    wishes: Any = None
    fresh: bool = True

    def is_like(self, other: Asking) -> bool:
        """Whether fusion would do the same for both."""
        same = self.wishes == other.wishes and self.fresh == other.fresh
        return same and np.array_equal(self.tokens, other.tokens)


def asking_of(req: Any) -> Asking:
    """Of SGLang's request. Wishes are the text of a JSON object, ``custom_params["kvcore"]``:
    SGLang passes on no deeper values."""
    params = getattr(req.sampling_params, "custom_params", None)
    wishes = params.get("kvcore") if isinstance(params, Mapping) else None
    fresh = not req.output_ids and getattr(req, "session", None) is None
    return Asking(np.asarray(req.origin_input_ids, dtype=np.int64), wishes, fresh)


def options_of(asking: Asking) -> FusionOptions:
    """What the request wishes of fusion. Raises ConfigError where that makes no sense."""
    given = asking.wishes
    if isinstance(given, str):
        try:
            given = msgspec.json.decode(given)
        except msgspec.DecodeError as error:
            raise ConfigError(
                f"custom_params.kvcore is {given!r}, which is no JSON: {error}"
            ) from error
    return fusion_options(given, len(asking.tokens))


class Held(NamedTuple):
    """What there is of a prompt: ``exact`` tokens, whole pages of them, of which ``nbytes`` by tier
    have to be loaded. From ``limit`` on the engine computes by itself."""

    exact: int
    limit: int
    nbytes: Mapping[str, int]


@dataclass
class Wanted:
    """What fusion found for one request. ``found`` is None until its prompt was searched, and
    ``fetched`` says that chunks were asked for from their tiers. ``decision`` is the controller's,
    once it was asked."""

    options: FusionOptions
    found: list[Reusable] | None = None
    fetched: bool = False
    decision: Decision | None = None


class FusionLeader:
    """One per engine, beside its leader. Scheduler's thread only; no call does I/O or waits.

    ``page`` is SGLang's page in tokens, ``steps`` the layers in which chunks land. ``pace`` decides
    what is worth a blend; None where every prompt with chunks gets one.
    """

    def __init__(
        self,
        config: Config,
        shape: BlockShape,
        manager: Manager,
        segments: SegmentBook,
        steps: Sequence[Span],
        page: int,
        metrics: Metrics,
        pace: Pace | None = None,
    ) -> None:
        self._settings = config.fusion
        self._page = page
        self._steps = tuple(steps)
        self._metrics = metrics
        self._pace = pace
        self.chunks = Chunks(config.fusion, config.block.tokens, shape.nbytes, manager, segments)
        self._nbytes = shape.nbytes
        self._staged = 0
        self._plans: OrderedDict[str, BlendPlan] = OrderedDict()
        self._void: set[str] = set()  # of these, requests that are computed from the start
        self._told: OrderedDict[str, dict[str, Any]] = OrderedDict()

    # -- a request comes --------------------------------------------------------------------

    def track(self, rid: str, asking: Asking) -> Wanted:
        """Read what the request says of fusion; wishes that make no sense keep it exact."""
        if not asking.fresh:
            return Wanted(FusionOptions(enabled=False))
        try:
            return Wanted(options_of(asking))
        except ConfigError as error:
            _log.warning("request=%s is answered without fusion: %s", rid, error)
            self._tell(rid, {"error": str(error)})
            return Wanted(FusionOptions(enabled=False))

    def plan(
        self, rid: str, wanted: Wanted, asking: Asking, namespace: Namespace, held: Held
    ) -> BlendPlan | None:
        """What to blend of a prompt of which ``held`` is held exactly; None where it is not worth
        it."""
        if not wanted.options.enabled or self.chunks.given_up:
            return None
        if wanted.found is None:
            prompt = asking.tokens.tolist()
            wanted.found = self.chunks.find(prompt, wanted.options, namespace, held.exact)
        plan = self._whole_pages(wanted.found, held.exact, held.limit, self._settings.ratio)
        if plan is None:
            return None
        if wanted.options.ratio is not None:  # as was asked, whatever it costs
            return replace(plan, ratio=wanted.options.ratio)
        if self._pace is None:
            return plan
        if wanted.decision is None:
            wanted.decision = self._decide(self._pace, rid, len(asking.tokens), plan, held)
        if wanted.decision.mode is Mode.PREFIX:
            return None
        return replace(plan, ratio=wanted.decision.ratio)

    def _decide(self, pace: Pace, rid: str, tokens: int, plan: BlendPlan, held: Held) -> Decision:
        chunks = self.chunks.nbytes(plan)
        decision = pace.decide(tokens, plan.exact, plan.reused, held.nbytes, chunks)
        _log.debug("request=%s %s: %s", rid, decision.mode.value, decision.reason)
        if decision.mode is Mode.PREFIX:
            self._metrics.blend("declined")
            self._tell(rid, {"declined": decision.reason})
        return decision

    def _whole_pages(
        self, found: Sequence[Reusable], exact: int, limit: int, ratio: float
    ) -> BlendPlan | None:
        """The blend of these chunks that ends at a page's border."""
        plan = self.chunks.plan(found, exact, limit, ratio, self._staged)
        while plan is not None and plan.stop % self._page:
            border = plan.stop // self._page * self._page
            plan = self.chunks.plan(found, exact, border, ratio, self._staged)
        return plan

    def in_host(self, plan: BlendPlan) -> BlendPlan | None:
        """The plan with the chunks that are in host memory, up to a page's border."""
        here = self.chunks.in_host(plan)
        if here is None:
            return None
        return self._whole_pages(here.chunks, plan.exact, here.stop, plan.ratio)

    # -- a request is scheduled -------------------------------------------------------------

    def order(
        self, rid: str, tokens: Tokens, plan: BlendPlan, take: Callable[[TransferGraph], object]
    ) -> BlendOrder:
        """The order for a plan whose slots are allocated; ``take`` is given the graph of each of
        its chunks. The pages are filled in on each rank."""
        loads, blocks = self.chunks.launch(plan, self._steps, take)
        self._staged += blocks * self._nbytes
        self._plans[rid] = plan
        if len(self._plans) > TOLD_KEPT:
            self._void.discard(self._plans.popitem(last=False)[0])
        self._tell(rid, told(plan, None))
        return BlendOrder(
            rid,
            pack_tokens(tokens.tolist()),
            plan.exact,
            plan.exact,
            plan.stop,
            [],
            plan.ratio,
            loads,
            blocks,
        )

    def learn_times(
        self,
        profile: Sequence[tuple[int, float]],
        forwards: Sequence[tuple[Sequence[Part], float]],
        counted: Data,
    ) -> None:
        """Take in what workers measured of their layers, forwards and copies."""
        if self._pace is not None:
            steps = [(self._pace.time(parts), seconds) for parts, seconds in forwards]
            self._pace.learn(profile, steps, counted)

    def begin_batch(self) -> None:
        """The batch whose requests were ordered begins: the next one has its own staging."""
        self._staged = 0

    def judge(self, report: BlendReport) -> None:
        """Take in what became of a blend."""
        plan = self._plans.pop(report.request_id, None)
        if plan is None:
            return
        if report.request_id in self._void:  # where it went well, a load of its batch did not
            self._void.discard(report.request_id)
            arrived = report.arrived and not report.ok
            report = msgspec.structs.replace(report, ok=False, arrived=arrived)
        self._tell(report.request_id, told(plan, report))
        if self._pace is not None:
            self._pace.blended(report, plan.exact)
        self._metrics.blend("blended" if report.ok else "failed")
        for verdict in report.verdicts:
            self._metrics.judged(verdict)
        if report.ratio > plan.ratio:
            _log.info(
                "gate request=%s ratio=%s: %s", report.request_id, report.ratio, report.reason
            )
        if report.ok:
            seconds = {"wait": report.wait_s, "compute": report.compute_s, "look": report.look_s}
            self._metrics.blended(plan.reused, report.ratio, seconds)
        self.chunks.judge(report)

    def refuse(self, rid: str) -> None:
        """The request is computed from the start, whatever its blend came to on this rank."""
        if rid in self._plans:
            self._void.add(rid)  # its report is on the way
        elif "blended_tokens" in self._told.get(rid, {}):
            self._tell(rid, {"error": "a load failed: the engine computed the prompt"})

    def drop(self, rid: str) -> None:
        """The request's blend will not be made."""
        self._plans.pop(rid, None)
        self._void.discard(rid)
        self._told.pop(rid, None)

    # -- what is stored ---------------------------------------------------------------------

    def learn(self, chain: KeyChain, tokens: Tokens) -> None:
        """The blocks of a chain are stored; ``tokens`` are those it was made of."""
        self.chunks.learn(chain, 0, len(chain.keys), tokens.tolist())

    # -- what is told -----------------------------------------------------------------------

    def _tell(self, rid: str, what: dict[str, Any]) -> None:
        self._told[rid] = what
        if len(self._told) > TOLD_KEPT:
            self._told.popitem(last=False)

    @property
    def results(self) -> dict[str, dict[str, Any]]:
        """What became of the last requests that fusion had to do with, by their ids."""
        return dict(self._told)
