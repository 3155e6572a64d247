"""The manager's transport where graphs leave with the engine's own messages, and reports of all
ranks made one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvcore.index.slots import SlotRun
from kvcore.manager.base import Lane
from kvcore.transfer.graph import OpReport, RowError, TransferGraph

__all__ = ["Outbox", "Quorum"]


class Quorum:
    """Adds up the reports of an op until they speak for all ``ranks``.

    A row failed when it failed on any rank. Not thread-safe.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._partial: dict[tuple[int, int], tuple[int, dict[int, RowError]]] = {}

    def add(self, report: OpReport, ranks: int = 1) -> OpReport | None:
        """Take in a report that speaks for ``ranks`` of them; the whole one once all have ended."""
        place = (report.graph_id, report.op_id)
        seen, failed = self._partial.pop(place, (0, {}))
        seen, failed = seen + ranks, {**failed, **report.failed}
        if seen < self._ranks:
            self._partial[place] = (seen, failed)
            return None
        return OpReport(*place, failed)

    def __len__(self) -> int:
        """Ops that some ranks have ended and others have not."""
        return len(self._partial)


class Outgoing(NamedTuple):
    """What a leader has for its workers: graphs, ids of graphs to cancel, slots of tiers."""

    graphs: list[TransferGraph]
    cancelled: list[int]
    forgotten: list[tuple[str, list[SlotRun]]]


class Outbox:
    """`kvcore.manager.Transport` of a leader that speaks to its workers once a step.

    ``graphs``, ``cancelled`` and ``forgotten`` wait here until the adapter takes them into the
    step's plan; `deliver` gives it what the workers reported, and a report is passed on once all
    ``ranks`` have ended the op. ``pump`` lets the workers work for some seconds and deliver their
    reports; None where they cannot be reached between two steps. Not thread-safe: the leader's.
    """

    def __init__(self, ranks: int = 1, pump: Callable[[float], None] | None = None) -> None:
        self._quorum = Quorum(ranks)
        self.pump = pump
        self.graphs: list[TransferGraph] = []
        self.cancelled: list[int] = []
        self.forgotten: list[tuple[str, list[SlotRun]]] = []
        self._ready: list[OpReport] = []

    def take(self) -> Outgoing:
        """All that waits; nothing does any more."""
        taken = Outgoing(self.graphs, self.cancelled, self.forgotten)
        self.graphs, self.cancelled, self.forgotten = [], [], []
        return taken

    def submit(self, graph: TransferGraph, lane: Lane | None = None) -> None:
        (self.graphs.append if lane is None else lane)(graph)

    def cancel(self, graph_id: int) -> None:
        self.cancelled.append(graph_id)

    def forget(self, tier: str, slots: Sequence[SlotRun]) -> None:
        self.forgotten.append((tier, list(slots)))

    def wait_report(self, timeout: float) -> bool:
        """Whether there is a report; blocks for one, at most ``timeout`` seconds, where there is a
        pump. Without, reports come with the engine's messages only: there is nothing to block on.
        """
        if self.pump is not None:
            self.pump(timeout)
        return bool(self._ready)

    def poll(self) -> Sequence[OpReport]:
        ready, self._ready = self._ready, []
        return ready

    def deliver(self, report: OpReport, ranks: int = 1) -> None:
        """Take in a worker's report; ``ranks`` is how many of them it speaks for."""
        whole = self._quorum.add(report, ranks)
        if whole is not None:
            self._ready.append(whole)
