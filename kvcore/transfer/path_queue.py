"""The order in which the ops of a path start.

    order   priority ──▶ wave ──▶ first layer ──▶ arrival

A wave is a set of graphs that are waited for together, layer by layer: the loads of a step, or the
chunks of a blend. Layer 0 of all graphs of a wave is copied before layer 1 of any of them, and an
earlier wave before a later one.

Waves are numbered by a clock that also counts the bytes of the loads that were begun. A load that
no step waits for is a wave of its own, as late as if its own bytes had been moved first:

    the clock   ──┬─────────────────┬────────────────▶
      large load  └── 4 GiB ────────┼───────▶ its wave
      small load                    └ 8 MiB ▶ its wave: it overtakes what is left of the large one

So the load with the fewest bytes left goes first: the sum of all waits is then the smallest, where
taking turns would let loads of one size all end at the end. But none waits for ever: once as many
bytes as its own were moved by others, no later load overtakes it.

The saves of a named wave are those of one step, of a few blocks each. Those that wait together are
joined: the executor copies all of them at once, up to `COPY_BYTES`, for about the cost of one op.

A large save comes in several ops, each of at most `COPY_BYTES` where a row is not larger. So a step
that gives away the pages of a short save waits for two of them at most, and not for all that was
saved before: the short save is put first.

What is issued cannot be overtaken. So at most `SAVES_ISSUED` ops of saves a thread are issued and
have not ended, and at most `BYTES_ISSUED` of the loads that no step waits for. The loads of a named
wave are issued as soon as they are ready, and so is any op that was put first.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Mapping

from kvcore.transfer.active import ActiveGraph, OpState, TakenOp
from kvcore.transfer.executor import Executor, JoiningExecutor
from kvcore.transfer.graph import COPY_BYTES, Path, Priority, RowError

__all__ = ["BYTES_ISSUED", "SAVES_ISSUED", "PathQueue"]

SAVES_ISSUED = 2
"""The most ops of saves and spills that a thread has issued and that have not ended."""

BYTES_ISSUED = 2 * COPY_BYTES
"""The most bytes of loads without a wave that a thread has issued to a device and that have not
ended, unless it is one op: two ops, so that the device always has one while the host sees the end
of another."""

_AWAITED = -1
"""The priority of ops that somebody waits for."""

_Entry = tuple[int, int, int, int, int, int]
"""Priority, wave, first layer, arrival, id of the graph, and position of the op in it."""


class PathQueue:
    """The ready ops of one path. Guarded by ``lock``, the engine's.

    ``threads`` take ops from it, for the executor of the path. ``runs`` are the graphs in flight,
    by id. ``work`` is notified when an op may start.
    """

    def __init__(
        self,
        path: Path,
        threads: int,
        executors: Mapping[Path, Executor],
        runs: Mapping[int, ActiveGraph],
        lock: threading.Lock,
    ) -> None:
        self.work = threading.Condition(lock)
        self._path = path
        self._threads = threads
        self._runs = runs
        self._executors = executors
        self._entries: list[_Entry] = []
        self._saves_issued = 0
        self._bytes_issued = 0

    def push(self, run: ActiveGraph, position: int, arrival: int) -> None:
        """Queue an op that has become ready."""
        self._push(run, position, arrival, run.graph.priority.value)

    def put_first(self, run: ActiveGraph, position: int, arrival: int) -> None:
        """Queue a ready op once more, before all others. Its earlier entry becomes void."""
        run.awaited.add(position)
        self._push(run, position, arrival, _AWAITED)

    def _push(self, run: ActiveGraph, position: int, arrival: int, priority: int) -> None:
        layers = run.graph.ops[position].layers
        rank = priority, run.wave, 0 if layers is None else layers.start, arrival
        heapq.heappush(self._entries, (*rank, run.graph.graph_id, position))
        self.work.notify()

    def take(self) -> list[TakenOp]:
        """Take the first op, and the saves of its wave that wait with it; none if it must wait.

        A thread must end what was taken, so all of them are running at once, or none.
        """
        taken = self._first_ones()
        for op in taken:
            op.run.states[op.position] = OpState.RUNNING
        return taken

    def _first_ones(self) -> list[TakenOp]:
        first = self._first()
        if first is None or not self._may_start(first):
            return []
        heapq.heappop(self._entries)
        taken = [self._taken(*first[-2:], counted=True)]
        run = taken[0].run
        joins = isinstance(self._executors[self._path], JoiningExecutor) and not run.alone
        if not joins or run.graph.priority is not Priority.SAVE:
            return taken
        nbytes = run.nbytes[taken[0].position]
        while (entry := self._first()) and entry[:3] == first[:3]:
            graph_id, position = entry[-2:]
            nbytes += self._runs[graph_id].nbytes[position]
            if nbytes > COPY_BYTES:
                break
            heapq.heappop(self._entries)
            taken.append(self._taken(graph_id, position, counted=False))
        return taken

    def has_ended(self, op: TakenOp) -> None:
        """Record that an op is issued no more."""
        if op.counted:
            self._count_issued(op.run, op.position, -1)

    @property
    def is_empty(self) -> bool:
        """True if no op is left. Void entries may be, until an op is taken."""
        return not self._entries

    @property
    def ready(self) -> set[tuple[int, int]]:
        """The graph and position of each op that is ready."""
        return {entry[-2:] for entry in self._entries if self._is_ready(*entry[-2:])}

    def _is_ready(self, graph_id: int, position: int) -> bool:
        run = self._runs.get(graph_id)
        return run is not None and run.states[position] is OpState.READY

    def _first(self) -> _Entry | None:
        """Return the first op that is ready. Forgets entries that are void."""
        while self._entries and not self._is_ready(*self._entries[0][-2:]):
            heapq.heappop(self._entries)
        return self._entries[0] if self._entries else None

    def _may_start(self, entry: _Entry) -> bool:
        """Return True unless as much as may be issued of its kind is issued."""
        priority, *_, graph_id, position = entry
        run, before = self._runs[graph_id], self._bytes_issued
        if priority > Priority.LOAD:
            return self._saves_issued < SAVES_ISSUED * self._threads
        if priority == _AWAITED or not (before and run.alone and self._path.touches_device):
            return True
        return before + run.nbytes[position] <= BYTES_ISSUED * self._threads

    def _count_issued(self, run: ActiveGraph, position: int, sign: int) -> None:
        """Count an op that starts (+1) or has ended (-1) against what may be issued."""
        if run.graph.priority > Priority.LOAD:
            self._saves_issued += sign
        elif run.alone:
            self._bytes_issued += sign * run.nbytes[position]

    def _taken(self, graph_id: int, position: int, *, counted: bool) -> TakenOp:
        run = self._runs[graph_id]
        span = range(*run.graph.ops[position].rows)
        upstream = {row: RowError.UPSTREAM for row in span if row in run.failed}
        rows = [row for row in span if row not in upstream]
        taken = TakenOp(run, position, upstream, rows, counted)
        if counted:
            self._count_issued(run, position, 1)
        return taken
