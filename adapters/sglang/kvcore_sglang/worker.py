"""The data plane inside an SGLang rank: it carries out orders around the engine's forward.

    load   start ──▶ wait_layer(0) ... wait_layer(n - 1) ──▶ finish       (layer by layer)
    blend  made before the forward, while its loads arrive
    save   submitted at the insert; its pages stay locked in the tree until its copy has ended

A load from host memory that fails is tried again before anything is computed from it. It is
reported once its result is final.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from kvcore.connector.forward_timer import ForwardTimer
from kvcore.connector.fusion_messages import BlendOrder
from kvcore.connector.fusion_worker import FusionWorker, RefusingFusionWorker
from kvcore.connector.rank_guard import RankGuard
from kvcore.connector.worker import ATTEMPTS, Load, StepWorker
from kvcore.memory.device import Event
from kvcore.telemetry.rates import ForwardPart
from kvcore.transfer.graph import OpReport, Priority, RowError, TransferGraph
from kvcore.worker.lifecycle import RankParts
from kvcore_sglang.messages import Order


class WorkerConnector(StepWorker[str]):
    """The worker half of one rank.

    Two threads call it: the scheduler's, and the one that exchanges messages with the leader. The
    methods for loads, blends and forwards are for the scheduler's thread only.

    ``forward_stream`` is SGLang's stream for forwards, if it has one beside the current stream of
    the scheduler's thread. ``blends`` makes KV from stored chunks; None if the model cannot be
    blended. ``clock`` times this rank's forwards; None if they are not timed.
    """

    attempts = ATTEMPTS

    def __init__(
        self,
        parts: RankParts,
        forward_stream: object = None,
        blends: FusionWorker | RefusingFusionWorker | None = None,
        clock: ForwardTimer[Sequence[ForwardPart]] | None = None,
    ) -> None:
        super().__init__(parts, blends)
        streams = () if forward_stream is None else (parts.worker.stream_of(forward_stream),)
        self._forward_streams = streams
        self._clock = clock
        self._started: dict[int, Load[str]] = {}
        self.guard = RankGuard(self, self.open_loads)

    # -- orders -----------------------------------------------------------------------------

    def carry_out(self, order: Order) -> None:
        """Carry out an order without its loads. Does I/O only to open tiers and invalidate slots.

        After an error of kvcore on this rank, graphs are refused, and the leader stops. Raises
        TransferError as `RankGuard.run` does.
        """
        left = deque(order.graphs)

        def upkeep() -> None:
            self.tend_tiers(order)
            self._cancel(order.cancel)

        def submit() -> None:
            together = self._worker.wave()
            while left:
                save = left[0].priority is Priority.SAVE
                self._submit(left[0], together if save else None)
                left.popleft()

        self.guard.run("an order", upkeep, None, always=True)
        self.guard.run("an order", submit, None)
        self._refuse(left, RowError.REFUSED)

    def _mark(self) -> Event | None:
        """Return an event after what the scheduler's thread and the forwards were given so far."""
        return self._worker.mark(*self._forward_streams)

    def start_loads(self, graphs: Sequence[TransferGraph]) -> None:
        """Start to copy into the engine's pages. Blocks as `_submit` does."""
        for graph in graphs:
            self._started[graph.graph_id] = self._expect(graph)
        together = self._worker.wave()
        for graph in graphs:
            self._submit(graph, together)

    # -- loads ------------------------------------------------------------------------------

    def wait_layer(self, graph_ids: Iterable[int], layer: int) -> None:
        """Let the forward wait until these loads have copied all layers up to ``layer``.

        A copy that failed is tried again first.
        """
        self._wait_layer([self._started[graph_id] for graph_id in graph_ids], layer)

    def finish(self, graph_ids: Iterable[int]) -> bool:
        """Block the host until these loads have ended; return True if all succeeded.

        Call exactly once for each load that was started.
        """
        loads = [self._started.pop(graph_id) for graph_id in graph_ids]
        for load in loads:
            self._settle(load)
        return not any(load.failed for load in loads)

    def blend(self, orders: Sequence[BlendOrder], landed: Callable[[int], None]) -> bool:
        """Make the KV of these orders in the engine's pages; return True if all of it is right.

        ``landed(layer)`` lets the current stream wait until the batch's loads have copied a layer.
        Call right before the forward.
        """
        self._begin_blends(self._blends, orders)
        unfilled = self._blends.run(landed)
        return not self._lose(orders) and not unfilled

    # -- forwards ---------------------------------------------------------------------------

    @property
    def times_forwards(self) -> bool:
        """True if forwards of this rank are timed."""
        return self._clock is not None

    @contextlib.contextmanager
    def forward(self, parts: Sequence[ForwardPart]) -> Iterator[None]:
        """Time the block, which is a forward over these parts that waits for no load."""
        if self._clock is None:
            yield
            return
        self._clock.start(parts)
        yield
        self._clock.stop()

    def take_forwards(self) -> list[tuple[Sequence[ForwardPart], float]]:
        """Return (parts, seconds) of forwards that ended since the last call. Does not block."""
        return [] if self._clock is None else self._clock.take()

    # -- reports ----------------------------------------------------------------------------

    def wait_report(self, timeout: float) -> bool:
        """Block until a report can be polled, at most ``timeout`` seconds; return True if so."""
        return self._worker.wait_report(timeout)

    def wait_graph(self, timeout: float) -> bool:
        """Block until a graph with unpolled reports has ended, at most ``timeout`` seconds."""
        return self._worker.wait_graph(timeout)

    def poll(self) -> list[OpReport]:
        """Return the reports that were passed on since the last call. Blocks as `_submit` does."""
        self._collect()
        return self._take_reports()
