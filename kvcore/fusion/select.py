"""The choice of cached rows to recompute.

A row is one token of the prompt, identified by its position. Rows leave from layer to layer and
never return, because a row at layer ``i + 1`` needs its hidden state of layer ``i``:

    layer   0    1    2    3    4  ...  last
    rows    all  all  ┐
                      └ 1.5r ─ ─ ─ ─ ─ 0.5r   of the chunks' tokens, and every fresh token

A `Selector` scores the chunk rows at one layer, a `Budget` sets how many are kept, and `narrow`
combines the two. Fresh rows (the question, and all other tokens without cached KV) are always
computed. They are not candidates and do not count in the budget.

K at layer 0 depends only on the token, so its deviation is rounding noise. Selectors are therefore
used from layer 1 on. All functions here work on tensors of any device, and are thread-safe.

The deviation and gradual filtering come from CacheBlend (arXiv 2405.16444).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from kvcore.errors import ConfigError

__all__ = [
    "BUILTIN_SELECTORS",
    "Budget",
    "Candidates",
    "KeyDeviation",
    "KeyValueDeviation",
    "Measure",
    "OfAnother",
    "QuestionAttention",
    "QuestionDeviation",
    "Ratio",
    "RelativeDeviation",
    "Selector",
    "Smoothed",
    "Threshold",
    "ValueDeviation",
    "attention_mass",
    "balanced",
    "deviation",
    "keep_top",
    "narrow",
    "rows_kept",
    "smoothed",
]

FIRST_TELLING_LAYER = 1
"""The first layer whose K depends on the preceding tokens."""

ROUNDING = 1e-9
"""Subtracted before rounding up, so that 7% of 100 rows is 7 although 0.07 * 100 > 7."""


# ---------------------------------------------------------------------------------------------
# quantities for scores


def deviation(fresh: Tensor, cached: Tensor) -> Tensor:
    """Return the error of the cache: the sum over heads and dims of (fresh - cached)^2.

    Both are [rows, kv_heads, head_dim], with K at the *same* positions: cached K must be shifted
    first, or else the result measures the shift. Returns [rows] in float32. The result is additive
    over heads, so tensor-parallel ranks sum theirs before rows are chosen.
    """
    difference = fresh.float() - cached.float()
    return difference.square().sum(dim=(-2, -1))


def attention_mass(probabilities: Tensor, sharpness: float = 1.0) -> Tensor:
    """Return the maximum over question rows of each key's probability, summed over heads.

    Maps [heads, question rows, keys] to [keys]. Probabilities are raised to the power
    ``sharpness``. Above 1, the few heads that retrieve outweigh the many that spread their
    attention. The result is additive over heads and layers: the caller sums the layers, and
    tensor-parallel ranks sum theirs.
    """
    return probabilities.float().amax(dim=1).pow(sharpness).sum(dim=0)


def keep_top(rows: Tensor, scores: Tensor, count: int) -> Tensor:
    """Return the ``count`` rows with the highest scores, sorted by position.

    Of rows with equal scores the earlier ones are taken. NaN marks a broken row and counts as the
    highest score.
    """
    scores = torch.nan_to_num(scores.float(), nan=math.inf)
    order = torch.sort(scores, descending=True, stable=True).indices
    return rows[order[:count].sort().values]


def smoothed(rows: Tensor, scores: Tensor, reach: int, end: int) -> Tensor:
    """Return each score averaged over the rows up to ``reach`` tokens away, in float32.

    ``rows`` ascend and are below ``end``. Tokens that are not in ``rows`` count as zero.
    """
    line = torch.zeros(end, dtype=torch.float32, device=scores.device)
    line.index_copy_(0, rows, scores.float())
    mean = functional.avg_pool1d(line[None, None], 2 * reach + 1, 1, reach)
    return mean[0, 0].index_select(0, rows)


def balanced(one: Tensor, other: Tensor) -> Tensor:
    """Return the sum of two kinds of scores [n] float32, each in units of its mean over the rows.

    If all scores of a kind are 0, they add 0.
    """
    tiny = torch.finfo(one.dtype).tiny
    return one / one.mean().clamp_min(tiny) + other / other.mean().clamp_min(tiny)


def _same(scores: Tensor) -> Tensor:
    return scores


class Measure(str, Enum):
    """A number for each candidate that is a sum over KV heads, and so over ranks."""

    KEY = "deviation of K"
    VALUE = "deviation of V"
    KEY_SIZE = "square of the fresh K"
    VALUE_SIZE = "square of the fresh V"


@dataclass(frozen=True)
class Candidates:
    """The candidates that a selector scores: n chunk rows at one layer.

    Args:
        layer: the layer, counted from 0.
        rows: [n] int64, positions, ascending.
        keys, values: computed at this layer, [n, kv_heads, head_dim], K after RoPE.
        cached_keys, cached_values: the cached KV of the same rows, with K shifted.
        offsets: [n] int64, the index of each row in its chunk.
        question: [n] `attention_mass` of the question over the reused cache, all layers and heads;
            None unless the selector `needs_question`.
        reduce: sums [n] scores over tensor-parallel ranks. It is a collective: every rank must call
            it equally often.
        distance: computes `deviation` on the device of these rows.
        smooth: computes `smoothed` on the device of these rows.
        balance: computes `balanced` on the device of these rows.
        end: a number above every row, if the host knows one. Without it, the last row is read
            where it is needed, which waits for the device.
    """

    layer: int
    rows: Tensor
    keys: Tensor
    values: Tensor
    cached_keys: Tensor
    cached_values: Tensor
    offsets: Tensor
    question: Tensor | None = None
    reduce: Callable[[Tensor], Tensor] = field(default=_same, repr=False)
    distance: Callable[[Tensor, Tensor], Tensor] = field(default=deviation, repr=False)
    smooth: Callable[[Tensor, Tensor, int, int], Tensor] = field(default=smoothed, repr=False)
    balance: Callable[[Tensor, Tensor], Tensor] = field(default=balanced, repr=False)
    end: int | None = None

    def __len__(self) -> int:
        """Return the number of candidates."""
        return len(self.rows)

    def measure(self, what: Measure) -> Tensor:
        """Return a measure [n] in float32, summed over the heads of all ranks. A collective."""
        return self.reduce(self.local(what))

    def local(self, what: Measure) -> Tensor:
        """Return a measure [n] in float32, summed over the heads of this rank."""
        if what is Measure.KEY:
            return self.distance(self.keys, self.cached_keys)
        if what is Measure.VALUE:
            return self.distance(self.values, self.cached_values)
        fresh = self.keys if what is Measure.KEY_SIZE else self.values
        return deviation(fresh, torch.zeros_like(fresh))

    @property
    def key_deviation(self) -> Tensor:
        """K deviation [n], summed over the heads of all ranks. A collective."""
        return self.measure(Measure.KEY)

    @property
    def value_deviation(self) -> Tensor:
        """V deviation [n], summed over the heads of all ranks. A collective."""
        return self.measure(Measure.VALUE)

    @property
    def last(self) -> int:
        """A number above every row."""
        if self.end is not None:
            return self.end
        return int(self.rows[-1]) + 1 if len(self.rows) else 0


# ---------------------------------------------------------------------------------------------
# how many


class Budget(ABC):
    """The number of chunk rows computed at each layer."""

    full_layers: int
    """How many first layers compute every row: at least 2, because K of layer 0 shows no error."""

    @property
    def is_reuse(self) -> bool:
        """Whether no chunk row is computed at any layer, not even at the first ones."""
        return False

    @abstractmethod
    def rows_at(self, layer: int, layers: int, tokens: int, scores: Callable[[], Tensor]) -> int:
        """Return how many rows to compute at ``layer`` of ``layers``.

        ``tokens`` is the number of tokens in the chunks. This is called only for layers from
        `full_layers` on. ``scores`` returns the scores of the rows that can still be kept; only a
        budget that depends on them should call it.
        """


def _check_full_layers(full_layers: int) -> None:
    if full_layers <= FIRST_TELLING_LAYER:
        raise ConfigError(
            f"full_layers must be at least {FIRST_TELLING_LAYER + 1}, got {full_layers}: "
            "K of layer 0 depends only on the token and does not show which rows deviate"
        )


@dataclass(frozen=True)
class Ratio(Budget):
    """A share of the chunks' tokens, rounded up: ``ceil(ratio * tokens)`` rows per layer.

    With a ``spread`` of s, the share falls linearly from ``ratio * (1 + s)`` at the first layer
    after the full ones to ``ratio * (1 - s)`` at the last, so the mean is ``ratio``. s is reduced
    if the first share would exceed 1.
    """

    ratio: float
    spread: float = 0.0
    full_layers: int = 2

    def __post_init__(self) -> None:
        _check_full_layers(self.full_layers)
        if not 0 <= self.ratio <= 1:
            raise ConfigError(f"a ratio of rows to recompute must be from 0 to 1, got {self.ratio}")
        if not 0 <= self.spread <= 1:
            raise ConfigError(
                f"the spread of a ratio over layers must be from 0 to 1, got {self.spread}"
            )

    @property
    def is_reuse(self) -> bool:
        return self.ratio == 0

    def share(self, layer: int, layers: int) -> float:
        """Return the share of the chunks' tokens that ``layer`` computes, before rounding."""
        if self.is_reuse:
            return 0.0
        if layer < self.full_layers:
            return 1.0
        spread = min(self.spread, 1 / self.ratio - 1)
        steps = layers - 1 - self.full_layers
        depth = (layer - self.full_layers) / steps if steps else 0.5
        return self.ratio * (1 + spread * (1 - 2 * depth))

    def rows_at(self, layer: int, layers: int, tokens: int, scores: Callable[[], Tensor]) -> int:
        return math.ceil(self.share(layer, layers) * tokens - ROUNDING)


