"""Carries graphs to the workers of all ranks, which live in this process, and adds up reports.

An engine with ranks in other processes sends graphs with its own messages; here a graph is handed
over at once. What that means for the caller: a save may be launched only after the forward that
computes its KV, a load only into pages that nobody reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvcore.connector.step_transport import Quorum
from kvcore.index.slots import SlotRun
from kvcore.memory.layout import DeviceGroup
from kvcore.transfer.graph import OpReport, TransferGraph
from kvcore.worker import KVWorker

__all__ = ["DirectTransport"]


class DirectTransport:
    """The manager's transport over ``workers``, one a rank. Engine thread only."""

    def __init__(self, workers: Sequence[KVWorker]) -> None:
        self.workers = tuple(workers)
        self._elsewhere: Sequence[tuple[Sequence[DeviceGroup], int]] | None = None
        self._quorum = Quorum(len(self.workers))
        self._whole: list[OpReport] = []

    @contextmanager
    def into(self, groups: Sequence[Sequence[DeviceGroup]]) -> Iterator[None]:
        """Graphs submitted in this block go to ``groups``, one a rank, not the engine's pages, and
        are waited for together: layer 0 of all of them is copied first."""
        waves = [worker.wave() for worker in self.workers]
        self._elsewhere = list(zip(groups, waves, strict=True))
        try:
            yield
        finally:
            self._elsewhere = None

    def submit(self, graph: TransferGraph) -> None:
        for rank, worker in enumerate(self.workers):
            into, wave = (None, None) if self._elsewhere is None else self._elsewhere[rank]
            for report in worker.submit(graph, into, wave):
                self._take(report)

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
            for report in worker.poll():
                self._take(report)
        whole, self._whole = self._whole, []
        return whole

    def _take(self, report: OpReport) -> None:
        whole = self._quorum.add(report)
        if whole is not None:
            self._whole.append(whole)
