"""What something costs, learnt from what it did: seconds as a sum of rates times amounts.

    seconds  ~  v0 * x0 + v1 * x1 + ...        no rate below zero

Squares of *relative* errors are minimised, the newest counting most. Before enough was seen a prior
answers; afterwards its proportions are where the rates set out from. What the observations leave
open (all of one size say nothing of what is paid once and what is paid a row) stays as it was.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import combinations
from statistics import median
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvcore.errors import ConfigError

__all__ = ["Fit", "is_amount"]

Vector: TypeAlias = npt.NDArray[np.float64]

PULL = 0.02
"""What staying where they are weighs for the rates, in observations: little beside the dozens
remembered, and all there is where the observations say nothing."""

OUTLIER = 2.0
"""An observation counts as no more than this times what was expected, and no less than its inverse:
one that a page fault or a neighbour made ten times slower moves a rate by a few percent, and a
machine that has really changed is followed within some dozens of observations."""

LEAST_RATE = 1e-18
"""Seconds; a byte at an exabyte per second."""

LEAST = 1e-3
"""A rate found to be nothing sets out again from this share of what the prior would make it."""


def is_amount(value: float) -> bool:
    """Whether a number can be a count, an amount or a time: nothing, or a nano to an exa of it."""
    return value == 0 or 1e-9 <= value <= 1e18


class Fit:
    """Rates learnt online. Not thread-safe; holds two small matrices, whatever the uptime.

    Args:
        prior: the rate of each amount, in seconds, all above zero.
        memory: observations after which one counts about a third.
        enough: observations before the prior stops answering; their median sets the level, so that
            a first run that also compiled something is outvoted.
    """

    def __init__(self, prior: Sequence[float], memory: int = 32, enough: int = 3) -> None:
        if not prior or not all(LEAST_RATE <= rate <= 1 / LEAST_RATE for rate in prior):
            raise ConfigError(
                f"rates of a prior are seconds from {LEAST_RATE} to {1 / LEAST_RATE}, "
                f"got {list(prior)}"
            )
        if memory < 1 or enough < 1:
            raise ConfigError(
                f"a fit remembers and waits for at least one observation: got {memory} and {enough}"
            )
        self.prior = tuple(float(rate) for rate in prior)
        self._scale = np.array(self.prior)
        self._decay = math.exp(-1 / memory)
        self._enough = enough
        self.forget()

    def forget(self) -> None:
        """Begin anew: the prior answers until enough was seen again."""
        self._early: list[tuple[Vector, float]] = []
        self._gram = np.zeros((len(self.prior), len(self.prior)))
        self._moment = np.zeros(len(self.prior))
        self._centre = np.ones(len(self.prior))
        self._level = 1.0
        self._rates = self.prior

    @property
    def is_learnt(self) -> bool:
        """Whether enough was seen for the rates to be measured ones."""
        return len(self._early) >= self._enough

    @property
    def rates(self) -> tuple[float, ...]:
        """Seconds of one unit of each amount, none below zero."""
        return self._rates

    def predict(self, amounts: Iterable[float]) -> float:
        """Seconds. Does not fall as an amount grows."""
        return sum(rate * amount for rate, amount in zip(self._rates, amounts, strict=True))

    def observe(self, amounts: Sequence[float], seconds: float) -> bool:
        """Learn from one run. False, and nothing learnt, from numbers that cannot be one's."""
        sound = all(map(is_amount, amounts)) and is_amount(seconds)
        if not sound or not seconds or not any(amounts):
            return False
        given = np.array(amounts, dtype=np.float64) * self._scale
        if self.is_learnt:
            self._note(given, seconds)
            self._settle()
        else:
            self._early.append((given, seconds))
            if self.is_learnt:
                self._begin()
        return True

    def _begin(self) -> None:
        """Set the level by the median of the first observations, then learn from all of them."""
        self._level = median(seconds / float(given.sum()) for given, seconds in self._early)
        self._centre = np.full(len(self.prior), self._level)
        for given, seconds in self._early:
            self._note(given, seconds)
        self._settle()

    def _note(self, given: Vector, seconds: float) -> None:
        """``given`` is amounts times the prior, so that they and the rates are of one size."""
        expected = float(given @ self._centre)
        row = given / expected
        told = min(max(seconds / expected, 1 / OUTLIER), OUTLIER)
        self._gram = self._decay * self._gram + np.outer(row, row)
        self._moment = self._decay * self._moment + told * row

    def _settle(self) -> None:
        """Move the rates to what is noted, and the notes to what is expected by now.

        ``level`` is the prior's best multiple. Errors noted before it rose would else count as
        relative to the little expected then, and hold it back.
        """
        found = self._centre * self._step()
        level = float(self._moment.sum() / self._gram.sum())
        self._gram *= (self._level / level) ** 2
        self._moment *= (self._level / level) ** 2
        self._level = level
        self._centre = np.maximum(found, LEAST * level)
        self._rates = tuple((found * self._scale).tolist())

    def _step(self) -> Vector:
        """Factors on the rates: the f >= 0 of least |rows f - told|^2 + PULL |f - 1|^2.

        There are at most three rates, so each set of them that may be above zero is tried. In units
        of the rates so far no element is far above the number of observations, so `PULL` keeps the
        matrix from ever being singular.
        """
        size = len(self.prior)
        gram = self._gram * np.outer(self._centre, self._centre) + PULL * np.eye(size)
        moment = self._moment * self._centre + PULL
        best, least = np.zeros(size), math.inf
        for free in _subsets(size):
            found = np.zeros(size)
            found[free] = np.linalg.solve(gram[np.ix_(free, free)], moment[free])
            loss = float(found @ gram @ found - 2 * moment @ found)
            if (found >= 0).all() and loss < least:
                best, least = found, loss
        return best


def _subsets(size: int) -> list[list[int]]:
    """All but the empty one."""
    return [list(some) for n in range(1, size + 1) for some in combinations(range(size), n)]
