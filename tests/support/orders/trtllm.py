"""The order in which TensorRT-LLM's executor calls a worker, and issues the forward.

py_executor.py, on the executor's thread:

    start_load_kv                                              on its current stream
    the execution stream waits for the current one
    for each layer: wait_for_layer_load, the layer; the end of the forward   on the execution stream
    the current stream waits for the execution stream
    get_finished

With ``overlap`` the output of a batch is looked at after the next one was launched.
"""

from __future__ import annotations

from collections import deque

from kvcore.memory.device import Event, device_of
from kvcore.transfer.graph import OpReport
from kvcore_devtools.gpu import GpuRank
from kvcore_trtllm.messages import StepPlan
from kvcore_trtllm.worker import Tally, WorkerConnector
from support.orders.books import Books, Step

__all__ = ["TrtllmExecutor"]


class TrtllmExecutor:
    """TensorRT-LLM's executor on a rank that is alone."""

    def __init__(self, rank: GpuRank, *, layerwise: bool, overlap: bool) -> None:
        self.rank = rank
        self.execution = device_of(None).stream()
        self.worker = WorkerConnector(
            rank.parts,
            Tally(1, lambda payload: [payload]),
            layers=rank.shape.layers,
            layerwise=layerwise,
        )
        self.worker.listener = lambda news: self._reports.extend(news.ended)
        self._reports: list[OpReport] = []
        self._layerwise, self._overlap = layerwise, overlap
        self._number = 0
        self._loading: dict[int, str] = {}
        self._outputs: deque[Event] = deque()

    def step(self, step: Step) -> tuple[set[str], list[OpReport]]:
        """Run a step; return the requests whose loads have ended, and the reports."""
        self._number += 1
        machine, current = self.rank.machine, device_of(None).current_stream()
        parked = {int(name.split()[-1]): name for name, _ in step.async_loads}
        plan = StepPlan(
            early_saves=[(0, graph) for graph in step.early_saves],
            fence=step.fence,
            sync_loads=step.sync_loads,
            async_loads=[(int(name.split()[-1]), graph) for name, graph in step.async_loads],
            late_saves=[(0, graph) for graph in step.late_saves],
            spills=step.spills,
        )
        with machine.in_step(), machine.doing(f"step {self._number}"):
            with self.worker.on(current):
                self.worker.begin(plan)
            if not step.empty:
                self.execution.follow(current.record())
                with self.execution.issuing():
                    for layer in range(self.rank.shape.layers):
                        if self._layerwise:
                            with self.worker.on(self.execution):
                                self.worker.wait_for_layer(layer)
                        self.rank.layer(layer, step.reads, step.writes)
                    self.worker.end_forward()
                current.follow(self.execution.record())
                self._outputs.append(current.record())
            self._look(last=step.empty)
            _, loaded = self.worker.finished([], list(parked))
            self._loading.update(parked)
        names = {self._loading.pop(number) for number in loaded}
        reports, self._reports = self._reports, []
        return names, reports

    def _look(self, *, last: bool) -> None:
        kept = 1 if self._overlap and not last else 0
        while len(self._outputs) > kept:
            self._outputs.popleft().wait()

    def run(self, books: Books, steps: int) -> None:
        """Run random steps, then end what is in flight, and check what was saved."""
        for number in range(steps + 400):
            drain = number >= steps
            if drain and books.idle:
                break
            finished, reports = self.step(books.plan(drain=drain))
            books.take(reports)
            books.arrived(finished)
            if drain:
                self.worker.pump(0.01)
        assert books.idle
        books.check()
        self.worker.close()
        self.rank.machine.check()
