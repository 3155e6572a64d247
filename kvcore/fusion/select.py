"""Which cached rows to recompute.

A row is one token of the prompt, named by its position. Rows leave on the way down and none
returns, since a row computed at layer ``i + 1`` needs its hidden state of layer ``i``:

    layer   0    1    2    3    4  ...  last
    rows    all  all  ┐
                      └ 1.5r ─ ─ ─ ─ ─ 0.5r   of the chunks' tokens, and every fresh token

A `Selector` scores the rows of the chunks at one layer, a `Budget` says how many go on, and
`narrow` puts the two together. Fresh rows (the question, and whatever has no cached KV) are always
computed; they are no candidates and no part of the budget.

K at layer 0 depends on the token alone, so a deviation there is rounding noise: no selector is
asked before layer 1. Everything here is a function of tensors on any device, and thread-safe.

CacheBlend (arXiv 2405.16444) is the source of the deviation and of gradual filtering.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from kvcore.errors import ConfigError

__all__ = [
    "BUILTIN_SELECTORS",
    "Budget",
    "ChunkHeads",
    "HeadsToo",
    "KeyDeviation",
    "KeyValueDeviation",
    "QuestionAttention",
    "QuestionDeviation",
    "RandomRows",
    "Ratio",
    "RelativeDeviation",
    "Seen",
    "Selector",
    "Smoothed",
    "Threshold",
    "ValueDeviation",
    "attention_mass",
    "deviation",
    "keep_top",
    "narrow",
]

FIRST_TELLING_LAYER = 1
"""The first layer whose K tells one row from another by what stands before it."""

ROUNDING = 1e-9
"""Taken off before rounding up, so that 7% of 100 rows are 7 though 0.07 * 100 > 7."""


# ---------------------------------------------------------------------------------------------
# what rows are scored by


def deviation(fresh: Tensor, cached: Tensor) -> Tensor:
    """How far the cache is off: sum over heads and dims of (fresh - cached)^2.

    Both are [rows, kv_heads, head_dim], K at the *same* positions: cached K must be shifted first,
    or this measures the distance of the shift. Gives [rows] in float32. It is additive over heads,
    so tensor-parallel ranks add theirs up before anything is chosen.
    """
    difference = fresh.float() - cached.float()
    return difference.square().sum(dim=(-2, -1))


def attention_mass(probabilities: Tensor, sharpness: float = 1.0) -> Tensor:
    """What the most interested question row gives each key, summed over heads.

    [heads, question rows, keys] -> [keys]. A ``sharpness`` above 1 lets the few heads that retrieve
    outweigh the many that spread: probabilities are raised to that power. Additive over heads and
    layers: a caller adds the layers up and tensor-parallel ranks add theirs.
    """
    return probabilities.float().amax(dim=1).pow(sharpness).sum(dim=0)


def keep_top(rows: Tensor, scores: Tensor, count: int) -> Tensor:
    """The ``count`` rows of highest score, sorted by position; among equals the earlier row.

    A score that is not a number marks a broken row: it counts as the highest.
    """
    scores = torch.nan_to_num(scores.float(), nan=math.inf)
    order = torch.sort(scores, descending=True, stable=True).indices
    return rows[order[:count].sort().values]


def _same(scores: Tensor) -> Tensor:
    return scores


@dataclass(frozen=True)
class Seen:
    """What a selector is shown: the candidates at one layer, n rows of chunks.

    Args:
        layer: counts from 0.
        rows: [n] int64, positions, ascending.
        keys, values: computed at this layer, [n, kv_heads, head_dim], K after RoPE.
        cached_keys, cached_values: what the chunks hold for the same rows, K shifted.
        offsets: [n] int64, each row's place in its own chunk.
        question: [n] `attention_mass` of the question over the reused cache, all layers and heads;
            None unless the selector `needs_question`.
        reduce: adds [n] scores up over tensor-parallel ranks. A collective: every rank calls it
            equally often.
        distance: `deviation`, on the device of these rows.
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

    @property
    def key_deviation(self) -> Tensor:
        """[n], over the heads of all ranks."""
        return self.reduce(self.distance(self.keys, self.cached_keys))

    @property
    def value_deviation(self) -> Tensor:
        """[n], over the heads of all ranks."""
        return self.reduce(self.distance(self.values, self.cached_values))


# ---------------------------------------------------------------------------------------------
# how many


