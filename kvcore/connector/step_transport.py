"""The manager's transport for engines that talk to their workers once a step.

Graphs leave with the engine's own messages. The reports of all ranks are merged into one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvcore.index.slots import SlotRun
from kvcore.manager.base import Lane
from kvcore.transfer.graph import OpReport, TransferGraph
from kvcore.transfer.quorum import Quorum

__all__ = ["Outbox"]


class Outgoing(NamedTuple):
    """The queued work of a leader for its workers.

    Attributes:
        graphs: graphs to submit.
        cancelled: ids of graphs to cancel.
        invalidated: slots of tiers to make unreadable.
    """

    graphs: list[TransferGraph]
    cancelled: list[int]
    invalidated: list[tuple[str, list[SlotRun]]]


class Outbox:
    """The `kvcore.manager.Transport` of a leader that sends to its workers once a step.

    ``graphs``, ``cancelled`` and ``invalidated`` are queued here until the adapter takes them into
    the step's plan. The adapter delivers the workers' reports with `deliver`. `poll` returns a
    report once all ``ranks`` have ended the op. ``pump`` lets the workers work for up to the given
    seconds and delivers their reports. It is None if the workers cannot be reached between two
    steps. Not thread-safe; owned by the leader.
    """

    def __init__(self, ranks: int = 1, pump: Callable[[float], None] | None = None) -> None:
        self._quorum = Quorum(ranks)
        self.pump = pump
        self.graphs: list[TransferGraph] = []
        self.cancelled: list[int] = []
        self.invalidated: list[tuple[str, list[SlotRun]]] = []
        self._ready: list[OpReport] = []

    def take(self) -> Outgoing:
        """Return all queued work and empty the queues."""
        taken = Outgoing(self.graphs, self.cancelled, self.invalidated)
        self.graphs, self.cancelled, self.invalidated = [], [], []
        return taken

    def submit(self, graph: TransferGraph, lane: Lane | None = None) -> None:
        (self.graphs.append if lane is None else lane)(graph)

    def cancel(self, graph_id: int) -> None:
        self.cancelled.append(graph_id)

    def invalidate(self, tier: str, slots: Sequence[SlotRun]) -> None:
        self.invalidated.append((tier, list(slots)))

    def wait_report(self, timeout: float) -> bool:
        """Return True if there is a report.

        Blocks for one for at most ``timeout`` seconds if there is a pump. Without a pump, reports
        come with the engine's messages only, so the call does not block.
        """
        if self.pump is not None:
            self.pump(timeout)
        return bool(self._ready)

    def poll(self) -> Sequence[OpReport]:
        ready, self._ready = self._ready, []
        return ready

    def deliver(self, report: OpReport) -> None:
        """Add a worker's report."""
        whole = self._quorum.add(report)
        if whole is not None:
            self._ready.append(whole)
