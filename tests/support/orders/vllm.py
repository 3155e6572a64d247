"""The orders in which vLLM's two model runners call a worker, and issue the forward.

V1 (vllm/v1/worker/gpu_model_runner.py, kv_connector_model_runner_mixin.py)
    handle_preemptions ─▶ _update_states ─▶ [start_load_kv, if there are sync loads] ─▶ forward
    ─▶ [start_load_kv] ─▶ wait_for_save ─▶ get_transfer_results ─▶ errors, worker's metadata

V2 (vllm/v1/worker/gpu/model_runner.py, kv_connector.py)
    update_requests ─▶ handle_preemptions ─▶ [start_load_kv, if there are sync loads] ─▶ forward
    ─▶ finish_forward ─▶ sample ─▶ [start_load_kv] ─▶ wait_for_save ─▶ get_transfer_results ─▶ ...

`_update_states` and `update_requests` launch the zeroing and the copies of pages. With asynchronous
scheduling the runner's thread waits for no output: another one does. A full graph has no calls
between its layers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvcore.connector.forward_timer import ForwardTimer
from kvcore.connector.fusion_worker import FusionWorker, RefusingFusionWorker
from kvcore.memory.device import Event, device_of
from kvcore.transfer.graph import OpReport
from kvcore_devtools.gpu import GpuRank
from kvcore_devtools.gpu.device import RecordedEvent
from kvcore_vllm.messages import StepPlan
from kvcore_vllm.worker import WorkerConnector
from kvcore_vllm.worker_guard import WorkerGuard
from support.orders.books import Books, Step
from support.vllm_steps import begin

__all__ = ["VllmRunner"]


class VllmRunner:
    """A model runner of vLLM on a rank. ``runner`` is 1 or 2.

    ``full`` is True with full CUDA graphs. ``depth`` is the number of steps that are launched
    before the output of the first one is looked at. ``blends`` makes the steps' blends.
    """

    def __init__(
        self,
        rank: GpuRank,
        *,
        runner: int = 1,
        full: bool = False,
        depth: int = 1,
        blends: FusionWorker | None = None,
    ) -> None:
        self.rank = rank
        self._runner, self._full, self._depth = runner, full, depth
        self.connector = WorkerConnector(
            rank.parts,
            blends or RefusingFusionWorker(rank.shape.block_tokens),
            layer_of={f"layer {layer}": layer for layer in range(rank.shape.layers)},
            page_tokens=(rank.shape.block_tokens,),
            clock=ForwardTimer(device_of(None)),
        )
        self.worker = WorkerGuard(self.connector)
        self.zeroes: list[int] = []
        self.copies: list[tuple[int, int]] = []
        self._number = 0
        self._outputs: deque[Event] = deque()

    def step(self, step: Step) -> tuple[set[str], list[OpReport]]:
        """Run a step; return the requests whose loads or blends have ended, and the reports."""
        self._number += 1
        plan = StepPlan(
            fence=step.fence,
            sync_loads=step.sync_loads,
            async_loads=step.async_loads,
            early_saves=step.early_saves,
            late_saves=step.late_saves,
            blend_loads=step.blend_loads,
            spills=step.spills,
            blends=step.blends,
            empty_step=step.empty,
            number=self._number,
            timed=self._number,
        )
        worker, machine = self.worker, self.rank.machine
        with machine.in_step(), machine.doing(f"step {self._number}"):
            if self._runner == 1:
                begin(worker, plan, self.connector)
                self._update()
            else:
                self._update()
                begin(worker, plan, self.connector)
            early = bool(step.sync_loads)
            if early:
                worker.start((), layerwise=not self._full)
            if not step.empty:
                self._forward(step)
            if self._runner == 2:
                worker.forward_launched()
            if not early:
                worker.start((), layerwise=not self._full)
            worker.end_forward()
            finished, failed = worker.finished_loads()
            assert failed == step.failing
            assert not worker.take_bad_pages()
            report = worker.take_report()
            self._outputs.append(self.rank.output())
            self._look()
        assert not worker.stopped, worker.stopped
        return finished, [] if report is None else report.reports

    def _update(self) -> None:
        if self.zeroes:
            self.rank.zero(self.zeroes)
        if self.copies:
            self.rank.copy_on_write(self.copies)
        self.zeroes, self.copies = [], []

    def _forward(self, step: Step) -> None:
        if self._full:
            self.rank.replay(step.reads, step.writes)
            return
        for layer in range(self.rank.shape.layers):
            self.worker.wait_for_layer(f"layer {layer}")
            self.rank.layer(layer, step.reads, step.writes)

    def _look(self) -> None:
        """Wait for a step's output, in this thread or, with asynchronous scheduling, elsewhere."""
        if self._depth == 1:
            self._outputs.pop().wait()
        elif len(self._outputs) >= self._depth:
            output = self._outputs.popleft()
            assert isinstance(output, RecordedEvent)
            self.rank.machine.force(output.point.work)

    def drive(self, books: Books, steps: int, enough: Callable[[], bool] = lambda: True) -> None:
        """Run random steps, and up to 200 more until there are ``enough``; then end what flies."""
        for number in range(steps + 600):
            drain = number >= steps and (number >= steps + 200 or enough())
            if drain and books.idle:
                break
            step = books.plan(drain=drain)
            finished, reports = self.step(step)
            books.take(reports)
            books.arrived(finished, step.failing)
        assert books.idle

    def run(self, books: Books, steps: int) -> None:
        """Run random steps, then check what was saved, and what the machine saw."""
        self.drive(books, steps)
        books.check()
        self.worker.close()
        self.rank.machine.check()
