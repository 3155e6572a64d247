"""A worker over a device that queues its work, with one group of pages of a block each."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import torch

from kvcore.memory.arena import HostArena
from kvcore.memory.copy import builtin_ops, select_ops
from kvcore.memory.device import serve_devices
from kvcore.memory.layout import DeviceGroup, KVView, from_strides
from kvcore.model.shape import BlockShape
from kvcore.telemetry.metrics import Metrics
from kvcore.transfer.graph import OpReport, TransferGraph, UnitTable
from kvcore.transfer.plan import Chain, build_load, build_save, layer_steps
from kvcore.worker import EnginePages, KVWorker, WorkerLimits
from kvcore.worker.lifecycle import RankParts, refuse_tier
from support.manual_device import WAIT, ManualDevice, ManualStream, QueuedOps

SHAPE = BlockShape(3, 2, 8, 16, "float32")
PAGES = SLOTS = 8
"""A page is a block."""


class ManualRig:
    """A worker whose pages and host memory hold other numbers. Main thread: the engine's."""

    def __init__(self) -> None:
        self.device = ManualDevice()
        undo = serve_devices("cpu", lambda name: self.device)
        try:
            self.pages = self._memory()
            views = [page.transpose(1, 2) for page in self.pages]
            self.groups = [DeviceGroup((0, 1, 2), KVView(from_strides(views, SHAPE), views))]
            self.arena = HostArena(SHAPE, SLOTS, huge_pages=False)
            flat = KVView(self.arena.layout(), [self.arena.tensor()])
            inner = select_ops(self.groups[0].view, flat, builtin_ops())
            self.ops = QueuedOps(inner, self.device)
            self.worker = KVWorker(
                arena=self.arena,
                arena_view=flat,
                ops=self.ops,
                pages=EnginePages(self.groups),
                limits=WorkerLimits(),
            )
        finally:
            undo()
        self.arena.tensor().fill_(1.0)
        self.reports: list[OpReport] = []

    def _memory(self) -> list[torch.Tensor]:
        return [torch.zeros(PAGES, SHAPE.block_tokens, 2, 16) for _ in range(SHAPE.layers)]

    def compute(self, work: Callable[[], None]) -> None:
        """Give the engine's stream a part of a step."""
        self.device.compute.launch(work)

    def write(self, page: int, value: float) -> None:
        for tensor in self.pages:
            tensor[page] = value

    def read(self, page: int) -> set[float]:
        return {float(x) for tensor in self.pages for x in tensor[page].unique()}

    def kept(self, slot: int) -> set[float]:
        block = self.arena.tensor().view(SLOTS, -1)[slot][: SHAPE.nbytes // 4]  # padding follows
        return {float(x) for x in block.unique()}

    def load(self, graph_id: int, page: int, slot: int, *, by_layer: bool = True) -> TransferGraph:
        steps = layer_steps(SHAPE.layers, growth=1) if by_layer else ()
        return build_load(graph_id, chain(), [slot], [], units(page), batch_rows=1, layers=steps)

    def save(self, graph_id: int, page: int, slot: int) -> TransferGraph:
        return build_save(graph_id, chain(), [slot], units(page), None, batch_rows=1)

    def submit(self, *graphs: TransferGraph) -> None:
        for graph in graphs:
            assert self.worker.submit(graph) == []

    def issued(self, graph: TransferGraph) -> bool:
        return len(self.worker.engine.issued(graph.graph_id)) == len(graph.ops)

    def until_issued(self, graph: TransferGraph) -> None:
        assert self.worker.engine.wait_issued(graph.graph_id, timeout=WAIT)

    def end(self) -> list[OpReport]:
        """Let the device work until no copy is left; return the reports."""
        with self.device.working():
            assert self.worker.wait_idle(WAIT)
        return self.worker.poll()

    def others(self, *but: ManualStream) -> list[ManualStream]:
        """Return the streams, but these and that of the engine's steps."""
        return [s for s in self.device.streams if s not in (self.device.compute, *but)]

    @property
    def host_waited(self) -> bool:
        """True if this thread has waited for the device."""
        return threading.current_thread().name in self.device.host_waits

    @property
    def parts(self) -> RankParts:
        return RankParts(self.worker, Metrics(), refuse_tier)

    def close(self) -> None:
        with self.device.working():
            assert self.worker.close()


def chain() -> Chain:
    return Chain(b"n", b"", (b"k",))


def units(page: int) -> tuple[UnitTable, ...]:
    return (UnitTable.of(np.array([[page]], dtype=np.int64), SHAPE.block_tokens),)
