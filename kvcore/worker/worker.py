"""The data plane of one model rank: its arena, its tiers, and the engine that moves the bytes.

    device pages ◀──copy_blocks──▶ host arena ◀──read / write──▶ backing tiers

A worker is told what to do by transfer graphs and reports what became of their ops. It decides
nothing and knows no keys but those that graphs carry for verification.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvcore.errors import (
    BlockMissing,
    CapacityError,
    CorruptBlock,
    TierError,
    TierUnavailable,
    TransferError,
)
from kvcore.index.slots import SlotRun
from kvcore.memory.arena import HostArena
from kvcore.memory.copy.base import DeviceOps
from kvcore.memory.device_region import DeviceRegion
from kvcore.memory.layout import KVView
from kvcore.telemetry.metrics import Metrics
from kvcore.telemetry.timeline import Tracer
from kvcore.tiers.base import BlockRead, BlockRecord, BlockWrite, DeviceRead, Tier
from kvcore.transfer.engine import Executor, OpTiming, TransferEngine
from kvcore.transfer.graph import (
    SKIP,
    OpReport,
    Path,
    RowError,
    TransferGraph,
    TransferOp,
)
from kvcore.worker.device_staging import StagedReads

if TYPE_CHECKING:
    import torch

_log = logging.getLogger("kvcore.worker")

_MARKS_KEPT = 65536
_UNMARKED = -1
"""No graph's id."""


@dataclass(frozen=True)
class DeviceGroup:
    """Layers that share one page table in the engine: ``layers`` are canonical layer indices and
    ``view`` has exactly their planes, in that order."""

    layers: tuple[int, ...]
    view: KVView


class _DeviceCopy:
    """Executor of H2D, D2H and D2D: blocks of the arena, or of the staging on the device, to and
    from the engine's pages."""

    def __init__(
        self,
        ops: DeviceOps,
        groups: Sequence[DeviceGroup],
        arena: KVView,
        to_device: bool,
        sync: _Stream,
        elsewhere: Mapping[int, Sequence[DeviceGroup]],
        first_layer: int,
    ) -> None:
        self._ops = ops
        self._first_layer = first_layer
        self._groups = groups
        self._elsewhere = elsewhere
        self.use(arena)
        self._block_tokens = arena.layout.page_tokens
        self._to_device = to_device
        self._sync = sync

    def use(self, arena: KVView) -> None:
        """Copy from and to another arena. Nothing may be running."""
        first = self._first_layer
        self._arenas = [
            _select_layers(arena, [layer - first for layer in group.layers])
            for group in self._groups
        ]

    def run(self, graph: TransferGraph, op: TransferOp, rows: list[int]) -> dict[int, RowError]:
        places = graph.staged if op.path.is_staged else graph.host_slots
        slots = np.array([places[row] for row in rows], dtype=np.int64)
        groups = self._elsewhere.get(graph.graph_id, self._groups)
        with self._sync.copying(graph.graph_id):
            for group, arena, table in zip(groups, self._arenas, graph.units, strict=True):
                layers = _positions(group.layers, op)
                units = table.array()[rows]
                if layers and (units != SKIP).any():  # rows may go no further than host memory
                    self._copy(group.view, units, arena, slots, layers, table.unit_tokens)
        return {}

    def _copy(
        self,
        device: KVView,
        units: npt.NDArray[np.int64],
        arena: KVView,
        slots: npt.NDArray[np.int64],
        layers: Sequence[int],
        unit_tokens: int,
    ) -> None:
        per_block = self._block_tokens // unit_tokens
        blocks = slots[:, None] * per_block + np.arange(per_block, dtype=np.int64)
        blocks = np.where(units == SKIP, SKIP, blocks)
        if self._to_device:
            self._ops.copy_blocks(arena, blocks, device, units, layers, unit_tokens)
        else:
            self._ops.copy_blocks(device, units, arena, blocks, layers, unit_tokens)


class _TierRead:
    """Executor of reads from a backing tier into arena slots. A block is verified by its tier."""

    def __init__(self, tiers: Mapping[str, Tier], arena: HostArena) -> None:
        self._tiers = tiers
        self._arena = arena

    def run(self, graph: TransferGraph, op: TransferOp, rows: list[int]) -> dict[int, RowError]:
        requests = [
            BlockRead(
                graph.tier_slots[row],
                graph.keys[row],
                self._arena.slot_buffers(graph.host_slots[row]),
                graph.nodes,
            )
            for row in rows
        ]
        return _errors(op, rows, _tier(self._tiers, op).read(requests))


