"""The worker's half of fusion: carries out a step's blends on one rank, before the forward.

begin    starts to copy the chunks into the pages of the request
run      allocates all that a blend needs, and agrees with the other ranks that it can begin;
         then layer by layer: wait, recompute, write to the engine's pages

If a blend fails, the engine computes the request: `run` returns the pages that were not filled.
`PromisedFusionWorker` is for engines in which a promise of KV cannot be taken back.

A rank that fails where others may wait for it in a collective raises RankLostError, which ends the
engine (`kvcore.fusion.decoder.InStep`).
"""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import NamedTuple

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from kvcore.config import Config
from kvcore.connector.blend_clock import BlendClock
from kvcore.connector.fusion_messages import (
    FULL_LAYERS,
    BlendOrder,
    BlendReport,
    BlendTime,
    pages_made,
    slots_of,
)
from kvcore.errors import RankLostError, TransferError
from kvcore.fusion.decoder import DecoderLayers, HiddenState, InStep, LeaveLayer
from kvcore.fusion.fusor import BlendJob, BlendOutcome, Fusor
from kvcore.fusion.gate import Gate, GateAction
from kvcore.fusion.ops import FusionOps, Sample
from kvcore.fusion.placed import PlacedChunks, in_slots
from kvcore.fusion.plan import LayerKV
from kvcore.fusion.rope import Rope
from kvcore.fusion.select import Ratio, Selector
from kvcore.memory.device import Event
from kvcore.transfer.graph import OpReport, RowError
from kvcore.worker import KVWorker, refuse

__all__ = [
    "EngineLayers",
    "FusionWorker",
    "PromisedFusionWorker",
    "RefusingFusionWorker",
    "ServedRequest",
]

PROFILED_ROWS = (16, 64, 256)
"""Numbers of rows that the layers are timed with at start."""

_log = logging.getLogger("kvcore.fusion")


class ServedRequest(NamedTuple):
    """The request that layers are run for.

    ``pages`` [1, n] are the engine's. ``lora`` is the engine's number of the adapter, 0 for none.
    """

    request_id: str
    pages: Tensor
    page_tokens: int
    lora: int = 0


class EngineLayers(DecoderLayers):
    """An engine's decoder on one rank, and its pages. Model's thread only."""

    @abstractmethod
    def serving(self, served: ServedRequest) -> AbstractContextManager[None]:
        """Return a context in which layers run for one request."""

    @abstractmethod
    def write(self, layer: int, kv: LayerKV, slots: Tensor) -> None:
        """Write K and V [rows, kv_heads, dim] to the engine's ``slots`` [rows] of a layer."""


class _Ready(NamedTuple):
    """An order for which this rank has all memory. Layers run for its request until it is left."""

    job: BlendJob
    placed: PlacedChunks
    clock: BlendClock


def _well(well: bool) -> bool:
    return well


def _lost(error: Exception) -> RankLostError:
    """Return what ends an engine whose ranks may wait for one that has failed between meetings."""
    return RankLostError(
        f"this rank failed beside a blend ({type(error).__name__}: {error}) while other ranks may "
        "wait for it; the engine must be restarted"
    )


class _Meetings:
    """Keeps a rank in step with the others: all of them *meet* (agree) before each blend.

    ``agree`` is `DecoderLayers.agree`, and ``collective`` says whether there are other ranks. Every
    rank makes one call for each order of a step. The others would wait for ever for a rank that did
    not.
    """

    def __init__(self, agree: Callable[[bool], bool], *, collective: bool) -> None:
        self._agree = agree
        self._collective = collective
        self._met: list[BlendOrder] = []  # kept, so that no other order gets the id of one

    def begin(self) -> None:
        """Begin a step."""
        self._met.clear()

    def end(self, orders: Iterable[BlendOrder]) -> None:
        """End the part of a step in which ranks meet for ``orders``: nothing is left of them."""
        self._met = list(orders)

    def agree(self, order: BlendOrder, well: bool) -> bool:
        """Return True if every rank can carry out the order. A collective."""
        self.note([order])
        return self.ask(well)

    def ask(self, well: bool) -> bool:
        """Return True if every rank is well. A collective.

        Raises RankLostError if that cannot be known: the others may wait for this one.
        """
        try:
            return self._agree(well)
        except Exception as error:
            if not self._collective:
                raise
            raise _lost(error) from error

    def note(self, orders: Iterable[BlendOrder]) -> None:
        """Record that this rank will meet the others for these orders."""
        self._met += orders

    def left(self, orders: Iterable[BlendOrder]) -> list[BlendOrder]:
        """Return the orders for which this rank has not met the others.

        A request may have another order in a later step, so orders are told apart as objects.
        """
        met = {id(order) for order in self._met}
        return [order for order in orders if id(order) not in met]

    def decline(self, orders: Iterable[BlendOrder]) -> None:
        """Tell the other ranks that this one cannot carry out those orders that are left."""
        for order in self.left(orders):
            self.agree(order, well=False)


