"""The states of a graph in flight.

op      created ──▶ ready ──▶ running ──▶ issued ──▶ completed | failed
              │       │           └──────────────────▶
              └───────┴──▶ cancelled (by the caller, a deadline, or close)
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

from kvcore.transfer.executor import Issued
from kvcore.transfer.graph import RowError, TransferGraph, TransferOp

__all__ = ["ActiveGraph", "OpState", "TakenOp", "Which", "every", "on_device", "up_to"]

Which = Callable[[TransferOp], bool]
"""Chooses ops of a graph."""


class OpState(Enum):
    """State of an op in flight."""

    CREATED = "created"
    READY = "ready"
    RUNNING = "running"
    ISSUED = "issued"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        """True for the final states."""
        return self in (OpState.COMPLETED, OpState.FAILED, OpState.CANCELLED)

    @property
    def issued(self) -> bool:
        """True once the device has the op's work in a queue, and in the final states."""
        return self is OpState.ISSUED or self.ended


def every(op: TransferOp) -> bool:
    return True


def on_device(op: TransferOp) -> bool:
    return op.path.touches_device


def up_to(layer: int | None) -> Which:
    """Return what is true for the device ops of layers up to ``layer``; None for all layers.

    Earlier layers are included: who waits for the last one only may count on all of them.
    """
    if layer is None:
        return on_device
    return lambda op: op.path.touches_device and (op.layers is None or op.layers.start <= layer)


class ActiveGraph:
    """A graph in flight. All fields are guarded by the engine's lock."""

    def __init__(
        self,
        graph: TransferGraph,
        deadline: float | None,
        wave: int,
        nbytes: list[int],
        *,
        alone: bool,
    ) -> None:
        self.graph = graph
        self.deadline = deadline
        self.wave = wave
        self.nbytes = nbytes  # by position
        self.alone = alone  # True without a named wave
        self.states = [OpState.CREATED] * len(graph.ops)
        self.index = {op.op_id: i for i, op in enumerate(graph.ops)}
        self.failed: dict[int, RowError] = {}
        self.issued: dict[int, Issued] = {}  # by position
        self.awaited: set[int] = set()  # positions of ops that were put first

    def positions(self, which: Which) -> list[int]:
        """Return the positions of the ops for which ``which`` is true."""
        return [i for i, op in enumerate(self.graph.ops) if which(op)]

    def ended(self, which: Which) -> bool:
        return all(self.states[i].ended for i in self.positions(which))

    def all_issued(self, which: Which) -> bool:
        return all(self.states[i].issued for i in self.positions(which))

    def runnable(self) -> list[int]:
        """Return the positions of created ops whose deps have all ended."""
        return [
            i
            for i, op in enumerate(self.graph.ops)
            if self.states[i] is OpState.CREATED
            and all(self.states[self.index[dep]].ended for dep in op.deps)
        ]


class TakenOp(NamedTuple):
    """An op that a thread carries out. ``counted`` if it counts against what may be issued.

    Of ops that are joined the first one counts for all.
    """

    run: ActiveGraph
    position: int
    upstream: dict[int, RowError]
    rows: list[int]
    counted: bool

    @property
    def op(self) -> TransferOp:
        return self.run.graph.ops[self.position]
