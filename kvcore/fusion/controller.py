"""Whether to blend a request, and how many rows to recompute: from measured seconds.

Layer i + 1 loads while layer i recomputes, so rows are free until recomputing takes longer than
loading:

    load       ├─ 0 ─┼─ 1 ─┼─ 2 ─┼─ 3 ─┼─ 4 ─┼─ ...
    recompute        ├─ 0 ───┼─ 1 ───┼─2─┤ ├─3─┤ ├─4─┤      ratio = the largest whose
                      full layers      └ r·chunks + fresh ┘   rows fit under a load

The ratio is that one, never under the floor that quality asks for. A blend with it is weighed
against the plain way, the exact prefix loaded and everything behind it computed by the engine; it
is chosen where it is clearly faster. Where even the fastest load is hidden by the floor's rows, a
slower and cheaper tier costs nothing: `Controller.best_tier` (CacheBlend, arXiv 2405.16444, 5.1).

Everything here is arithmetic on seconds that the caller measured: no clock, no I/O, tens of
microseconds a decision.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from kvcore.errors import ConfigError
from kvcore.telemetry.fit import Fit, is_amount
from kvcore.telemetry.rates import ComputeRates, Part, Rates, TierRates, pairs, pipelined, seen

__all__ = [
    "BlendCandidate",
    "ComputeRates",
    "Controller",
    "ControllerSettings",
    "Decision",
    "Mode",
    "Part",
    "TierRates",
    "hidden_ratio",
    "pipelined",
]

_log = logging.getLogger("kvcore.fusion.controller")


class Mode(str, Enum):
    """What to do with a request's cached chunks."""

    BLEND = "blend"
    PREFIX = "prefix"


@dataclass(frozen=True)
class BlendCandidate:
    """What a prompt would load and compute.

    Args:
        tokens: all of the prompt's.
        prefix: of them, those with exact KV from position 0 on, wherever it is.
        chunks: of them, those of cached chunks behind the prefix; the others are fresh.
        prefix_bytes, chunk_bytes: of KV to load for these, over all layers, by tier. What the
            engine already holds is not loaded.
    """

    tokens: int
    prefix: int
    chunks: int
    prefix_bytes: Mapping[str, int] = field(default_factory=dict)
    chunk_bytes: Mapping[str, int] = field(default_factory=dict)

    @property
    def behind(self) -> int:
        """Tokens behind the prefix."""
        return self.tokens - self.prefix

    @property
    def fresh(self) -> int:
        """Tokens without cached KV."""
        return self.behind - self.chunks

    @property
    def is_sound(self) -> bool:
        """Whether these counts can be a prompt's."""
        counts = (self.tokens, self.prefix, self.chunks, self.fresh)
        loads = (*self.prefix_bytes.values(), *self.chunk_bytes.values())
        return all(map(is_amount, (*counts, *loads)))


@dataclass(frozen=True)
class Decision:
    """What to do, and what it is expected to cost.

    Args:
        mode: the way to go.
        ratio: what a blend recomputes, or would, of the chunks' tokens; a mean over the layers
            behind the full ones.
        blend_seconds, prefix_seconds: expected of each way, loading included.
        load_seconds, row_seconds: of one layer behind the full ones, in a blend: loading it, and
            recomputing its rows.
        reason: a sentence for the log.
    """

    mode: Mode
    ratio: float
    blend_seconds: float
    prefix_seconds: float
    load_seconds: float
    row_seconds: float
    reason: str


@dataclass(frozen=True)
class ControllerSettings:
    """What a controller is told.

    Args:
        layers: of the model.
        full_layers: the first ones, where a blend computes every row.
        floor, ceiling: no ratio under or over these, whatever would hide behind loading.
        looks: the question is run over the reused cache before the walk. That takes every layer,
            so nothing is left for the walk to hide behind: the ratio is the floor.
        enter: a blend is chosen if it saves this share of the plain way's time;
        leave: and chosen again while it saves this much. The gap keeps requests of one size from
            going one way and the other in turns.
        memory: observations after which one counts about a third.
        enough: observations of a kind before they are believed over the prior.
        retry: refusals of a blend in a row, with no blend measured since, after which what was
            measured of blends is forgotten, and of tiers that loaded nothing meanwhile: a bad hour
            must not rule them out for ever.
    """

    layers: int
    full_layers: int = 2
    floor: float = 0.15
    ceiling: float = 0.5
    looks: bool = False
    enter: float = 0.2
    leave: float = 0.05
    memory: int = 32
    enough: int = 3
    retry: int = 256

    def __post_init__(self) -> None:
        if not 1 <= self.full_layers <= self.layers:
            raise ConfigError(
                f"full_layers is from 1 to the model's {self.layers} layers, got {self.full_layers}"
            )
        if not 0 <= self.floor <= self.ceiling <= 1:
            raise ConfigError(
                f"floor and ceiling of the ratio are shares of the chunks' tokens, "
                f"0 <= floor <= ceiling <= 1: got {self.floor} and {self.ceiling}"
            )
        if not 0 <= self.leave <= self.enter < 1:
            raise ConfigError(
                f"the time a blend must save is a share, 0 <= leave <= enter < 1: "
                f"got leave {self.leave} and enter {self.enter}"
            )
        if self.retry < 1:
            raise ConfigError(f"retry counts refusals and is at least 1, got {self.retry}")


