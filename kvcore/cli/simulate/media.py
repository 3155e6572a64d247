"""Simulated media between leader and pages: they copy nothing, and take as long as their rates say.

Each path serves one operation at a time, like a path of the transfer engine. When one ends, the
ready operation with the best priority is next. Time is a number that `Clock` advances.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Mapping, Sequence

from kvcore.index.slots import SlotRun
from kvcore.manager.base import Lane
from kvcore.telemetry.rates import TierRates
from kvcore.transfer.graph import OpReport, Path, TransferGraph, TransferOp

__all__ = ["Clock", "Media"]


class Clock:
    """A queue of events by time. Events of equal time happen in the order of `after` calls."""

    def __init__(self) -> None:
        self.now = 0.0
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Call ``call`` in ``seconds`` from now."""
        heapq.heappush(self._events, (self.now + seconds, next(self._order), call))

    def run_until(self, when: float) -> None:
        """Run all events that are due by ``when``, and set the time to ``when``."""
        while self._events and self._events[0][0] <= when:
            self.now, _, call = heapq.heappop(self._events)
            call()
        self.now = when

    def run_out(self) -> None:
        """Run all events."""
        while self._events:
            self.now, _, call = heapq.heappop(self._events)
            call()


class _Run:
    """A graph in flight: for each op, how many ops it waits for, and which wait for it."""

    __slots__ = ("behind", "graph", "missing")

    def __init__(self, graph: TransferGraph) -> None:
        self.graph = graph
        self.missing = [len(op.deps) for op in graph.ops]
        self.behind: dict[int, list[TransferOp]] = {}
        for op in graph.ops:
            for dep in op.deps:
                self.behind.setdefault(dep, []).append(op)


class Media:
    """The manager's transport in a simulation. ``complete`` receives the report of each op.

    A row moves ``block_bytes`` bytes. The layers of a load by layers share them evenly.
    """

    def __init__(
        self,
        clock: Clock,
        rates: Mapping[Path, TierRates],
        block_bytes: int,
        complete: Callable[[OpReport], None],
    ) -> None:
        self._clock = clock
        self._rates = dict(rates)
        self._block_bytes = block_bytes
        self._complete = complete
        self._order = itertools.count()
        self._ready: dict[Path, list[tuple[int, int, _Run, TransferOp]]] = {p: [] for p in Path}
        self._busy: set[Path] = set()

    # -- the Transport protocol -----------------------------------------------------------------

    def submit(self, graph: TransferGraph, lane: Lane | None = None) -> None:
        assert lane is None, "nothing here sends messages"
        run = _Run(graph)
        for op in graph.ops:
            if not op.deps:
                self._queue(run, op)

    def cancel(self, graph_id: int) -> None:
        """Do nothing, because no load misses its deadline here."""

    def invalidate(self, tier: str, slots: Sequence[SlotRun]) -> None:
        """Do nothing, because there are no bytes to make unreadable."""

    def wait_report(self, timeout: float) -> bool:
        """Return False: reports are delivered as they happen."""
        return False

    def poll(self) -> Sequence[OpReport]:
        return ()

    # -- the paths ------------------------------------------------------------------------------

    def _queue(self, run: _Run, op: TransferOp) -> None:
        entry = (run.graph.priority, next(self._order), run, op)
        heapq.heappush(self._ready[op.path], entry)
        if op.path not in self._busy:
            self._serve(op.path)

    def _serve(self, path: Path) -> None:
        if not self._ready[path]:
            self._busy.discard(path)
            return
        self._busy.add(path)
        _, _, run, op = heapq.heappop(self._ready[path])
        latency, byte = self._rates[path]
        seconds = latency + byte * op.rows.size * self._block_bytes
        self._clock.after(seconds, lambda: self._ended(run, op))

    def _ended(self, run: _Run, op: TransferOp) -> None:
        for waiting in run.behind.get(op.op_id, ()):
            run.missing[waiting.op_id] -= 1
            if not run.missing[waiting.op_id]:
                self._queue(run, waiting)
        self._serve(op.path)
        self._complete(OpReport(run.graph.graph_id, op.op_id))
