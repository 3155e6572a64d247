"""The decision between load, recompute and blend for one prompt, from measured rates.

A prompt is cut once: KV before the cut is loaded, and tokens after it are computed. Every cut has
an estimate of the seconds to the first token. The plan is the cut with the fewest.

    tokens   0 ......... computed ......... stop ............... tokens
             the engine's own   │   loaded   │   computed          │
    recompute                stop = computed
    load                                     stop = all that is held
    mix                      somewhere between: tiers differ, and a token late in the prompt costs
                             more to compute than one at its start

    between steps   max(load, engine busy) + compute         from a medium that can fail, or large
    in the step     layer i + 1 loads while layer i computes (`kvcore.telemetry.rates.pipelined`)

The seconds of a load include the reads in flight before it on the same tier. Until prefill and the
tiers in question have been measured, everything held is loaded, as without a planner. The fusion
controller decides whether chunks after the prefix are blended. The planner asks it, so that one
place decides.

The module only computes with what the caller passes: no clock, no I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import combinations
from typing import NamedTuple

from kvcore.errors import ConfigError
from kvcore.fusion.controller import BlendCandidate, Controller, Decision, Mode
from kvcore.manager.base import HOST
from kvcore.telemetry.rates import Rates, TierRates, pipelined

__all__ = [
    "Action",
    "Ahead",
    "Estimate",
    "Plan",
    "PlanRequest",
    "Planner",
    "PlannerSettings",
    "TokenSource",
    "Ways",
    "Why",
]

PREFILL = "the prefill"
"""Stands for the engine's forwards in `Ways.unmeasured`. No tier can have this name."""

FADE = 1 - 1 / 1024
"""The factor by which planned and tried seconds lose weight with each decision."""


class Action(str, Enum):
    """What to do with the KV that is held of a prompt."""

    LOAD = "load"
    RECOMPUTE = "recompute"
    MIX = "mix"
    BLEND = "blend"


class Why(str, Enum):
    """The reason for a plan."""

    NOTHING_HELD = "nothing is held"
    UNMEASURED = "not all of its rates are measured yet"
    FASTEST = "the fewest seconds expected"
    KEPT = "as for the last prompt of its size: another way saves too little"
    TRIED = "a little is loaded to measure a tier again"
    BLEND = "the fusion controller says so"


class TokenSource(NamedTuple):
    """Tokens up to ``stop`` that are read from ``tier``, from the stop of the source before."""

    tier: str
    stop: int


class Ahead(NamedTuple):
    """The reads in flight from a tier before this load."""

    operations: float
    nbytes: float


@dataclass(frozen=True)
class PlanRequest:
    """The lookup of one prompt, as input for a plan.

    Args:
        tokens: the number of tokens in the prompt.
        computed: the number of leading tokens whose KV the engine holds itself.
        sources: where the tokens after them would be read from; adjacent, in prompt order.
        ahead: the reads already in flight, by tier.
        busy: seconds until the engine can compute any of it; a load proceeds meanwhile.
        blend: the question for the fusion controller, if there are chunks to blend.
    """

    tokens: int
    computed: int
    sources: tuple[TokenSource, ...] = ()
    ahead: Mapping[str, Ahead] = field(default_factory=dict)
    busy: float = 0.0
    blend: BlendCandidate | None = None


class Estimate(NamedTuple):
    """The cost of one cut: seconds to the first token, and seconds to load and to compute alone."""

    stop: int
    seconds: float
    load: float
    compute: float


class Ways(NamedTuple):
    """Estimates of loading all that is held of a prompt, and of loading nothing.

    ``load`` is None if nothing is held. ``unmeasured`` names what was not measured often enough:
    `PREFILL`, or a tier. The parts of an estimate that depend on these are guesses.
    """

    load: Estimate | None
    recompute: Estimate
    unmeasured: frozenset[str]


