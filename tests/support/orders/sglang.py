"""The order in which SGLang's overlap schedule calls a worker, and issues the forward.

scheduler.py: event_loop_overlap, run_batch, _apply_war_barrier

    plan the batch, start its loads                          on the schedule stream
    the forward stream waits for the schedule stream
    set_consumer; for each layer: wait_until, the layer      on the forward stream
    the schedule stream waits for the forward
    wait for the output of the batch before; end its loads; insert what it computed: saves

On a rank that does not lead, a thread polls the reports and sends them to the leader, and repeats
loads that failed. Another one carries out the orders that touch no page.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import NamedTuple

from kvcore.connector.worker import Load
from kvcore.memory.device import Event, Stream, device_of
from kvcore.transfer.graph import OpReport, TransferGraph
from kvcore_devtools.gpu import GpuRank
from kvcore_devtools.gpu.clocks import Clock
from kvcore_sglang.gate import LayerGate
from kvcore_sglang.messages import Order
from kvcore_sglang.worker import WorkerConnector
from support.orders.books import Books, Step

__all__ = ["SglangScheduler"]


class _Batch(NamedTuple):
    output: Event
    loads: int
    saves: list[TransferGraph]


class _Worker(WorkerConnector):
    """Orders a thread that sees a load ended after the thread that took its last report."""

    def __init__(self, rank: GpuRank, forward: Stream) -> None:
        super().__init__(rank.parts, forward)
        self._machine = rank.machine
        self._over: dict[int, Clock] = {}

    def _ended(self, load: Load[str]) -> None:
        self._over[load.graph_id] = self._machine.now()

    def _settle(self, load: Load[str]) -> None:
        super()._settle(load)
        self._machine.learn(self._over[load.graph_id])


class SglangScheduler:
    """SGLang's scheduler on a rank. Reports are polled by a thread unless the rank ``leads``."""

    def __init__(self, rank: GpuRank, *, layerwise: bool, leads: bool) -> None:
        self.rank = rank
        self.device = device_of(None)
        self.schedule, self.forward = self.device.stream(), self.device.stream()
        self._copies = self.device.stream()
        self.worker = _Worker(rank, self.forward)
        self.gate = LayerGate(self.worker, layerwise=layerwise, layers=rank.shape.layers)
        self._leads = leads
        self._last: _Batch | None = None
        self._ending = threading.Event()
        self._told: deque[tuple[list[OpReport], Clock]] = deque()
        self._threads: list[threading.Thread] = []
        if not leads:
            self._start(self._report, "kvcore-reports")

    def _start(self, work: object, name: str) -> None:
        thread = threading.Thread(target=work, name=name, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    # -- the schedule -----------------------------------------------------------------------

    def step(self, books: Books, *, drain: bool) -> None:
        machine = self.rank.machine
        with self.schedule.issuing(), machine.in_step():
            self._take(books)
            step = books.plan(drain=drain)
            if step.early_saves:
                self.worker.carry_out(Order(graphs=step.early_saves))
            if step.spills:
                self._now(Order(now=True, graphs=step.spills))
            batch = None
            if not step.empty:
                batch = self._run(step)
            if self._last is not None:
                last, self._last = self._last, None
                self._end(last)
            self._last = batch

    def _run(self, step: Step) -> _Batch:
        index = self.gate.start(step.sync_loads)
        self.forward.follow(self.schedule.record())
        with self.forward.issuing():
            self.gate.set_consumer(index)
            for layer in range(self.rank.shape.layers):
                self.gate.wait_until(layer)
                self.rank.layer(layer, step.reads, step.writes)
            forwarded = self.forward.record()
        self._copies.follow(forwarded)
        output = self._copies.record()
        self.schedule.follow(self.forward.record())
        return _Batch(output, index, step.late_saves)

    def _end(self, batch: _Batch) -> None:
        batch.output.wait()
        if batch.loads >= 0:
            assert self.gate.finish(batch.loads)
        if batch.saves:
            self.worker.carry_out(Order(graphs=batch.saves))

    def _now(self, order: Order) -> None:
        """Carry out an order that arrives by a link, on a thread of its own."""
        if self._leads:
            self.worker.carry_out(order)
            return
        thread = threading.Thread(target=self.worker.carry_out, args=(order,), name="kvcore-orders")
        thread.start()
        thread.join()

    # -- reports ----------------------------------------------------------------------------

    def _report(self) -> None:
        """Do what `Follower._report` does."""
        self.device.enter()
        while not self._ending.is_set():
            self.worker.wait_report(0.01)
            reports = self.worker.poll()
            if reports:
                self._told.append((reports, self.rank.machine.now()))
            else:
                self._ending.wait(0.001)

    def _take(self, books: Books) -> None:
        if self._leads:
            books.take(self.worker.poll())
            return
        while self._told:
            reports, clock = self._told.popleft()
            self.rank.machine.learn(clock)
            books.take(reports)

    def run(self, books: Books, steps: int) -> None:
        """Run random steps, then end what is in flight, and check what was saved."""
        for number in range(steps + 4000):
            drain = number >= steps
            if drain and books.idle and self._last is None:
                break
            self.step(books, drain=drain)
            if drain:
                self._ending.wait(0.001)
        assert books.idle
        self._ending.set()
        for thread in self._threads:
            thread.join()
        with self.schedule.issuing():
            self._take(books)
            books.check()
        self.worker.close()
        self.rank.machine.check()
