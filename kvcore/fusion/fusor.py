"""The fast blend: an engine's own decoder layers, run over a shrinking set of rows.

The engine provides its layers (`DecoderLayers`), a `Placed` provides the cached KV layer by layer,
and `Fusor.blend` writes merged KV back, one layer after another:

    layer    placed cache          rows computed                      written
    0        waits till it landed  all that are not exact             K, V of every row
    1        ...                   all; then the rows to keep are chosen
    2 ..     ...                   the chosen and the fresh ones
    last     ...                   the same, up to K and V            nothing reads its output

The engine's own forward computes the question (the fresh tokens after the last chunk). A blend runs
the question only if the selector needs its attention. A blend computes the same as
`kvcore.fusion.reference`, which is written for readers; tests compare the two.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvcore.errors import ConfigError
from kvcore.fusion.attend import Attention, Look, look_of, look_rows
from kvcore.fusion.candidates import LayerCandidates
from kvcore.fusion.decoder import DecoderLayers, HiddenState, InStep, LeaveLayer, Pieces
from kvcore.fusion.gate import Gate, GateMonitor, Verdict, values_off
from kvcore.fusion.ops import FusionOps, Kept, TorchFusion
from kvcore.fusion.plan import LayerKV
from kvcore.fusion.rows import LOOK_ROWS, OnDevice, Rows, split_look, upload_rows
from kvcore.fusion.select import Budget, Measure, Selector, rows_kept
from kvcore.telemetry.timeline import Tracer

__all__ = ["BlendJob", "BlendOutcome", "Fusor", "LayerTiming", "Placed"]

_CPU = torch.device("cpu")
_NO_ROWS = torch.empty(0, dtype=torch.int64)  # made here: a blend that began may not fail alone

WORTH_A_SECOND_RUN = 0.7
"""If a smaller share of the rows is kept, the layer runs again for the kept rows alone. Projecting
these twice costs less than attention and MLP of the rows that leave."""


class Placed(ABC):
    """The cached KV of one prompt, moved to its positions in the prompt."""

    @abstractmethod
    def layer(self, layer: int) -> LayerKV:
        """Return K and V of all positions, [tokens, kv_heads, dim] each.

        Positions without cached KV have unspecified values. Blocks until the layer has been loaded.
        The caller owns the result until the next call, and may write to it.
        """

    def keep(self, layer: int, rows: Tensor) -> None:  # noqa: B027 - for those that lose them
        """Keep the cached K and V of ``rows`` (int64), which `write` is about to replace.

        The walk may start over: `layer` then returns the cached KV of all rows again. The layer
        must be the last that `layer` has returned, and unchanged.
        """

    @abstractmethod
    def write(self, layer: int, kv: LayerKV) -> None:
        """Write the merged K and V of one layer to the engine's pages."""