@dataclass(frozen=True)
class Threshold(Budget):
    """All rows that score above ``bound``, within the shares ``floor`` and ``ceiling`` of tokens.

    The number is decided once, after `full_layers`. The bound is in the selector's unit. The unit
    of `RelativeDeviation` has the same meaning for every model.
    """

    bound: float
    floor: float = 0.0
    ceiling: float = 1.0
    full_layers: int = 2

    def __post_init__(self) -> None:
        _check_full_layers(self.full_layers)
        if not 0 <= self.floor <= self.ceiling <= 1:
            raise ConfigError(
                f"floor and ceiling of a threshold are shares of the chunks' tokens, "
                f"0 <= floor <= ceiling <= 1; got {self.floor} and {self.ceiling}"
            )

    def rows_at(self, layer: int, layers: int, tokens: int, scores: Callable[[], Tensor]) -> int:
        if layer > self.full_layers:
            return tokens
        least = math.ceil(self.floor * tokens - ROUNDING)
        most = math.ceil(self.ceiling * tokens - ROUNDING)
        above = int((torch.nan_to_num(scores(), nan=math.inf) > self.bound).sum())
        return min(max(above, least), most)


# ---------------------------------------------------------------------------------------------
# selectors


class Selector(ABC):
    """Scores rows. It holds settings only, so one instance serves all requests at once."""

    name: ClassVar[str]

    @property
    def measures(self) -> tuple[Measure, ...] | None:
        """The measures that `score` reads, so that they are summed over ranks before it is called.

        None means that they are not known. `score` then performs the sums itself, and an error in
        it ends the engine if there are several ranks, because nobody knows which sums the other
        ranks wait for.
        """
        return None

    @property
    def needs_question(self) -> bool:
        """True if the question must run over the reused cache first, to see what it attends to."""
        return False

    @property
    def sharpness(self) -> float:
        """The power in the `attention_mass` of the question."""
        return 1.0

    @abstractmethod
    def score(self, candidates: Candidates) -> Tensor:
        """Return scores [n] float32, equal on all ranks. Rows with high scores are recomputed."""


