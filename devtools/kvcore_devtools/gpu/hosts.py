"""The order between host threads, at the points where the transfer engine hands work over.

    submit ──▶ every op of the graph ──▶ its end ──▶ ops that depend on it
                     │                          ├──▶ a wait that returns because the op has ended
                     │                          └──▶ the poll that returns the op's report
                     └─ issued ──▶ `wait_issued`, and the thread that waits for the end

A mark that has passed is forgotten by the thread that saw it pass. The lock around it orders the
copy thread, which finds no mark any more, after that.

These are the engine's promises. Its lock is no edge: whoever takes it after an op has ended would
be ordered after the op by chance, and a wait that is missing would stay unseen. Between other
threads only the start and the join of a thread are an order. A test says what else is, with
`Machine.now` and `Machine.learn`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast
from unittest import mock

from kvcore.memory.arena import HostArena
from kvcore.memory.device import Device, Event, serve_devices
from kvcore.memory.device_region import DeviceRegion
from kvcore.transfer.engine import TransferEngine
from kvcore.transfer.executor import Executor, Issued, JoiningExecutor, OpPart
from kvcore.transfer.graph import OpReport, Path, RowError, TransferGraph, TransferOp
from kvcore.worker.streams import CopyStreams, IssuedCopies
from kvcore_devtools.gpu.clocks import Clock
from kvcore_devtools.gpu.device import RecordedEvent, RecordingDevice
from kvcore_devtools.gpu.machine import Machine
from kvcore_devtools.gpu.memory import Spans, span, together

__all__ = [
    "WatchedEngine",
    "WatchedStreams",
    "arena_spans",
    "installed",
    "watched_engine",
    "watched_streams",
]


_T = TypeVar("_T")


@dataclass
class _Op:
    """What is known of an op: when it was issued, what is waited for then, and when it ended."""

    op: TransferOp
    issued: Clock | None = None
    copies: Issued | None = None
    ended: Clock | None = None


class _Watched:
    """An executor whose runs are ordered after what they depend on."""

    def __init__(self, engine: WatchedEngine, executor: Executor) -> None:
        self._engine = engine
        self._executor = executor

    def run(
        self, graph: TransferGraph, op: TransferOp, rows: list[int]
    ) -> dict[int, RowError] | Issued:
        part = OpPart(graph, op, rows)
        return self._watch([part], lambda: self._executor.run(*part))

    def _watch(self, parts: Sequence[OpPart], run: Callable[[], _T]) -> _T:
        engine, machine = self._engine, self._engine.machine
        named = [f"graph {graph.graph_id}, op {op.op_id}" for graph, op, _ in parts]
        with machine.doing(" and ".join(named)):
            known = [engine.begin(*part) for part in parts]

            def ended() -> None:
                for one in known:
                    one.ended = machine.now()

            try:
                outcome = run()
            except BaseException:
                ended()
                raise
        if outcome is None or isinstance(outcome, dict):
            ended()
            return outcome
        copies = cast(Issued, outcome)
        issued, wait = machine.now(), copies.wait

        def waits() -> None:
            machine.learn(issued)
            wait()
            ended()

        for one in known:
            one.issued, one.copies = issued, copies
        copies.wait = waits  # type: ignore[method-assign]
        return outcome


class _WatchedJoining(_Watched):
    """The same of an executor that takes several ops at once."""

    _executor: JoiningExecutor

    def run_joined(self, parts: Sequence[OpPart]) -> Issued | None:
        return self._watch(parts, lambda: self._executor.run_joined(parts))


def _watched(engine: WatchedEngine, executor: Executor) -> Executor:
    joins = isinstance(executor, JoiningExecutor)
    return _WatchedJoining(engine, executor) if joins else _Watched(engine, executor)


class WatchedEngine(TransferEngine):
    """A transfer engine whose hand-overs order the machine's host threads.

    ``arena`` is the arena that ops read tiers into and write them from, and ``region`` the staging
    on the device that tiers are read into directly; their accesses of both are recorded.
    """

    machine: Machine
    arena: HostArena | None = None
    region: DeviceRegion | None = None

    def __init__(self, executors: Mapping[Path, Executor], **limits: Any) -> None:
        self._submitted: dict[int, Clock] = {}
        self._known: dict[int, dict[int, _Op]] = {}
        watched = {path: _watched(self, one) for path, one in executors.items()}
        super().__init__(watched, **limits)

    def begin(self, graph: TransferGraph, op: TransferOp, rows: list[int]) -> _Op:
        """Order the calling thread, which runs ``op``, after what the op depends on."""
        self.machine.learn(self._submitted[graph.graph_id])
        others = self._known.setdefault(graph.graph_id, {})
        for dep in op.deps:
            if dep in others:
                self.machine.learn(others[dep].ended or {})
        if self.arena is not None and op.tier and not op.path.is_staged:
            slots = [graph.host_slots[row] for row in rows]
            touched = arena_spans(self.arena, slots)
            self.machine.touch(f"the {op.path.value}", touched, writes=op.path.reads_tier)
        if self.region is not None and op.path is Path.DISK2D:
            touched = _places(self.region, [graph.staged[row] for row in rows])
            self.machine.touch("the disk2d", touched, writes=True)
        others[op.op_id] = known = _Op(op)
        return known

    def submit(self, graph: TransferGraph, wave: int | None = None) -> None:
        # The engine refuses a graph that is in flight: an attempt before this one has ended, even
        # if another thread took its reports.
        self._after(graph.graph_id, lambda op: True)
        self._submitted[graph.graph_id] = self.machine.now()
        super().submit(graph, wave)

    def wait(self, graph_id: int, timeout: float | None = None) -> bool:
        waited = super().wait(graph_id, timeout)
        if waited:
            self._after(graph_id, lambda op: True)
        return waited

    def wait_device(self, graph_id: int, timeout: float | None = None) -> bool:
        waited = super().wait_device(graph_id, timeout)
        if waited:
            self._after(graph_id, _carrying(None))
        return waited

    def wait_issued(
        self, graph_id: int, layer: int | None = None, timeout: float | None = None
    ) -> bool:
        waited = super().wait_issued(graph_id, layer, timeout)
        if waited:
            for known in self._ops(graph_id, _carrying(layer)):
                self.machine.learn((known.ended if known.issued is None else known.issued) or {})
        return waited

    def issued(self, graph_id: int, layer: int | None = None) -> list[Issued]:
        found = super().issued(graph_id, layer)
        for known in self._ops(graph_id, _carrying(layer)):
            if known.ended is not None and not any(known.copies is one for one in found):
                self.machine.learn(known.ended)  # it is not to be waited for: it has ended
        return found

    def wait_idle(self, timeout: float) -> bool:
        idle = super().wait_idle(timeout)
        if idle:
            for graph_id in list(self._known):
                self._after(graph_id, _carrying(None))
        return idle

    @property
    def in_flight(self) -> int:
        count = super().in_flight
        if not count:
            for graph_id in list(self._known):
                self._after(graph_id, lambda op: True)
        return count

    def poll(self) -> list[OpReport]:
        reports = super().poll()
        for report in reports:
            known = self._known.get(report.graph_id, {}).get(report.op_id)
            if known is not None:
                self.machine.learn(known.ended or {})
        return reports

    def close(self, *, drain: bool = True, timeout: float = 30.0) -> bool:
        closed = super().close(drain=drain, timeout=timeout)
        if closed:
            for graph_id in list(self._known):
                self._after(graph_id, lambda op: True)
        return closed

    def _ops(self, graph_id: int, which: Callable[[TransferOp], bool]) -> list[_Op]:
        every = list(self._known.get(graph_id, {}).values())
        return [known for known in every if which(known.op)]

    def _after(self, graph_id: int, which: Callable[[TransferOp], bool]) -> None:
        for known in self._ops(graph_id, which):
            self.machine.learn(known.ended or {})


def _carrying(layer: int | None) -> Callable[[TransferOp], bool]:
    """Return what is true for the device ops that carry ``layer``; None for all layers."""

    def carries(op: TransferOp) -> bool:
        covers = layer is None or op.layers is None or op.layers.covers(layer)
        return op.path.touches_device and covers

    return carries


class WatchedStreams(CopyStreams):
    """Copy streams that order a copy after a mark that was seen to pass, and forgotten."""

    machine: Machine

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self._marks: dict[int, Event] = {}

    def start_after(self, graph_id: int, event: Event) -> None:
        self._marks[graph_id] = event
        super().start_after(graph_id, event)

    @contextmanager
    def copying(self, *graph_ids: int) -> Iterator[IssuedCopies]:
        with super().copying(*graph_ids) as copies:
            for mark in map(self._marks.get, graph_ids):
                if isinstance(mark, RecordedEvent) and mark.seen:
                    self.machine.learn(mark.point.clock)
            yield copies


def watched_streams(machine: Machine) -> type[WatchedStreams]:
    """Return the class of copy streams that order the threads of ``machine``."""
    return type("WatchedStreams", (WatchedStreams,), {"machine": machine})


def watched_engine(machine: Machine) -> type[WatchedEngine]:
    """Return the class of engines that order the threads of ``machine``."""
    return type("WatchedEngine", (WatchedEngine,), {"machine": machine})


def _places(region: DeviceRegion, places: list[int]) -> Spans:
    """Return the bytes of some slots of a region."""
    start, size = region.memory.address, region.slot_nbytes
    return together(span(start + place * size, size) for place in places)


def arena_spans(arena: HostArena, slots: list[int]) -> Spans:
    """Return the bytes of some slots of an arena."""
    import numpy as np

    return together(
        span(np.frombuffer(piece, dtype=np.uint8).ctypes.data, piece.nbytes)
        for slot in slots
        for piece in arena.slot_buffers(slot)
    )


@contextmanager
def installed(machine: Machine) -> Iterator[Machine]:
    """Let ``machine`` be the CPU's device and the GPU, and order threads by their start and join.

    Only workers that are built in this block use it.
    """
    start, ended = threading.Thread.start, threading.Thread.join

    def started(thread: threading.Thread) -> None:
        thread._gpu_born = machine.now()  # type: ignore[attr-defined]
        start(thread)

    def joined(thread: threading.Thread, timeout: float | None = None) -> None:
        ended(thread, timeout)
        host = getattr(thread, "_gpu_host", None)
        if host is not None and not thread.is_alive():
            machine.learn(host.clock)

    undo = [serve_devices(kind, partial(RecordingDevice, machine)) for kind in ("cpu", "cuda")]
    try:
        with (
            mock.patch.object(threading.Thread, "start", started),
            mock.patch.object(threading.Thread, "join", joined),
            mock.patch("kvcore.worker.worker.TransferEngine", watched_engine(machine)),
            mock.patch("kvcore.worker.worker.CopyStreams", watched_streams(machine)),
        ):
            machine.host().device = machine.index
            yield machine
    finally:
        for one in undo:
            one()
