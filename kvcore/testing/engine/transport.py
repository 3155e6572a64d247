"""The transport of the reference engine, whose ranks all live in this process.

An engine with ranks in other processes sends graphs with its own messages. Here the workers get a
graph at once. The caller must therefore launch a save only after the forward that computes its KV,
and a load only into pages that nobody reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvcore.index.slots import SlotRun
from kvcore.manager.base import Lane
from kvcore.transfer.graph import OpReport, TransferGraph
from kvcore.transfer.quorum import Quorum
from kvcore.worker import KVWorker

__all__ = ["DirectTransport"]


class DirectTransport:
    """The manager's transport over ``workers``, one a rank. Merges their reports.

    Engine thread only.
    """

    def __init__(self, workers: Sequence[KVWorker]) -> None:
        self.workers = tuple(workers)
        self._quorum = Quorum(len(self.workers))
        self._whole: list[OpReport] = []

    def submit_together(self, graphs: Sequence[TransferGraph]) -> None:
        """Start graphs that are waited for together: layer 0 of each is copied first."""
        for worker in self.workers:
            wave = worker.wave()
            for graph in graphs:
                self._take_all(worker.submit(graph, wave))

    def submit(self, graph: TransferGraph, lane: Lane | None = None) -> None:
        if lane is not None:
            lane(graph)
            return
        for worker in self.workers:
            self._take_all(worker.submit(graph))

    def cancel(self, graph_id: int) -> None:
        for worker in self.workers:
            worker.cancel(graph_id)

    def invalidate(self, tier: str, slots: Sequence[SlotRun]) -> None:
        for worker in self.workers:
            worker.invalidate(tier, slots)

    def wait_report(self, timeout: float) -> bool:
        """Block for at most ``timeout`` seconds for a report. Return True if there is one."""
        share = timeout / len(self.workers)
        return bool(self._whole) or any(worker.wait_report(share) for worker in self.workers)

    def wait_device(self, graph_id: int) -> None:
        """Block until the graph no longer touches any rank's pages."""
        for worker in self.workers:
            worker.wait_device(graph_id)

    def poll(self) -> Sequence[OpReport]:
        """Return the reports of the ops that have ended on every rank since the last call."""
        for worker in self.workers:
            self._take_all(worker.poll())
        whole, self._whole = self._whole, []
        return whole

    def _take_all(self, reports: Iterable[OpReport]) -> None:
        for report in reports:
            self._take(report)

    def _take(self, report: OpReport) -> None:
        whole = self._quorum.add(report)
        if whole is not None:
            self._whole.append(whole)
