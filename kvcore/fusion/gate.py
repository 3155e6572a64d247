"""The quality gate: how wrong a blend is going to be, seen while it runs.

Every row is computed on the first layers, so what the rows left behind are off by is known there.
It grows with depth, and by how much can be seen on the rows that are recomputed further down, whose
cached KV is known to be wrong by the difference:

    layer      0   1 ─────────────────────────── depth ────── last
    measured       off by d1, all rows           off by d, the recomputed rows
    left           d1 of the rows left behind
    growth                                       d / d1 of these rows
    expected       left x usual growth           left x growth

Off by: squared distance of cached from fresh KV as a share of the fresh one's square, the mean of K
and V. Expected is in that unit too, and past a bound the blend takes a larger ratio, or gives way
to a full prefill. ``docs/fusion.md`` has what the bound was measured to be worth.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from kvcore.errors import ConfigError
from kvcore.fusion.select import Budget, Ratio, Seen, Selector, deviation, keep_top

__all__ = ["Gate", "Measured", "Observed", "Step", "Verdict", "Watch", "left_behind", "measure"]

ROUNDING = 1e-9
"""Off by less than this share counts as this: the growth of rounding noise means nothing."""


class Step(str, Enum):
    """What a blend does next."""

    GO_ON = "go on"
    LARGER = "larger ratio"
    FULL = "full prefill"


class Verdict(NamedTuple):
    """What a gate says: ``ratio`` is the one to go on or to start over with, 1.0 if in full."""

    step: Step
    ratio: float
    expected: float
    reason: str


@dataclass(frozen=True)
class Observed:
    """What a gate is shown of one blend.

    Args:
        layer: at which it was seen, counted from 0.
        ratio: the one blended with.
        left: for this ratio and for larger ones, what the rows left behind are off by at the
            choice, as a share of all rows of the chunks.
        growth: by what factor rows are further off at ``layer`` than they were at the choice; None
            at the choice itself.
    """

    layer: int
    ratio: float
    left: Mapping[float, float]
    growth: float | None = None

    def __post_init__(self) -> None:
        if self.ratio not in self.left:
            raise ConfigError(
                f"nothing is said of what the ratio {self.ratio} leaves: left has "
                f"{sorted(self.left)}"
            )


@dataclass(frozen=True)
class Gate:
    """Judges blends. Settings only: one instance serves all requests and threads.

    Args:
        bound: what the rows left behind may be expected to be off by at ``depth``.
        larger: ratios to take instead, where one of them keeps the bound; else a full prefill.
        usual: growth expected at the choice, where none was seen yet. With 0 only what is seen at
            ``depth`` counts.
        depth: how far down the growth is looked at, as a share of the layers.
    """

    bound: float
    larger: tuple[float, ...] = (0.3, 0.5)
    usual: float = 1.0
    depth: float = 0.5

    def __post_init__(self) -> None:
        if not self.bound >= 0 or not 0 <= self.usual < math.inf:
            raise ConfigError(
                f"a gate's bound and usual growth are not below zero: got {self.bound} "
                f"and {self.usual}"
            )
        if not all(0 < ratio < 1 for ratio in self.larger) or not 0 < self.depth < 1:
            raise ConfigError(
                f"a gate's ratios and depth are between 0 and 1: got {self.larger} and {self.depth}"
            )

    def ratios(self, ratio: float) -> list[float]:
        """This one and the larger ones, ascending."""
        return [ratio, *sorted({larger for larger in self.larger if larger > ratio})]

    def judge(self, observed: Observed) -> Verdict:
        """Go on, or the least of the larger ratios that keeps the bound, or a full prefill.

        What is not a number is taken for past the bound.
        """
        growth = self.usual if observed.growth is None else observed.growth
        first = observed.left[observed.ratio] * growth
        seen = f"expected to be off by {first:.3g} at layer {observed.layer}, allowed {self.bound}"
        if first <= self.bound:
            return Verdict(Step.GO_ON, observed.ratio, first, seen)
        for ratio in sorted(observed.left):
            expected = observed.left[ratio] * growth
            if ratio > observed.ratio and expected <= self.bound:
                return Verdict(Step.LARGER, ratio, expected, f"{seen}: {expected:.3g} at {ratio}")
        return Verdict(Step.FULL, 1.0, 0.0, f"{seen}: past it at every ratio")


# ---------------------------------------------------------------------------------------------
# what is measured of a walk


class Measured(NamedTuple):
    """Squares of n rows at one layer, [n] each and added up over ranks: off by, and size."""

    rows: Tensor
    key: Tensor
    value: Tensor
    key_size: Tensor
    value_size: Tensor

    def among(self, chosen: Tensor) -> Measured:
        """Of the rows where ``chosen`` [n] is true."""
        return Measured(*(part[chosen] for part in self))

    @property
    def off(self) -> Tensor:
        """[n]: what each row adds to what all of them are off by, a share of all their square."""
        key, value = _positive(self.key_size.sum()), _positive(self.value_size.sum())
        return (self.key / key + self.value / value) / 2

    @property
    def total(self) -> float:
        """What all of them are off by."""
        return float(self.off.sum())


def _positive(size: Tensor) -> Tensor:
    return size.clamp_min(torch.finfo(size.dtype).tiny)


def measure(seen: Seen) -> Measured:
    """Four reductions over ranks, in this order."""
    return Measured(
        seen.rows,
        seen.key_deviation,
        seen.value_deviation,
        seen.reduce(deviation(seen.keys, torch.zeros_like(seen.keys))),
        seen.reduce(deviation(seen.values, torch.zeros_like(seen.values))),
    )


def left_behind(
    measured: Measured, scores: Tensor, counts: Mapping[float, int]
) -> dict[float, float]:
    """By ratio, what the rows beyond the ``counts[ratio]`` of highest score are off by."""
    off = measured.off
    left = {}
    for ratio, count in counts.items():
        kept = torch.isin(measured.rows, keep_top(measured.rows, scores, count))
        left[ratio] = float(off[~kept].sum())
    return left


class Watch:
    """Follows one walk for a gate. One owner.

    Args:
        gate: what judges.
        selector, budget: those of the walk. A gate enlarges a `Ratio`; it has no say in another.
        layers: of the model.
        tokens: of the chunks.

    Attributes:
        verdicts: of this walk, so far.
        budget: to walk with: that of the walk, or the one to start over with.
    """

    def __init__(
        self, gate: Gate, selector: Selector, budget: Budget, layers: int, tokens: int
    ) -> None:
        if not isinstance(budget, Ratio) or budget.is_reuse:
            raise ConfigError(
                f"a gate enlarges a ratio above 0, and sees nothing where none is: got {budget}"
            )
        self.gate, self.selector, self.budget = gate, selector, budget
        self.verdicts: list[Verdict] = []
        self._layers, self._tokens = layers, tokens
        self._choice = budget.full_layers - 1
        self._depth = max(budget.full_layers, math.floor(gate.depth * layers))
        self._first: Measured | None = None
        self._left: dict[float, float] = {}

    @property
    def next_gate(self) -> Gate | None:
        """The gate of a walk that starts over; none where every row is computed."""
        return None if self.verdicts[-1].step is Step.FULL else self.gate

    def see(self, seen: Seen) -> bool:
        """Whether the walk has to start over, with what `budget` is by then.

        To be called at every layer before rows are dropped, by every rank alike: at the choice and
        at the gate's depth it reduces over ranks, and adds a verdict.
        """
        observed = self._observed(seen)
        if observed is None:
            return False
        verdict = self.gate.judge(observed)
        self.verdicts.append(verdict)
        self.budget = replace(self.budget, ratio=verdict.ratio)
        return verdict.step is not Step.GO_ON

    def _observed(self, seen: Seen) -> Observed | None:
        if not len(seen.rows) or self._choice + 1 >= self._layers:
            return None
        if seen.layer == self._choice:
            self._first = measure(seen)
            self._left = left_behind(self._first, self.selector.score(seen), self._counts())
            return Observed(seen.layer, self.budget.ratio, self._left)
        if seen.layer == self._depth and self._first:
            was = self._first.among(torch.isin(self._first.rows, seen.rows)).total
            growth = measure(seen).total / max(was, ROUNDING)
            return Observed(seen.layer, self.budget.ratio, self._left, growth)
        return None

    def _counts(self) -> dict[float, int]:
        """By ratio, how many rows of the chunks go on after the choice."""
        at = self._choice + 1, self._layers, self._tokens
        return {
            ratio: replace(self.budget, ratio=ratio).rows_at(*at, lambda: torch.empty(0))
            for ratio in self.gate.ratios(self.budget.ratio)
        }
