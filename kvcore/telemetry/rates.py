"""Costs in seconds of computing and loading on one engine, learnt from measurements.

    prefill      once + row * rows + pair * (row, key seen) pairs       over all layers
    load         latency * operations + byte * bytes                    of each tier

The fits change slowly on purpose, so that one odd run has little effect. `Rates.drift` notices a
lasting change sooner (a disk that another process fills, a network that recovers): it compares the
last loads with what was expected.

The engine's scheduler owns it and reports what the workers measured. It is not thread-safe and does
arithmetic only: no clock, no I/O, microseconds per call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from statistics import median
from typing import NamedTuple

from kvcore.errors import ConfigError
from kvcore.telemetry.fit import Fit, is_amount

__all__ = ["ComputeRates", "ForwardPart", "Rates", "TierRates", "pairs", "pipelined", "seen"]

RECENT = 3
"""Number of recent loads whose median error is the drift, so that one outlier is ignored."""

LEAST_SECONDS = 1e-12
"""Least seconds expected of a load, for rates fitted as zero."""

DRIFTED = 2.0
"""Errors up to this factor, either way, are not drift."""


class ComputeRates(NamedTuple):
    """Seconds of a forward pass over all layers.

    ``once`` is paid once, ``row`` for each row and layer, and ``pair`` for each (row, key seen)
    pair and layer.
    """

    once: float
    row: float
    pair: float

    @classmethod
    def guess(cls, parameters: int, hidden: int, layers: int, flops: float) -> ComputeRates:
        """Guess the rates of a model of that shape at ``flops`` per second.

        Counts two operations per weight and four per pair. ``hidden`` is heads times head_dim. Used
        until there are measurements; 100 microseconds per layer are the cost of a layer that
        computes nothing.
        """
        return cls(1e-4 * layers, 2 * parameters / layers / flops, 4 * hidden / flops)


class TierRates(NamedTuple):
    """Seconds of a load from one tier: ``latency`` per operation or layer, and per byte."""

    latency: float
    byte: float


class _LoadSample(NamedTuple):
    """A recent load: its amounts and its duration."""

    amounts: tuple[float, float]
    seconds: float


class ForwardPart(NamedTuple):
    """Rows of one request in a forward, after ``context`` tokens. A decode is one row."""

    tokens: int
    context: int


class Rates:
    """The rates of one engine: those of its prefill, and those of every tier it loads from.

    Args:
        layers: number of layers of the model.
        compute: rates of prefill until there are measurements.
        tiers: every tier, with the rates to expect until there are measurements.
        memory: observations after which an observation's weight has fallen to about a third.
        enough: observations of a kind before they replace the prior.
        otherwise: rates to expect of a tier that appears later; None makes that an error.
    """

    def __init__(
        self,
        layers: int,
        compute: ComputeRates,
        tiers: Mapping[str, TierRates],
        memory: int = 32,
        enough: int = 3,
        otherwise: TierRates | None = None,
    ) -> None:
        self.layers = layers
        self._otherwise = otherwise
        self._memory, self._enough = memory, enough
        self.prefill = Fit(compute, memory, enough)
        self._tiers = {name: Fit(rates, memory, enough) for name, rates in tiers.items()}
        self._recent: dict[str, deque[_LoadSample]] = {name: deque(maxlen=RECENT) for name in tiers}
        self._now: dict[str, TierRates] = {}  # drift included, until the next load

    @property
    def tiers(self) -> frozenset[str]:
        """Names of the tiers with rates."""
        return frozenset(self._tiers)

    def tier(self, name: str) -> Fit:
        """Return the fit of a tier's loads.

        Raises ConfigError for an unknown tier, unless ``otherwise`` was given.
        """
        if name not in self._tiers and self._otherwise is not None:
            self._tiers[name] = Fit(self._otherwise, self._memory, self._enough)
            self._recent[name] = deque(maxlen=RECENT)
        if name not in self._tiers:
            raise ConfigError(
                f"there are no rates for tier {name!r}, only for "
                f"{', '.join(sorted(self._tiers)) or 'none'}: name it when making the rates"
            )
        return self._tiers[name]

    # -- what was measured ----------------------------------------------------------------------

    def prefilled(self, parts: Iterable[ForwardPart], seconds: float) -> bool:
        """Learn from one forward pass over these parts of requests, decodes included.

        Returns False and learns nothing if the numbers cannot be those of a forward pass.
        """
        parts = list(parts)
        if not all(is_amount(part.tokens) and is_amount(part.context) for part in parts):
            return False
        rows = sum(part.tokens for part in parts)
        keys = sum(pairs(part.tokens, part.context) for part in parts)
        return bool(rows) and self.prefill.observe(self.amounts(rows, keys), seconds)

    def loaded(self, tier: str, nbytes: int, seconds: float, operations: int = 1) -> bool:
        """Learn from ``operations`` (or layers) of a tier that moved ``nbytes`` in sequence.

        Returns False and learns nothing if the numbers cannot be those of a load.
        """
        fit = self.tier(tier)
        if operations <= 0 or not is_amount(operations) or not is_amount(nbytes):
            return False
        used = fit.observe((operations, nbytes), seconds)
        if used:
            self._now.pop(tier, None)
            self._recent[tier].append(_LoadSample((operations, nbytes), seconds))
        return used

    def forget(self, tier: str) -> None:
        """Discard what was measured of a tier's loads."""
        self.tier(tier).forget()
        self._recent[tier].clear()
        self._now.pop(tier, None)

    # -- what follows ---------------------------------------------------------------------------

    def amounts(self, rows: float, keys: float) -> tuple[float, float, float]:
        """Return the amounts of a run over all layers, in the terms of the prefill's fit."""
        return 1.0, rows * self.layers, keys * self.layers

    def prefill_seconds(self, rows: float, context: float) -> float:
        """Return the seconds of a forward of ``rows`` after ``context`` tokens; 0 for no rows."""
        once, row, pair = self.prefill.rates
        return once + self.layers * rows * (row + pair * seen(rows, context)) if rows else 0.0

    def load_seconds(self, tier: str, nbytes: float, operations: float) -> float:
        """Return the seconds of consecutive loads from a tier, drift included.

        The result never falls when either amount grows.
        """
        latency, byte = self.of_tier(tier)
        return latency * operations + byte * nbytes

    def of_tier(self, tier: str) -> TierRates:
        """Return the seconds per operation and per byte of a tier, drift included."""
        now = self._now.get(tier)
        if now is None:
            drift = self.drift(tier)
            now = self._now[tier] = TierRates(*(rate * drift for rate in self.tier(tier).rates))
        return now

    def drift(self, tier: str) -> float:
        """Return by what factor recent loads exceed the fit; 1 if the difference is small."""
        fit, recent = self.tier(tier), self._recent[tier]
        if len(recent) < RECENT or not fit.is_learnt:
            return 1.0
        expected = [max(fit.predict(load.amounts), LEAST_SECONDS) for load in recent]
        found = median(load.seconds / by for load, by in zip(recent, expected, strict=True))
        return 1.0 if 1 / DRIFTED <= found <= DRIFTED else found

    def are_learnt(self, tiers: Iterable[str]) -> bool:
        """Return True if prefill and the loads of all these tiers have enough measurements."""
        return self.prefill.is_learnt and all(self.tier(name).is_learnt for name in tiers)


def pairs(rows: float, context: float) -> float:
    """Return how many keys consecutive rows after a context see, themselves included."""
    return rows * context + rows * (rows + 1) / 2


def seen(rows: float, context: float) -> float:
    """Return how many keys one of these rows sees on average."""
    return context + (rows + 1) / 2


def pipelined(load: float, *stages: tuple[int, float]) -> float:
    """Return the seconds until the last layer is computed, if loading and computing overlap.

    Each layer needs its own load and the layer before it. Loads follow each other without a pause,
    ``load`` seconds per layer; ``stages`` are pairs of a number of layers and the seconds to
    compute each of them. After some layer k computing never waits again, so the result is the
    maximum over k of k + 1 loads plus the computing from k on. This k is the first layer of a
    stage, or the last layer.
    """
    stages = tuple((count, seconds) for count, seconds in stages if count)
    layers, left = 0, sum(count * seconds for count, seconds in stages)
    ends = [0.0]
    for count, seconds in stages:
        ends.append((layers + 1) * load + left)
        layers += count
        left -= count * seconds
        ends.append(layers * load + left + seconds)
    return max(ends)
