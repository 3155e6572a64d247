"""The candidates of one layer of a blend, whose parts are made only if a selector reads them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial

import torch
from torch import Tensor

from kvcore.errors import ConfigError
from kvcore.fusion.decoder import DecoderLayers, InStep
from kvcore.fusion.ops import FusionOps
from kvcore.fusion.plan import LayerKV
from kvcore.fusion.rows import Rows
from kvcore.fusion.select import Candidates, Measure, Selector, deviation

__all__ = ["LayerCandidates"]

_PARTS = {Measure.KEY: 0, Measure.VALUE: 1}
"""The part of a `LayerKV` that a deviation is of."""


class LayerCandidates(Candidates):
    """The rows of one layer that have cached KV. One owner.

    Measures are summed over the ranks by `take`, before a selector reads them. So all ranks make
    the same collectives, also if one of them fails at scoring.
    """

    _rows: Rows
    _new: LayerKV
    _cached: LayerKV
    _offset_of: Tensor
    _question: Tensor | None
    _ops: FusionOps
    _step: InStep
    _taken: dict[Measure, Tensor]
    _scores: Tensor | None
    _closed: bool

    def __init__(
        self,
        layer: int,
        rows: Rows,
        new: LayerKV,
        cached: LayerKV,
        offset_of: Tensor,
        question: Tensor | None,
        layers: DecoderLayers,
        ops: FusionOps,
        step: InStep,
    ) -> None:
        self.__dict__.update(  # the base is frozen
            layer=layer, rows=rows.places, reduce=layers.reduce, distance=deviation,
            smooth=ops.smooth, balance=ops.balance, end=offset_of.shape[0],
            _rows=rows, _new=new, _cached=cached, _offset_of=offset_of, _question=question,
            _ops=ops, _step=step, _taken={}, _scores=None, _closed=False,
        )  # fmt: skip

    @cached_property
    def keys(self) -> Tensor:
        return self._new.keys.index_select(0, self._rows.chunk)

    @cached_property
    def values(self) -> Tensor:
        return self._new.values.index_select(0, self._rows.chunk)

    @cached_property
    def cached_keys(self) -> Tensor:
        return self._cached.keys.index_select(0, self._rows.places)

    @cached_property
    def cached_values(self) -> Tensor:
        return self._cached.values.index_select(0, self._rows.places)

    @cached_property
    def offsets(self) -> Tensor:
        return self._offset_of.index_select(0, self._rows.places)

    @cached_property
    def question(self) -> Tensor | None:
        whole = self._question
        return None if whole is None else whole.index_select(0, self._rows.places)

    def local(self, what: Measure) -> Tensor:
        return self._deviations([what])[0] if what in _PARTS else super().local(what)

    def _deviations(self, whats: Sequence[Measure]) -> Tensor:
        """Return deviations of K and V, in this order, [measures, n] in float32."""
        new, cached = ([kv[_PARTS[what]] for what in whats] for kv in (self._new, self._cached))
        return self._ops.deviation(new, self._rows.chunk, cached, self._rows.places)

    def take(self, measures: Sequence[Measure]) -> None:
        """Compute measures and sum them over the ranks. A collective.

        The deviations of K and V are computed and summed together.
        """
        wanted = [what for what in Measure if what in measures and what not in self._taken]
        off = [what for what in wanted if what in _PARTS]
        if off:
            own = self._step.alone(
                partial(self._deviations, off), lambda: self._zeros().repeat(len(off), 1)
            )
            self._taken.update(zip(off, self.reduce(own).unbind(), strict=True))
        for what in wanted:
            if what not in off:
                own = self._step.alone(partial(self.local, what), self._zeros)
                self._taken[what] = self.reduce(own)

    def measure(self, what: Measure) -> Tensor:
        if what not in self._taken:
            if self._closed:
                raise ConfigError(
                    f"a selector reads the {what.value}, which its ``measures`` do not name"
                )
            self.take((what,))
        return self._taken[what]

    def scored(self, selector: Selector) -> Tensor:
        """Return the selector's scores, computed once. A collective."""
        scores = self._scores
        if scores is None:
            scores = self.__dict__["_scores"] = self._score(selector)
        return scores

    def _score(self, selector: Selector) -> Tensor:
        measures = selector.measures
        if measures is None:
            return selector.score(self)
        self.take(measures)
        self.__dict__["_closed"] = True
        return self._step.alone(lambda: selector.score(self), self._zeros)

    def _zeros(self) -> Tensor:
        return torch.zeros(self.rows.shape[0], device=self.rows.device)
