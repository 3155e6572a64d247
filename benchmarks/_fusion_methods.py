"""Variants of the reference's `Blender` that do more than choose rows once.

Corrected    rows that are not recomputed are corrected by a regression on those that are
SecondLook   half of the rows, a second look of the question, then the other half
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvcore.fusion.plan import LayerKV
from kvcore.fusion.reference import Blended, Blender, Projected
from kvcore.fusion.reference import question_mass as look
from kvcore.fusion.select import Ratio, Selector

__all__ = ["Corrected", "SecondLook"]


class Corrected(Blender):
    """A blender that predicts the KV error of rows that are not recomputed from that at layer 1.

    At layer 1 every row is computed, so the error x = (dK, dV) is known for all rows. At a later
    layer the error y is known for the recomputed rows only. A ridge regression y = x W through the
    origin is fitted to these and applied to the other rows: a row that was right at layer 1 is not
    changed. K is compared with its rotation undone, so that W does not depend on positions.
    """

    FEATURES_LAYER = 1
    RIDGE = 1.0
    """The penalty, in units of the mean square of a feature times the number of fitted rows."""

    def __init__(self, decoder: Any, plan: Any, ropes: Any) -> None:
        super().__init__(decoder, plan, ropes)
        self.ropes = ropes
        self.known = torch.empty(0)

    def merge(self, layer: int, cache: LayerKV, rows: Tensor, new: Projected) -> None:
        super().merge(layer, cache, rows, new)
        chosen = torch.isin(rows, self.chunks)
        rows = rows[chosen]
        off = self._off(layer, rows, LayerKV(new.keys[chosen], new.values[chosen]))
        if layer == self.FEATURES_LAYER:
            self.known = torch.zeros(len(self.plan), off.shape[1])
            self.known[rows] = off
        others = self.chunks[~torch.isin(self.chunks, rows)]
        if layer > self.FEATURES_LAYER and len(rows) and len(others):
            self._move(layer, cache, others, self._predicted(rows, off, others))

    def _off(self, layer: int, rows: Tensor, new: LayerKV) -> Tensor:
        """Return fresh minus cached, K with its rotation undone: [rows, 2 * kv_heads * dim]."""
        was = self.placed[layer]
        keys = self._turned(layer, new.keys - was.keys[rows], -rows)
        return torch.cat([keys.flatten(1), (new.values - was.values[rows]).flatten(1)], dim=1)

    def _turned(self, layer: int, keys: Tensor, distances: Tensor) -> Tensor:
        rope = self.ropes[layer]
        return rope.shift(keys.transpose(0, 1), distances).transpose(0, 1) if rope else keys

    def _predicted(self, rows: Tensor, off: Tensor, others: Tensor) -> Tensor:
        x = self.known[rows]
        penalty = self.RIDGE * x.square().sum() / x.shape[1]
        gram = x @ x.T + penalty * torch.eye(len(x))  # the dual: fewer rows than features
        return self.known[others] @ (x.T @ torch.linalg.solve(gram, off))

    def _move(self, layer: int, cache: LayerKV, rows: Tensor, off: Tensor) -> None:
        keys, values = off.chunk(2, dim=1)
        shape = (len(rows), *cache.keys.shape[1:])
        cache.keys[rows] += self._turned(layer, keys.reshape(shape), rows)
        cache.values[rows] += values.reshape(shape)


class SecondLook(Blender):
    """A blender that recomputes half of the rows, then looks again and recomputes the rest.

    The second look is over the cache that the first half has repaired, and the second half starts
    from it. Layers 0 and 1 need no second pass, because their output can be kept. So the cost is
    that of one blend and one more pass of the question.
    """

    merged: list[LayerKV] | None = None

    def start(self) -> list[LayerKV]:
        if self.merged is None:
            return super().start()
        return [LayerKV(kv.keys.clone(), kv.values.clone()) for kv in self.merged]

    def blend(self, selector: Selector, budget: Any, question: Tensor | None = None) -> Blended:
        if budget.is_reuse or budget.ratio == 1:
            return super().blend(selector, budget, question)
        half: Ratio = replace(budget, ratio=budget.ratio / 2)
        first = super().blend(selector, half, question)
        self.merged = first.context.layers
        try:
            right = first.computed[half.full_layers]
            second = super().blend(selector, half, look(self).index_fill(0, right, 0.0))
        finally:
            self.merged = None
        both = [
            one if layer < half.full_layers else torch.cat([one, two]).unique()
            for layer, (one, two) in enumerate(zip(first.computed, second.computed, strict=True))
        ]
        return replace(second, computed=tuple(both))
