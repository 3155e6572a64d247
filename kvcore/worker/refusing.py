"""Stand-ins for a worker or a tier that cannot be used: they refuse, and say why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvcore.errors import TierError
from kvcore.index.slots import SlotRun
from kvcore.memory.device import Event, Stream, device_of
from kvcore.tiers.base import BlockRead, BlockRecord, BlockWrite, Tier
from kvcore.transfer.graph import OpReport, RowError, TransferGraph

__all__ = ["DeadTier", "RefusingWorker", "refuse"]


class DeadTier(Tier):
    """Stands in for a tier that could not be opened: every block fails with its error."""

    slot_nbytes = 0

    def __init__(self, error: TierError) -> None:
        self._error = error

    def write(self, requests: Sequence[BlockWrite]) -> list[TierError | None]:
        return [self._error] * len(requests)

    def read(self, requests: Sequence[BlockRead]) -> list[TierError | None]:
        return [self._error] * len(requests)

    def invalidate(self, slots: Iterable[int]) -> None:
        pass

    def scan(self) -> list[BlockRecord]:
        return []

    def check_integrity(self) -> None:
        raise self._error


class RefusingWorker:
    """Stands in for a worker that could not be built: refuses every graph, so no caller waits."""

    def stream_of(self, engine_stream: Any) -> Stream:
        return device_of(None).current_stream()

    def enter_device(self) -> None:
        pass  # it uses none

    def mark(self, *others: Stream) -> Event | None:
        return None

    def wave(self) -> int:
        return 0

    def submit(
        self,
        graph: TransferGraph,
        wave: int | None = None,
        after: Event | None = None,
    ) -> list[OpReport]:
        return refuse(graph, RowError.REFUSED)

    def open_tier(self, name: str, tier: Tier) -> None:
        tier.close()

    def poll(self) -> list[OpReport]:
        return []

    def cancel(self, graph_id: int) -> None:
        pass

    def invalidate(self, tier: str, slots: Sequence[SlotRun]) -> None:
        pass

    def wait_report(self, timeout: float) -> bool:
        return False

    def wait_graph(self, timeout: float) -> bool:
        return False

    def wait_device(self, graph_id: int) -> None:
        pass

    def wait_idle(self, timeout: float) -> bool:
        return True

    def wait_layer(self, graph_id: int, layer: int) -> None:
        pass

    def follow(self, *graph_ids: int) -> None:
        pass

    def close(self, *, timeout: float = 30.0) -> bool:
        return True


def refuse(graph: TransferGraph, why: RowError) -> list[OpReport]:
    """Return reports that every op of ``graph`` has failed for all of its rows."""
    return [
        OpReport(graph.graph_id, op.op_id, dict.fromkeys(range(*op.rows), why)) for op in graph.ops
    ]