class Budget(ABC):
    """How many rows of the chunks are computed at each layer."""

    full_layers: int
    """The first layers compute every row: at least 2, for layer 0 tells nothing."""

    @property
    def is_reuse(self) -> bool:
        """Whether no row of a chunk is ever computed, the first layers included."""
        return False

    @abstractmethod
    def rows_at(self, layer: int, layers: int, tokens: int, scores: Callable[[], Tensor]) -> int:
        """Rows to compute at ``layer`` of ``layers``, of ``tokens`` in the chunks.

        Only asked from `full_layers` on. ``scores`` gives those of the rows that can still be kept;
        it is called only by a budget that depends on them.
        """


def _check_full_layers(full_layers: int) -> None:
    if full_layers <= FIRST_TELLING_LAYER:
        raise ConfigError(
            f"full_layers must be at least {FIRST_TELLING_LAYER + 1}, got {full_layers}: "
            "K of layer 0 depends on the token alone and cannot tell which rows deviate"
        )


@dataclass(frozen=True)
class Ratio(Budget):
    """A share of the chunks' tokens, rounded up: ``ceil(ratio * tokens)`` rows a layer.

    With a ``spread`` of s it falls linearly from ``ratio * (1 + s)`` at the first layer chosen for
    to ``ratio * (1 - s)`` at the last, so its mean stays; s shrinks where the first would pass 1.
    """

    ratio: float
    spread: float = 0.0
    full_layers: int = 2

    def __post_init__(self) -> None:
        _check_full_layers(self.full_layers)
        if not 0 <= self.ratio <= 1:
            raise ConfigError(f"a ratio of rows to recompute is from 0 to 1, got {self.ratio}")
        if not 0 <= self.spread <= 1:
            raise ConfigError(
                f"the spread of a ratio over the layers is from 0 to 1: {self.spread}"
            )

    @property
    def is_reuse(self) -> bool:
        return self.ratio == 0

    def share(self, layer: int, layers: int) -> float:
        """Of the chunks' tokens, what `layer` computes, before rounding."""
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
    """As many rows as score above ``bound``, between ``floor`` and ``ceiling`` of the tokens.

    Decided once, after `full_layers`. The bound is in the selector's own unit; `RelativeDeviation`
    has one that means the same on every model.
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
                f"0 <= floor <= ceiling <= 1: got {self.floor} and {self.ceiling}"
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
    """Scores rows. Holds settings only, so one instance serves all requests at once."""

    name: ClassVar[str]

    @property
    def needs_question(self) -> bool:
        """True: the question's rows are run over the reused cache first, to see where they look."""
        return False

    @property
    def sharpness(self) -> float:
        """The power in `attention_mass` of that look."""
        return 1.0

    @abstractmethod
    def score(self, seen: Seen) -> Tensor:
        """[n] float32; the higher, the sooner a row is recomputed. Equal on all ranks."""


class KeyDeviation(Selector):
    """CacheBlend's own: the rows whose K is furthest off."""

    name = "key"

    def score(self, seen: Seen) -> Tensor:
        return seen.key_deviation


class ValueDeviation(Selector):
    """The rows whose V is furthest off."""

    name = "value"

    def score(self, seen: Seen) -> Tensor:
        return seen.value_deviation


class KeyValueDeviation(Selector):
    """K and V deviation, each in units of its own mean over the candidates."""

    name = "key+value"

    def score(self, seen: Seen) -> Tensor:
        key, value = seen.key_deviation, seen.value_deviation
        tiny = torch.finfo(key.dtype).tiny
        return key / key.mean().clamp_min(tiny) + value / value.mean().clamp_min(tiny)


class RelativeDeviation(Selector):
    """K deviation as a share of the fresh K's square; 1 is a row with nothing right in it."""

    name = "relative"

    def score(self, seen: Seen) -> Tensor:
        size = seen.reduce(deviation(seen.keys, torch.zeros_like(seen.keys)))
        return seen.key_deviation / size.clamp_min(torch.finfo(size.dtype).tiny)


class ChunkHeads(Selector):
    """The first tokens of every chunk: these were computed as if a text began there."""

    name = "heads"

    def score(self, seen: Seen) -> Tensor:
        return -seen.offsets.float()