@dataclass(frozen=True)
class Plan:
    """What to do with a prompt, and the expected cost.

    Args:
        action: what to do.
        stop: KV of tokens [computed, stop) is loaded; ``stop`` is ``computed`` if none is.
        why: the reason.
        chosen: the estimate of the chosen cut.
        load_all, recompute: the estimates of loading all that is held, and of loading nothing.
        deadline_s: seconds after which the load should be given up; None if it has no estimate.
        rates: the rates of each tier that was considered, with their drift.
        decision: the fusion controller's decision, if it was asked.
    """

    action: Action
    stop: int
    why: Why
    chosen: Estimate
    load_all: Estimate
    recompute: Estimate
    deadline_s: float | None = None
    rates: Mapping[str, TierRates] = field(default_factory=dict)
    decision: Decision | None = None

    @property
    def saved(self) -> float:
        """The seconds saved over loading nothing, as expected; negative for a try."""
        return self.recompute.seconds - self.chosen.seconds

    @property
    def reason(self) -> str:
        """The plan in one sentence, for the log and for reports."""
        if self.decision is not None and self.action is Action.BLEND:
            return self.decision.reason
        return (
            f"{self.action.value}: {self.why.value}; load {self.load_all.seconds:.4g} s, "
            f"recompute {self.recompute.seconds:.4g} s, chosen {self.chosen.seconds:.4g} s"
        )


@dataclass(frozen=True)
class PlannerSettings:
    """The parameters of a planner.

    Args:
        block_tokens, block_bytes: size of a token block; bytes are those of one rank, as in rates.
        batch_blocks: blocks that one operation moves.
        step_bytes: the largest load from host memory that is done inside a step, in bytes of one
            rank; 0 if no load is.
        step_operations: operations of such a load (one for each step of layers).
        least: the fewest tokens that are worth a load.
        keep: the share of seconds that a change of the way must save, compared with the way that
            the last prompt of this size took.
        slack: a load is given up after this multiple of its expected seconds, but never before the
            seconds that it saves.
        deadline_least, deadline_most: bounds of that deadline, in seconds.
        retry: decisions against a tier after which a little is loaded from it to measure it again.
        explore: the share of all planned seconds that such tries may cost.
        trusts_priors: decide by the given rates before they have been measured.
    """

    block_tokens: int
    block_bytes: int
    batch_blocks: int = 16
    step_bytes: int = 0
    step_operations: int = 1
    least: int = 1
    keep: float = 0.03
    slack: float = 4.0
    deadline_least: float = 0.1
    deadline_most: float = 30.0
    retry: int = 64
    explore: float = 0.01
    trusts_priors: bool = False

    def __post_init__(self) -> None:
        counts = (self.block_tokens, self.block_bytes, self.batch_blocks, self.step_operations)
        if min(*counts, self.retry) < 1 or min(self.step_bytes, self.least) < 0:
            raise ConfigError(
                "sizes and counts of a planner must be at least 1 (step_bytes and least: 0); "
                f"got {self}"
            )
        if not (0 <= self.keep < 1 and 0 <= self.explore < 1 and self.slack >= 1):
            raise ConfigError(
                "keep and explore must be shares below 1, and slack at least 1; "
                f"got {self.keep}, {self.explore} and {self.slack}"
            )
        if not 0 < self.deadline_least <= self.deadline_most:
            raise ConfigError(
                "deadlines must satisfy 0 < deadline_least <= deadline_most; "
                f"got {self.deadline_least} and {self.deadline_most}"
            )