def hidden_ratio(load: float, once: float, row: float, chunks: int, fresh: int) -> float:
    """The largest share of ``chunks`` whose rows, beside all fresh ones, recompute within ``load``.

    Seconds of one layer: ``load``, ``once`` and of one ``row``. From 0 to 1, a whole number of
    rows. It does not fall as the load takes longer or a row takes less.
    """
    spare = load - once
    if spare <= 0 or chunks <= 0:
        return 0.0
    if spare >= row * (fresh + chunks):
        return 1.0
    return max(0, math.floor(spare / row - fresh)) / chunks


class Controller:
    """Learns what computing, blending and loading cost, and decides request by request.

    One owner, not thread-safe; it lives beside the engine's scheduler and is told there what the
    workers measured. Numbers that cannot be a measurement (nothing done, no time, NaN) are left
    out: the methods that take one say whether it was used.

    Args:
        settings: floors and margins.
        compute: of the engine's prefill before anything is measured; blends are taken to be
            computed at the engine's own rates until some were measured.
        tiers: every tier that KV may be loaded from, with what to expect before it was measured.
        otherwise: what to expect of a tier that is met later; None where that is an error.

    ``rates`` are what it has learnt of prefill and of loads; a planner decides by the same ones.
    """

    def __init__(
        self,
        settings: ControllerSettings,
        compute: ComputeRates,
        tiers: Mapping[str, TierRates],
        otherwise: TierRates | None = None,
    ) -> None:
        self.settings = settings
        self.rates = Rates(
            settings.layers,
            compute,
            tiers,
            memory=settings.memory,
            enough=settings.enough,
            otherwise=otherwise,
        )
        self._blend = Fit(compute, settings.memory, settings.enough)
        self._quiet = set(self.rates.tiers)  # without a load since blends were measured anew
        self._blending: set[int] = set()
        self._refused = 0

    # -- what was measured ----------------------------------------------------------------------

    def prefilled(self, parts: Iterable[Part], seconds: float) -> bool:
        """One forward of the engine over these parts of requests, decodes included."""
        return self.rates.prefilled(parts, seconds)

    def blended(self, rows: int, kept: int, context: int, seconds: float) -> bool:
        """One blend: ``rows`` at the full layers, ``kept`` (a mean) at the others.

        ``context`` is the exact prefix before the first of them. ``seconds`` are those of
        computing, over all layers and with the question's look where one was made; waits for a
        layer to arrive are not part of them.
        """
        if not all(map(is_amount, (rows, kept, context))) or not 0 < kept <= rows:
            return False
        used = self._blend.observe(self._walk(rows, kept, context), seconds)
        if used:
            self._refused = 0
        return used

    def loaded(self, tier: str, nbytes: int, seconds: float, layers: int = 1) -> bool:
        """``layers`` layers of KV, ``nbytes`` together, came from a tier one after the other."""
        used = self.rates.loaded(tier, nbytes, seconds, layers)
        if used:
            self._quiet.discard(tier)
        return used

    # -- what follows ---------------------------------------------------------------------------

    def decide(self, request: BlendCandidate) -> Decision:
        """The way to go for one request; remembers which way requests of its size went.

        Raises:
            ConfigError: it loads from a tier that this controller was not told of.
        """
        if not request.is_sound or not request.chunks or not request.fresh:
            return self._refuse(request)
        load = self._load(request.prefix_bytes, request.chunk_bytes)
        once, row = self._layer(request.behind, request.prefix)
        hiding = 0.0 if self.settings.looks else load
        ratio = hidden_ratio(hiding, once, row, request.chunks, request.fresh)
        ratio = min(max(ratio, self.settings.floor), self.settings.ceiling)
        kept = request.fresh + ratio * request.chunks
        rows = once + row * kept
        blend, prefix = self._blend_seconds(request, load, rows), self._prefix_seconds(request)
        mode = self._weigh(request.chunks.bit_length(), blend, prefix)
        self._remember(mode)
        reason = (
            f"a blend at ratio {ratio:.2f} takes {blend:.4g} s, the prefix alone {prefix:.4g} s; "
            f"a layer loads in {load:.3g} s and recomputes in {rows:.3g} s"
        )
        return Decision(mode, ratio, blend, prefix, load, rows, reason)

    def best_tier(self, tokens: int, nbytes: int, tiers: Sequence[str], context: int = 0) -> str:
        """Where to put a chunk: the first of ``tiers`` that loads under recompute at the floor.

        ``tiers`` are in the order of preference, the cheapest first; if a load of ``nbytes`` hides
        from none of them, it is the one that loads fastest.

        Raises:
            ConfigError: no tiers, or one that this controller was not told of.
        """
        if not tiers:
            raise ConfigError("no tiers to choose from: name at least one")
        loads = {tier: self._load({tier: nbytes}) for tier in tiers}
        once, row = self._layer(tokens, context)
        hiding = once + row * math.ceil(self.settings.floor * tokens)
        fastest = min(tiers, key=lambda tier: loads[tier])
        return next((tier for tier in tiers if loads[tier] <= hiding), fastest)

    # -- arithmetic -----------------------------------------------------------------------------

    def _walk(self, rows: float, kept: float, context: float) -> tuple[float, float, float]:
        """Amounts of a blend: all rows on the full layers, fewer on the rest."""
        full, rest = self.settings.full_layers, self.settings.layers - self.settings.full_layers
        keys = full * pairs(rows, context) + rest * kept * seen(rows, context)
        return 1.0, full * rows + rest * kept, keys

    @property
    def _walking(self) -> tuple[float, ...]:
        return (self._blend if self._blend.is_learnt else self.rates.prefill).rates

    def _layer(self, rows: float, context: float) -> tuple[float, float]:
        """Seconds of one layer of a blend: once, and for each row."""
        once, row, pair = self._walking
        return once / self.settings.layers, row + pair * seen(rows, context)

    def _load(self, *loads: Mapping[str, int]) -> float:
        """Seconds until one layer of all these is there: tiers beside each other."""
        nbytes: dict[str, int] = {}
        for load in loads:
            for tier, some in load.items():
                nbytes[tier] = nbytes.get(tier, 0) + some
        layers = self.settings.layers
        return max(
            (self.rates.load_seconds(tier, n / layers, 1) for tier, n in nbytes.items() if n),
            default=0.0,
        )

    def _blend_seconds(self, request: BlendCandidate, load: float, rows: float) -> float:
        """The walk, and the engine's own step over the last row that follows it."""
        full, layers = self.settings.full_layers, self.settings.layers
        once, row = self._layer(request.behind, request.prefix)
        walk = (full, once + row * request.behind), (layers - full, rows)
        last = self.rates.prefill.predict(self.rates.amounts(1, request.tokens))
        if self.settings.looks:
            return layers * load + pipelined(0.0, *walk) + last
        return pipelined(load, *walk) + last

    def _prefix_seconds(self, request: BlendCandidate) -> float:
        """Layers of the prefix arrive while the engine computes what is behind it."""
        load, layers = self._load(request.prefix_bytes), self.settings.layers
        keys = pairs(request.behind, request.prefix)
        computing = self.rates.prefill.predict(self.rates.amounts(request.behind, keys))
        return pipelined(load, (layers, computing / layers))

    def _weigh(self, size: int, blend: float, prefix: float) -> Mode:
        margin = self.settings.leave if size in self._blending else self.settings.enter
        if blend <= (1 - margin) * prefix:
            self._blending.add(size)
            return Mode.BLEND
        self._blending.discard(size)
        return Mode.PREFIX

    def _remember(self, mode: Mode) -> None:
        """Forget what keeps on speaking against blends once it has grown old."""
        self._refused = 0 if mode is Mode.BLEND else self._refused + 1
        if self._refused >= self.settings.retry:
            _log.info("blends refused %d times, measuring them anew", self._refused)
            self._refused = 0
            self._blend.forget()
            for tier in self._quiet:
                self.rates.forget(tier)
            self._quiet = set(self.rates.tiers)

    def _refuse(self, request: BlendCandidate) -> Decision:
        if not request.is_sound:
            why = f"these counts are no prompt's: {request}"
        elif not request.chunks:
            why = "no chunk to blend"
        else:
            why = "no fresh token to take the next one from"
        floor = self.settings.floor
        prefix = self._prefix_seconds(request) if request.is_sound else 0.0
        return Decision(Mode.PREFIX, floor, math.inf, prefix, 0.0, 0.0, why)
