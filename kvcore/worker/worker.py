"""The data plane of one model rank: its arena, its tiers, and the engine that moves the bytes.

    device pages ◀──copy_blocks──▶ host arena ◀──read / write──▶ backing tiers

A worker carries out transfer graphs and reports how their ops ended. It decides nothing, and knows
no keys but those that graphs carry for verification.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvcore._util.cpus import node_cores
from kvcore.errors import CapacityError, TierError, TransferError
from kvcore.index.slots import SlotRun
from kvcore.memory.arena import HostArena
from kvcore.memory.copy.base import DeviceOps
from kvcore.memory.device import Event, Stream, device_of
from kvcore.memory.device_group import DeviceGroup
from kvcore.memory.device_region import DeviceRegion
from kvcore.memory.layout import KVView
from kvcore.memory.points import NO_POINTS, PointCopies
from kvcore.memory.runs import SlotPlace
from kvcore.telemetry.metrics import Metrics
from kvcore.telemetry.timeline import Tracer
from kvcore.tiers.base import Tier
from kvcore.transfer.engine import TransferEngine
from kvcore.transfer.executor import Executor
from kvcore.transfer.graph import OpReport, Path, RowError, TransferGraph, TransferOp
from kvcore.transfer.op_thread import OpTiming
from kvcore.worker.device_staging import StagedReads
from kvcore.worker.executors import DeviceCopy, StagedRead, TierRead, TierWrite
from kvcore.worker.refusing import refuse
from kvcore.worker.streams import CopyStreams, IssuedCopies

if TYPE_CHECKING:
    import torch

_log = logging.getLogger("kvcore.worker")


@dataclass(frozen=True)
class EnginePages:
    """The engine's pages on one rank, as a worker copies them.

    ``groups`` are the engine's layer groups in the order of a graph's unit tables, with this rank's
    layers, the first of which is ``first_layer`` of the model. ``device`` is where the pages are;
    None is a CPU. ``points`` are the engine's pages of resume points.
    """

    groups: Sequence[DeviceGroup] = ()
    first_layer: int = 0
    device: torch.device | None = None
    points: PointCopies = NO_POINTS


@dataclass(frozen=True)
class WorkerLimits:
    """What a worker may have running at once.

    ``copy_threads`` copy to and from the device. ``io_queues`` threads read from each kind of tier.
    ``queue_depth`` ops may wait. ``device_slots`` is the number of blocks of the staging on the
    device, which DISK2D needs; 0 for none.
    """

    copy_threads: int = 1
    io_queues: int = 2
    queue_depth: int = 16384
    device_slots: int = 0


class KVWorker:
    """One rank's arena, tiers and transfer engine.

    ``arena_view`` describes ``arena`` as canonical blocks of this rank's heads and layers. Tiers
    are opened when the leader names them. ``reads``, if given, carries out reads from tiers,
    whatever their name. Raises UnsupportedError if the device has no room for the staging.
    """

    def __init__(
        self,
        *,
        arena: HostArena,
        arena_view: KVView,
        ops: DeviceOps,
        pages: EnginePages,
        limits: WorkerLimits,
        reads: Executor | None = None,
        metrics: Metrics | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self.arena = arena
        self._block = arena.shape
        first_layer, self.device = pages.first_layer, device_of(pages.device)
        self.first_layer = first_layer
        self._layers = range(first_layer, first_layer + arena.shape.layers)
        self.tiers: dict[str, Tier] = {}
        self.ops = ops
        self.groups = tuple(pages.groups)
        self._metrics = metrics or Metrics(enabled=False)
        self.tracer = tracer or Tracer()
        self._stream = CopyStreams(self.device)
        read = reads or TierRead(self.tiers, arena, self._metrics)
        write = TierWrite(self.tiers, arena)

        def copier(memory: KVView, *, to_device: bool) -> DeviceCopy:
            return DeviceCopy(
                ops,
                self.groups,
                memory,
                to_device,
                self._stream,
                first_layer,
                pages.points,
                SlotPlace(arena.slot_nbytes),
            )

        self._copies = {
            Path.H2D: copier(arena_view, to_device=True),
            Path.D2H: copier(arena_view, to_device=False),
        }
        executors: dict[Path, Any] = {**self._copies}
        executors |= dict.fromkeys((Path.DISK2H, Path.REMOTE2H), read)
        self._staging: StagedReads | None = None
        if limits.device_slots:
            region = DeviceRegion(arena.shape, limits.device_slots, ops, pages.device)
            self._staging = StagedReads(region, self._metrics)
            executors[Path.DISK2D] = StagedRead(
                self.tiers, self._staging, self._stream, self._metrics
            )
            executors[Path.D2D] = copier(region.view(), to_device=True)
        executors |= {path: write for path in Path if path.writes_tier}
        threads = {path: limits.io_queues for path in executors if path.reads_tier}
        threads |= {path: limits.copy_threads for path in executors if path.touches_device}
        self.engine = TransferEngine(
            executors,
            threads=threads,
            queue_depth=limits.queue_depth,
            nbytes=self._nbytes,
            observer=self._observe,
            near=node_cores(self.device.numa_node()),
        )

    def open_tier(self, name: str, tier: Tier) -> None:
        """Serve ops to and from ``tier`` from now on. The worker closes it at its own end."""
        tier.attach(self.arena.memory)
        if self._staging is not None:
            how = tier.attach_device(self._staging.region)
            _log.info("tier %s to the device: %s", name, how or "through host memory")
        self.tiers[name] = tier

    def use_arena(self, arena: HostArena, arena_view: KVView, part_at: int = 0) -> None:
        """Copy from and to another arena from now on; this worker's own tiers keep the first one.

        Of what is not cut by heads, the rank's part is ``part_at`` bytes behind the begin of each
        slot. No transfer may be in flight. The caller closes the previous arena. Raises LayoutError
        if slots cannot hold what is copied, which is the same in all copies. Nothing changes then.
        """
        for copy in self._copies.values():
            copy.use(arena_view, SlotPlace(arena.slot_nbytes, part_at))
        self.arena = arena

    def _nbytes(self, op: TransferOp, rows: int | None = None) -> int:
        """Return the bytes of some rows of ``op`` in this rank's layers; of all rows if None."""
        whole = (op.rows.size if rows is None else rows) * self._block.nbytes
        if op.layers is None:
            return whole
        mine = self._layers
        held = min(op.layers.stop, mine.stop) - max(op.layers.start, mine.start)
        return whole * max(0, held) // len(mine)

    def _observe(self, timing: OpTiming) -> None:
        span = timing.op.layers
        moved = self._nbytes(timing.op, timing.rows - timing.failed)
        self._metrics.transferred(timing.op.path.value, moved, timing.seconds)
        self.tracer.span(
            timing.op.path.value,
            "all layers" if span is None else f"layers {span.start}..{span.stop}",
            timing.started,
            timing.started + timing.seconds,
            graph=timing.graph_id,
            nbytes=moved,
            failed=timing.failed,
        )

    def wave(self) -> int:
        """Return a new wave for `submit`: its graphs are copied together, layer by layer."""
        return self.engine.wave()

    def stream_of(self, engine_stream: Any) -> Stream:
        """Return an engine's stream, by the engine's own object for it."""
        return self.device.stream_of(engine_stream)

    def enter_device(self) -> None:
        """Make the rank's device the current one of the calling thread, one of kvcore's own."""
        self.device.enter()

    def mark(self, *others: Stream) -> Event:
        """Return an event after all that the current stream and ``others`` were given so far."""
        return self._stream.mark(*others)

    def submit(
        self,
        graph: TransferGraph,
        wave: int | None = None,
        after: Event | None = None,
    ) -> list[OpReport]:
        """Start a graph, ordered after earlier waves' copies. Its copies begin after ``after``.

        Without ``after`` they begin after the current stream's work so far: a step that is under
        way may still write to the pages. A graph that cannot be taken (it is malformed, or the
        queue is full) does not run at all: reports of its failed ops are returned. They are refused
        if the engine has stopped: this rank then takes no more work.
        """
        if graph.units:  # else it goes to and from host memory only
            self._stream.start_after(graph.graph_id, after or self._stream.mark())
        self.arena.reach(graph.host_slots)
        try:
            self.engine.submit(graph, wave)
        except (CapacityError, TransferError) as error:
            _log.warning("graph refused: %s", error)
            return refuse(graph, RowError.REFUSED if self.engine.stopped else RowError.INTERNAL)
        return []

    def poll(self) -> list[OpReport]:
        """Return reports of the ops that ended since the last call. Does not block."""
        return self.engine.poll()

    def cancel(self, graph_id: int) -> None:
        self.engine.cancel(graph_id)

    def invalidate(self, tier: str, slots: Sequence[SlotRun]) -> None:
        """Make slots of ``tier`` unreadable, now and after a restart. Blocks.

        If the tier cannot do it, that is logged.
        """
        try:
            self.tiers[tier].invalidate(slot for run in slots for slot in range(*run))
        except (KeyError, TierError) as error:
            count = sum(stop - start for start, stop in slots)
            _log.error("tier %s could not invalidate %d slots: %s", tier, count, error)

    def wait_report(self, timeout: float) -> bool:
        """Block for a report, at most ``timeout`` seconds; return whether there is one."""
        return self.engine.wait_report(timeout)

    def wait_graph(self, timeout: float) -> bool:
        """Block until some graph has ended and its last reports can be polled.

        Waits and returns as `wait_report` does.
        """
        return self.engine.wait_graph(timeout)

    def wait_device(self, graph_id: int) -> None:
        """Block the host until the graph no longer touches the engine's pages."""
        self.engine.wait_device(graph_id)

    def wait_idle(self, timeout: float) -> bool:
        """Block the host until no op in flight touches the engine's pages; True if so.

        Blocks at most ``timeout`` seconds. Ops that have not begun, and copies that a stream has
        not come to, count too.
        """
        return self.engine.wait_idle(timeout)

    def wait_layer(self, graph_id: int, layer: int) -> None:
        """Let the current stream wait for the graph's copies of all layers up to ``layer``.

        Blocks as `follow` does.
        """
        self._follow([graph_id], layer)

    def follow(self, *graph_ids: int) -> None:
        """Let the current stream wait for these graphs' copies from and to the engine's pages.

        Blocks the host only until they were issued, or have ended. Every reason for which rows may
        fail, but a failure of the device itself, can be polled then. On a CPU, copies that were
        issued have ended.
        """
        if len(graph_ids) > 1:
            self.engine.put_first(graph_ids)  # saves are issued together
        self._follow(graph_ids, None)

    def _follow(self, graph_ids: Sequence[int], layer: int | None) -> None:
        done: dict[int, Event] = {}
        for graph_id in graph_ids:
            self.engine.wait_issued(graph_id, layer)
            for copies in self.engine.issued(graph_id, layer):
                assert isinstance(copies, IssuedCopies)
                done[id(copies)] = copies.done  # ops that were joined share them
        stream = self.device.current_stream()
        for event in done.values():
            stream.follow(event)

    def close(self, *, timeout: float = 30.0) -> bool:
        """Finish what is in flight, flush the tiers and give the memory back.

        Returns False if something has not ended within ``timeout`` seconds. Tiers and memory then
        stay open, because it may still use them. `close` can be called again.
        """
        ended = self.engine.close(drain=True, timeout=timeout)
        if ended:
            for name, tier in self.tiers.items():
                _close_tier(name, tier)
            if self._staging is not None:
                self._staging.close()
                self._staging = None
            self.arena.close()
        self.tracer.close()
        return ended


def _close_tier(name: str, tier: Tier) -> None:
    try:
        tier.close()
    except TierError as error:
        _log.error("closing tier %s: %s", name, error)
