"""The transport between a manager and a worker that are in one process."""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.index.slots import SlotRun
from kvcore.manager.base import Lane
from kvcore.transfer.graph import OpReport, TransferGraph
from kvcore.worker import KVWorker

__all__ = ["LocalTransport"]


class LocalTransport:
    """Hands graphs to ``worker`` at once. A `kvcore.manager.base.Transport`."""

    def __init__(self, worker: KVWorker) -> None:
        self.worker = worker
        self.refused: list[OpReport] = []

    def submit(self, graph: TransferGraph, lane: Lane | None = None) -> None:
        if lane is None:
            self.refused += self.worker.submit(graph)
        else:
            lane(graph)

    def cancel(self, graph_id: int) -> None:
        self.worker.cancel(graph_id)

    def invalidate(self, tier: str, slots: Sequence[SlotRun]) -> None:
        self.worker.invalidate(tier, slots)

    def wait_report(self, timeout: float) -> bool:
        return bool(self.refused) or self.worker.wait_report(timeout)

    def poll(self) -> list[OpReport]:
        refused, self.refused = self.refused, []
        return refused + self.worker.poll()
