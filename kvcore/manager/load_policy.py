"""Load, recompute or blend: what to do with the KV that is held of a prompt, from measured rates.

A prompt is cut once: KV before the cut is loaded, tokens behind it are computed. Every cut has its
seconds to the first token, and the plan is the cut with the fewest.

    tokens   0 ......... computed ......... stop ............... tokens
             the engine's own   │   loaded   │   computed          │
    recompute                stop = computed
    load                                     stop = all that is held
    mix                      somewhere between: tiers differ, and what is far down costs more to
                             compute than what stands at the front

    between steps   max(load, engine busy) + compute         from a medium that can fail, or large
    in the step     layer i + 1 loads while layer i computes (`kvcore.telemetry.rates.pipelined`)

Seconds of a load count what is in flight before it on the same tier. Before prefill and the tiers
in question were measured everything held is loaded, as without a planner. Whether chunks behind the
prefix are blended is the fusion controller's word: the planner asks it, so that one place decides.

Arithmetic on what the caller knows: no clock, no I/O.
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
    "Ask",
    "Estimate",
    "Plan",
    "Planner",
    "Settings",
    "Source",
    "Ways",
    "Why",
]

PREFILL = "the prefill"
"""Among what is not measured: the engine's forwards, beside tiers. No tier can have this name."""

FADE = 1 - 1 / 1024
"""What seconds planned and spent on trying count for, one decision later."""


class Action(str, Enum):
    """What to do with what is held of a prompt."""

    LOAD = "load"
    RECOMPUTE = "recompute"
    MIX = "mix"
    BLEND = "blend"


class Why(str, Enum):
    """What a plan rests on."""

    NOTHING_HELD = "nothing is held"
    UNMEASURED = "not all of its rates are measured yet"
    FASTEST = "the fewest seconds expected"
    KEPT = "as for the last prompt of its size: another way saves too little"
    TRIED = "a little is loaded to measure a tier again"
    BLEND = "the fusion controller says so"


class Source(NamedTuple):
    """Tokens up to ``stop`` are read from ``tier``, from where the source before it stops."""

    tier: str
    stop: int


class Ahead(NamedTuple):
    """What is in flight from a tier before this load."""

    operations: float
    nbytes: float


@dataclass(frozen=True)
class Ask:
    """One prompt, as it is looked up.

    Args:
        tokens: all of the prompt's.
        computed: of them, those whose KV the engine holds itself.
        sources: where those after them would be read from, adjacent, from the front.
        ahead: what is in flight already, by tier.
        busy: seconds before the engine could compute anything of it; a load goes on meanwhile.
        blend: what the fusion controller is asked, where there are chunks to blend.
    """

    tokens: int
    computed: int
    sources: tuple[Source, ...] = ()
    ahead: Mapping[str, Ahead] = field(default_factory=dict)
    busy: float = 0.0
    blend: BlendCandidate | None = None


class Estimate(NamedTuple):
    """What one cut costs: seconds to the first token, and of them loading and computing alone."""

    stop: int
    seconds: float
    load: float
    compute: float


class Ways(NamedTuple):
    """Loading all that is held of a prompt, and loading nothing, by measured rates alone.

    ``load`` is None where nothing is held. ``unmeasured`` names what was not measured often enough:
    `PREFILL`, or a tier. Of an estimate, what rests on those is a guess.
    """

    load: Estimate | None
    recompute: Estimate
    unmeasured: frozenset[str]


