"""The order between host threads, at the points where the transfer engine hands work over.

    submit ──▶ every op of the graph ──▶ ops that depend on it
                                    ├──▶ a wait that returns because the op has ended
                                    ├──▶ the poll that returns the op's report
                                    └──▶ `on_device` that counts nothing any more

These are the engine's promises. Its lock is no edge: whoever takes it after an op has ended would
be ordered after the op by chance, and a wait that is missing would stay unseen. Between other
threads only the start and the join of a thread are an order. A test says what else is, with
`Machine.now` and `Machine.learn`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvcore.memory.arena import HostArena
from kvcore.testing.gpu.clocks import Clock
from kvcore.testing.gpu.machine import Machine
from kvcore.testing.gpu.memory import Spans, span, together
from kvcore.transfer.engine import Executor, TransferEngine
from kvcore.transfer.graph import OpReport, Path, RowError, TransferGraph, TransferOp

__all__ = ["WatchedEngine", "arena_spans", "watched_engine"]


class _Watched:
    """An executor whose runs are ordered after what they depend on."""

    def __init__(self, engine: WatchedEngine, executor: Executor) -> None:
        self._engine = engine
        self._executor = executor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def run(self, graph: TransferGraph, op: TransferOp, rows: list[int]) -> dict[int, RowError]:
        with self._engine.machine.doing(f"graph {graph.graph_id}, op {op.op_id}"):
            self._engine.begin(graph, op, rows)
            try:
                return self._executor.run(graph, op, rows)
            finally:
                self._engine.end(graph, op)


class WatchedEngine(TransferEngine):
    """A transfer engine whose hand-overs order the machine's host threads.

    ``arena`` is the arena that ops read tiers into and write them from; their accesses of it are
    recorded.
    """

    machine: Machine
    arena: HostArena | None = None

    def __init__(self, executors: Mapping[Path, Executor], **limits: Any) -> None:
        self._submitted: dict[int, Clock] = {}
        self._ended: dict[int, dict[int, tuple[TransferOp, Clock]]] = {}
        super().__init__({path: _Watched(self, one) for path, one in executors.items()}, **limits)

    def begin(self, graph: TransferGraph, op: TransferOp, rows: list[int]) -> None:
        self.machine.learn(self._submitted[graph.graph_id])
        ended = self._ended.get(graph.graph_id, {})
        for dep in op.deps:
            if dep in ended:
                self.machine.learn(ended[dep][1])
        if self.arena is not None and op.tier and not op.path.is_staged:
            slots = [graph.host_slots[row] for row in rows]
            touched = arena_spans(self.arena, slots)
            self.machine.touch(f"the {op.path.value}", touched, writes=op.path.reads_tier)

    def end(self, graph: TransferGraph, op: TransferOp) -> None:
        ended = self._ended.setdefault(graph.graph_id, {})
        ended[op.op_id] = op, self.machine.now()

    def submit(self, graph: TransferGraph, wave: int | None = None) -> None:
        self._submitted[graph.graph_id] = self.machine.now()
        super().submit(graph, wave)

    def wait(self, graph_id: int, timeout: float | None = None) -> bool:
        return self._after(graph_id, lambda op: True, super().wait(graph_id, timeout))

    def wait_device(self, graph_id: int, timeout: float | None = None) -> bool:
        waited = super().wait_device(graph_id, timeout)
        return self._after(graph_id, lambda op: op.path.touches_device, waited)

    def wait_layer(self, graph_id: int, layer: int, timeout: float | None = None) -> bool:
        def carries(op: TransferOp) -> bool:
            return op.path.touches_device and (op.layers is None or op.layers.covers(layer))

        return self._after(graph_id, carries, super().wait_layer(graph_id, layer, timeout))

    def poll(self) -> list[OpReport]:
        reports = super().poll()
        for report in reports:
            self._after(report.graph_id, lambda op, r=report: op.op_id == r.op_id, True)  # type: ignore[misc]
        return reports

    @property
    def on_device(self) -> int:
        count = super().on_device
        if not count:
            for graph_id in list(self._ended):
                self._after(graph_id, lambda op: op.path.touches_device, True)
        return count

    def close(self, *, drain: bool = True, timeout: float | None = 30.0) -> bool:
        closed = super().close(drain=drain, timeout=timeout)
        if closed:
            for graph_id in list(self._ended):
                self._after(graph_id, lambda op: True, True)
        return closed

    def _after(self, graph_id: int, which: Callable[[TransferOp], bool], ended: bool) -> bool:
        if ended:
            for op, clock in list(self._ended.get(graph_id, {}).values()):
                if which(op):
                    self.machine.learn(clock)
        return ended


def watched_engine(machine: Machine) -> type[WatchedEngine]:
    """Return the class of engines that order the threads of ``machine``."""
    return type("WatchedEngine", (WatchedEngine,), {"machine": machine})


def arena_spans(arena: HostArena, slots: list[int]) -> Spans:
    """Return the bytes of some slots of an arena."""
    import numpy as np

    parts = []
    for slot in slots:
        for piece in arena.slot_buffers(slot):
            parts.append(span(np.frombuffer(piece, dtype=np.uint8).ctypes.data, piece.nbytes))
    return together(parts)
