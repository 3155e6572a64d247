"""Faults between leader and worker, and in the worker: messages, transfers, copies, the clock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from kvcore.connector.step_transport import Outbox
from kvcore.index.slots import SlotRun
from kvcore.manager.base import Lane, Transport
from kvcore.memory.copy.base import Copy, DeviceOps
from kvcore.memory.layout import KVView
from kvcore.testing.faults.media import FaultyTier, into_disk
from kvcore.testing.faults.plan import Fault, Faults, Seam
from kvcore.tiers.base import Tier
from kvcore.tiers.disk import DiskTier
from kvcore.transfer.executor import Executor, Issued
from kvcore.transfer.graph import OpReport, Path, RowError, TransferGraph, TransferOp
from kvcore.worker.executors import DeviceCopy
from kvcore.worker.worker import KVWorker

__all__ = [
    "FaultyClock",
    "FaultyExecutor",
    "FaultyMessages",
    "FaultyOps",
    "into_outbox",
    "into_worker",
]


def into_worker(worker: KVWorker, faults: Faults) -> None:
    """Put faults into a worker: its transfers, copies, clock and tiers, even those opened later.

    A `DiskTier` gets faults under and above its checksums, any other tier only above. Nothing may
    be in flight.
    """
    engine = worker.engine
    seams = {Path.H2D: Seam.LOAD, Path.D2H: Seam.SAVE}
    for path, seam in seams.items():
        executor = engine._executors[path]
        assert isinstance(executor, DeviceCopy)
        executor._ops = FaultyOps(executor._ops, faults)
        engine._executors[path] = FaultyExecutor(executor, faults, seam)
    engine._clock = FaultyClock(faults, engine._clock)
    for name, tier in worker.tiers.items():
        worker.tiers[name] = _faulty(tier, faults)
    opened = worker.open_tier

    def open_tier(name: str, tier: Tier) -> None:
        opened(name, _faulty(tier, faults))

    worker.open_tier = open_tier  # type: ignore[method-assign]


def _faulty(tier: Tier, faults: Faults) -> FaultyTier:
    under = into_disk(tier, faults) if isinstance(tier, DiskTier) else tier
    return FaultyTier(under, faults)


def into_outbox(outbox: Outbox, faults: Faults) -> None:
    """Put faults into the messages of a leader that sends them once a step."""
    _tamper(outbox, ("submit", "cancel", "invalidate"), faults)


def into_reports(worker: KVWorker, faults: Faults) -> None:
    """Put faults into the reports of a worker that its engine polls once a step."""
    _tamper(worker, ("poll", "wait_report"), faults)


def _tamper(sender: Any, names: Sequence[str], faults: Faults) -> None:
    inner: Any = SimpleNamespace(**{name: getattr(sender, name) for name in names})
    messages = FaultyMessages(inner, faults)
    for name in names:
        setattr(sender, name, getattr(messages, name))


class FaultyExecutor:
    """An executor that wraps ``inner``. Faults strike once per op; an error fails all its rows."""

    def __init__(self, inner: Executor, faults: Faults, seam: Seam) -> None:
        self.inner = inner
        self.faults = faults
        self.seam = seam

    def run(
        self, graph: TransferGraph, op: TransferOp, rows: list[int]
    ) -> dict[int, RowError] | Issued:
        if self.faults.meet(self.seam) is not None:
            return dict.fromkeys(rows, RowError.INTERNAL)
        return self.inner.run(graph, op, rows)


class FaultyOps(DeviceOps):
    """Device operations that wrap ``inner``. Faults at `Seam.DEVICE` strike once per copy.

    A copy that fails has copied the first half.
    """

    name = "faulty"
    priority = -1

    def __init__(self, inner: DeviceOps, faults: Faults) -> None:
        self.inner = inner
        self.faults = faults

    def supports(self, src: KVView, dst: KVView) -> bool:
        return self.inner.supports(src, dst)

    def copy(self, copy: Copy) -> None:
        strike = self.faults.meet(Seam.DEVICE)
        half = len(copy.src_units) if strike is None else len(copy.src_units) // 2
        if half:
            a, b = copy.src_units[:half], copy.dst_units[:half]
            self.inner.copy(copy._replace(src_units=a, dst_units=b))
        if strike is not None:
            raise OSError("an injected fault stopped the copy half way")


class FaultyMessages:
    """A `kvcore.manager.Transport` that wraps ``inner``; some messages come late or are lost.

    Attributes of ``inner`` beyond the protocol are passed through. A report that is delayed comes
    after those of a later poll. If there is only one, it comes with the next poll.
    """

    def __init__(self, inner: Transport, faults: Faults) -> None:
        self.inner = inner
        self.faults = faults
        self._held: list[OpReport] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def submit(self, graph: TransferGraph, lane: Lane | None = None) -> None:
        self._unless_lost(Seam.SUBMIT, lambda: self.inner.submit(graph, lane))

    def cancel(self, graph_id: int) -> None:
        self._unless_lost(Seam.CANCEL, lambda: self.inner.cancel(graph_id))

    def invalidate(self, tier: str, slots: Sequence[SlotRun]) -> None:
        self._unless_lost(Seam.INVALIDATE, lambda: self.inner.invalidate(tier, slots))

    def wait_report(self, timeout: float) -> bool:
        return bool(self._held) or self.inner.wait_report(timeout)

    def poll(self) -> Sequence[OpReport]:
        now: list[OpReport] = []
        later: list[OpReport] = []
        for report in self.inner.poll():
            strike = self.faults.meet(Seam.REPORT)
            if strike is None:
                now.append(report)
            elif strike.fault is Fault.REORDER:
                later.append(report)
        held, self._held = self._held, later
        return [*now, *reversed(held)]

    def _unless_lost(self, seam: Seam, send: Callable[[], None]) -> None:
        if self.faults.meet(seam) is None:
            send()


class FaultyClock:
    """A clock, in seconds, that wraps ``inner``. A reading can jump (`Seam.CLOCK`). Thread-safe."""

    def __init__(self, faults: Faults, inner: Callable[[], float] = time.monotonic) -> None:
        self.faults = faults
        self.inner = inner
        self._lock = threading.Lock()
        self._ahead = 0.0

    def __call__(self) -> float:
        strike = self.faults.at(Seam.CLOCK)
        with self._lock:
            if strike is not None:
                self._ahead += strike.rule.seconds
            return self.inner() + self._ahead
