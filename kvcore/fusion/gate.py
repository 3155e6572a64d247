"""The quality gate: how wrong a blend is going to be, seen while it runs.

What a stale row is off by deep down is not known, but the rows that are recomputed there can be
compared with what the cache had for them. The further off these are, the worse for the rows that
stay as they were:

    layer       0   1   2 ────────── depth ────────── last
    rows        all all recomputed ones ...
    measured                         off = |V fresh - V cached|^2 / |V fresh|^2, recomputed rows
    expected                         off x (1 - ratio)            the share of rows left stale

Past a bound the walk starts over with a larger ratio, or every row is computed. Of what could be
seen on the way this predicted a blend's loss best; ``docs/fusion.md`` has the others, and what a
bound costs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

import torch

from kvcore.errors import ConfigError
from kvcore.fusion.select import Budget, Ratio, Seen, deviation

__all__ = ["Gate", "GateMonitor", "Observed", "Step", "Verdict", "values_off"]


class Step(str, Enum):
    """What a blend does next."""

    GO_ON = "go on"
    LARGER = "larger ratio"
    FULL = "full prefill"


class Verdict(NamedTuple):
    """What a gate says: ``ratio`` is the one to go on or to start over with, 1.0 if in full.

    ``expected`` is in the unit of the gate's bound, at that ratio.
    """

    step: Step
    ratio: float
    expected: float
    reason: str


class Observed(NamedTuple):
    """What a gate is shown of one walk.

    Args:
        layer: at which it was seen, counted from 0.
        ratio: the one walked with.
        off: `values_off` of the chunks' rows recomputed there.
    """

    layer: int
    ratio: float
    off: float


@dataclass(frozen=True)
class Gate:
    """Judges blends. Settings only: one instance serves all requests and threads.

    Args:
        bound: the largest expected deviation to go on with, in shares of V's square.
        larger: ratios to take instead, where one of them keeps the bound; else a full prefill.
        depth: where to look, as a share of the layers. Further down is a better view and a dearer
            walk to give up.
    """

    bound: float
    larger: tuple[float, ...] = (0.3, 0.5)
    depth: float = 0.25

    def __post_init__(self) -> None:
        if not self.bound >= 0:
            raise ConfigError(f"a gate's bound is not below zero: got {self.bound}")
        if not all(0 < ratio < 1 for ratio in self.larger) or not 0 < self.depth < 1:
            raise ConfigError(
                f"a gate's ratios and depth are between 0 and 1: got {self.larger} and {self.depth}"
            )

    def layer(self, layers: int, full_layers: int) -> int:
        """Where to look, behind the layers that compute every row."""
        return max(full_layers, math.floor(self.depth * layers))

    def judge(self, observed: Observed) -> Verdict:
        """Go on, or the least of the larger ratios that is expected to keep the bound, or in full.

        A larger ratio is expected to leave fewer rows stale, and these as far off as was seen; they
        are less far off, since the worst rows are chosen first. What is not a number is past the
        bound.
        """
        ratios = [observed.ratio, *sorted({more for more in self.larger if more > observed.ratio})]
        seen = f"rows are off by {observed.off:.3g} at layer {observed.layer}"
        for ratio in ratios:
            expected = observed.off * (1 - ratio)
            if expected <= self.bound:
                step = Step.GO_ON if ratio == observed.ratio else Step.LARGER
                reason = f"{seen}: {expected:.3g} expected at {ratio:.2f}, allowed {self.bound:.3g}"
                return Verdict(step, ratio, expected, reason)
        return Verdict(Step.FULL, 1.0, 0.0, f"{seen}: past {self.bound:.3g} at every ratio")


def values_off(seen: Seen) -> float:
    """Square of what the cached V of these rows is off by, as a share of the fresh V's square.

    0 is right, 1 is as wrong as zeros. Two reductions over ranks; waits for the device.
    """
    size = seen.reduce(deviation(seen.values, torch.zeros_like(seen.values))).sum()
    return float(seen.value_deviation.sum() / size.clamp_min(torch.finfo(size.dtype).tiny))


class GateMonitor:
    """Follows one walk for a gate. One owner.

    Args:
        gate: what judges.
        budget: of the walk. A gate enlarges a `Ratio`; it has no say in another.
        layers: of the model.

    Attributes:
        budget: to walk with: that of the walk, or the one to start over with.
        verdict: on this walk, once there is one.
    """

    def __init__(self, gate: Gate, budget: Budget, layers: int) -> None:
        if not isinstance(budget, Ratio) or budget.is_reuse:
            raise ConfigError(
                f"a gate enlarges a ratio above 0, and sees nothing where none is: got {budget}"
            )
        self.gate, self.budget = gate, budget
        self.verdict: Verdict | None = None
        self._layer = gate.layer(layers, budget.full_layers)

    @property
    def next_gate(self) -> Gate | None:
        """The gate of the walk that starts over; none where every row is computed."""
        full = self.verdict is not None and self.verdict.step is Step.FULL
        return None if full else self.gate

    def see(self, seen: Seen) -> bool:
        """Whether the walk has to start over, with what `budget` is by then.

        To be called at every layer with the rows computed there, by every rank alike. All but one
        layer cost nothing.
        """
        if seen.layer != self._layer or not len(seen.rows):
            return False
        verdict = self.gate.judge(Observed(seen.layer, self.budget.ratio, values_off(seen)))
        self.verdict, self.budget = verdict, replace(self.budget, ratio=verdict.ratio)
        return verdict.step is not Step.GO_ON
