"""A worker over a machine that the test lets work, with pages of a block each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from kvcore.memory.copy.base import Copy
from kvcore.model.shape import BlockShape
from kvcore.testing.waiting import PATIENCE_S
from kvcore.transfer.graph import OpReport, TransferGraph
from kvcore.transfer.plan import Chain, build_load, build_save, layer_steps
from kvcore_devtools.gpu import GpuRank, ManualMachine, RecordingDevice, RecordingOps, installed
from kvcore_devtools.gpu.device import RecordedStream

SHAPE = BlockShape(3, 2, 8, 16, "float32")
PAGES = SLOTS = 8
"""A page is a block."""
CPU = torch.device("cpu")


class FailingOps(RecordingOps):
    """Copies that fail.

    ``refuse`` is the number of next copies that raise before they are queued; ``breaks`` makes the
    device fail when it comes to a copy.
    """

    refuse = 0
    breaks = False

    def copy(self, copy: Copy) -> None:
        if self.refuse:
            self.refuse -= 1
            raise RuntimeError("planted: out of memory")
        if self.breaks:
            self.machine.launch("a copy", _break)
        super().copy(copy)


def _break() -> None:
    raise RuntimeError("planted: an illegal address")


class ManualRig(GpuRank):
    """A rank whose pages and host memory hold other numbers. Main thread: the engine's."""

    machine: ManualMachine

    def __init__(self, machine: ManualMachine) -> None:
        self.device = RecordingDevice(machine, CPU)
        self.ops = FailingOps(machine)
        super().__init__(machine, pages=PAGES, slots=SLOTS, shape=SHAPE, ops=self.ops, device=CPU)
        self.arena.tensor().fill_(1.0)
        self.stream = self.device.current_stream()

    def compute(self, work: Callable[[], None], stream: RecordedStream | None = None) -> None:
        """Give the engine's stream, or this one, a part of a step."""
        with (stream or self.stream).issuing():
            self.machine.launch("a part of a step", work)

    def write(self, page: int, value: float) -> None:
        for tensor in self.caches:
            tensor[page] = value

    def read(self, page: int) -> set[float]:
        return {float(x) for tensor in self.caches for x in tensor[page].unique()}

    def kept(self, slot: int) -> set[float]:
        block = self.arena.tensor().view(SLOTS, -1)[slot][: SHAPE.nbytes // 4]  # padding follows
        return {float(x) for x in block.unique()}

    def load(self, graph_id: int, page: int, slot: int, *, by_layer: bool = True) -> TransferGraph:
        steps = layer_steps(SHAPE.layers, growth=1) if by_layer else ()
        return build_load(graph_id, chain(), [slot], [], batch_rows=1, layers=steps).bind(
            self.units([page])
        )

    def save(self, graph_id: int, page: int, slot: int) -> TransferGraph:
        return build_save(graph_id, chain(), [slot], None, batch_rows=1).bind(self.units([page]))

    def submit(self, *graphs: TransferGraph) -> None:
        for graph in graphs:
            assert self.worker.submit(graph) == []

    def issued(self, graph: TransferGraph) -> bool:
        return len(self.worker.engine.issued(graph.graph_id)) == len(graph.ops)

    def until_issued(self, graph: TransferGraph) -> None:
        assert self.worker.engine.wait_issued(graph.graph_id, timeout=PATIENCE_S)

    def run(self, *only: RecordedStream) -> None:
        """Let all streams, or only these, work until none can go on."""
        self.machine.run(*(stream.queue for stream in only))

    def end(self) -> list[OpReport]:
        """Let the device work until nothing is left; return the reports."""
        with self.machine.working():
            assert self.worker.wait_idle(PATIENCE_S)
        self.run()
        return self.worker.poll()

    def others(self, *but: RecordedStream) -> list[RecordedStream]:
        """Return the streams, but these and that of the engine's steps."""
        out = [stream.queue for stream in (self.stream, *but)]
        streams = tuple(self.machine.streams)
        return [RecordedStream(self.machine, one) for one in streams if one not in out]

    @property
    def host_waited(self) -> bool:
        """True if this thread has waited for the device."""
        return threading.current_thread().name in self.machine.waited


@contextmanager
def manual_rig() -> Iterator[ManualRig]:
    """Yield a rig. Raises AssertionError at the end if its machine saw a fault."""
    with installed(ManualMachine()) as machine:
        rig = ManualRig(machine)
        try:
            yield rig
        finally:
            with machine.working():
                closed = rig.worker.close()
        assert closed
        machine.check()


def chain() -> Chain:
    return Chain(b"n", b"", (b"k",))
