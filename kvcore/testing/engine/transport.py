"""Carries graphs to the workers of all ranks, which live in this process, and adds up reports.

An engine with ranks in other processes sends graphs with its own messages; here a graph is handed
over at once. What that means for the caller: a save may be launched only after the forward that
computes its KV, a load only into pages that nobody reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvcore.connector.step_transport import Quorum
from kvcore.index.slots import SlotRun
from kvcore.manager.base import Lane
from kvcore.memory.layout import DeviceGroup
from kvcore.transfer.graph import OpReport, TransferGraph
from kvcore.worker import KVWorker

__all__ = ["DirectTransport"]


class DirectTransport:
    """The manager's transport over ``workers``, one a rank. Engine thread only."""

    def __init__(self, workers: Sequence[KVWorker]) -> None:
        self.workers = tuple(workers)
        self._quorum = Quorum(len(self.workers))
        self._whole: list[OpReport] = []

    def into(self, groups: Sequence[Sequence[DeviceGroup]]) -> Lane:
        """Return a lane to ``groups``, one a rank, in place of the engine's pages. All graphs of a
        lane are waited for together: layer 0 of each is copied first."""
        elsewhere = [
            (worker, into, worker.wave()) for worker, into in zip(self.workers, groups, strict=True)
        ]

        def lane(graph: TransferGraph) -> None:
            for worker, into, wave in elsewhere:
                self._take_all(worker.submit(graph, into, wave))

        return lane

    def submit(self, graph: TransferGraph, lane: Lane | None = None) -> None:
        if lane is not None:
            lane(graph)
            return
        for worker in self.workers:
            self._take_all(worker.submit(graph))

    def cancel(self, graph_id: int) -> None:
        for worker in self.workers:
            worker.cancel(graph_id)

    def forget(self, tier: str, slots: Sequence[SlotRun]) -> None:
        for worker in self.workers:
            worker.forget(tier, slots)

    def wait_report(self, timeout: float) -> bool:
        """Block until some rank has a report, at most ``timeout`` seconds."""
        share = timeout / len(self.workers)
        return bool(self._whole) or any(worker.wait_report(share) for worker in self.workers)

    def wait_device(self, graph_id: int) -> None:
        """Block until the graph touches no rank's pages any more."""
        for worker in self.workers:
            worker.wait_device(graph_id)

    def poll(self) -> Sequence[OpReport]:
        """Reports of the ops that have ended on every rank."""
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
