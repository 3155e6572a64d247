"""The decision whether to blend a request and how many rows to recompute, from measured seconds.

Layer i + 1 loads while layer i recomputes, so recomputing rows is free as long as it does not take
longer than loading:

    load       ├─ 0 ─┼─ 1 ─┼─ 2 ─┼─ 3 ─┼─ 4 ─┼─ ...
    recompute        ├─ 0 ───┼─ 1 ───┼─2─┤ ├─3─┤ ├─4─┤      ratio = the largest whose
                      full layers      └ r·chunks + fresh ┘   rows fit under a load

That ratio is used, unless it is below the floor that quality requires (CacheBlend, arXiv
2405.16444, section 5.1). The blend is then compared with the plain way, in which the exact prefix
is loaded and the engine computes the rest. The blend is chosen if it is clearly faster.

This module only does arithmetic on seconds that the caller measured. It uses no clock and no I/O,
and a decision takes tens of microseconds.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from kvcore.errors import ConfigError
from kvcore.telemetry.fit import Fit, is_amount
from kvcore.telemetry.rates import (
    ComputeRates,
    ForwardPart,
    Rates,
    TierRates,
    pairs,
    pipelined,
    seen,
)

__all__ = [
    "BlendCandidate",
    "ComputeRates",
    "Controller",
    "ControllerSettings",
    "Decision",
    "ForwardPart",
    "Mode",
    "TierRates",
    "hidden_ratio",
    "pipelined",
]

_log = logging.getLogger("kvcore.fusion.controller")


class Mode(str, Enum):
    """How to serve a request that has cached chunks."""

    BLEND = "blend"
    PREFIX = "prefix"


@dataclass(frozen=True)
class BlendCandidate:
    """What a prompt would have to load and to compute.

    Args:
        tokens: number of tokens of the prompt.
        prefix: how many of them, from position 0 on, have exact KV in any tier or in the engine.
        chunks: how many of them belong to cached chunks after the prefix; the others are fresh.
        prefix_bytes, chunk_bytes: bytes of KV to load for these, over all layers, by tier. KV that
            the engine holds already is not counted.
    """

    tokens: int
    prefix: int
    chunks: int
    prefix_bytes: Mapping[str, int] = field(default_factory=dict)
    chunk_bytes: Mapping[str, int] = field(default_factory=dict)

    @property
    def behind(self) -> int:
        """Number of tokens after the prefix."""
        return self.tokens - self.prefix

    @property
    def fresh(self) -> int:
        """Number of tokens without cached KV."""
        return self.behind - self.chunks

    @property
    def is_sound(self) -> bool:
        """Whether these counts are possible for a prompt."""
        counts = (self.tokens, self.prefix, self.chunks, self.fresh)
        loads = (*self.prefix_bytes.values(), *self.chunk_bytes.values())
        return all(map(is_amount, (*counts, *loads)))


@dataclass(frozen=True)
class Decision:
    """How to serve a request, and what that is expected to cost.

    Args:
        mode: the choice.
        ratio: share of the chunks' tokens that a blend recomputes, or would recompute: the mean
            over the layers after the full ones.
        blend_seconds, prefix_seconds: expected seconds of each mode, including loading.
        load_seconds, row_seconds: seconds to load one layer after the full ones in a blend, and to
            recompute its rows.
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
    """Settings of a controller.

    Args:
        layers: number of layers of the model.
        full_layers: number of first layers in which a blend computes every row.
        floor, ceiling: limits of the ratio, however many rows would hide behind loading.
        look_rows: the most fresh rows that run over the reused cache before the walk, which
            computes them once more; 0 if the selector needs no such look. A look loads every
            layer, so no load remains for the walk to hide behind, and the ratio is the floor.
        enter: a blend is chosen if it saves at least this share of the plain way's time.
        leave: after a blend was chosen, it is chosen again if it saves at least this share. The gap
            prevents requests of one size from alternating between the modes.
        memory: number of further observations after which the weight of one is about a third.
        enough: number of observations of a kind that replace the prior.
        retry: number of blends refused in a row, with none measured in between, after which the
            measurements of blends are forgotten. Those of tiers that loaded nothing meanwhile are
            forgotten too. So one bad hour cannot rule them out forever.
    """

    layers: int
    full_layers: int = 2
    floor: float = 0.15
    ceiling: float = 0.5
    look_rows: int = 0
    enter: float = 0.2
    leave: float = 0.05
    memory: int = 32
    enough: int = 3
    retry: int = 256

    def __post_init__(self) -> None:
        if not 1 <= self.full_layers <= self.layers:
            raise ConfigError(
                f"full_layers must be from 1 to {self.layers}, the model's layers, "
                f"got {self.full_layers}"
            )
        if not 0 <= self.floor <= self.ceiling <= 1:
            raise ConfigError(
                f"floor and ceiling of the ratio are shares of the chunks' tokens, "
                f"0 <= floor <= ceiling <= 1; got {self.floor} and {self.ceiling}"
            )
        if not 0 <= self.leave <= self.enter < 1:
            raise ConfigError(
                f"the time that a blend must save is a share, 0 <= leave <= enter < 1; "
                f"got leave {self.leave} and enter {self.enter}"
            )
        if self.retry < 1:
            raise ConfigError(f"retry counts refusals and must be at least 1, got {self.retry}")


