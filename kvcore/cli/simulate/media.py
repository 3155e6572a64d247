"""The media between leader and pages: they move nothing, and take as long as their rates say.

Each path is one server, as a path of the transfer engine is: of the operations that are ready the
one of best priority runs, and the next when it ends. Time is a number that `Clock` moves.
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
    """What happens when. Events of one time happen in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """``call`` happens ``seconds`` from now."""
        heapq.heappush(self._events, (self.now + seconds, next(self._order), call))

    def run_until(self, when: float) -> None:
        """Let everything happen that is due by ``when``; it is ``when`` then."""
        while self._events and self._events[0][0] <= when:
            self.now, _, call = heapq.heappop(self._events)
            call()
        self.now = when

    def run_out(self) -> None:
        """Let everything happen."""
        while self._events:
            self.now, _, call = heapq.heappop(self._events)
            call()


class _Run:
    """A graph in flight: for each op how many it waits for, and which wait for it."""

    __slots__ = ("behind", "graph", "missing")

    def __init__(self, graph: TransferGraph) -> None:
        self.graph = graph
        self.missing = [len(op.deps) for op in graph.ops]
        self.behind: dict[int, list[TransferOp]] = {}
        for op in graph.ops:
            for dep in op.deps:
                self.behind.setdefault(dep, []).append(op)


class Media:
    """The manager's transport in a simulation. ``complete`` takes the report of each op.

    ``block_bytes`` are moved a row; layers of a load by layers share them evenly.
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

    # -- what the manager asks of a transport ---------------------------------------------------

    def submit(self, graph: TransferGraph, lane: Lane | None = None) -> None:
        assert lane is None, "nothing here sends messages"
        run = _Run(graph)
        for op in graph.ops:
            if not op.deps:
                self._queue(run, op)

    def cancel(self, graph_id: int) -> None:
        """Nothing is late here: every load ends as its rates say."""

    def forget(self, tier: str, slots: Sequence[SlotRun]) -> None:
        """There are no bytes to make unreadable."""

    def wait_report(self, timeout: float) -> bool:
        """Reports are delivered as they happen."""
        return False

    def poll(self) -> Sequence[OpReport]:
        return ()

    # -- the servers ----------------------------------------------------------------------------

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
