"""The fast blend: an engine's own decoder layers, run over a shrinking set of rows.

The engine lends its layers (`DecoderLayers`), somebody brings the cached KV layer by layer
(`Placed`), and `Fusor.blend` writes merged KV back, one layer after another:

    layer    placed cache          rows computed                      written
    0        waits till it landed  all that are not exact             K, V of every row
    1        ...                   all; here it is chosen who goes on
    2 ..     ...                   the chosen and the fresh ones
    last     ...                   the same, up to K and V            nothing reads its output

The question (fresh tokens behind the last chunk) is left to the engine's own forward; it is run
here only where the selector asks where it looks. What a blend computes is what
`kvcore.fusion.reference` computes, which is written to be read; tests hold the two together.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from kvcore.errors import ConfigError, KVCoreError
from kvcore.fusion.attend import Attention, look_rows
from kvcore.fusion.gate import Gate, GateMonitor, Verdict
from kvcore.fusion.ops import FusionOps, TorchFusion
from kvcore.fusion.plan import LayerKV
from kvcore.fusion.select import Budget, Seen, Selector, narrow
from kvcore.telemetry.timeline import Tracer

__all__ = [
    "Attend",
    "BlendOutcome",
    "DecoderLayers",
    "Fusor",
    "HiddenState",
    "Job",
    "LayerTiming",
    "Placed",
]

WORTH_A_SECOND_RUN = 0.7
"""Where fewer of the rows than this go on, the layer is run again for them alone: projecting them
twice costs less than attention and MLP for the rows that leave."""


class HiddenState(NamedTuple):
    """What flows between decoder layers, [rows, hidden] each; ``residual`` None before layer 0."""

    hidden: Tensor
    residual: Tensor | None

    def of(self, rows: Tensor | slice) -> HiddenState:
        """The state of some rows: a boolean mask, indices, or a view of consecutive ones."""
        residual = None if self.residual is None else self.residual[rows]
        return HiddenState(self.hidden[rows], residual)

    def copy(self) -> HiddenState:
        """One of its own memory."""
        return HiddenState(
            self.hidden.clone(), None if self.residual is None else self.residual.clone()
        )


def _joined(states: Sequence[HiddenState]) -> HiddenState:
    """Of all their rows."""
    if len(states) == 1:
        return states[0]
    residuals = [state.residual for state in states if state.residual is not None]
    return HiddenState(
        torch.cat([state.hidden for state in states]), torch.cat(residuals) if residuals else None
    )


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q [rows, heads, dim], k and v [rows, kv_heads, dim], after RoPE -> [rows, heads, v_dim]."""


class DecoderLayers(ABC):
    """An engine's decoder, as far as a blend needs it. One rank's share of the heads.

    ``layers`` is how many there are, ``attention`` what each one's attention computes. A call is of
    ``max_rows`` rows at most, None for any number: engines have memory for one batch.
    """

    layers: int
    attention: tuple[Attention, ...]
    max_rows: int | None = None

    @abstractmethod
    def embed(self, tokens: Tensor) -> Tensor:
        """[rows] int64 -> [rows, hidden]: what goes into layer 0."""

    @abstractmethod
    def run(self, layer: int, positions: Tensor, state: HiddenState, attend: Attend) -> HiddenState:
        """One layer, with ``attend`` in the place of its attention.

        The state given may be overwritten: engines add residuals in place. What ``attend`` raises
        passes through, and the layer is as it was before.
        """

    def reduce(self, scores: Tensor) -> Tensor:
        """Sum over the ranks that hold other heads. A collective."""
        return scores

    def agree(self, well: bool) -> bool:
        """Whether all is ``well`` on every rank that holds other heads. A collective."""
        return well


class Placed(ABC):
    """The cached KV of one prompt, moved to where it stands there."""

    @abstractmethod
    def layer(self, layer: int) -> LayerKV:
        """K and V of all positions, [tokens, kv_heads, dim]; unspecified where nothing is cached.

        Blocks until the layer has landed. The caller may write to what it gets, and owns it until
        the next call.
        """

    @abstractmethod
    def write(self, layer: int, kv: LayerKV) -> None:
        """Take the merged K and V of one layer into the engine's pages."""