@dataclass(frozen=True)
class BlendJob:
    """One prompt to blend, described on the host. All tensors are on the CPU.

    Args:
        tokens: [n] int64, the prompt including the question.
        exact: positions [0, exact) have exact KV, which is read and never computed.
        stop: the blend makes KV for [exact, stop); the question is [stop, n).
        chunks: [c] int64 ascending, the positions in [exact, stop) that have cached KV. The other
            positions there are fresh.
        offsets: [c] int64, the index of each of these positions in its chunk.
        device: where the KV is.
        look_rows: the most rows of the question's look.
    """

    tokens: Tensor
    exact: int
    stop: int
    chunks: Tensor
    offsets: Tensor
    device: torch.device = _CPU
    look_rows: int = LOOK_ROWS

    def __post_init__(self) -> None:
        if not 0 <= self.exact < self.stop <= len(self.tokens):
            raise ConfigError(
                f"KV for positions [{self.exact}, {self.stop}) of a prompt of {len(self.tokens)} "
                "tokens: give 0 <= exact < stop <= tokens"
            )
        inside = (self.chunks >= self.exact) & (self.chunks < self.stop)
        if len(self.chunks) != len(self.offsets) or not bool(inside.all()):
            raise ConfigError(
                f"{len(self.chunks)} chunk rows with {len(self.offsets)} offsets, "
                f"{int((~inside).sum())} of them outside [{self.exact}, {self.stop}): give one "
                "offset for each row, and only rows inside"
            )

    @cached_property
    def on_device(self) -> OnDevice:
        """The job on its device. The first use uploads it."""
        return upload_rows(
            self.tokens,
            self.exact,
            self.stop,
            self.chunks,
            self.offsets,
            self._split,
            self.device,
        )

    @cached_property
    def look(self) -> tuple[list[int], list[int]]:
        """Positions of the rows that look, and of the others without KV. Both ascend."""
        rows, unseen = self._split
        return rows.tolist(), unseen.tolist()

    @cached_property
    def _split(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        fresh = np.ones(len(self.tokens), dtype=np.bool_)
        fresh[: self.exact] = False
        fresh[self.chunks.numpy()] = False
        return split_look(fresh.nonzero()[0], self.look_rows)


class LayerTiming(NamedTuple):
    """The seconds a layer waited for its cache, its computing seconds, and its number of rows."""

    wait_s: float
    compute_s: float
    rows: int


@dataclass
class BlendOutcome:
    """What a blend did. ``chosen`` has the chunk rows computed on the last layer, ascending.

    ``looked`` counts the rows of the question's look. ``verdicts`` come from the gate.
    ``abandoned`` has the layers of walks that it restarted.
    """

    layers: list[LayerTiming] = field(default_factory=list)
    chosen: Tensor = _NO_ROWS
    look_s: float = 0.0
    looked: int = 0
    verdicts: list[Verdict] = field(default_factory=list)
    abandoned: list[LayerTiming] = field(default_factory=list)

    def share(self, job: BlendJob) -> float:
        """Return the rows computed, including abandoned walks, as a share of layers x rows made."""
        rows = sum(layer.rows for layer in (*self.layers, *self.abandoned))
        return rows / (len(self.layers) * (job.stop - job.exact))


class _StartOver(Exception):
    """Raised to start the walk over with more rows."""


class _RunAgain(Exception):
    """Raised to run the layer again with fewer rows."""


class _ScoresWanted(Exception):
    """Raised if a budget depends on scores."""


class Fusor:
    """Blends prompts through one engine's layers. It has one owner and no state between blends.

    Each layer of a blend is a span of ``tracer``. ``ops`` must support the device of the KV; the
    default is torch's.
    """

    def __init__(
        self, layers: DecoderLayers, tracer: Tracer | None = None, ops: FusionOps | None = None
    ) -> None:
        self.layers = layers
        self._pieces = Pieces(layers)
        self.tracer = tracer or Tracer()
        self.ops = ops or TorchFusion()

    @torch.inference_mode()
    def blend(
        self,
        job: BlendJob,
        placed: Placed,
        selector: Selector,
        budget: Budget,
        gate: Gate | None = None,
    ) -> BlendOutcome:
        """Make KV for positions [exact, stop) and write it. Blocks. See the module's diagram.

        A ``gate`` may start the walk over with a larger ratio, after it has seen the error. The
        host waits for the device once for each decision of a gate or of a `Threshold`, and else
        never. If several ranks blend together, an error on one of them stops all; see `InStep`.
        """
        outcome = BlendOutcome()
        reuse = budget.is_reuse
        question = None
        step = InStep(self.layers)
        with step.lasting():
            if selector.needs_question and not reuse:
                started = time.monotonic()
                question = self._look(step, job, placed, selector.sharpness)
                outcome.look_s, outcome.looked = time.monotonic() - started, len(job.look[0])
            walk = _Walk(self._pieces, self.ops, job, placed, selector, budget, question, step)
            walk.watch(gate if len(job.chunks) and not reuse else None)
            while not self._walked(walk, reuse, outcome):
                outcome.abandoned += outcome.layers
                outcome.layers = []
            step.meet()
        outcome.verdicts = walk.verdicts
        return outcome

    @torch.inference_mode()
    def compute(self, tokens: Tensor) -> HiddenState:
        """Run every layer over a prompt [rows] without cached KV, and return the last output.

        Nothing is written. This is used to measure the cost of a blend's layers.
        """
        rows = torch.arange(len(tokens), device=tokens.device)
        state = self._pieces.embed(tokens)
        for layer in range(self.layers.layers):
            attention = self.layers.attention[layer]
            made: list[LayerKV] = []

            def attend(
                piece: slice,
                q: Tensor,
                k: Tensor,
                v: Tensor,
                attention: Attention = attention,
                made: list[LayerKV] = made,
            ) -> Tensor:
                made.append(LayerKV(k, v))
                kv = LayerKV(*map(torch.cat, zip(*made, strict=True)))
                return self.ops.attend(q, rows[piece], kv, attention)

            state = self._pieces.run(layer, rows, state, attend)
        return state

    def _walked(self, walk: _Walk, reuse: bool, outcome: BlendOutcome) -> bool:
        """Walk through all layers. Return False if the gate wants to start over."""
        rows, state = walk.start(reuse)
        for layer in range(self.layers.layers):
            try:
                rows, state, timing = walk.layer(layer, rows, state)
            except _StartOver:
                outcome.layers.append(LayerTiming(0.0, 0.0, len(rows)))
                return False
            outcome.layers.append(timing)
            stop = time.monotonic()
            landed = stop - timing.compute_s
            self.tracer.span("wait", f"layer {layer}", landed - timing.wait_s, landed)
            self.tracer.span("recompute", f"layer {layer}", landed, stop, rows=timing.rows)
        outcome.chosen = rows.places
        return True

    @torch.inference_mode()
    def look(self, job: BlendJob, placed: Placed, sharpness: float) -> Tensor:
        """Return the question's attention to each token of the reused cache: [tokens] float32.

        It is summed over layers and ranks (see `kvcore.fusion.select.attention_mass`). The job's
        ``look`` says which rows are run. docs/fusion.md says which of them are the *question*. A
        collective; blocks.
        """
        step = InStep(self.layers)
        with step.lasting():
            return self._look(step, job, placed, sharpness)

    def _look(self, step: InStep, job: BlendJob, placed: Placed, sharpness: float) -> Tensor:
        (known, holes), rows, unseen = job.look, job.on_device.look, job.on_device.unseen
        count = len(job.tokens)
        mass = torch.zeros(count, device=rows.device)
        if not known:
            return mass
        asking = bisect_left(known, job.stop) if job.stop < count else 0
        looks = {
            piece.start: look_of(
                rows[piece], known[piece], max(asking - piece.start, 0), unseen, holes
            )
            for piece in self._pieces.of(len(known))
        }
        state = _embedded(step, self._pieces, job, rows)
        for layer in range(self.layers.layers):
            started = time.monotonic()
            kv, attention = _landed(step, placed, layer), self.layers.attention[layer]
            landed = time.monotonic()
            self.tracer.span("wait", f"layer {layer}", started, landed)
            if holes:
                step.alone(partial(_blank, kv.values, unseen), lambda: None)
            interest: list[Tensor] = []

            def attend(
                piece: slice,
                q: Tensor,
                k: Tensor,
                v: Tensor,
                kv: LayerKV = kv,
                attention: Attention = attention,
                interest: list[Tensor] = interest,
            ) -> Tensor:
                look: Look = looks[piece.start]

                def looked() -> Tensor:
                    if not interest:
                        interest.append(torch.zeros(q.shape[1], len(mass), device=q.device))
                    self.ops.merge(kv, look.positions, LayerKV(k, v))
                    return look_rows(q, look, kv.keys, kv.values, attention, interest[0])

                return step.alone(looked, lambda: _zeros(q, v))

            def seen(interest: list[Tensor] = interest) -> None:
                mass.add_(interest[0].pow_(sharpness).sum(dim=0))

            state = self._pieces.run(layer, rows, state, attend)
            step.alone(seen, lambda: None)
            now = time.monotonic()
            self.tracer.span("look", f"layer {layer}", landed, now, rows=len(rows))
        step.meet()
        return self.layers.reduce(mass)


def _embedded(step: InStep, pieces: Pieces, job: BlendJob, rows: Tensor) -> HiddenState:
    """Return the input of layer 0 once every rank can compute it. A collective."""
    tokens = step.alone(lambda: job.on_device.tokens.index_select(0, rows), lambda: None)
    step.meet()
    assert tokens is not None
    return pieces.embed(tokens)


def _landed(step: InStep, placed: Placed, layer: int) -> LayerKV:
    """Return the cached KV of a layer once every rank has it."""
    kv = step.alone(lambda: placed.layer(layer), lambda: None)
    step.meet()
    assert kv is not None
    return kv


def _blank(values: Tensor, rows: Tensor) -> None:
    """Zero the values of rows without KV. They may be NaN, which a weight of zero would keep."""
    values.index_fill_(0, rows, 0.0)


def _zeros(queries: Tensor, values: Tensor) -> Tensor:
    """Return zeros in the shape of an attention's result: [rows, heads, v_dim]."""
    return queries.new_zeros(*queries.shape[:2], values.shape[2])


class _Walk:
    """The walk of one blend through the layers."""

    def __init__(
        self,
        pieces: Pieces,
        ops: FusionOps,
        job: BlendJob,
        placed: Placed,
        selector: Selector,
        budget: Budget,
        question: Tensor | None,
        step: InStep,
    ) -> None:
        self.layers = pieces.layers
        self.pieces = pieces
        self.ops = ops
        self.job = job
        self.placed = placed
        self.selector = selector
        self.budget = budget
        self.question = question
        self.verdicts: list[Verdict] = []
        self.step = step
        self._watch: GateMonitor | None = None

    def watch(self, gate: Gate | None) -> None:
        """Let a gate observe the walk from now on; None stops that."""
        self._watch = None
        if gate is not None:
            self._watch = GateMonitor(gate, self.budget, self.layers.layers)

    def start(self, reuse: bool) -> tuple[Rows, HiddenState]:
        """Return the rows of layer 0 and their embedding. A collective."""
        job = self.job.on_device
        rows = job.fresh if reuse else job.every
        return rows, _embedded(self.step, self.pieces, self.job, rows.positions)

    def layer(
        self, layer: int, rows: Rows, state: HiddenState
    ) -> tuple[Rows, HiddenState, LayerTiming]:
        """Run one layer over ``rows``. Return the rows and the state that the next layer gets."""
        started = time.monotonic()
        kv = _landed(self.step, self.placed, layer)
        landed = time.monotonic()
        count = len(rows)
        if not count:  # pure reuse without a gap, so there is nothing to compute
            self.step.alone(lambda: self.placed.write(layer, kv), lambda: None)
        elif self.layers.max_rows is not None and count > self.layers.max_rows:
            rows, state = self._in_pieces(layer, rows, state, kv)
        else:
            rows, state = self._at_once(layer, rows, state, kv)
        timing = LayerTiming(landed - started, time.monotonic() - landed, count)
        return rows, state, timing

    def _at_once(
        self, layer: int, rows: Rows, state: HiddenState, kv: LayerKV
    ) -> tuple[Rows, HiddenState]:
        """Run a layer in one call. Return the rows that are kept, and their state."""
        attention = self.layers.attention[layer]
        last = layer == self.layers.layers - 1
        kept: Kept | None = None
        # Rows may leave at this layer. It may then run again from the state it began with.
        given = state if last or not self._may_run_again(layer, rows) else self._copy(state)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            nonlocal kept
            kept = self._narrowed(layer, rows, LayerKV(k, v), kv)
            self._merge(layer, rows, LayerKV(k, v), kv)
            if last:
                raise LeaveLayer
            if kept is not None and kept.going.shape[0] < WORTH_A_SECOND_RUN * len(rows):
                raise _RunAgain
            return self._attend(q, rows.positions, kv, attention)

        try:
            state = self._of(self.layers.run(layer, rows.positions, state, attend), kept)
        except LeaveLayer:  # no layer follows
            pass
        except _RunAgain:
            assert kept is not None
            state = self._again(layer, kept.rows.positions, self._of(given, kept), kv)
        return rows if kept is None else kept.rows, state

    def _in_pieces(
        self, layer: int, rows: Rows, state: HiddenState, kv: LayerKV
    ) -> tuple[Rows, HiddenState]:
        """Do `_at_once` for more rows than fit a call: K and V of all rows first, then the rest."""
        new = self.pieces.project(layer, rows.positions, state)
        kept = self._narrowed(layer, rows, new, kv)
        self._merge(layer, rows, new, kv)
        going = rows if kept is None else kept.rows
        if layer < self.layers.layers - 1:
            state = self._again(layer, going.positions, self._of(state, kept), kv)
        return going, state

    def _again(self, layer: int, positions: Tensor, state: HiddenState, kv: LayerKV) -> HiddenState:
        attention = self.layers.attention[layer]
        if not positions.shape[0]:
            return state

        def attend(piece: slice, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self._attend(q, positions[piece], kv, attention)

        return self.pieces.run(layer, positions, state, attend)

    def _merge(self, layer: int, rows: Rows, new: LayerKV, kv: LayerKV) -> None:
        def merged() -> None:
            if self._watch is not None and self._watch.verdict is None:
                self.placed.keep(layer, rows.places)
            self.ops.merge(kv, rows.positions, new)
            self.placed.write(layer, kv)

        self.step.alone(merged, lambda: None)

    def _attend(self, q: Tensor, rows: Tensor, kv: LayerKV, attention: Attention) -> Tensor:
        return self.step.alone(
            lambda: self.ops.attend(q, rows, kv, attention), lambda: _zeros(q, kv.values)
        )

    def _copy(self, state: HiddenState) -> HiddenState:
        return self.step.alone(state.copy, lambda: state)

    def _of(self, state: HiddenState, kept: Kept | None) -> HiddenState:
        """Return the state of the rows that are kept."""
        if kept is None:
            return state
        going = kept.going
        return self.step.alone(lambda: state.of(going), lambda: state.of(slice(0, going.shape[0])))

    # -- which rows go on -------------------------------------------------------------------

    def _count(self, layer: int, rows: Rows, scores: Callable[[], Tensor]) -> int:
        return rows_kept(
            self.budget,
            layer,
            self.layers.layers,
            self.job.chunks.shape[0],
            rows.chunk.shape[0],
            scores,
        )

    def _known_count(self, layer: int, rows: Rows) -> int | None:
        """Return how many chunk rows go on; None if that depends on their scores."""

        def wanted() -> Tensor:
            raise _ScoresWanted

        try:
            return self._count(layer, rows, wanted)
        except _ScoresWanted:
            return None

    def _may_run_again(self, layer: int, rows: Rows) -> bool:
        count = self._known_count(layer, rows)
        left = 0 if count is None else count
        return len(rows) - rows.chunk.shape[0] + left < WORTH_A_SECOND_RUN * len(rows)

    def _narrowed(self, layer: int, rows: Rows, new: LayerKV, kv: LayerKV) -> Kept | None:
        """Return the rows that the next layer computes too; None if all. A collective."""
        job = self.job.on_device
        candidates = LayerCandidates(
            layer, rows, new, kv, job.offset_of, self.question, self.layers, self.ops, self.step
        )
        self._judge(candidates)
        count = self._known_count(layer, rows)
        if count is None:
            count = self._count(layer, rows, lambda: self._agreed(candidates))
        if count == rows.chunk.shape[0]:
            return None
        scores = candidates.scored(self.selector)
        size, left = count, len(rows) - rows.chunk.shape[0] + count

        def failed() -> Kept:
            some = Rows(rows.positions[:left], rows.chunk[:size], rows.places[:size])
            return Kept(some, rows.positions[:left])

        return self.step.alone(lambda: self.ops.keep(rows, job.offset_of, scores, size), failed)

    def _agreed(self, candidates: LayerCandidates) -> Tensor:
        """Return scores that all ranks have, because the number of rows depends on them."""
        scores = candidates.scored(self.selector)
        self.step.meet()
        return scores

    def _judge(self, candidates: LayerCandidates) -> None:
        """Show the gate a layer. Raises _StartOver if it wants rows that have left already."""
        watch = self._watch
        if watch is None or not watch.observes(candidates.layer) or not len(candidates):
            return
        candidates.take((Measure.VALUE_SIZE, Measure.VALUE))
        off = self.step.alone(lambda: values_off(candidates), lambda: 0.0)
        self.step.meet()  # whether the walk starts over is decided alike on all ranks
        over = watch.judge(off)
        if watch.verdict is not None and watch.verdict not in self.verdicts[-1:]:
            self.verdicts.append(watch.verdict)
        if over:
            self.budget = watch.budget
            self.watch(watch.next_gate)
            raise _StartOver
