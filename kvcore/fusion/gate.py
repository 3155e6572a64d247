"""The quality gate: an estimate of a blend's error, made while the blend runs.

The error of a stale row at a deep layer is unknown. But the rows that are recomputed there can be
compared with their cached KV, and if these deviate much, the stale rows deviate much too:

    layer       0   1   2 ────────── depth ────────── last
    rows        all all recomputed ones ...
    measured                         off = |V fresh - V cached|^2 / |V fresh|^2, recomputed rows
    expected                         off x (1 - ratio)            the share of rows left stale

If the expected deviation exceeds a bound, the walk starts over with a larger ratio, or computes
every row. Of the values that can be observed during a blend, this one predicted the loss best.
``docs/fusion-measurements.md`` compares it with the others and shows what a bound costs ("What a
bound of the gate is worth"); the defaults below come from there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

import torch

from kvcore.errors import ConfigError
from kvcore.fusion.select import Budget, Candidates, Measure, Ratio

__all__ = ["Gate", "GateAction", "GateMonitor", "Observed", "Verdict", "values_off"]


class GateAction(str, Enum):
    """What a blend does after a gate has judged it."""

    GO_ON = "go on"
    LARGER = "larger ratio"
    FULL = "full prefill"


class Verdict(NamedTuple):
    """The decision of a gate. ``ratio`` is the ratio to use from now on; 1.0 for all rows.

    ``expected`` is the deviation expected at that ratio, in the unit of the gate's bound.
    """

    action: GateAction
    ratio: float
    expected: float
    reason: str


class Observed(NamedTuple):
    """What a gate observes of one walk.

    Args:
        layer: the layer of the observation, counted from 0.
        ratio: the ratio of the walk.
        off: `values_off` of the chunk rows that are recomputed at that layer.
    """

    layer: int
    ratio: float
    off: float


@dataclass(frozen=True)
class Gate:
    """Judges blends. It holds settings only, so one instance serves all requests and threads.

    Args:
        bound: the largest expected deviation with which a blend continues, as a share of the square
            of V.
        larger: ratios to try instead. If none of them keeps the bound, every row is computed.
        depth: the layer to observe, as a share of the layers. A deeper layer gives a better
            estimate, but more work is lost if the walk starts over.
    """

    bound: float
    larger: tuple[float, ...] = (0.3, 0.5)
    depth: float = 0.25

    def __post_init__(self) -> None:
        if not self.bound >= 0:
            raise ConfigError(f"a gate's bound must be at least 0, got {self.bound}")
        if not all(0 < ratio < 1 for ratio in self.larger) or not 0 < self.depth < 1:
            raise ConfigError(
                f"a gate's ratios and depth must be between 0 and 1, got {self.larger} "
                f"and {self.depth}"
            )

    def layer(self, layers: int, full_layers: int) -> int:
        """Return the layer to observe, which is after the layers that compute every row."""
        return max(full_layers, math.floor(self.depth * layers))

    def judge(self, observed: Observed) -> Verdict:
        """Decide to go on, to take the smallest ratio expected to keep the bound, or all rows.

        The estimate for a larger ratio assumes fewer stale rows with the observed deviation. This
        is pessimistic, because the worst rows are chosen first. NaN counts as above the bound.
        """
        ratios = [observed.ratio, *sorted({more for more in self.larger if more > observed.ratio})]
        seen = f"rows are off by {observed.off:.3g} at layer {observed.layer}"
        for ratio in ratios:
            expected = observed.off * (1 - ratio)
            if expected <= self.bound:
                action = GateAction.GO_ON if ratio == observed.ratio else GateAction.LARGER
                reason = f"{seen}: {expected:.3g} expected at {ratio:.2f}, allowed {self.bound:.3g}"
                return Verdict(action, ratio, expected, reason)
        return Verdict(GateAction.FULL, 1.0, 0.0, f"{seen}: past {self.bound:.3g} at every ratio")


def values_off(candidates: Candidates) -> float:
    """Return the squared deviation of these rows' cached V, as a share of the fresh V's square.

    0 is exact, and 1 is as wrong as zeros would be. Performs two reductions over ranks, and waits
    for the device.
    """
    size = candidates.measure(Measure.VALUE_SIZE).sum()
    return float(candidates.value_deviation.sum() / size.clamp_min(torch.finfo(size.dtype).tiny))


class GateMonitor:
    """Observes one walk on behalf of a gate. One owner.

    Args:
        gate: the gate that judges.
        budget: the budget of the walk. It must be a `Ratio`, which a gate can enlarge.
        layers: number of layers of the model.

    Attributes:
        budget: the budget of the walk, or the one to start over with.
        verdict: the verdict on this walk; None until there is one.
    """

    def __init__(self, gate: Gate, budget: Budget, layers: int) -> None:
        if not isinstance(budget, Ratio) or budget.is_reuse:
            raise ConfigError(
                f"a gate needs a Ratio above 0, because it compares recomputed rows: got {budget}"
            )
        self.gate, self.budget = gate, budget
        self.verdict: Verdict | None = None
        self._layer = gate.layer(layers, budget.full_layers)

    @property
    def next_gate(self) -> Gate | None:
        """The gate of the next walk; None if that computes every row."""
        full = self.verdict is not None and self.verdict.action is GateAction.FULL
        return None if full else self.gate

    def observes(self, layer: int) -> bool:
        """Return True if the gate observes the rows that are computed at ``layer``."""
        return layer == self._layer

    def judge(self, off: float) -> bool:
        """Return True if the walk must start over with `budget`, which has then been updated.

        ``off`` is `values_off` of the rows at the observed layer.
        """
        verdict = self.gate.judge(Observed(self._layer, self.budget.ratio, off))
        self.verdict, self.budget = verdict, replace(self.budget, ratio=verdict.ratio)
        return verdict.action is not GateAction.GO_ON

    def see(self, candidates: Candidates) -> bool:
        """Judge the rows of a layer, if it is the observed one.

        Every rank must call this at every layer with the rows computed there. Only the observed
        layer has a cost.
        """
        if not self.observes(candidates.layer) or not len(candidates.rows):
            return False
        return self.judge(values_off(candidates))
