"""The data plane of one rank: carries out orders around the engine's forward.

    load   start ──▶ wait_layer(0) ... wait_layer(n - 1) ──▶ finish       (layer by layer)
    blend  before the forward, while its loads land
    save   submit at the insert; its pages stay locked in the tree until its copy has ended

A load from host memory that fails is tried again before anything is computed from it. What became
of it is reported once that is certain.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager

from kvcore.connector.forward_timer import ForwardClock
from kvcore.connector.fusion_messages import BlendOrder
from kvcore.connector.fusion_worker import FusionWorker, RefusingFusionWorker
from kvcore.connector.worker import ATTEMPTS, RETRY_WAIT_S, Load, StepWorker
from kvcore.telemetry.rates import ForwardPart
from kvcore.transfer.graph import OpReport, TransferGraph
from kvcore.worker import KVWorker
from kvcore.worker.lifecycle import RankParts
from kvcore_sglang.messages import Order

Fence = Callable[[], AbstractContextManager[object]]
"""Context in which what is submitted is ordered after the engine's work so far."""


class WorkerConnector(StepWorker[str]):
    """The worker half of one rank. Thread-safe: called from the scheduler's thread and from the one
    that speaks to the leader.

    ``blends`` make KV of stored chunks, if that is right for this rank's model. ``clock`` times
    this rank's forwards, if they are to be timed.
    """

    attempts = ATTEMPTS

    def __init__(
        self,
        parts: RankParts,
        fence: Fence = contextlib.nullcontext,
        blends: FusionWorker | RefusingFusionWorker | None = None,
        clock: ForwardClock[Sequence[ForwardPart]] | None = None,
    ) -> None:
        super().__init__(parts, blends)
        self._fence = fence
        self._clock = clock
        self._started: dict[int, Load[str]] = {}

    # -- orders -----------------------------------------------------------------------------

    def carry_out(self, order: Order) -> None:
        """Carry out all of an order but its loads. Does I/O only to open tiers, or forget slots."""
        self._tend_tiers(order)
        self._cancel(order.cancel)
        if order.graphs:
            with contextlib.nullcontext() if order.now else self._fence():
                for graph in order.graphs:
                    self._submit(graph)

    def start_loads(self, graphs: Sequence[TransferGraph]) -> None:
        """Begin copying into the engine's pages. Does not block."""
        for graph in graphs:
            self._started[graph.graph_id] = self._expect(graph)
        with self._fence():
            for graph in graphs:
                self._submit(graph)

    # -- loads ------------------------------------------------------------------------------

    def wait_layer(self, graph_ids: Iterable[int], layer: int) -> None:
        """Block until these loads have copied ``layer``, tried again if the copy failed."""
        self._wait_layer([self._started[graph_id] for graph_id in graph_ids], layer)

    def finish(self, graph_ids: Iterable[int]) -> bool:
        """Block until these loads write no more; return True if all of them landed. Call once for
        each load that was started."""
        loads = [self._started.pop(graph_id) for graph_id in graph_ids]
        for load in loads:
            self._settle(load)
        return not any(load.failed for load in loads)

    def blend(self, orders: Sequence[BlendOrder], landed: Callable[[int], None]) -> bool:
        """Make the KV of these orders in the engine's pages; return True if all of it is good.
        Blocks.

        ``landed(layer)`` blocks until the batch's loads hold a layer. Call right before the
        forward.
        """
        self._begin_blends(self._blends, orders)
        unfilled = self._blends.run(landed)
        return not self._lose(orders) and not unfilled

    # -- forwards ---------------------------------------------------------------------------

    @property
    def times_forwards(self) -> bool:
        """Whether forwards of this rank are timed."""
        return self._clock is not None

    @contextlib.contextmanager
    def forward(self, parts: Sequence[ForwardPart]) -> Iterator[None]:
        """The block is a forward over these parts, in which nothing is waited for. Scheduler's
        thread only."""
        if self._clock is None:
            yield
            return
        self._clock.start(parts)
        yield
        self._clock.stop()

    def take_forwards(self) -> list[tuple[Sequence[ForwardPart], float]]:
        """(parts, seconds) of forwards that ended since the last call. Does not block."""
        return [] if self._clock is None else self._clock.take()

    # -- reports ----------------------------------------------------------------------------

    def wait_report(self, timeout: float) -> bool:
        """Block until an op has ended, at most ``timeout`` seconds."""
        return self._worker.wait_report(timeout)

    def wait_graph(self, timeout: float) -> bool:
        """Block until a graph has ended that was not polled since, at most ``timeout`` seconds."""
        return self._worker.wait_graph(timeout)

    def poll(self) -> list[OpReport]:
        """Return the reports of the ops that ended since the last call. Does not block."""
        self._collect()
        return self._take_reports()

    def quiesce(self, timeout: float) -> bool:
        """Block until this rank copies neither from nor to the engine's pages; return False after
        ``timeout`` seconds. A medium that hangs has no page."""
        assert isinstance(self._worker, KVWorker)
        limit = time.monotonic() + timeout
        while self._worker.engine.on_device:
            if time.monotonic() >= limit:
                return False
            time.sleep(RETRY_WAIT_S / 10)
        return True
