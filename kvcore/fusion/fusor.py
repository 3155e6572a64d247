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
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from kvcore.errors import ConfigError
from kvcore.fusion.attend import Attention, look_rows
from kvcore.fusion.decoder import DecoderLayers, HiddenState, InStep, LeaveLayer, Pieces
from kvcore.fusion.gate import Gate, GateMonitor, Verdict
from kvcore.fusion.ops import FusionOps, TorchFusion
from kvcore.fusion.plan import LayerKV
from kvcore.fusion.select import Budget, Candidates, Selector, narrow
from kvcore.telemetry.timeline import Tracer

__all__ = ["BlendJob", "BlendOutcome", "Fusor", "LayerTiming", "Placed"]

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

    @abstractmethod
    def write(self, layer: int, kv: LayerKV) -> None:
        """Write the merged K and V of one layer to the engine's pages."""


@dataclass(frozen=True)
class BlendJob:
    """One prompt to blend.

    Args:
        tokens: [n] int64, the prompt including the question.
        exact: positions [0, exact) have exact KV, which is read and never computed.
        stop: the blend makes KV for [exact, stop); the question is [stop, n).
        chunks: [c] int64 ascending, the positions in [exact, stop) that have cached KV. The other
            positions there are fresh.
        offsets: [c] int64, the index of each of these positions in its chunk.
    """

    tokens: Tensor
    exact: int
    stop: int
    chunks: Tensor
    offsets: Tensor

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

    @property
    def rows(self) -> Tensor:
        """Positions [exact, stop)."""
        return torch.arange(self.exact, self.stop, device=self.tokens.device)

    @property
    def fresh(self) -> Tensor:
        """Positions in [exact, stop) without cached KV, ascending."""
        return self.rows[~torch.isin(self.rows, self.chunks)]

    @property
    def question(self) -> Tensor:
        """Positions [stop, n)."""
        return torch.arange(self.stop, len(self.tokens), device=self.tokens.device)


class LayerTiming(NamedTuple):
    """The seconds a layer waited for its cache, its computing seconds, and its number of rows."""

    wait_s: float
    compute_s: float
    rows: int