@dataclass(frozen=True)
class Plan:
    """What to do, and what it is expected to cost.

    Args:
        action: the way to go.
        stop: KV of tokens [computed, stop) is loaded; ``stop`` is ``computed`` where none is.
        why: what this rests on.
        chosen: what is expected of it.
        load_all, recompute: what is expected of loading all that is held, and of loading nothing.
        deadline_s: seconds after which the load is better given up; None where nothing is known.
        rates: those of each tier that was weighed, with their drift.
        decision: the fusion controller's, where it was asked.
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
        """Seconds expected to be saved against loading nothing; below zero for a try."""
        return self.recompute.seconds - self.chosen.seconds

    @property
    def reason(self) -> str:
        """A sentence for the log and for who asks."""
        if self.decision is not None and self.action is Action.BLEND:
            return self.decision.reason
        return (
            f"{self.action.value}: {self.why.value}; load {self.load_all.seconds:.4g} s, "
            f"recompute {self.recompute.seconds:.4g} s, chosen {self.chosen.seconds:.4g} s"
        )


@dataclass(frozen=True)
class Settings:
    """What a planner is told.

    Args:
        block_tokens, block_bytes: of a token block; bytes of one rank, as its rates are.
        batch_blocks: blocks that one operation moves.
        step_bytes: largest load from host memory that is part of a step, bytes of one rank; 0:
            none is.
        step_operations: operations of such a load (one a step of layers).
        least: fewest tokens worth a load.
        keep: another way than the last prompt of this size went must save this share.
        slack: a load is given this times what is expected of it before it is given up, and never
            less than it saves.
        deadline_least, deadline_most: bounds of that, in seconds.
        retry: decisions against a tier after which a little of it is loaded to see how it does.
        explore: the share of all planned seconds that such tries may cost.
        trusts_priors: decide by the rates given, before they were measured.
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
                "sizes and counts of a planner are at least 1 (step_bytes and least: 0): "
                f"got {self}"
            )
        if not (0 <= self.keep < 1 and 0 <= self.explore < 1 and self.slack >= 1):
            raise ConfigError(
                f"keep and explore are shares below 1 and slack is at least 1: got {self.keep}, "
                f"{self.explore} and {self.slack}"
            )
        if not 0 < self.deadline_least <= self.deadline_most:
            raise ConfigError(
                "a deadline has 0 < deadline_least <= deadline_most: "
                f"got {self.deadline_least} and {self.deadline_most}"
            )


