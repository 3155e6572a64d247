"""A rank's worker whose ops end when the test says so, and graphs for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import numpy as np

from kvcore.connector.fusion_messages import BlendOrder, ChunkLoad
from kvcore.memory.device import Stream, device_of
from kvcore.telemetry.metrics import Metrics
from kvcore.transfer.graph import (
    OpReport,
    Path,
    Priority,
    RowError,
    Span,
    TransferGraph,
    TransferOp,
    UnitTable,
)
from kvcore.transfer.plan import Chain, build_save
from kvcore.worker import refuse
from kvcore.worker.lifecycle import RankParts, refuse_tier

UNIT_TOKENS = 16


def load_graph(graph_id: int, *, layers: int = 1, from_disk: bool = False) -> TransferGraph:
    """Return a load of one block into unit ``graph_id``: a copy a layer, after a read if asked."""
    ops = [TransferOp(0, Path.DISK2H, Span(0, 1), tier="disk")] if from_disk else []
    for layer in range(layers):
        deps = (0,) if from_disk else ()
        span = Span(layer, layer + 1)
        ops.append(TransferOp(len(ops), Path.H2D, Span(0, 1), layers=span, deps=deps))
    units = UnitTable.of(np.array([[graph_id]]), UNIT_TOKENS)
    return TransferGraph(
        graph_id, Priority.LOAD, b"n", b"p", (b"k",), (0,), (0,), (units,), tuple(ops)
    )


def save_graph(graph_id: int, *, parts: int = 1) -> TransferGraph:
    """Return a save of ``parts`` blocks into as many slots: a copy a block."""
    keys = tuple(bytes([part]) * 16 for part in range(parts))
    graph = build_save(
        graph_id, Chain(b"n", b"p", keys), range(parts), None, batch_rows=1, copy_rows=1
    )
    return graph.bind([UnitTable.of(np.arange(parts)[:, None], UNIT_TOKENS)])


class ScriptedWorker:
    """Stands in for a `KVWorker`.

    ``refusals`` is how many of the next graphs are refused. ``on_wait`` is called by everything
    that blocks, so that ops can end meanwhile.
    """

    def __init__(self) -> None:
        self.submitted: list[int] = []
        self.cancelled: list[int] = []
        self.invalidated: list[tuple[str, Sequence[Any]]] = []
        self.refusals = 0
        self.on_wait: Callable[[], None] = lambda: None
        self.on_cancel: Callable[[int], None] = self.cancelled.append
        self.count_on_device: Callable[[], int] = lambda: 0
        self._reports: list[OpReport] = []
        self._ended: set[int] = set()

    @property
    def parts(self) -> RankParts:
        return RankParts(cast(Any, self), Metrics(), refuse_tier)

    def end(
        self, graph: TransferGraph, ops: Iterable[int] | None = None, *, ok: bool = True
    ) -> None:
        """End ops of a graph (all of them by default), well or with their row failed."""
        failed = {} if ok else {0: RowError.IO}
        for op in range(len(graph.ops)) if ops is None else ops:
            self._reports.append(OpReport(graph.graph_id, op, failed))

    def end_once(self, graph: TransferGraph, *, ok: bool = True) -> None:
        """End all ops of a graph, unless this method has done so."""
        if graph.graph_id not in self._ended:
            self._ended.add(graph.graph_id)
            self.end(graph, ok=ok)

    def wait_idle(self, timeout: float) -> bool:
        while self.count_on_device():
            if (timeout := timeout - 0.05) <= 0:
                return False
        return True

    def mark(self, *others: Any) -> None:
        return None

    def stream_of(self, engine_stream: Any) -> Stream:
        return device_of(None).current_stream()

    def wave(self) -> int:
        return 0

    def submit(
        self,
        graph: TransferGraph,
        wave: int | None = None,
        after: Any = None,
    ) -> list[OpReport]:
        self.submitted.append(graph.graph_id)
        self.refusals -= 1
        return refuse(graph, RowError.INTERNAL) if self.refusals >= 0 else []

    def cancel(self, graph_id: int) -> None:
        self.on_cancel(graph_id)

    def invalidate(self, tier: str, slots: Sequence[Any]) -> None:
        self.invalidated.append((tier, slots))

    def poll(self) -> list[OpReport]:
        reports, self._reports = self._reports, []
        return reports

    def wait_report(self, timeout: float) -> bool:
        self.on_wait()
        return bool(self._reports)

    def wait_device(self, graph_id: int) -> None:
        self.on_wait()

    def wait_layer(self, graph_id: int, layer: int) -> None:
        self.on_wait()

    def follow(self, *graph_ids: int) -> None:
        self.on_wait()


def blend_of(request_id: str, chunk: TransferGraph) -> BlendOrder:
    loads = [ChunkLoad(chunk, 0, UNIT_TOKENS, 0, 0)]
    tokens = b"\0" * 4 * UNIT_TOKENS
    return BlendOrder(request_id, tokens, 0, 0, UNIT_TOKENS, [5], 0.1, loads, 1)
