"""Online regression of a cost in seconds: a sum of rates times amounts.

    seconds  ~  v0 * x0 + v1 * x1 + ...        no rate below zero

It minimizes the squares of *relative* errors and weights recent observations most. Until there are
enough observations the prior answers. Afterwards the rates start from the prior's proportions. What
the observations do not determine stays unchanged: if all have one size, they cannot separate a
fixed cost from a cost per row.
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
"""Weight, in observations, that holds the rates where they are. It is small beside the dozens of
observations remembered, and decides only what they leave undetermined."""

OUTLIER = 2.0
"""Limit on an observation relative to the expectation, as a factor either way. A run that a page
fault or another process made ten times slower moves a rate by a few percent, and a lasting change
of the machine is followed within some dozens of observations."""

LEAST_RATE = 1e-18
"""Least rate in seconds: one byte at an exabyte per second."""

LEAST = 1e-3
"""A rate fitted as zero restarts from this share of what the prior gives."""


def is_amount(value: float) -> bool:
    """Return True if a number can be a count, an amount or a time: 0, or 1e-9 to 1e18."""
    return value == 0 or 1e-9 <= value <= 1e18


class Fit:
    """Rates learnt online. Not thread-safe; keeps two small matrices, whatever the uptime.

    Args:
        prior: the rate of each amount, in seconds, all above zero.
        memory: observations after which an observation's weight has fallen to about a third.
        enough: observations until the prior stops answering; their median sets the level, so that a
            first run that also compiled something is outvoted.
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
        """Start again: the prior answers until there are enough observations."""
        self._early: list[tuple[Vector, float]] = []
        self._gram = np.zeros((len(self.prior), len(self.prior)))
        self._moment = np.zeros(len(self.prior))
        self._centre = np.ones(len(self.prior))
        self._level = 1.0
        self._rates = self.prior

    @property
    def is_learnt(self) -> bool:
        """True if there are enough observations for the rates to be measured ones."""
        return len(self._early) >= self._enough

    @property
    def rates(self) -> tuple[float, ...]:
        """Seconds for one unit of each amount, none below zero."""
        return self._rates

    def predict(self, amounts: Iterable[float]) -> float:
        """Return the expected seconds, which never fall when an amount grows."""
        return sum(rate * amount for rate, amount in zip(self._rates, amounts, strict=True))

    def observe(self, amounts: Sequence[float], seconds: float) -> bool:
        """Learn from one run; returns False and learns nothing if the numbers are implausible."""
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
        """Move the rates to fit the notes, and rescale the notes to the new level.

        ``level`` is the best multiple of the prior. Errors noted before the level rose would
        otherwise count relative to the smaller expectation of that time, and hold the level back.
        """
        found = self._centre * self._step()
        level = float(self._moment.sum() / self._gram.sum())
        self._gram *= (self._level / level) ** 2
        self._moment *= (self._level / level) ** 2
        self._level = level
        self._centre = np.maximum(found, LEAST * level)
        self._rates = tuple((found * self._scale).tolist())

    def _step(self) -> Vector:
        """Return factors on the rates: the f >= 0 of least |rows f - told|^2 + PULL |f - 1|^2.

        There are at most three rates, so it tries every set of rates that may be above zero. All of
        them come first, and are nearly always it: where the least of all f is nowhere below zero,
        no other is less. In units of the current rates no matrix element is far above the number of
        observations, so `PULL` keeps the matrix from becoming singular.
        """
        size = len(self.prior)
        gram = self._gram * np.outer(self._centre, self._centre) + PULL * np.eye(size)
        moment = self._moment * self._centre + PULL
        found = np.linalg.solve(gram, moment)
        if (found >= 0).all():
            return found
        best, least = np.zeros(size), math.inf
        for free in _smaller_subsets(size):
            found = np.zeros(size)
            found[free] = np.linalg.solve(gram[np.ix_(free, free)], moment[free])
            loss = float(found @ gram @ found - 2 * moment @ found)
            if (found >= 0).all() and loss < least:
                best, least = found, loss
        return best


def _smaller_subsets(size: int) -> list[list[int]]:
    """Return all non-empty subsets of range(size) but the whole."""
    return [list(some) for n in range(1, size) for some in combinations(range(size), n)]