@dataclass(frozen=True)
class RandomRows(Selector):
    """Any rows: the control that every other selector must beat."""

    name: ClassVar[str] = "random"
    seed: int = 0

    def score(self, seen: Seen) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        everyone = torch.rand(int(seen.rows[-1]) + 1 if len(seen.rows) else 0, generator=generator)
        return everyone.to(seen.rows.device)[seen.rows]


def _question(seen: Seen) -> Tensor:
    if seen.question is None:
        raise ConfigError(
            "this selector weighs rows by the question's attention, and none was computed: "
            "run the question over the reused cache first (Selector.needs_question)"
        )
    return seen.question.float()


class QuestionAttention(Selector):
    """The rows the question looks at."""

    name = "question"

    @property
    def needs_question(self) -> bool:
        return True

    def score(self, seen: Seen) -> Tensor:
        return _question(seen)


@dataclass(frozen=True)
class QuestionDeviation(Selector):
    """The rows the question looks at and that are wrong: mass * |K deviation|^power."""

    name: ClassVar[str] = "question*key"
    power: float = 2.0
    sharp: float = 1.0

    @property
    def needs_question(self) -> bool:
        return True

    @property
    def sharpness(self) -> float:
        return self.sharp

    def score(self, seen: Seen) -> Tensor:
        return _question(seen) * seen.key_deviation.pow(self.power / 2)


@dataclass(frozen=True)
class _OfAnother(Selector):
    """Makes something of another selector's scores, and wants to see what that one does."""

    inner: Selector

    @property
    def needs_question(self) -> bool:
        return self.inner.needs_question

    @property
    def sharpness(self) -> float:
        return self.inner.sharpness


@dataclass(frozen=True)
class HeadsToo(_OfAnother):
    """Another selector's rows, after the first ``heads`` tokens of every chunk.

    What a text begins with draws attention from everything behind it (an attention sink). A chunk
    computed alone has such a beginning and its place in a prompt has not; that shows at layers
    deeper than those a deviation is taken at.
    """

    name: ClassVar[str] = "heads, then another"
    heads: int = 1

    def score(self, seen: Seen) -> Tensor:
        return self.inner.score(seen).masked_fill(seen.offsets < self.heads, math.inf)


@dataclass(frozen=True)
class Smoothed(_OfAnother):
    """Another selector's scores, each the mean over the rows up to ``reach`` tokens away.

    A fact is a run of tokens, and a recomputed row reads its neighbours. Rows that have left count
    as zero; a neighbour in another chunk counts as any.
    """

    name: ClassVar[str] = "runs of another"
    reach: int = 1

    def score(self, seen: Seen) -> Tensor:
        scores = self.inner.score(seen).float()
        if not len(scores):
            return scores
        line = scores.new_zeros(int(seen.rows[-1]) + 1)
        line[seen.rows] = scores
        window = 2 * self.reach + 1
        mean = functional.avg_pool1d(line[None, None], window, 1, self.reach)
        return mean[0, 0, seen.rows]


def runs(reach: int = 2, power: float = 2.0, sharp: float = 2.0) -> Selector:
    """Runs of rows that the question looks at sharply and that are wrong: the default."""
    return Smoothed(QuestionDeviation(power, sharp), reach)


BUILTIN_SELECTORS: dict[str, Callable[..., Selector]] = {
    "runs": runs,
    "question": QuestionAttention,
    "key": KeyDeviation,
    "value": ValueDeviation,
    "key+value": KeyValueDeviation,
    "heads": ChunkHeads,
    "random": RandomRows,
}


# ---------------------------------------------------------------------------------------------
# the choice


def narrow(
    selector: Selector,
    budget: Budget,
    seen: Seen,
    layers: int,
    tokens: int,
    keep: Callable[[Tensor, Tensor, int], Tensor] = keep_top,
) -> Tensor:
    """Positions of the chunks' rows to compute at the layer after ``seen.layer``, ascending.

    ``tokens`` counts all tokens of the chunks, so a ratio keeps its meaning as rows leave. Scores
    are computed only where rows must go. At most all of ``seen.rows`` are kept. ``keep`` is
    `keep_top`, on the device of these rows.
    """
    target = seen.layer + 1
    if target < budget.full_layers or target >= layers:
        return seen.rows
    scores: list[Tensor] = []

    def scored() -> Tensor:
        if not scores:
            scores.append(selector.score(seen))
        return scores[0]

    count = budget.rows_at(target, layers, tokens, scored)
    if count >= len(seen.rows):
        return seen.rows
    return keep(seen.rows, scored(), count)