class KeyDeviation(Selector):
    """The rows whose K deviates most, as in CacheBlend."""

    name = "key"

    @property
    def measures(self) -> tuple[Measure, ...] | None:
        return (Measure.KEY,)

    def score(self, candidates: Candidates) -> Tensor:
        return candidates.key_deviation


class ValueDeviation(Selector):
    """The rows whose V deviates most."""

    name = "value"

    @property
    def measures(self) -> tuple[Measure, ...] | None:
        return (Measure.VALUE,)

    def score(self, candidates: Candidates) -> Tensor:
        return candidates.value_deviation


class KeyValueDeviation(Selector):
    """The sum of K and V deviation, each in units of its mean over the candidates."""

    name = "key+value"

    @property
    def measures(self) -> tuple[Measure, ...] | None:
        return (Measure.KEY, Measure.VALUE)

    def score(self, candidates: Candidates) -> Tensor:
        return candidates.balance(candidates.key_deviation, candidates.value_deviation)


class RelativeDeviation(Selector):
    """K deviation as a share of the fresh K's square; 1 is as wrong as zeros would be."""

    name = "relative"

    @property
    def measures(self) -> tuple[Measure, ...] | None:
        return (Measure.KEY, Measure.KEY_SIZE)

    def score(self, candidates: Candidates) -> Tensor:
        size = candidates.measure(Measure.KEY_SIZE)
        return candidates.key_deviation / size.clamp_min(torch.finfo(size.dtype).tiny)


