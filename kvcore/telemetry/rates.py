"""What computing and loading cost one engine, in seconds, learnt from what they did.

    prefill      once + row * rows + pair * (row, key seen) pairs       over all layers
    load         latency * operations + byte * bytes                    of each tier

The fits are slow on purpose: one strange run moves them little. A medium that has really changed
(a disk that another process fills, a network that comes back) is seen sooner, by how far its last
loads were from what was expected: `Rates.drift`.

One owner, not thread-safe: it lives beside the engine's scheduler and is told there what the
workers measured. Arithmetic only: no clock, no I/O, microseconds a call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from statistics import median
from typing import NamedTuple

from kvcore.errors import ConfigError
from kvcore.telemetry.fit import Fit, is_amount

__all__ = ["ComputeRates", "Part", "Rates", "TierRates", "pairs", "pipelined", "seen"]

RECENT = 3
"""Loads whose median error is the drift: one of them may be anything."""

LEAST_SECONDS = 1e-12
"""Expected of a load whose rates were found to be nothing."""

DRIFTED = 2.0
"""Errors up to this factor, either way, are left to the fit."""


class ComputeRates(NamedTuple):
    """Seconds of a run over all layers: once, a row and layer, a (row, key seen) pair and layer."""

    once: float
    row: float
    pair: float

    @classmethod
    def guess(cls, parameters: int, hidden: int, layers: int, flops: float) -> ComputeRates:
        """What a model of that shape costs at ``flops`` per second: two a weight, four a pair.

        ``hidden`` is heads times head_dim. A guess for before anything was measured; 100
        microseconds a layer are what a layer costs that computes nothing.
        """
        return cls(1e-4 * layers, 2 * parameters / layers / flops, 4 * hidden / flops)


class TierRates(NamedTuple):
    """Seconds of a load from one tier: once an operation (or layer), and a byte."""

    latency: float
    byte: float


class _Load(NamedTuple):
    """One of the last loads: what it was made of, and what it took."""

    amounts: tuple[float, float]
    seconds: float


class Part(NamedTuple):
    """Consecutive rows computed behind ``context`` tokens; a decode is one row."""

    tokens: int
    context: int


class Rates:
    """The rates of one engine: its prefill's, and those of every tier that KV is loaded from.

    Args:
        layers: of the model.
        compute: of prefill before anything is measured.
        tiers: every tier, with what to expect before it was measured.
        memory: observations after which one counts about a third.
        enough: observations of a kind before they are believed over the prior.
        otherwise: what to expect of a tier that is met later; None where that is an error.
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
        self._recent: dict[str, deque[_Load]] = {name: deque(maxlen=RECENT) for name in tiers}
        self._now: dict[str, TierRates] = {}  # with their drift, until the next load

    @property
    def tiers(self) -> frozenset[str]:
        """The tiers it was told of."""
        return frozenset(self._tiers)

    def tier(self, name: str) -> Fit:
        """The fit of a tier's loads. Raises ConfigError for one that it was not told of, where it
        does not know what to expect of others."""
        if name not in self._tiers and self._otherwise is not None:
            self._tiers[name] = Fit(self._otherwise, self._memory, self._enough)
            self._recent[name] = deque(maxlen=RECENT)
        if name not in self._tiers:
            raise ConfigError(
                f"no tier {name!r} in these rates, which know "
                f"{', '.join(sorted(self._tiers)) or 'none'}: name it when making them"
            )
        return self._tiers[name]

    # -- what was measured ----------------------------------------------------------------------

    def prefilled(self, parts: Iterable[Part], seconds: float) -> bool:
        """One forward of the engine over these parts of requests, decodes included.

        False, and nothing learnt, from numbers that cannot be a forward's.
        """
        parts = list(parts)
        if not all(is_amount(part.tokens) and is_amount(part.context) for part in parts):
            return False
        rows = sum(part.tokens for part in parts)
        keys = sum(pairs(part.tokens, part.context) for part in parts)
        return bool(rows) and self.prefill.observe(self.amounts(rows, keys), seconds)

    def loaded(self, tier: str, nbytes: int, seconds: float, operations: int = 1) -> bool:
        """``operations`` (or layers) of a tier, ``nbytes`` together, ran one after the other.

        False, and nothing learnt, from numbers that cannot be a load's.
        """
        fit = self.tier(tier)
        if operations <= 0 or not is_amount(operations) or not is_amount(nbytes):
            return False
        used = fit.observe((operations, nbytes), seconds)
        if used:
            self._now.pop(tier, None)
            self._recent[tier].append(_Load((operations, nbytes), seconds))
        return used

    def forget(self, tier: str) -> None:
        """What was measured of a tier's loads counts no more."""
        self.tier(tier).forget()
        self._recent[tier].clear()
        self._now.pop(tier, None)

    # -- what follows ---------------------------------------------------------------------------

    def amounts(self, rows: float, keys: float) -> tuple[float, float, float]:
        """What a run over all layers is made of, as the prefill's fit counts it."""
        return 1.0, rows * self.layers, keys * self.layers

    def prefill_seconds(self, rows: float, context: float) -> float:
        """Seconds of a forward of ``rows`` behind ``context`` tokens; nothing for no rows."""
        once, row, pair = self.prefill.rates
        return once + self.layers * rows * (row + pair * seen(rows, context)) if rows else 0.0

    def load_seconds(self, tier: str, nbytes: float, operations: float) -> float:
        """Seconds of loads of a tier, one after the other, with its drift. Does not fall as
        either amount grows."""
        latency, byte = self.of_tier(tier)
        return latency * operations + byte * nbytes

    def of_tier(self, tier: str) -> TierRates:
        """Seconds of an operation and of a byte of a tier, with its drift."""
        now = self._now.get(tier)
        if now is None:
            drift = self.drift(tier)
            now = self._now[tier] = TierRates(*(rate * drift for rate in self.tier(tier).rates))
        return now

    def drift(self, tier: str) -> float:
        """How many times longer than the fit says loads take of late; 1 where that is not far."""
        fit, recent = self.tier(tier), self._recent[tier]
        if len(recent) < RECENT or not fit.is_learnt:
            return 1.0
        expected = [max(fit.predict(load.amounts), LEAST_SECONDS) for load in recent]
        found = median(load.seconds / by for load, by in zip(recent, expected, strict=True))
        return 1.0 if 1 / DRIFTED <= found <= DRIFTED else found

    def are_learnt(self, tiers: Iterable[str]) -> bool:
        """Whether prefill and the loads of all these tiers were measured often enough."""
        return self.prefill.is_learnt and all(self.tier(name).is_learnt for name in tiers)


def pairs(rows: float, context: float) -> float:
    """Keys seen by consecutive rows behind a context, themselves included."""
    return rows * context + rows * (rows + 1) / 2


def seen(rows: float, context: float) -> float:
    """Keys that one of these rows sees, in the mean."""
    return context + (rows + 1) / 2


def pipelined(load: float, *stages: tuple[int, float]) -> float:
    """Seconds until the last layer is computed, where each needs its own load and the one before.

    Loads follow each other without a pause, ``load`` seconds a layer; ``stages`` are (how many
    layers, seconds of computing each). After some layer k the computing never waits again, so it is
    the largest over k of (k + 1) loads and the computing from k on; k is where a stage begins, or
    the last layer.
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
