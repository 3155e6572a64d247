"""An engine's decoder layers: what a blend needs of them, and how it runs them.

`DecoderLayers` is the seam that an adapter implements. `Pieces` runs a layer over more rows than
the engine takes at once, and `InStep` keeps the ranks of an engine together if one of them fails.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from kvcore.errors import KVCoreError, RankLostError
from kvcore.fusion.attend import Attention
from kvcore.fusion.plan import LayerKV

__all__ = ["Attend", "DecoderLayers", "HiddenState", "InStep", "LeaveLayer", "Pieces"]


class HiddenState(NamedTuple):
    """State between decoder layers, [rows, hidden] each; ``residual`` is None before layer 0."""

    hidden: Tensor
    residual: Tensor | None

    def of(self, rows: Tensor | slice) -> HiddenState:
        """Return the state of some rows, given as indices (int64); of a slice, a view."""
        if isinstance(rows, slice):
            residual = None if self.residual is None else self.residual[rows]
            return HiddenState(self.hidden[rows], residual)
        residual = None if self.residual is None else self.residual.index_select(0, rows)
        return HiddenState(self.hidden.index_select(0, rows), residual)

    def copy(self) -> HiddenState:
        """Return a copy in new memory; of two equal shapes in one piece, so in one launch."""
        hidden, residual = self
        if residual is None:
            return HiddenState(hidden.clone(), None)
        if hidden.shape != residual.shape or hidden.dtype != residual.dtype:
            return HiddenState(hidden.clone(), residual.clone())
        return _Whole(torch.stack((hidden, residual)))


class _Whole(HiddenState):
    """A state in one piece, [2, rows, hidden]."""

    both: Tensor

    def __new__(cls, both: Tensor) -> _Whole:
        whole = super().__new__(cls, both[0], both[1])
        whole.both = both
        return whole

    def of(self, rows: Tensor | slice) -> HiddenState:
        some = self.both[:, rows] if isinstance(rows, slice) else self.both.index_select(1, rows)
        return HiddenState(some[0], some[1])


def _joined(states: Sequence[HiddenState]) -> HiddenState:
    """Concatenate the rows of all states."""
    if len(states) == 1:
        return states[0]
    residuals = [state.residual for state in states if state.residual is not None]
    return HiddenState(
        torch.cat([state.hidden for state in states]), torch.cat(residuals) if residuals else None
    )


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Maps q [rows, heads, dim], k and v [rows, kv_heads, dim] after RoPE to [rows, heads, v_dim]."""


class DecoderLayers(ABC):
    """The parts of an engine's decoder that a blend needs, with one rank's share of the heads.

    ``layers`` is the number of layers, and ``attention`` has the parameters of each layer's
    attention. A call gets at most ``max_rows`` rows (None: any number), because engines have memory
    for one batch.
    """

    layers: int
    attention: tuple[Attention, ...]
    max_rows: int | None = None
    collective: bool = False
    """True if `embed`, `run` and `reduce` are calls that several ranks make together."""

    @abstractmethod
    def embed(self, tokens: Tensor) -> Tensor:
        """Return the input of layer 0, [rows, hidden], for tokens [rows] int64."""

    @abstractmethod
    def run(self, layer: int, positions: Tensor, state: HiddenState, attend: Attend) -> HiddenState:
        """Run one layer with ``attend`` in place of its attention, and return the new state.

        The given state may be overwritten, because engines add residuals in place. An exception
        from ``attend`` propagates; the layer itself is then unchanged.
        """

    def reduce(self, scores: Tensor) -> Tensor:
        """Return the sum over the ranks that hold other heads. A collective."""
        return scores

    def agree(self, well: bool) -> bool:
        """Return True if ``well`` is true on every rank that holds other heads. A collective."""
        return well


class LeaveLayer(Exception):
    """Raised in ``attend`` to leave a layer after K and V: its output is not needed."""


class Pieces:
    """Runs layers over any number of rows, in calls of at most `DecoderLayers.max_rows`.

    Rows ascend, so the keys that a piece needs from other pieces were computed before it.
    """

    def __init__(self, layers: DecoderLayers) -> None:
        self.layers = layers

    def of(self, count: int) -> list[slice]:
        most = self.layers.max_rows or max(count, 1)
        return [slice(i, min(i + most, count)) for i in range(0, max(count, 1), most)]

    def embed(self, tokens: Tensor) -> HiddenState:
        parts = [self.layers.embed(tokens[piece]) for piece in self.of(len(tokens))]
        return HiddenState(torch.cat(parts) if len(parts) > 1 else parts[0], None)

    def run(
        self,
        layer: int,
        rows: Tensor,
        state: HiddenState,
        attend: Callable[[slice, Tensor, Tensor, Tensor], Tensor],
    ) -> HiddenState:
        """Run one layer. The first argument of ``attend`` says which rows a call covers."""
        return _joined(
            [
                self.layers.run(layer, rows[piece], state.of(piece), partial(attend, piece))
                for piece in self.of(len(rows))
            ]
        )

    def project(self, layer: int, rows: Tensor, state: HiddenState) -> LayerKV:
        """Return K and V of the rows. The state is not changed."""
        found: list[LayerKV] = []

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            found.append(LayerKV(k, v))
            raise LeaveLayer

        for piece in self.of(len(rows)):
            with suppress(LeaveLayer):
                self.layers.run(layer, rows[piece], state.of(piece).copy(), attend)
        return LayerKV(torch.cat([kv.keys for kv in found]), torch.cat([kv.values for kv in found]))


T = TypeVar("T")


class InStep:
    """Keeps ranks in step if one of them fails. One for each blend.

    Layers are collectives: if one rank stopped alone, the others would wait for it. So an error in
    what a rank does `alone` is kept until all ranks `meet`, and then all of them stop. What a rank
    does between two meetings is `alone`, or a call of the engine that every rank makes. An error
    of such a call cannot be repaired, because the rank does not know for which collective the
    others wait: `lasting` makes it a `RankLostError`, which must end the engine's process.
    """

    def __init__(self, layers: DecoderLayers) -> None:
        self._layers = layers
        self._error: Exception | None = None
        self._stopped = False

    def alone(self, work: Callable[[], T], otherwise: Callable[[], T]) -> T:
        """Return ``work()`` of this rank, or ``otherwise()`` if this or earlier work failed.

        ``otherwise`` must not fail. Neither may be a collective.
        """
        if self._error is None:
            try:
                return work()
            except Exception as error:  # noqa: BLE001 - raised when the ranks meet
                self._error = error
        return otherwise()

    def meet(self) -> None:
        """Raise on every rank if something failed on one. A collective."""
        if not self._layers.agree(self._error is None):
            self._stopped = True
            raise self._error or KVCoreError("another rank failed in this blend")

    @contextmanager
    def lasting(self) -> Iterator[None]:
        """Pass on an error of which all ranks know, or that concerns only this rank.

        Raises RankLostError for any other one.
        """
        try:
            yield
        except Exception as error:
            if self._stopped or not self._layers.collective:
                raise
            raise RankLostError(
                f"this rank failed in a blend ({type(error).__name__}: {error}) while other ranks "
                "may wait for it in a collective; the engine must be restarted"
            ) from error