class _StagedRead:
    """Executor of reads from a backing tier into the staging on the device, where they are
    verified. It waits for no compute of the engine: it touches none of its pages."""

    def __init__(self, tiers: Mapping[str, Tier], reads: StagedReads, sync: _Stream) -> None:
        self._tiers = tiers
        self._reads = reads
        self._sync = sync

    def run(self, graph: TransferGraph, op: TransferOp, rows: list[int]) -> dict[int, RowError]:
        requests = [
            DeviceRead(graph.tier_slots[row], graph.keys[row], graph.staged[row]) for row in rows
        ]
        with self._sync.copying(_UNMARKED):
            results = self._reads.read(op.tier, _tier(self._tiers, op), requests)
        return _errors(op, rows, results)


class _TierWrite:
    """Executor of writes from arena slots to a backing tier."""

    def __init__(self, tiers: Mapping[str, Tier], arena: HostArena) -> None:
        self._tiers = tiers
        self._arena = arena

    def run(self, graph: TransferGraph, op: TransferOp, rows: list[int]) -> dict[int, RowError]:
        requests = [
            BlockWrite(
                graph.tier_slots[row],
                graph.keys[row],
                graph.parent_of(row),
                graph.namespace,
                self._arena.slot_buffers(graph.host_slots[row]),
            )
            for row in rows
        ]
        return _errors(op, rows, _tier(self._tiers, op).write(requests))


def _tier(tiers: Mapping[str, Tier], op: TransferOp) -> Tier:
    return tiers.get(op.tier) or DeadTier(TierUnavailable(f"tier {op.tier!r} is not open here"))


def _errors(
    op: TransferOp, rows: Sequence[int], results: Sequence[TierError | None]
) -> dict[int, RowError]:
    failed: dict[int, RowError] = {}
    for row, error in zip(rows, results, strict=True):
        if error is not None:
            failed[row] = _row_error(error)
            _log.warning("%s tier=%s failed: %s", op.path.value, op.tier, error)
    return failed


def _row_error(error: TierError) -> RowError:
    if isinstance(error, CorruptBlock):
        return RowError.CORRUPT
    return RowError.MISSING if isinstance(error, BlockMissing) else RowError.IO


class _Stream:
    """Orders copies with the engine's compute.

    On a CPU the engine's forward has ended when it hands over, so there is nothing to order.
    """

    def mark(self, graph_id: int) -> None:
        """The engine's work submitted so far must end before the graph's copies begin."""

    def copying(self, graph_id: int) -> Any:
        """Context in which copies are issued; on exit they have ended."""
        return _NOTHING


class _Nothing:
    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


_NOTHING = _Nothing()