@dataclass(frozen=True)
class Job:
    """One prompt to be blended.

    Args:
        tokens: [n] int64, the prompt with the question.
        exact: positions [0, exact) have exact KV: read, never computed.
        stop: KV is made for [exact, stop); what stands behind is the question.
        chunks: [c] int64 ascending, positions in [exact, stop) with cached KV. All others there
            are fresh.
        offsets: [c] int64, each one's place in its chunk.
    """

    tokens: Tensor
    exact: int
    stop: int
    chunks: Tensor
    offsets: Tensor

    def __post_init__(self) -> None:
        if not 0 <= self.exact < self.stop <= len(self.tokens):
            raise ConfigError(
                f"KV for [{self.exact}, {self.stop}) of a prompt of {len(self.tokens)} tokens"
            )
        inside = (self.chunks >= self.exact) & (self.chunks < self.stop)
        if len(self.chunks) != len(self.offsets) or not bool(inside.all()):
            raise ConfigError(
                f"{len(self.chunks)} chunk rows with {len(self.offsets)} offsets, of which "
                f"{int((~inside).sum())} lie outside [{self.exact}, {self.stop})"
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
    """Seconds a layer waited for its cache and computed, and how many rows it computed."""

    wait_s: float
    compute_s: float
    rows: int


@dataclass
class BlendOutcome:
    """What a blend did. ``chosen`` are the chunks' rows computed on the last layer, ascending.

    ``verdicts`` are a gate's, ``abandoned`` the layers of a walk it gave up.
    """

    layers: list[LayerTiming] = field(default_factory=list)
    chosen: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    look_s: float = 0.0
    verdicts: list[Verdict] = field(default_factory=list)
    abandoned: list[LayerTiming] = field(default_factory=list)

    def share(self, job: Job) -> float:
        """Rows computed, those of an abandoned walk too, by the rows KV was made for x layers."""
        rows = sum(layer.rows for layer in (*self.layers, *self.abandoned))
        return rows / (len(self.layers) * (job.stop - job.exact))


class _Done(Exception):
    """K and V of the last layer are merged; its output is not wanted."""


class _Pieces:
    """Layers over any number of rows, in calls of as many as they take at once.

    Rows ascend, so what a piece's rows see of other pieces was computed before it.
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
        """``attend`` is told which of the rows a call is of."""
        return _joined(
            [
                self.layers.run(layer, rows[piece], state.of(piece), partial(attend, piece))
                for piece in self.of(len(rows))
            ]
        )

    def project(self, layer: int, rows: Tensor, state: HiddenState) -> LayerKV:
        """K and V of the rows alone; the state stays as it is."""
        found: list[LayerKV] = []

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            found.append(LayerKV(k, v))
            raise _Done

        for piece in self.of(len(rows)):
            with suppress(_Done):
                self.layers.run(layer, rows[piece], state.of(piece).copy(), attend)
        return LayerKV(torch.cat([kv.keys for kv in found]), torch.cat([kv.values for kv in found]))


T = TypeVar("T")


class _InStep:
    """Holds ranks together. Layers are collectives: a rank that stopped alone would leave the
    others waiting for it, so what fails on one is kept until all of them `meet`, and stop."""

    def __init__(self, layers: DecoderLayers) -> None:
        self._layers = layers
        self._error: Exception | None = None

    def alone(self, work: Callable[[], T], otherwise: Callable[[], T]) -> T:
        """``work``, of this rank only; ``otherwise`` where it failed, or something did before."""
        if self._error is None:
            try:
                return work()
            except Exception as error:  # noqa: BLE001 - raised when the ranks meet
                self._error = error
        return otherwise()

    def meet(self) -> None:
        """Raise on every rank what has failed on one."""
        if not self._layers.agree(self._error is None):
            raise self._error or KVCoreError("another rank could not go on with this blend")


class _Over(Exception):
    """The walk starts over, with more rows."""


class _Fewer(Exception):
    """The layer is worth running again with fewer rows."""

    def __init__(self, going: Tensor) -> None:
        self.going = going


class Fusor:
    """Blends prompts through one engine's layers. One owner; holds no state between blends.

    Each layer of a blend is a span of ``tracer``. ``ops`` work on the device of the KV; torch's
    where none are given.
    """

    def __init__(
        self, layers: DecoderLayers, tracer: Tracer | None = None, ops: FusionOps | None = None
    ) -> None:
        self.layers = layers
        self._pieces = _Pieces(layers)
        self.tracer = tracer or Tracer()
        self.ops = ops or TorchFusion()

    @torch.inference_mode()
    def blend(
        self,
        job: Job,
        placed: Placed,
        selector: Selector,
        budget: Budget,
        gate: Gate | None = None,
    ) -> BlendOutcome:
        """Make KV for positions [exact, stop) and write it. Blocks; see the module's picture.

        A ``gate`` may enlarge the ratio, and once it has seen how errors grow, start over.
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
        """Run every layer over a prompt [rows] of which nothing is cached: what comes out of the
        last. Nothing is written; what a blend's layers cost is measured with it."""
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
        """Walk through all layers; False where the gate wants to start over."""
        state = self._pieces.embed(walk.job.tokens[rows])
        for layer in range(self.layers.layers):
            try:
                rows, state, timing = walk.layer(layer, rows, state)
            except _Over:
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
    def look(self, job: Job, placed: Placed, sharpness: float) -> Tensor:
        """[tokens] float32: how the question looks at the cache as it is, summed over layers.

        All fresh rows are run, the question's are those behind ``stop`` (all of them where the
        prompt ends there). Additive over ranks, and added up here.
        """
        rows = torch.cat([job.fresh, job.question])
        asking = rows >= job.stop if len(job.question) else torch.ones_like(rows, dtype=torch.bool)
        mass = torch.zeros(len(job.tokens), device=job.tokens.device)
        if not len(rows):
            return mass
        step = _InStep(self.layers)
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


def _landed(step: _InStep, placed: Placed, layer: int) -> LayerKV:
    """The cached KV of a layer, once it is there on every rank."""
    kv = step.alone(lambda: placed.layer(layer), lambda: None)
    step.meet()
    assert kv is not None
    return kv


def _zeros(queries: Tensor, values: Tensor) -> Tensor:
    """[rows, heads, v_dim]: an attention's answer without one."""
    return queries.new_zeros(*queries.shape[:2], values.shape[2])


class _Walk:
    """One blend on its way through the layers."""

    def __init__(
        self,
        pieces: _Pieces,
        ops: FusionOps,
        job: Job,
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
        self.step = _InStep(pieces.layers)
        self._watch: GateMonitor | None = None

    def watch(self, gate: Gate | None) -> None:
        """Have a gate look at the walk from here on."""
        self._watch = None
        if gate is not None:
            self._watch = GateMonitor(gate, self.budget, self.layers.layers)

    def _judge(self, seen: Seen) -> None:
        """Show the gate a layer. Raises _Over where it wants rows that have left already."""
        watch = self._watch
        if watch is None:
            return
        over = watch.see(seen)
        if watch.verdict is not None and watch.verdict not in self.verdicts[-1:]:
            self.verdicts.append(watch.verdict)
        if over:
            self.budget = watch.budget
            self.watch(watch.next_gate)
            raise _Over

    def layer(
        self, layer: int, rows: Tensor, state: HiddenState
    ) -> tuple[Tensor, HiddenState, LayerTiming]:
        """Run one layer over ``rows``; gives the rows and the state that go on."""
        started = time.monotonic()
        kv = _landed(self.step, self.placed, layer)
        landed = time.monotonic()
        if not len(rows):  # pure reuse without a gap: there is nothing to compute
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
        """(which rows go on [rows] bool, their state): decided inside the layer's one call."""
        attention = self.layers.attention[layer]
        last = layer == self.layers.layers - 1
        going = torch.empty(0)
        # Rows may leave at this layer, which is then run again from the state it began with.
        given = state.copy() if layer + 1 >= self.budget.full_layers and not last else state

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            nonlocal going
            going = self.going(layer, rows, k, v, kv)
            self._merge(layer, rows, LayerKV(k, v), kv)
            if last:
                raise _Done
            if int(going.sum()) < WORTH_A_SECOND_RUN * len(rows):
                raise _Fewer(going)
            return self._attend(q, rows, kv, attention)

        try:
            state = self.layers.run(layer, rows, state, attend).of(going)
        except _Done:  # nothing goes on from here
            pass
        except _Fewer as fewer:
            state = self._again(layer, rows[fewer.going], given.of(fewer.going), kv)
        return going, state

    def _in_pieces(
        self, layer: int, rows: Tensor, state: HiddenState, kv: LayerKV
    ) -> tuple[Tensor, HiddenState]:
        """`_at_once` for more rows than a call takes: K and V of all first, then who goes on."""
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
        """[rows] bool: which rows the next layer computes too."""
        candidate = self.is_chunk[rows]
        chunk_rows = rows[candidate]
        seen = Seen(
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
        self._judge(seen)
        kept = narrow(
            self.selector,
            self.budget,
            seen,
            self.layers.layers,
            len(self.job.chunks),
            self.ops.keep_top,
        )
        return ~candidate | torch.isin(rows, kept)