class RefusingFusionWorker:
    """The fusion worker of a rank that cannot blend: the engine computes. The log says why.

    ``agree`` is `DecoderLayers.agree` of the engine's ranks; the default is that of a rank alone.
    """

    def __init__(self, page_tokens: int, agree: Callable[[bool], bool] = _well) -> None:
        self._page_tokens = page_tokens
        self._orders: list[BlendOrder] = []
        self.meets_others = agree is not _well and getattr(agree, "collective", True)
        self._meetings = _Meetings(agree, collective=self.meets_others)

    def begin(
        self, orders: Sequence[BlendOrder], mark: Callable[[], Event | None]
    ) -> list[OpReport]:
        """Refuse the chunks' graphs, and return their reports."""
        self._meetings.begin()
        self._orders += orders
        graphs = [chunk.graph for order in orders for chunk in order.chunks]
        return [report for graph in graphs for report in refuse(graph, RowError.CANCELLED)]

    def run(self, landed: Callable[[int], None]) -> list[int]:
        """Return the pages of every order: none was filled. A collective."""
        self._meetings.decline(self._orders)
        return [page for order in self._orders for page in pages_made(order, self._page_tokens)]

    def take_reports(self) -> list[BlendReport]:
        """Return and forget a failure for each order."""
        orders, self._orders = self._orders, []
        return [BlendReport(order.request_id, ok=False) for order in orders]

    def take_profile(self) -> list[tuple[int, float]]:
        """Return nothing: there are no layers to time."""
        return []

    def take_times(self) -> list[BlendTime]:
        """Return nothing: there are no blends."""
        return []

    def decline(self, orders: Sequence[BlendOrder]) -> None:
        """Tell the other ranks that this one does not blend. A collective; ends the step."""
        self._meetings.decline(orders)
        self._meetings.end(orders)