class Planner:
    """Plans one prompt at a time. One owner, not thread-safe; about 0.1 ms a plan.

    ``rates`` are updated elsewhere (`Rates.prefilled`, `Rates.loaded`) and shared with
    ``controller``, which decides about blends. The planner keeps one value for each tier and for
    each power of two in prompt size.
    """

    def __init__(
        self, settings: PlannerSettings, rates: Rates, controller: Controller | None = None
    ) -> None:
        self.settings = settings
        self.rates = rates
        self._controller = controller
        self._loading: dict[tuple[int, str], bool] = {}
        self._refused: dict[str, int] = {}
        self._planned = 0.0
        self._tried = 0.0

    # -- deciding -------------------------------------------------------------------------------

    def plan(self, request: PlanRequest) -> Plan:
        """Return what to do for one prompt.

        Raises ConfigError for a tier that the rates do not know.
        """
        decision = self._decide_blend(request)
        nothing = self.weigh(request, request.computed)
        everything = self.weigh(request, _held(request))
        if decision is not None and decision.mode is Mode.BLEND:
            blend = Estimate(request.computed, decision.blend_seconds, 0.0, 0.0)
            return self._made(request, blend, Why.BLEND, everything, nothing, decision)
        if everything.stop - request.computed < max(1, self.settings.least):
            return self._made(request, nothing, Why.NOTHING_HELD, nothing, nothing, decision)
        if not self.settings.trusts_priors and not self.rates.are_learnt(_tiers(request)):
            return self._made(request, everything, Why.UNMEASURED, everything, nothing, decision)
        chosen, why = self._choose(request, [nothing, everything, *self._between(request)])
        return self._made(request, chosen, why, everything, nothing, decision)

    def _decide_blend(self, request: PlanRequest) -> Decision | None:
        if self._controller is None or request.blend is None:
            return None
        return self._controller.decide(request.blend)

    def _choose(self, request: PlanRequest, cuts: list[Estimate]) -> tuple[Estimate, Why]:
        """Choose the fastest cut, a slightly slower one of the kind chosen before, or a try."""
        best, why = min(cuts, key=lambda cut: cut.seconds), Why.FASTEST
        size = (request.tokens - request.computed).bit_length(), request.sources[-1].tier
        before = self._loading.get(size, best.stop > request.computed)
        if before is not (best.stop > request.computed):
            same = (cut for cut in cuts if (cut.stop > request.computed) is before)
            kept = min(same, key=lambda cut: cut.seconds)
            if best.seconds > (1 - self.settings.keep) * kept.seconds:
                best, why = kept, Why.KEPT
        self._loading[size] = best.stop > request.computed
        tried = self._try(request, best)
        return (best, why) if tried is None else (tried, Why.TRIED)

    def _try(self, request: PlanRequest, best: Estimate) -> Estimate | None:
        """Return a small load from a tier that was long refused, if its cost is allowed."""
        self._planned = FADE * self._planned + best.seconds
        self._tried *= FADE
        start = request.computed
        for source in request.sources:
            if source.stop <= max(start, best.stop):
                self._refused.pop(source.tier, None)
                start = max(start, source.stop)
                continue
            if best.stop > start:  # the best cut loads a part of this tier anyway
                return None
            count = self._refused[source.tier] = self._refused.get(source.tier, 0) + 1
            if count < self.settings.retry:
                return None
            return self._afford(request, source, start, best)
        return None

    def _afford(
        self, request: PlanRequest, source: TokenSource, start: int, best: Estimate
    ) -> Estimate | None:
        """Return a load of the first blocks of a source after ``start``, if its cost is allowed.

        It takes as many blocks as one operation moves, or else the fewest that are worth a load.
        """
        block = self.settings.block_tokens
        least = start + max(self.settings.least, 1)
        for blocks in (self.settings.batch_blocks, 1):
            stop = max((start // block + blocks) * block, least)
            probe = self.weigh(request, min(stop, source.stop, _held(request)))
            extra = max(0.0, probe.seconds - best.seconds)
            if self._tried + extra <= self.settings.explore * self._planned:
                self._tried += extra
                self._refused.pop(source.tier, None)
                return probe
        return None

    def _made(
        self,
        request: PlanRequest,
        chosen: Estimate,
        why: Why,
        everything: Estimate,
        nothing: Estimate,
        decision: Decision | None,
    ) -> Plan:
        action = Action.MIX
        if why is Why.BLEND:
            action = Action.BLEND
        elif chosen.stop <= request.computed:
            action = Action.RECOMPUTE
        elif chosen.stop >= everything.stop:
            action = Action.LOAD
        known = why not in (Why.UNMEASURED, Why.BLEND) and chosen.stop > request.computed
        return Plan(
            action,
            chosen.stop,
            why,
            chosen,
            everything,
            nothing,
            self._deadline(chosen, nothing) if known else None,
            {tier: self.rates.of_tier(tier) for tier in _tiers(request)},
            decision,
        )

    def _deadline(self, chosen: Estimate, nothing: Estimate) -> float:
        """Return the seconds after which the load is given up.

        A wait as long as computing would take costs at most twice the better of both.
        """
        wait = max(self.settings.slack * chosen.load, nothing.compute - chosen.compute)
        return min(max(wait, self.settings.deadline_least), self.settings.deadline_most)

    # -- what a cut costs -----------------------------------------------------------------------

    def ways(self, request: PlanRequest) -> Ways:
        """Estimate loading all and loading nothing. Decides and remembers nothing.

        Raises ConfigError for a tier that the rates do not know.
        """
        held = _held(request)
        unmeasured = {tier for tier in _tiers(request) if not self.rates.tier(tier).is_learnt}
        if not self.rates.prefill.is_learnt:
            unmeasured.add(PREFILL)
        return Ways(
            self.weigh(request, held) if held > request.computed else None,
            self.weigh(request, request.computed),
            frozenset(unmeasured),
        )

    def weigh(self, request: PlanRequest, stop: int) -> Estimate:
        """Estimate the cut at ``stop``: KV of tokens [request.computed, stop) is loaded."""
        stop = max(stop, request.computed)
        compute = self.rates.prefill_seconds(request.tokens - stop, stop)
        if stop == request.computed:
            return Estimate(stop, request.busy + compute, 0.0, compute)
        loads = list(self._loads(request, stop))
        if self._in_step(loads):
            load = self._loading_seconds(request, loads, self.settings.step_operations)
            layers = self.rates.layers
            both = pipelined(load / layers, (layers, compute / layers))
            return Estimate(stop, request.busy + both, load, compute)
        load = self._loading_seconds(request, loads, 1)
        return Estimate(stop, max(request.busy, load) + compute, load, compute)

    def _loads(self, request: PlanRequest, stop: int) -> Iterator[tuple[str, int]]:
        """Yield the tier and number of blocks of each read."""
        block, start = self.settings.block_tokens, request.computed
        for source in request.sources:
            end = min(source.stop, stop)
            if end > start:
                yield source.tier, -(-end // block) - start // block
                start = end

    def _in_step(self, loads: list[tuple[str, int]]) -> bool:
        """Return True if a load is done inside a step: from host memory only, and not too large."""
        [(tier, blocks), *others] = loads
        if others or tier != HOST:
            return False
        return blocks * self.settings.block_bytes <= self.settings.step_bytes

    def _loading_seconds(
        self, request: PlanRequest, loads: list[tuple[str, int]], host_operations: int
    ) -> float:
        """Return the seconds until the last byte is on the device.

        Tiers are read in parallel, and all of it passes through host memory: the last batch of a
        tier once it has been read.
        """
        return max(self._finished(request, loads, host_operations).values())

    def _finished(
        self, request: PlanRequest, loads: list[tuple[str, int]], host_operations: int
    ) -> dict[str, float]:
        """Return when the last byte of each tier, and of host memory, has been read, in seconds."""
        size, batch = self.settings.block_bytes, self.settings.batch_blocks
        operations, total, finished = 0, 0, {}
        for tier, blocks in loads:
            total += blocks
            if tier == HOST:
                operations += host_operations
                continue
            reads = -(-blocks // batch)
            operations += reads
            last = self.rates.load_seconds(HOST, min(blocks, batch) * size, 1)
            finished[tier] = last + self._queued(request, tier, blocks * size, reads)
        finished[HOST] = self._queued(request, HOST, total * size, operations)
        return finished

    def _queued(self, request: PlanRequest, tier: str, nbytes: int, operations: int) -> float:
        ahead = request.ahead.get(tier)
        if ahead is None:
            return self.rates.load_seconds(tier, nbytes, operations)
        return self.rates.load_seconds(tier, ahead.nbytes + nbytes, ahead.operations + operations)

    # -- cuts worth weighing --------------------------------------------------------------------

    def _between(self, request: PlanRequest) -> Iterator[Estimate]:
        """Yield the estimates of cuts that can be the best one, other than both ends.

        If computing follows the load, the seconds are concave along a tier, because each further
        token costs the same to load and more to compute. The best cut is then at one of these:

        - The end of a tier, or of its last full operation.
        - The point where another tier becomes the slowest.
        - The point where the load begins to last longer than the engine is busy.

        In a step, load and compute overlap, and the best cut is where both take equally long. The
        first cut that is too large for a step gains the time for which the engine is busy.
        """
        stops = {*self._ends(request), *self._overtaken(request)}
        block, held, before = self.settings.block_tokens, _held(request), request.computed
        if request.sources[0].tier == HOST and self.settings.step_bytes:
            most = self.settings.step_bytes // self.settings.block_bytes
            end = min((request.computed // block + most) * block, request.sources[0].stop, held)
            before = min((end // block + 1) * block, held)
            stops |= {end, before}
            stops |= self._last(request, request.computed, end, lambda cut: cut.load <= cut.compute)
        if request.busy:
            stops |= self._last(request, before, held, lambda cut: cut.load <= request.busy)
        least = request.computed + max(1, self.settings.least)
        return (self.weigh(request, stop) for stop in sorted(stops) if least <= stop < held)

    def _ends(self, request: PlanRequest) -> Iterator[int]:
        """Yield the end of each source, and the end of its last full operation."""
        block, start = self.settings.block_tokens, request.computed
        batch = block * self.settings.batch_blocks
        for source in request.sources:
            end, first = min(source.stop, _held(request)), start // block * block
            if end > start:
                yield end
                if source.tier != HOST:
                    yield first + (end - first - 1) // batch * batch
                start = end

    def _overtaken(self, request: PlanRequest) -> Iterator[int]:
        """Yield the block boundaries next to where another of two tiers becomes the slower one.

        Along a tier, the seconds of each tier are a line, apart from the starts of operations.
        """
        block, start = self.settings.block_tokens, request.computed
        for source in request.sources:
            end, first = min(source.stop, _held(request)), (start // block + 1) * block
            if start < first < end:
                near, far = (
                    self._finished(request, list(self._loads(request, at)), 1)
                    for at in (first, end)
                )
                for one, other in combinations(far, 2):
                    before, after = near[one] - near[other], far[one] - far[other]
                    if before * after < 0:
                        at = first + (end - first) * before / (before - after)
                        yield from (int(at) // block * block, (int(at) // block + 1) * block)
            start = max(start, end)

    def _last(
        self, request: PlanRequest, start: int, end: int, holds: Callable[[Estimate], bool]
    ) -> set[int]:
        """Return the last block boundary of [start, end] for which ``holds``, and the next one.

        Bisects: ``holds`` must be true up to some boundary and false after it.
        """
        block = self.settings.block_tokens
        low, high = start // block, end // block
        if holds(self.weigh(request, end)):
            return {end}
        while low < high:
            middle = (low + high + 1) // 2
            if holds(self.weigh(request, middle * block)):
                low = middle
            else:
                high = middle - 1
        return {low * block, (low + 1) * block} if end > start else set()


def _held(request: PlanRequest) -> int:
    """Return how many leading tokens can be loaded.

    The last token is always computed, because its logits are needed.
    """
    if not request.sources:
        return request.computed
    return max(request.computed, min(request.sources[-1].stop, request.tokens - 1))


def _tiers(request: PlanRequest) -> list[str]:
    """Return the tiers that a load would use; all of it passes through host memory."""
    tiers = dict.fromkeys((source.tier for source in request.sources), None)
    return [HOST, *(tier for tier in tiers if tier != HOST)] if tiers else []


class Otherwise(NamedTuple):
    """Estimates of what each way would take, from measured rates, in seconds.

    ``load_all`` and ``recompute`` are seconds to the first token if all that was found is loaded,
    and if all of it is computed. ``loading`` is the load alone. A value is None if it cannot be
    estimated; ``unknown`` says why.
    """

    load_all: float | None = None
    recompute: float | None = None
    loading: float | None = None
    unknown: tuple[str, ...] = ()