class _CudaStream(_Stream):
    """A stream of its own for copies, which waits for the compute stream as of ``mark``."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._torch = torch
        self._device = device
        self._streams: dict[int, Any] = {}
        self._marks: dict[int, Any] = {}

    def mark(self, graph_id: int) -> None:
        event = self._torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._torch.cuda.current_stream(self._device))
        self._marks[graph_id] = event
        while len(self._marks) > _MARKS_KEPT:  # ids ascend: the oldest graph ended long ago
            self._marks.pop(next(iter(self._marks)))

    def copying(self, graph_id: int) -> Any:
        return _CudaCopying(self, graph_id)

    def enter(self, graph_id: int) -> Any:
        import threading

        torch = self._torch
        thread = threading.get_ident()
        if thread not in self._streams:
            torch.cuda.set_device(self._device)
            self._streams[thread] = torch.cuda.Stream(self._device)
        stream = self._streams[thread]
        if (event := self._marks.get(graph_id)) is not None:
            stream.wait_event(event)
        context = torch.cuda.stream(stream)
        context.__enter__()
        return stream, context


class _CudaCopying:
    def __init__(self, owner: _CudaStream, graph_id: int) -> None:
        self._owner = owner
        self._graph_id = graph_id

    def __enter__(self) -> None:
        self._stream, self._context = self._owner.enter(self._graph_id)

    def __exit__(self, *exc: object) -> None:
        self._context.__exit__(*exc)
        self._stream.synchronize()


class KVWorker:
    """One rank's arena, tiers and transfer engine.

    ``arena_view`` describes ``arena`` as canonical blocks of this rank's heads and layers, the
    first of which is ``first_layer`` of the model. ``groups`` are the engine's layer groups in the
    order of a graph's unit tables, with this rank's layers. Tiers are opened when the leader
    names them; with ``reads``, that carries out reads from tiers, whatever their name. With
    ``device_slots`` it has a staging of so many blocks on the device, for DISK2D; raises
    UnsupportedError where the device has no room for it.
    """

    def __init__(
        self,
        *,
        arena: HostArena,
        arena_view: KVView,
        groups: Sequence[DeviceGroup],
        ops: DeviceOps,
        first_layer: int = 0,
        device: torch.device | None = None,
        copy_threads: int = 1,
        io_queues: int = 2,
        queue_depth: int = 16384,
        reads: Executor | None = None,
        device_slots: int = 0,
        metrics: Metrics | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self.arena = arena
        self._block = arena.shape
        self._layers = range(first_layer, first_layer + arena.shape.layers)
        self.tiers: dict[str, Tier] = {}
        self.ops = ops
        self.groups = tuple(groups)
        self._elsewhere: dict[int, Sequence[DeviceGroup]] = {}
        self._metrics = metrics or Metrics(enabled=False)
        self.tracer = tracer or Tracer()
        cuda = device is not None and device.type == "cuda"
        self._stream: _Stream = _CudaStream(device) if cuda and device is not None else _Stream()
        read, write = reads or _TierRead(self.tiers, arena), _TierWrite(self.tiers, arena)

        def copier(memory: KVView, *, to_device: bool) -> _DeviceCopy:
            return _DeviceCopy(
                ops, groups, memory, to_device, self._stream, self._elsewhere, first_layer
            )

        self._copies = {
            Path.H2D: copier(arena_view, to_device=True),
            Path.D2H: copier(arena_view, to_device=False),
        }
        executors: dict[Path, Any] = {**self._copies}
        executors |= dict.fromkeys((Path.DISK2H, Path.REMOTE2H), read)
        self._staging: StagedReads | None = None
        if device_slots:
            region = DeviceRegion(arena.shape, device_slots, ops, device)
            self._staging = StagedReads(region, self._metrics)
            executors[Path.DISK2D] = _StagedRead(self.tiers, self._staging, self._stream)
            executors[Path.D2D] = copier(region.view(), to_device=True)
        executors |= {path: write for path in Path if path.writes_tier}
        threads = {path: io_queues for path in executors if path.reads_tier}
        threads |= {path: copy_threads for path in executors if path.touches_device}
        self.engine = TransferEngine(
            executors, threads=threads, queue_depth=queue_depth, observer=self._observe
        )

    def open_tier(self, name: str, tier: Tier) -> None:
        """Serve ops to and from ``tier`` from now on; it is closed with the worker."""
        tier.attach(self.arena.memory)
        if self._staging is not None:
            how = tier.attach_device(self._staging.region)
            _log.info("tier %s to the device: %s", name, how or "through host memory")
        self.tiers[name] = tier

    def use_arena(self, arena: HostArena, arena_view: KVView) -> None:
        """Copy from and to another arena from now on; tiers of this worker's own keep the first.

        Nothing may be in flight. The one before is given back.
        """
        before, self.arena = self.arena, arena
        for copy in self._copies.values():
            copy.use(arena_view)
        before.close()

    def _observe(self, timing: OpTiming) -> None:
        span, layers = timing.op.layers, self._layers
        share = 1.0 if span is None else sum(map(span.covers, layers)) / len(layers)
        moved = (timing.rows - timing.failed) * self._block.nbytes * share
        self._metrics.transferred(timing.op.path.value, int(moved), timing.seconds)
        self.tracer.span(
            timing.op.path.value,
            "all layers" if span is None else f"layers {span.start}..{span.stop}",
            timing.started,
            timing.started + timing.seconds,
            graph=timing.graph_id,
            nbytes=int(moved),
            failed=timing.failed,
        )

    def wave(self) -> int:
        """A wave for `submit`: its graphs are copied layer by layer, all of them at once."""
        return self.engine.wave()

    def submit(
        self,
        graph: TransferGraph,
        into: Sequence[DeviceGroup] | None = None,
        wave: int | None = None,
    ) -> list[OpReport]:
        """Start a graph, ordered after the engine's work so far and after earlier waves' copies.

        ``into`` stands in for the engine's pages until `release` is called for the graph. A graph
        that cannot be taken (malformed, or the queue is full) is reported as failed: the reports
        are returned, and nothing of it runs.
        """
        self._stream.mark(graph.graph_id)
        self.arena.reach(graph.host_slots)
        if into is not None:
            self._elsewhere[graph.graph_id] = into
        try:
            self.engine.submit(graph, wave)
        except (CapacityError, TransferError) as error:
            _log.warning("graph refused: %s", error)
            return refuse(graph, RowError.INTERNAL)
        return []

    def release(self, graph_id: int) -> None:
        """Let go of what ``into`` gave for a graph. Blocks until its copies have ended."""
        self.engine.wait_device(graph_id)
        self._elsewhere.pop(graph_id, None)

    def poll(self) -> list[OpReport]:
        """Reports of the ops that ended since the last call. Does not block."""
        return self.engine.poll()

    def cancel(self, graph_id: int) -> None:
        self.engine.cancel(graph_id)

    def forget(self, tier: str, slots: Sequence[SlotRun]) -> None:
        """Make slots of ``tier`` unreadable, now and after a restart. Blocks; a tier that cannot
        do it is named in the log."""
        try:
            self.tiers[tier].invalidate(slot for run in slots for slot in range(*run))
        except (KeyError, TierError) as error:
            count = sum(stop - start for start, stop in slots)
            _log.error("tier %s could not forget %d slots: %s", tier, count, error)

    def wait_report(self, timeout: float) -> bool:
        """Block until there is a report, at most ``timeout`` seconds."""
        return self.engine.wait_report(timeout)

    def wait_graph(self, timeout: float) -> bool:
        """Like ``wait_report``, until a graph has ended whose last reports were not polled."""
        return self.engine.wait_graph(timeout)

    def wait_device(self, graph_id: int) -> None:
        """Block until the graph touches the engine's pages no more."""
        self.engine.wait_device(graph_id)

    def wait_layer(self, graph_id: int, layer: int) -> None:
        """Block until the graph's copies of ``layer`` have ended."""
        self.engine.wait_layer(graph_id, layer)

    def close(self, *, timeout: float = 30.0) -> bool:
        """Finish what is in flight, flush the tiers and give the memory back.

        False when something has not ended within ``timeout`` seconds: tiers and memory stay as they
        are then, for it may go on to use them. It can be called again.
        """
        ended = self.engine.close(drain=True, timeout=timeout)
        if ended:
            for name, tier in self.tiers.items():
                _close_tier(name, tier)
            if self._staging is not None:
                self._staging.close()
            self.arena.close()
        self.tracer.close()
        return ended