def hidden_ratio(load: float, once: float, row: float, chunks: int, fresh: int) -> float:
    """Return the largest share of ``chunks`` whose rows can be recomputed within ``load``.

    All ``fresh`` rows are recomputed too. ``load`` is the seconds to load one layer. Recomputing
    one layer takes ``once`` seconds, and ``row`` seconds more for each row. The share is from 0 to
    1 and gives a whole number of rows. It never falls if the load takes longer or a row takes less
    time.
    """
    spare = load - once
    if spare <= 0 or chunks <= 0:
        return 0.0
    if spare >= row * (fresh + chunks):
        return 1.0
    return max(0, math.floor(spare / row - fresh)) / chunks


class Controller:
    """Learns the cost of computing, blending and loading, and decides for each request.

    It has one owner and is not thread-safe. It runs in the engine's scheduler process, which passes
    on what the workers measured. Numbers that cannot be a measurement (no work, no time, NaN) are
    ignored: the methods that take a measurement return whether it was used.

    Args:
        settings: limits and margins.
        compute: expected rates of the engine's prefill before it is measured. They also apply to
            blends until some are measured.
        tiers: every tier that KV may be loaded from, with its expected rates before it is measured.
        otherwise: expected rates of a tier that appears later; None makes such a tier an error.

    ``rates`` holds what was learnt about prefill and loads. The load planner shares it.
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
        self._quiet = set(self.rates.tiers)  # without a load since rates were last forgotten
        self._blending: set[int] = set()
        self._refused = 0

    # -- what was measured ----------------------------------------------------------------------

    def prefilled(self, parts: Iterable[ForwardPart], seconds: float) -> bool:
        """Record one forward of the engine over these parts of requests, including decodes."""
        return self.rates.prefilled(parts, seconds)

    def blended(self, rows: int, kept: int, context: int, seconds: float, looked: int = 0) -> bool:
        """Record one blend of ``rows`` at the full layers and ``kept`` (a mean) at the others.

        ``context`` is the length of the exact prefix before the rows. ``seconds`` is the computing
        time over all layers. It includes the question's look over ``looked`` rows if there was one,
        and excludes waits for layers to arrive.
        """
        if not all(map(is_amount, (rows, kept, context, looked))) or not 0 < kept <= rows:
            return False
        used = self._blend.observe(self._walk(rows, kept, context, looked), seconds)
        if used:
            self._refused = 0
        return used

    def loaded(self, tier: str, nbytes: int, seconds: float, layers: int = 1) -> bool:
        """Record that ``layers`` layers, ``nbytes`` in total, were loaded from a tier in turn."""
        used = self.rates.loaded(tier, nbytes, seconds, layers)
        if used:
            self._quiet.discard(tier)
        return used

    # -- what follows ---------------------------------------------------------------------------

    def decide(self, request: BlendCandidate) -> Decision:
        """Decide how to serve one request, and remember the choice for requests of its size.

        Raises:
            ConfigError: the request loads from a tier that this controller does not know.
        """
        if not request.is_sound or not request.chunks or not request.fresh:
            return self._refuse(request)
        load = self._load(request.prefix_bytes, request.chunk_bytes)
        once, row = self._layer(request.behind, request.prefix)
        hiding = 0.0 if self.settings.look_rows else load
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

    # -- arithmetic -----------------------------------------------------------------------------

    def _walk(
        self, rows: float, kept: float, context: float, looked: float
    ) -> tuple[float, float, float]:
        """Return the amounts of work of a blend: all rows on the full layers, fewer on the rest.

        A look before it runs ``looked`` rows on all layers.
        """
        layers, full = self.settings.layers, self.settings.full_layers
        later = (layers - full) * kept + layers * looked
        keys = full * pairs(rows, context) + later * seen(rows, context)
        return 2.0 if looked else 1.0, full * rows + later, keys

    @property
    def _walking(self) -> tuple[float, ...]:
        return (self._blend if self._blend.is_learnt else self.rates.prefill).rates

    def _layer(self, rows: float, context: float) -> tuple[float, float]:
        """Return the seconds of one layer of a blend: once, and per row."""
        once, row, pair = self._walking
        return once / self.settings.layers, row + pair * seen(rows, context)

    def _load(self, *loads: Mapping[str, int]) -> float:
        """Return the seconds to load one layer of all these. Tiers load in parallel."""
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
        """Return the seconds of the walk and of the engine's step over the last row after it.

        A look before it loads each layer, and then runs the last fresh rows on it.
        """
        full, layers = self.settings.full_layers, self.settings.layers
        once, row = self._layer(request.behind, request.prefix)
        walk = (full, once + row * request.behind), (layers - full, rows)
        last = self.rates.prefill.predict(self.rates.amounts(1, request.tokens))
        if self.settings.look_rows:
            look = load + once + row * min(request.fresh, self.settings.look_rows)
            return layers * look + pipelined(0.0, *walk) + last
        return pipelined(load, *walk) + last

    def _prefix_seconds(self, request: BlendCandidate) -> float:
        """Return the seconds of a prefill whose prefix loads layer by layer while it computes."""
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
        """Forget old measurements after blends were refused `retry` times in a row."""
        self._refused = 0 if mode is Mode.BLEND else self._refused + 1
        if self._refused >= self.settings.retry:
            _log.info(
                "blends were refused %d times in a row: their rates will be measured again",
                self._refused,
            )
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