class Planner:
    """Decides prompt by prompt. One owner, not thread-safe; about 0.1 ms a plan.

    ``rates`` are learnt elsewhere (`Rates.prefilled`, `Rates.loaded`) and shared with
    ``controller``, which is asked about blends. What is kept per size of prompt and per tier is
    bounded by the number of these.
    """

    def __init__(
        self, settings: Settings, rates: Rates, controller: Controller | None = None
    ) -> None:
        self.settings = settings
        self.rates = rates
        self._controller = controller
        self._loading: dict[tuple[int, str], bool] = {}
        self._refused: dict[str, int] = {}
        self._planned = 0.0
        self._tried = 0.0

    # -- deciding -------------------------------------------------------------------------------

    def plan(self, ask: Ask) -> Plan:
        """What to do for one prompt. Raises ConfigError for a tier that the rates do not know."""
        decision = self._ask_controller(ask)
        nothing = self.weigh(ask, ask.computed)
        everything = self.weigh(ask, _held(ask))
        if decision is not None and decision.mode is Mode.BLEND:
            blend = Estimate(ask.computed, decision.blend_seconds, 0.0, 0.0)
            return self._made(ask, blend, Why.BLEND, everything, nothing, decision)
        if everything.stop - ask.computed < max(1, self.settings.least):
            return self._made(ask, nothing, Why.NOTHING_HELD, nothing, nothing, decision)
        if not self.settings.trusts_priors and not self.rates.are_learnt(_tiers(ask)):
            return self._made(ask, everything, Why.UNMEASURED, everything, nothing, decision)
        chosen, why = self._choose(ask, [nothing, everything, *self._between(ask)])
        return self._made(ask, chosen, why, everything, nothing, decision)

    def _ask_controller(self, ask: Ask) -> Decision | None:
        if self._controller is None or ask.blend is None:
            return None
        return self._controller.decide(ask.blend)

    def _choose(self, ask: Ask, cuts: list[Estimate]) -> tuple[Estimate, Why]:
        """The fastest cut, or a slightly slower one of the kind chosen before, or a try."""
        best, why = min(cuts, key=lambda cut: cut.seconds), Why.FASTEST
        size = (ask.tokens - ask.computed).bit_length(), ask.sources[-1].tier
        before = self._loading.get(size, best.stop > ask.computed)
        if before is not (best.stop > ask.computed):
            same = (cut for cut in cuts if (cut.stop > ask.computed) is before)
            kept = min(same, key=lambda cut: cut.seconds)
            if best.seconds > (1 - self.settings.keep) * kept.seconds:
                best, why = kept, Why.KEPT
        self._loading[size] = best.stop > ask.computed
        tried = self._try(ask, best)
        return (best, why) if tried is None else (tried, Why.TRIED)

    def _try(self, ask: Ask, best: Estimate) -> Estimate | None:
        """A small load from a tier that was refused for long, where what that costs is allowed."""
        self._planned = FADE * self._planned + best.seconds
        self._tried *= FADE
        start = ask.computed
        for source in ask.sources:
            if source.stop <= max(start, best.stop):
                self._refused.pop(source.tier, None)
                start = max(start, source.stop)
                continue
            if best.stop > start:  # a part of it is loaded anyway
                return None
            count = self._refused[source.tier] = self._refused.get(source.tier, 0) + 1
            if count < self.settings.retry:
                return None
            return self._afford(ask, source, start, best)
        return None

    def _afford(self, ask: Ask, source: Source, start: int, best: Estimate) -> Estimate | None:
        """The first blocks of a source behind ``start``: one operation's worth of them, or the
        fewest worth a load."""
        block = self.settings.block_tokens
        least = start + max(self.settings.least, 1)
        for blocks in (self.settings.batch_blocks, 1):
            stop = max((start // block + blocks) * block, least)
            probe = self.weigh(ask, min(stop, source.stop, _held(ask)))
            extra = max(0.0, probe.seconds - best.seconds)
            if self._tried + extra <= self.settings.explore * self._planned:
                self._tried += extra
                self._refused.pop(source.tier, None)
                return probe
        return None

    def _made(
        self,
        ask: Ask,
        chosen: Estimate,
        why: Why,
        everything: Estimate,
        nothing: Estimate,
        decision: Decision | None,
    ) -> Plan:
        action = Action.MIX
        if why is Why.BLEND:
            action = Action.BLEND
        elif chosen.stop <= ask.computed:
            action = Action.RECOMPUTE
        elif chosen.stop >= everything.stop:
            action = Action.LOAD
        known = why not in (Why.UNMEASURED, Why.BLEND) and chosen.stop > ask.computed
        return Plan(
            action,
            chosen.stop,
            why,
            chosen,
            everything,
            nothing,
            self._deadline(chosen, nothing) if known else None,
            {tier: self.rates.of_tier(tier) for tier in _tiers(ask)},
            decision,
        )

    def _deadline(self, chosen: Estimate, nothing: Estimate) -> float:
        """Waiting as long as computing would take costs at most twice the better of both."""
        wait = max(self.settings.slack * chosen.load, nothing.compute - chosen.compute)
        return min(max(wait, self.settings.deadline_least), self.settings.deadline_most)

    # -- what a cut costs -----------------------------------------------------------------------

    def ways(self, ask: Ask) -> Ways:
        """What both ends would cost, whatever is done; nothing is decided or remembered.

        Raises ConfigError for a tier that the rates do not know.
        """
        held = _held(ask)
        unmeasured = {tier for tier in _tiers(ask) if not self.rates.tier(tier).is_learnt}
        if not self.rates.prefill.is_learnt:
            unmeasured.add(PREFILL)
        return Ways(
            self.weigh(ask, held) if held > ask.computed else None,
            self.weigh(ask, ask.computed),
            frozenset(unmeasured),
        )

    def weigh(self, ask: Ask, stop: int) -> Estimate:
        """What is expected where KV of tokens [ask.computed, stop) is loaded."""
        stop = max(stop, ask.computed)
        compute = self.rates.prefill_seconds(ask.tokens - stop, stop)
        if stop == ask.computed:
            return Estimate(stop, ask.busy + compute, 0.0, compute)
        loads = list(self._loads(ask, stop))
        if self._in_step(loads):
            load = self._loading_seconds(ask, loads, self.settings.step_operations)
            layers = self.rates.layers
            both = pipelined(load / layers, (layers, compute / layers))
            return Estimate(stop, ask.busy + both, load, compute)
        load = self._loading_seconds(ask, loads, 1)
        return Estimate(stop, max(ask.busy, load) + compute, load, compute)

    def _loads(self, ask: Ask, stop: int) -> Iterator[tuple[str, int]]:
        """(tier, blocks) of what is read."""
        block, start = self.settings.block_tokens, ask.computed
        for source in ask.sources:
            end = min(source.stop, stop)
            if end > start:
                yield source.tier, -(-end // block) - start // block
                start = end

    def _in_step(self, loads: list[tuple[str, int]]) -> bool:
        """Only what is in host memory, and not too much of it."""
        [(tier, blocks), *others] = loads
        if others or tier != HOST:
            return False
        return blocks * self.settings.block_bytes <= self.settings.step_bytes

    def _loading_seconds(
        self, ask: Ask, loads: list[tuple[str, int]], host_operations: int
    ) -> float:
        """Until the last byte is there. Tiers are read beside each other, and all that they give
        passes through host memory: the last batch of a tier when it has been read."""
        return max(self._finished(ask, loads, host_operations).values())

    def _finished(
        self, ask: Ask, loads: list[tuple[str, int]], host_operations: int
    ) -> dict[str, float]:
        """When each tier has given its last byte, and host memory all of them."""
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
            finished[tier] = last + self._queued(ask, tier, blocks * size, reads)
        finished[HOST] = self._queued(ask, HOST, total * size, operations)
        return finished

    def _queued(self, ask: Ask, tier: str, nbytes: int, operations: int) -> float:
        ahead = ask.ahead.get(tier)
        if ahead is None:
            return self.rates.load_seconds(tier, nbytes, operations)
        return self.rates.load_seconds(tier, ahead.nbytes + nbytes, ahead.operations + operations)

    # -- cuts worth weighing --------------------------------------------------------------------

    def _between(self, ask: Ask) -> Iterator[Estimate]:
        """Cuts that can be the best one beside both ends.

        Where loads and computing follow each other, seconds are concave along a tier (each further
        token costs the same to load and more to compute): the best cut is where a tier ends, or its
        last full operation, where another tier becomes the one that is waited for, or where the
        load begins to last longer than the engine is busy. In a step they overlap, and the best one
        is where both take as long; the first cut that is no longer loaded in a step gains what the
        engine is busy for.
        """
        stops = {*self._ends(ask), *self._overtaken(ask)}
        block, held, before = self.settings.block_tokens, _held(ask), ask.computed
        if ask.sources[0].tier == HOST and self.settings.step_bytes:
            most = self.settings.step_bytes // self.settings.block_bytes
            end = min((ask.computed // block + most) * block, ask.sources[0].stop, held)
            before = min((end // block + 1) * block, held)
            stops |= {end, before}
            stops |= self._last(ask, ask.computed, end, lambda cut: cut.load <= cut.compute)
        if ask.busy:
            stops |= self._last(ask, before, held, lambda cut: cut.load <= ask.busy)
        least = ask.computed + max(1, self.settings.least)
        return (self.weigh(ask, stop) for stop in sorted(stops) if least <= stop < held)

    def _ends(self, ask: Ask) -> Iterator[int]:
        """Where each source ends, and the last of its operations that is full."""
        block, start = self.settings.block_tokens, ask.computed
        batch = block * self.settings.batch_blocks
        for source in ask.sources:
            end, first = min(source.stop, _held(ask)), start // block * block
            if end > start:
                yield end
                if source.tier != HOST:
                    yield first + (end - first - 1) // batch * batch
                start = end

    def _overtaken(self, ask: Ask) -> Iterator[int]:
        """The boundaries beside where, of two tiers read beside each other, the other one becomes
        the slower: along a tier the seconds of each are a line, but for its operations' starts."""
        block, start = self.settings.block_tokens, ask.computed
        for source in ask.sources:
            end, first = min(source.stop, _held(ask)), (start // block + 1) * block
            if start < first < end:
                near, far = (
                    self._finished(ask, list(self._loads(ask, at)), 1) for at in (first, end)
                )
                for one, other in combinations(far, 2):
                    before, after = near[one] - near[other], far[one] - far[other]
                    if before * after < 0:
                        at = first + (end - first) * before / (before - after)
                        yield from (int(at) // block * block, (int(at) // block + 1) * block)
            start = max(start, end)

    def _last(self, ask: Ask, start: int, end: int, holds: Callable[[Estimate], bool]) -> set[int]:
        """The last block boundary of [start, end] where ``holds``, and the next: it holds first."""
        block = self.settings.block_tokens
        low, high = start // block, end // block
        if holds(self.weigh(ask, end)):
            return {end}
        while low < high:
            middle = (low + high + 1) // 2
            if holds(self.weigh(ask, middle * block)):
                low = middle
            else:
                high = middle - 1
        return {low * block, (low + 1) * block} if end > start else set()


def _held(ask: Ask) -> int:
    """How far KV is held; the last token is always computed, its logits are wanted."""
    return (
        max(ask.computed, min(ask.sources[-1].stop, ask.tokens - 1))
        if ask.sources
        else (ask.computed)
    )


def _tiers(ask: Ask) -> list[str]:
    """Tiers that a load would touch; all of it passes through host memory."""
    tiers = dict.fromkeys((source.tier for source in ask.sources), None)
    return [HOST, *(tier for tier in tiers if tier != HOST)] if tiers else []


class Otherwise(NamedTuple):
    """What each way is estimated to take, from measured rates: seconds to the first token with all
    that was found loaded, and with all of it computed; and seconds of loading alone.

    None is what cannot be said; ``unknown`` says why.
    """

    load_all: float | None = None
    recompute: float | None = None
    loading: float | None = None
    unknown: tuple[str, ...] = ()