def _question(candidates: Candidates) -> Tensor:
    if candidates.question is None:
        raise ConfigError(
            "this selector weighs rows by the question's attention, which was not computed: "
            "run the question over the reused cache first (Selector.needs_question)"
        )
    return candidates.question.float()


class QuestionAttention(Selector):
    """The rows that the question attends to."""

    name = "question"

    @property
    def needs_question(self) -> bool:
        return True

    @property
    def measures(self) -> tuple[Measure, ...] | None:
        return ()

    def score(self, candidates: Candidates) -> Tensor:
        return _question(candidates)


@dataclass(frozen=True)
class QuestionDeviation(Selector):
    """Deviating rows that the question attends to: mass * |K deviation|^power."""

    name: ClassVar[str] = "question*key"
    power: float = 2.0
    sharp: float = 1.0

    @property
    def needs_question(self) -> bool:
        return True

    @property
    def sharpness(self) -> float:
        return self.sharp

    @property
    def measures(self) -> tuple[Measure, ...] | None:
        return (Measure.KEY,)

    def score(self, candidates: Candidates) -> Tensor:
        off = candidates.key_deviation
        return _question(candidates) * (off if self.power == 2 else off.pow(self.power / 2))


@dataclass(frozen=True)
class OfAnother(Selector):
    """A base for selectors that transform the scores of another one and share its needs."""

    inner: Selector

    @property
    def measures(self) -> tuple[Measure, ...] | None:
        return self.inner.measures

    @property
    def needs_question(self) -> bool:
        return self.inner.needs_question

    @property
    def sharpness(self) -> float:
        return self.inner.sharpness


@dataclass(frozen=True)
class Smoothed(OfAnother):
    """Another selector's scores, each averaged over the rows up to ``reach`` tokens away.

    A fact is a run of tokens, and a recomputed row reads its neighbours. Rows that have left count
    as zero. Neighbours in another chunk count like any others.
    """

    name: ClassVar[str] = "runs of another"
    reach: int = 1

    def score(self, candidates: Candidates) -> Tensor:
        scores = self.inner.score(candidates).float()
        if not scores.shape[0]:
            return scores
        return candidates.smooth(candidates.rows, scores, self.reach, candidates.last)


def runs(reach: int = 2, power: float = 2.0, sharp: float = 2.0) -> Selector:
    """Return the default selector: runs of deviating rows that the question attends to sharply."""
    return Smoothed(QuestionDeviation(power, sharp), reach)


BUILTIN_SELECTORS: dict[str, Callable[..., Selector]] = {
    "runs": runs,
    "question": QuestionAttention,
    "key": KeyDeviation,
    "value": ValueDeviation,
    "key+value": KeyValueDeviation,
}


# ---------------------------------------------------------------------------------------------
# the choice


def rows_kept(
    budget: Budget,
    layer: int,
    layers: int,
    tokens: int,
    there: int,
    scores: Callable[[], Tensor],
) -> int:
    """Return how many of the ``there`` chunk rows at ``layer`` are computed at the next one.

    ``tokens`` counts all tokens of the chunks, including those of rows that have left. ``scores``
    is called only if the budget depends on them.
    """
    target = layer + 1
    if target < budget.full_layers or target >= layers:
        return there
    return min(there, budget.rows_at(target, layers, tokens, scores))


def narrow(
    selector: Selector, budget: Budget, candidates: Candidates, layers: int, tokens: int
) -> Tensor:
    """Return the chunk rows to compute at the layer after that of ``candidates``, ascending.

    ``tokens`` counts all tokens of the chunks, including those of rows that have left. Scores are
    computed only if rows must leave. No more than ``candidates.rows`` are kept.
    """
    scores: list[Tensor] = []

    def scored() -> Tensor:
        if not scores:
            scores.append(selector.score(candidates))
        return scores[0]

    there = len(candidates.rows)
    count = rows_kept(budget, candidates.layer, layers, tokens, there, scored)
    return candidates.rows if count == there else keep_top(candidates.rows, scored(), count)