class FusionWorker:
    """Carries out blends on one rank. Called from the model runner's thread only."""

    def __init__(
        self,
        config: Config,
        worker: KVWorker,
        layers: EngineLayers,
        ropes: Sequence[Rope | None],
        selector: Selector,
        page_tokens: int,
        ops: FusionOps,
    ) -> None:
        self._worker = worker
        self._layers = layers
        self._ops = ops
        self._fusor = Fusor(layers, worker.tracer, ops)
        self._ropes = ropes
        self._selector = selector
        self._spread = config.fusion.spread
        bound = config.fusion.gate
        self._gate = None if bound is None else Gate(bound)
        self._page_tokens = page_tokens
        self._view = worker.groups[0].view
        self._device = self._view.tensors[0].device
        self._orders: list[tuple[BlendOrder, bool]] = []  # whether all its copies were begun
        self._reports: list[BlendReport] = []
        self._timed: deque[tuple[BlendTime, BlendClock]] = deque()
        self._meetings = _Meetings(layers.agree, collective=layers.collective)
        self._profile: list[tuple[int, float]] = []

    @property
    def meets_others(self) -> bool:
        """True if other ranks may wait for this one before a blend."""
        return self._layers.collective

    def warm_up(self, *, timed: bool) -> None:
        """Compile what blends use, and time the layers if ``timed``. Call before the engine serves.

        A collective: a rank that could not build its worker would be waited for. So the ranks agree
        first that each of them has a fusion worker.
        """
        if self._ops.compiles:
            self._prepare()
        if timed:
            self._profile = self._profiled()

    def begin(
        self, orders: Sequence[BlendOrder], mark: Callable[[], Event | None]
    ) -> list[OpReport]:
        """Start to copy chunks into their requests' pages; return the reports of refused graphs.

        Copies begin after the event that ``mark`` returns: a step that is under way may still use
        the pages. Does not raise: a rank that fails here must still meet the others in `run`.
        """
        refused: list[OpReport] = []
        self._meetings.begin()
        for order in orders:
            waiting = list(order.chunks)
            try:
                together, after = self._worker.wave(), mark()
                slots = slots_of(order, self._page_tokens)
                while waiting:
                    graph = waiting[0].into(slots)
                    refused += self._worker.submit(graph, together, after)
                    del waiting[0]
            except Exception:  # noqa: BLE001 - told to the other ranks in `run`
                _log.exception("chunks could not be copied request=%s", order.request_id)
            for chunk in waiting:
                refused += refuse(chunk.graph, RowError.CANCELLED)
            self._orders.append((order, not waiting))
        return refused

    def run(self, landed: Callable[[int], None]) -> list[int]:
        """Carry out the orders, and return the pages that failed blends left unfilled.

        Blocks. ``landed(layer)`` blocks until the step's loads into the engine's own pages have
        delivered a layer. Raises RankLostError if this rank fails where others may wait for it.
        """
        failed: list[int] = []
        orders, self._orders = self._orders, []
        for order, begun in orders:
            if not self._done(order, begun, landed):
                self._reports.append(BlendReport(order.request_id, ok=False))
                failed += pages_made(order, self._page_tokens)
            self._follow(order)
        return failed

    def _follow(self, order: BlendOrder) -> None:
        """Let what the current stream writes next be written after the order's copies.

        Blocks the host until they were issued.
        """
        for chunk in order.chunks:
            self._worker.follow(chunk.graph.graph_id)

    def decline(self, orders: Sequence[BlendOrder]) -> None:
        """Tell the other ranks that this one does not carry out the rest of a step's orders.

        For a rank whose other parts have failed: it still has to meet the others, once for each
        order. A collective; ends the step.
        """
        self._meetings.decline(orders)
        self._meetings.end(orders)

    @torch.inference_mode()
    def _done(self, order: BlendOrder, begun: bool, landed: Callable[[int], None]) -> bool:
        """Return True if the order was carried out on every rank. A collective.

        Layers are collectives, so either all ranks run them or none.
        """
        with ExitStack() as block:
            ready = self._ready(order, begun, landed, block)
            if not self._meetings.agree(order, ready is not None) or ready is None:
                return False
            budget = Ratio(order.ratio, self._spread, FULL_LAYERS)
            try:
                job, placed, clock = ready
                outcome = self._fusor.blend(job, placed, self._selector, budget, self._gate)
            except RankLostError:
                _log.exception("this rank is out of step with the others: the engine must end")
                raise
            except Exception:  # noqa: BLE001 - foreign layers and selectors: the engine computes
                _log.exception("blend failed, computing instead request=%s", order.request_id)
                return False
        self._report(order, job, outcome, clock if _stopped(clock) else None)
        return True

    def _ready(
        self,
        order: BlendOrder,
        begun: bool,
        landed: Callable[[int], None],
        block: ExitStack,
    ) -> _Ready | None:
        """Allocate all that a blend needs, and serve its request until ``block`` is left.

        Returns None if this rank cannot.
        """
        if not begun:
            return None
        try:
            clock = BlendClock(self._worker.device)
            job = _job(order, self._device)
            placed = self._placed(order, job, landed, clock)
            block.enter_context(self._layers.serving(self._served(order)))
        except Exception:  # noqa: BLE001 - told to the other ranks
            _log.exception("blend cannot begin, computing instead request=%s", order.request_id)
            return None
        return _Ready(job, placed, clock)

    def take_reports(self) -> list[BlendReport]:
        """Return and forget the results of the blends since the last call."""
        reports, self._reports = self._reports, []
        return reports

    def take_profile(self) -> list[tuple[int, float]]:
        """Return and forget (rows, seconds) of the layers, timed by `warm_up`."""
        profile, self._profile = self._profile, []
        return profile

    @torch.inference_mode()
    def _prepare(self) -> None:
        """Compile what blends use, before the engine captures graphs and serves. A collective.

        Writes to no page. If it fails, operations are compiled when they are first used.
        """
        rows = min(PROFILED_ROWS)
        try:
            with self._nobody(), InStep(self._layers).lasting():
                positions = torch.arange(rows, device=self._device)
                state = HiddenState(self._layers.embed(torch.zeros_like(positions)), None)

                def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                    sample = Sample(
                        q, LayerKV(k, v), self._layers.attention, self._ropes, self._view
                    )
                    self._ops.prepare(sample, self._worker.ops)
                    raise LeaveLayer

                with suppress(LeaveLayer):
                    self._layers.run(0, positions, state, attend)
        except RankLostError:
            raise
        except Exception:  # noqa: BLE001 - foreign layers: the engine must start all the same
            _log.exception("the operations of blends could not be compiled yet")

    @torch.inference_mode()
    def _profiled(self) -> list[tuple[int, float]]:
        """Time the layers over some rows with an empty context. A collective; writes nothing.

        The first run is not counted because the layers may compile something. If the layers fail
        here, the controller keeps its estimates, and blends fail one by one.
        """
        try:
            with self._nobody(), InStep(self._layers).lasting():
                self._seconds(PROFILED_ROWS[0])
                return [(rows, self._seconds(rows)) for rows in PROFILED_ROWS]
        except RankLostError:
            raise
        except Exception:  # noqa: BLE001 - foreign layers: the engine must start all the same
            _log.exception("the model's layers could not be timed")
            return []

    def _nobody(self) -> AbstractContextManager[None]:
        """Serve no request."""
        nowhere = torch.zeros(1, 1, dtype=torch.int64, device=self._device)
        return self._layers.serving(
            ServedRequest("profile", nowhere, self._view.layout.page_tokens)
        )

    def _seconds(self, rows: int) -> float:
        started = time.perf_counter()
        self._fusor.compute(torch.zeros(rows, dtype=torch.int64, device=self._device))
        self._worker.device.synchronize()
        return time.perf_counter() - started

    def _placed(
        self,
        order: BlendOrder,
        job: BlendJob,
        landed: Callable[[int], None],
        clock: BlendClock,
    ) -> PlacedChunks:
        slots = slots_of(order, self._page_tokens)
        made = slice(order.exact, order.stop)
        written = self._worker.device.upload(slots[made])

        def wait(layer: int) -> None:
            with clock.waiting():
                landed(layer)
                for chunk in order.chunks:
                    self._worker.wait_layer(chunk.graph.graph_id, layer)

        def sink(layer: int, kv: LayerKV) -> None:
            self._layers.write(layer, LayerKV(kv.keys[made], kv.values[made]), written)

        places = in_slots(slots, 0, order.readable)
        for chunk in order.chunks:
            stop = chunk.position + chunk.length
            places += in_slots(slots, chunk.position, stop, chunk.distance)
        return PlacedChunks(
            len(job.tokens),
            self._view,
            places,
            self._ropes,
            wait,
            sink,
            self._worker.ops,
            self._ops,
            again=self._selector.needs_question,
            over=self._gate is not None,
        )

    def _served(self, order: BlendOrder) -> ServedRequest:
        pages = self._worker.device.upload(np.array([self._pages(order)], dtype=np.int64))
        return ServedRequest(order.request_id, pages, self._view.layout.page_tokens, order.lora)

    def _pages(self, order: BlendOrder) -> list[int]:
        """Return the pages of the order's request in the memory.

        They are smaller than the scheduler's pages if the engine's attention needs that.
        """
        per_page = self._page_tokens // self._view.layout.page_tokens
        pages = np.asarray(order.pages, dtype=np.int64)[:, None] * per_page + np.arange(per_page)
        found: list[int] = pages.ravel().tolist()
        return found

    def take_times(self) -> list[BlendTime]:
        """Return and forget the times of blends that the device has ended. Does not block.

        A blend that started over has none: it says nothing about others.
        """
        found: list[BlendTime] = []
        while self._timed and (seconds := self._timed[0][1].seconds()) is not None:
            time, _ = self._timed.popleft()
            found.append(replace(time, seconds=seconds))
        return found

    def _report(
        self, order: BlendOrder, job: BlendJob, outcome: BlendOutcome, clock: BlendClock | None
    ) -> None:
        timings = outcome.layers + outcome.abandoned
        later = [t.rows for t in outcome.layers[FULL_LAYERS:]]
        verdicts = outcome.verdicts
        report = BlendReport(
            order.request_id,
            share=outcome.share(job),
            rows=job.stop - job.exact,
            kept=round(sum(later) / max(len(later), 1)),
            ratio=verdicts[-1].ratio if verdicts else order.ratio,
            verdicts=[verdict.action.value for verdict in verdicts],
            reason=verdicts[-1].reason if verdicts else "",
            wait_s=sum(t.wait_s for t in timings),
            compute_s=sum(t.compute_s for t in timings),
            look_s=outcome.look_s,
        )
        self._reports.append(report)
        if clock is not None and set(report.verdicts) <= {GateAction.GO_ON.value}:
            looked = outcome.looked
            time = BlendTime(order.request_id, report.rows, report.kept, order.exact, 0.0, looked)
            self._timed.append((time, clock))
        _log.debug(
            "blend request=%s tokens=%d..%d chunks=%d share=%.3f wait_s=%.4f compute_s=%.4f "
            "look_s=%.4f",
            order.request_id,
            order.exact,
            order.stop,
            len(order.chunks),
            report.share,
            report.wait_s,
            report.compute_s,
            report.look_s,
        )