@dataclass
class BlendOutcome:
    """What a blend did. ``chosen`` has the chunk rows computed on the last layer, ascending.

    ``verdicts`` come from the gate. ``abandoned`` has the layers of walks that it restarted.
    """

    layers: list[LayerTiming] = field(default_factory=list)
    chosen: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    look_s: float = 0.0
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

    def __init__(self, going: Tensor) -> None:
        self.going = going


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

        A ``gate`` may start the walk over with a larger ratio, after it has seen the error.
        """
        outcome = BlendOutcome()
        reuse = budget.is_reuse
        question = None
        if selector.needs_question and not reuse:
            started = time.monotonic()
            question = self.look(job, placed, selector.sharpness)
            outcome.look_s = time.monotonic() - started
        walk = _Walk(self._pieces, self.ops, job, placed, selector, budget, question)
        walk.watch(gate if len(job.chunks) and not reuse else None)
        while not self._walked(walk, job.fresh if reuse else job.rows, outcome):
            outcome.abandoned += outcome.layers
            outcome.layers = []
        walk.step.meet()
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

    def _walked(self, walk: _Walk, rows: Tensor, outcome: BlendOutcome) -> bool:
        """Walk through all layers. Return False if the gate wants to start over."""
        state = self._pieces.embed(walk.job.tokens[rows])
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
        outcome.chosen = rows[torch.isin(rows, walk.job.chunks)]
        return True

    @torch.inference_mode()
    def look(self, job: BlendJob, placed: Placed, sharpness: float) -> Tensor:
        """Return the question's attention to each token of the reused cache: [tokens] float32.

        It is summed over layers and ranks (see `kvcore.fusion.select.attention_mass`). All fresh
        rows are run. The question is the rows from ``stop`` on, or all fresh rows if the prompt
        ends at ``stop``. A collective; blocks.
        """
        rows = torch.cat([job.fresh, job.question])
        asking = rows >= job.stop if len(job.question) else torch.ones_like(rows, dtype=torch.bool)
        mass = torch.zeros(len(job.tokens), device=job.tokens.device)
        if not len(rows):
            return mass
        step = InStep(self.layers)
        state = self._pieces.embed(job.tokens[rows])
        for layer in range(self.layers.layers):
            started = time.monotonic()
            kv, attention = _landed(step, placed, layer), self.layers.attention[layer]
            landed = time.monotonic()
            self.tracer.span("wait", f"layer {layer}", started, landed)
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
                if not interest:
                    interest.append(torch.zeros(q.shape[1], len(mass), device=q.device))
                own = rows[piece]

                def looked() -> Tensor:
                    self.ops.merge(kv, own, LayerKV(k, v))
                    return look_rows(
                        q, own, kv.keys, kv.values, attention, asking[piece], interest[0]
                    )

                return step.alone(looked, lambda: _zeros(q, v))

            state = self._pieces.run(layer, rows, state, attend)
            mass.add_(interest[0].pow_(sharpness).sum(dim=0))
            now = time.monotonic()
            self.tracer.span("look", f"layer {layer}", landed, now, rows=len(rows))
        step.meet()
        return self.layers.reduce(mass)


def _landed(step: InStep, placed: Placed, layer: int) -> LayerKV:
    """Return the cached KV of a layer once every rank has it."""
    kv = step.alone(lambda: placed.layer(layer), lambda: None)
    step.meet()
    assert kv is not None
    return kv


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
    ) -> None:
        self.layers = pieces.layers
        self.pieces = pieces
        self.ops = ops
        self.job = job
        self.placed = placed
        self.selector = selector
        self.budget = budget
        self.question = question
        self.offset_of = torch.zeros(len(job.tokens), dtype=torch.int64, device=job.tokens.device)
        self.offset_of[job.chunks] = job.offsets
        self.is_chunk = torch.zeros(len(job.tokens), dtype=torch.bool, device=job.tokens.device)
        self.is_chunk[job.chunks] = True
        self.verdicts: list[Verdict] = []
        self.step = InStep(pieces.layers)
        self._watch: GateMonitor | None = None

    def watch(self, gate: Gate | None) -> None:
        """Let a gate observe the walk from now on; None stops that."""
        self._watch = None
        if gate is not None:
            self._watch = GateMonitor(gate, self.budget, self.layers.layers)

    def _judge(self, candidates: Candidates) -> None:
        """Show the gate a layer. Raises _StartOver if it wants rows that have left already."""
        watch = self._watch
        if watch is None:
            return
        over = watch.see(candidates)
        if watch.verdict is not None and watch.verdict not in self.verdicts[-1:]:
            self.verdicts.append(watch.verdict)
        if over:
            self.budget = watch.budget
            self.watch(watch.next_gate)
            raise _StartOver

    def layer(
        self, layer: int, rows: Tensor, state: HiddenState
    ) -> tuple[Tensor, HiddenState, LayerTiming]:
        """Run one layer over ``rows``. Return the rows and the state that the next layer gets."""
        started = time.monotonic()
        kv = _landed(self.step, self.placed, layer)
        landed = time.monotonic()
        if not len(rows):  # pure reuse without a gap, so there is nothing to compute
            self.step.alone(lambda: self.placed.write(layer, kv), lambda: None)
            return rows, state, LayerTiming(landed - started, time.monotonic() - landed, 0)
        if len(self.pieces.of(len(rows))) > 1:
            going, state = self._in_pieces(layer, rows, state, kv)
        else:
            going, state = self._at_once(layer, rows, state, kv)
        timing = LayerTiming(landed - started, time.monotonic() - landed, len(rows))
        return rows[going], state, timing

    def _at_once(
        self, layer: int, rows: Tensor, state: HiddenState, kv: LayerKV
    ) -> tuple[Tensor, HiddenState]:
        """Run a layer in one call. Return which rows are kept, [rows] bool, and their state."""
        attention = self.layers.attention[layer]
        last = layer == self.layers.layers - 1
        going = torch.empty(0)
        # Rows may leave at this layer. It may then run again from the state it began with.
        given = state.copy() if layer + 1 >= self.budget.full_layers and not last else state

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            nonlocal going
            going = self.going(layer, rows, k, v, kv)
            self._merge(layer, rows, LayerKV(k, v), kv)
            if last:
                raise LeaveLayer
            if int(going.sum()) < WORTH_A_SECOND_RUN * len(rows):
                raise _RunAgain(going)
            return self._attend(q, rows, kv, attention)

        try:
            state = self.layers.run(layer, rows, state, attend).of(going)
        except LeaveLayer:  # no layer follows
            pass
        except _RunAgain as fewer:
            state = self._again(layer, rows[fewer.going], given.of(fewer.going), kv)
        return going, state

    def _in_pieces(
        self, layer: int, rows: Tensor, state: HiddenState, kv: LayerKV
    ) -> tuple[Tensor, HiddenState]:
        """Do `_at_once` for more rows than fit a call: K and V of all rows first, then the rest."""
        new = self.pieces.project(layer, rows, state)
        going = self.going(layer, rows, new.keys, new.values, kv)
        self._merge(layer, rows, new, kv)
        if layer < self.layers.layers - 1:
            state = self._again(layer, rows[going], state.of(going), kv)
        return going, state

    def _again(self, layer: int, rows: Tensor, state: HiddenState, kv: LayerKV) -> HiddenState:
        attention = self.layers.attention[layer]
        if not len(rows):
            return state

        def attend(piece: slice, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self._attend(q, rows[piece], kv, attention)

        return self.pieces.run(layer, rows, state, attend)

    def _merge(self, layer: int, rows: Tensor, new: LayerKV, kv: LayerKV) -> None:
        def merged() -> None:
            self.ops.merge(kv, rows, new)
            self.placed.write(layer, kv)

        self.step.alone(merged, lambda: None)

    def _attend(self, q: Tensor, rows: Tensor, kv: LayerKV, attention: Attention) -> Tensor:
        return self.step.alone(
            lambda: self.ops.attend(q, rows, kv, attention), lambda: _zeros(q, kv.values)
        )

    def going(self, layer: int, rows: Tensor, keys: Tensor, values: Tensor, kv: LayerKV) -> Tensor:
        """Return which rows the next layer computes too: [rows] bool."""
        candidate = self.is_chunk[rows]
        chunk_rows = rows[candidate]
        candidates = Candidates(
            layer,
            chunk_rows,
            keys[candidate],
            values[candidate],
            kv.keys[chunk_rows],
            kv.values[chunk_rows],
            self.offset_of[chunk_rows],
            None if self.question is None else self.question[chunk_rows],
            self.layers.reduce,
            self.ops.deviation,
        )
        self._judge(candidates)
        kept = narrow(
            self.selector,
            self.budget,
            candidates,
            self.layers.layers,
            len(self.job.chunks),
            self.ops.keep_top,
        )
        return ~candidate | torch.isin(rows, kept)