def _close_tier(name: str, tier: Tier) -> None:
    try:
        tier.close()
    except TierError as error:
        _log.error("closing tier %s: %s", name, error)


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
    """Stands in for a worker that could not be built: refuses every graph, so that no one waits."""

    def wave(self) -> int:
        return 0

    def submit(
        self,
        graph: TransferGraph,
        into: Sequence[DeviceGroup] | None = None,
        wave: int | None = None,
    ) -> list[OpReport]:
        return refuse(graph, RowError.REFUSED)

    def release(self, graph_id: int) -> None:
        pass

    def open_tier(self, name: str, tier: Tier) -> None:
        tier.close()

    def poll(self) -> list[OpReport]:
        return []

    def cancel(self, graph_id: int) -> None:
        pass

    def forget(self, tier: str, slots: Sequence[SlotRun]) -> None:
        pass

    def wait_report(self, timeout: float) -> bool:
        return False

    def wait_graph(self, timeout: float) -> bool:
        return False

    def wait_device(self, graph_id: int) -> None:
        pass

    def wait_layer(self, graph_id: int, layer: int) -> None:
        pass

    def close(self, *, timeout: float = 30.0) -> bool:
        return True


def refuse(graph: TransferGraph, why: RowError) -> list[OpReport]:
    """Reports that say of every op of ``graph`` that none of its rows was copied."""
    return [
        OpReport(graph.graph_id, op.op_id, dict.fromkeys(range(*op.rows), why)) for op in graph.ops
    ]


def _select_layers(view: KVView, layers: Sequence[int]) -> KVView:
    """The view of some layers of ``view``, in the order given."""
    planes = tuple(view.layout.planes[layer] for layer in layers)
    return KVView(replace(view.layout, planes=planes), view.tensors)


def _positions(layers: Sequence[int], op: TransferOp) -> list[int]:
    """Positions within a group of the layers that ``op`` carries."""
    span = op.layers
    return [i for i, layer in enumerate(layers) if span is None or span.covers(layer)]