class PromisedFusionWorker(FusionWorker):
    """Makes KV that the engine already counts on: it cannot learn that a blend has failed.

    The ranks first agree whether their chunks have arrived. If a blend cannot be made, the same
    layers compute all of its tokens exactly.
    """

    def carry_out(self, arrived: Callable[[BlendOrder], bool]) -> None:
        """Make the KV of every order. Blocks.

        ``arrived`` waits for the chunks of an order and returns True if all are there. Raises
        TransferError, on every rank, if the layers cannot be run at all, and RankLostError if
        other ranks may wait for this one.
        """
        orders, self._orders = self._orders, []
        try:
            self._make(orders, arrived)
        except RankLostError:
            orders = []  # the engine ends: it gives no page to others
            raise
        finally:
            for order, _ in orders:
                self._follow(order)

    def _make(
        self, orders: Iterable[tuple[BlendOrder, bool]], arrived: Callable[[BlendOrder], bool]
    ) -> None:
        """Make the KV of every order. Raises as `carry_out` does."""
        try:
            self._meetings.note(order for order, _ in orders)
            for order, begun in orders:
                self._carry_out(order, self._there(order, arrived) and begun)
        except (RankLostError, TransferError):
            raise
        except Exception as error:
            if not self.meets_others:
                raise
            raise _lost(error) from error

    def decline(self, orders: Sequence[BlendOrder]) -> None:
        """Tell the other ranks that this one carries out none of a step's orders.

        They make no blend of the step then: it fails on every rank. Does nothing after `carry_out`,
        in which the ranks meet in any case. A collective; ends the step.
        """
        if self._meetings.left(orders):
            self._meetings.ask(False)  # the first order's chunks have not arrived
            self._meetings.ask(False)  # and it cannot be computed
        self._meetings.end(orders)

    def _there(self, order: BlendOrder, arrived: Callable[[BlendOrder], bool]) -> bool:
        try:
            return arrived(order)
        except Exception:  # noqa: BLE001 - told to the other ranks
            _log.exception("chunks did not arrive request=%s", order.request_id)
            return False

    def _quiet(self, order: BlendOrder) -> bool:
        """Return True if no copy of the order's chunks can come after what is written next."""
        try:
            self._follow(order)
        except Exception:  # noqa: BLE001 - told to the other ranks
            _log.exception("chunks may still be copied request=%s", order.request_id)
            return False
        return True

    def _carry_out(self, order: BlendOrder, well: bool) -> None:
        able = self._meetings.ask(well)
        if able and self._done(order, True, _landed):
            return
        bare = replace(order, chunks=[], ratio=0.0)
        if not self._done(bare, self._quiet(order), _landed):
            raise TransferError(
                f"tokens {order.exact}..{order.stop} of request {order.request_id} were promised "
                "and could be neither blended nor computed; the step's requests fail, because a "
                "wrong answer would be worse"
            )
        self._reports[-1] = BlendReport(order.request_id, ok=False, arrived=able)


def _stopped(clock: BlendClock) -> bool:
    """Stop a blend's clock. Return False on an error; the blend itself is unaffected."""
    try:
        clock.stop()
    except Exception:  # noqa: BLE001 - the other ranks have made the blend, and go on
        _log.exception("a blend could not be timed")
        return False
    return True


def _landed(layer: int) -> None:
    """Return at once: all loads have arrived before."""


def _job(order: BlendOrder, device: torch.device) -> BlendJob:
    tokens = torch.from_numpy(np.frombuffer(order.tokens, dtype="<u4").astype(np.int64))
    rows = [np.arange(c.position, c.position + c.length, dtype=np.int64) for c in order.chunks]
    offsets = [np.arange(c.length, dtype=np.int64) for c in order.chunks]
    empty = [np.empty(0, dtype=np.int64)]
    job = BlendJob(
        tokens,
        order.readable,
        order.stop,
        torch.from_numpy(np.concatenate(rows or empty)),
        torch.from_numpy(np.concatenate(offsets or empty)),
        device,
    )
    job.on_device  # noqa: B018 - uploaded before the ranks agree
    return job
