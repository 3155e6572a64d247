"""The executors of a transfer graph's ops: device copies, tier reads and tier writes."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from math import gcd
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcore._util.log_limit import LogLimit
from kvcore.errors import BlockMissing, CorruptBlock, TierError, TierUnavailable, TransferError
from kvcore.memory.arena import HostArena
from kvcore.memory.copy.base import DeviceOps
from kvcore.memory.device_group import DeviceGroup
from kvcore.memory.layout import KVView
from kvcore.memory.points import NO_POINTS, PointCopies, RowCopy
from kvcore.memory.runs import NO_PLACE, SlotPlace
from kvcore.telemetry.metrics import Metrics
from kvcore.tiers.base import BlockRead, BlockWrite, DeviceRead, Tier
from kvcore.transfer.executor import OpPart
from kvcore.transfer.graph import SKIP, RowError, TransferGraph, TransferOp, UnitTable
from kvcore.worker.device_staging import StagedReads
from kvcore.worker.refusing import DeadTier
from kvcore.worker.streams import CopyStreams, IssuedCopies

__all__ = ["DeviceCopy", "Failures", "StagedRead", "TierRead", "TierWrite"]

_log = logging.getLogger("kvcore.worker")


class DeviceCopy:
    """Executor of H2D, D2H and D2D.

    Copies blocks between the engine's pages and the arena, or the staging on the device. On a
    device that queues its work, copies have been issued when `run` returns, and nothing but a
    failure of the device can stop them: what they read has been read from its tier before.
    """

    def __init__(
        self,
        ops: DeviceOps,
        groups: Sequence[DeviceGroup],
        arena: KVView,
        to_device: bool,
        sync: CopyStreams,
        first_layer: int,
        points: PointCopies = NO_POINTS,
        place: SlotPlace = NO_PLACE,
    ) -> None:
        self._ops = ops
        self._first_layer = first_layer
        self._groups = groups
        self._points = points
        self.use(arena, place)
        self._to_device = to_device
        self._sync = sync

    def use(self, arena: KVView, place: SlotPlace) -> None:
        """Copy from and to another arena, whose rows of points are at ``place`` in its slots.

        No copy may be running. Raises LayoutError, and changes nothing, if it cannot.
        """
        memory = [group.memory(arena, place, self._first_layer) for group in self._groups]
        self._point_rows = self._points.in_memory(arena, place)
        self._arenas = memory

    def run(
        self, graph: TransferGraph, op: TransferOp, rows: list[int]
    ) -> dict[int, RowError] | IssuedCopies:
        return self.run_joined([OpPart(graph, op, rows)]) or {}

    def run_joined(self, parts: Sequence[OpPart]) -> IssuedCopies | None:
        """Copy the blocks of several ops in one call for each group of layers."""
        with self._sync.copying(*(part.graph.graph_id for part in parts)) as copies:
            for graph, op, rows in parts:
                if graph.point is not None:
                    self._copy_point(graph, graph.point, rows, _places(graph, op))
            for alike in self._alike(parts):
                self._copy_blocks(alike)
        return copies if self._sync.device.queues else None

    def _alike(self, parts: Sequence[OpPart]) -> Iterable[Sequence[OpPart]]:
        """Return the parts that one call can copy: of the same pages, layers and units."""
        found: dict[Any, list[OpPart]] = {}
        for part in parts:
            units = tuple((table.unit_tokens, table.units_per_block) for table in part.graph.units)
            found.setdefault((part.op.layers, units), []).append(part)
        return found.values()

    def _copy_blocks(self, parts: Sequence[OpPart]) -> None:
        graph, op, _ = parts[0]
        slots = np.array(
            [_places(part.graph, part.op)[row] for part in parts for row in part.rows],
            dtype=np.int64,
        )
        for i, (group, arena, table) in enumerate(
            zip(self._groups, self._arenas, graph.units, strict=True)
        ):
            layers = _positions(group.layers, op)
            units = np.concatenate([part.graph.units[i].array()[part.rows] for part in parts])
            if layers and (units != SKIP).any():  # some rows only go as far as host memory
                unit = group.view_tokens(table.unit_tokens)
                self._copy(group.view, units, arena, slots, layers, unit)

    def _copy_point(
        self, graph: TransferGraph, first: int, rows: Sequence[int], places: Sequence[int]
    ) -> None:
        """Copy the rows of the resume point, whose row 0 is row ``first`` of the graph."""
        chosen = set(rows)
        self._copy_windows(graph, first, chosen, places)
        points, memory = self._points, self._point_rows
        for part, own in zip(points.states, memory.states, strict=True):
            if (row := first + part.row) in chosen and not self._copy_row(
                graph, part, own, row, places
            ):
                raise TransferError(f"graph {graph.graph_id}: row {row} has no page of its states")
        for part, own in zip(points.pages, memory.pages, strict=True):
            if (row := first + part.row) in chosen:  # a page that the engine has, or never had
                self._copy_row(graph, part, own, row, places)
        if self._to_device and self._points.states and first - 1 in chosen:
            self._zero_rest(graph, first - 1)

    def _copy_row(
        self,
        graph: TransferGraph,
        part: RowCopy,
        memory: KVView,
        row: int,
        places: Sequence[int],
    ) -> bool:
        """Copy what row ``row`` of the graph holds of a page. Return False if there is no page."""
        page = graph.units[part.group].array()[row, part.page : part.page + 1]
        if page[0] == SKIP:
            return False
        slot = np.array([places[row]], dtype=np.int64)
        if self._to_device:
            self._ops.copy_blocks(memory, slot, part.pages, page)
        else:
            self._ops.copy_blocks(part.pages, page, memory, slot)
        return True

    def _copy_windows(
        self, graph: TransferGraph, first: int, chosen: set[int], places: Sequence[int]
    ) -> None:
        """Copy the rows of windows: one call for each part of a block that a row has."""
        for part, memory in zip(self._points.windows, self._point_rows.windows, strict=True):
            rows = [first + row for row in part.rows if first + row in chosen]
            table = graph.units[part.group]
            units = table.array()[rows]
            if (units != SKIP).any():
                slots = np.array([places[row] for row in rows], dtype=np.int64)
                layers = range(part.shape.layers)
                self._copy(part.pages, units, memory, slots, layers, table.unit_tokens)

    def _zero_rest(self, graph: TransferGraph, last: int) -> None:
        """Zero what pages have behind block ``last``, and before the first token of each window.

        The engine goes on after that block. Its pages may have held states before, which are no
        numbers if they are read as KV. It reads whole pages, and expects numbers also where no
        token is yet, and where none is that a window sees. Tokens that the engine has stay.
        """
        from kvcore.memory.copy.reference import zero_tokens

        loaded = 0  # tokens before the boundary that the engine did not have
        for group, table in zip(self._groups, graph.units, strict=True):
            if not group.layers:
                continue
            known = _tokens(table, range(last + 1))
            loaded = max(loaded, len(known) * table.unit_tokens)
            if group.page_tokens and len(known):
                stop = int(known[-1]) + table.unit_tokens
                zero_tokens(group.view, stop, -(-stop // group.page_tokens) * group.page_tokens)
        for part in self._points.windows:
            table, size = graph.units[part.group], self._groups[part.group].page_tokens
            known = _tokens(table, [last + 1 + row for row in reversed(part.rows)])
            unseen = max(loaded - len(known) * table.unit_tokens, 0)
            if len(known):
                start, stop = int(known[0]), int(known[-1]) + table.unit_tokens
                zero_tokens(part.pages, max(start // size * size, start - unseen), start)
                zero_tokens(part.pages, stop, -(-stop // size) * size)

    def _copy(
        self,
        device: KVView,
        units: npt.NDArray[np.int64],
        arena: KVView,
        slots: npt.NDArray[np.int64],
        layers: Sequence[int],
        unit_tokens: int,
    ) -> None:
        # The engine may have cut the pages that its scheduler knows into smaller ones.
        fits = gcd(unit_tokens, device.layout.page_tokens)
        units, unit_tokens = _cut(units, unit_tokens // fits), fits
        per_block = arena.layout.page_tokens // unit_tokens
        blocks = slots[:, None] * per_block + np.arange(per_block, dtype=np.int64)
        blocks = np.where(units == SKIP, SKIP, blocks)
        if self._to_device:
            self._ops.copy_blocks(arena, blocks, device, units, layers, unit_tokens)
        else:
            self._ops.copy_blocks(device, units, arena, blocks, layers, unit_tokens)


def _places(graph: TransferGraph, op: TransferOp) -> Sequence[int]:
    """Return where each row is that is not in the engine's pages."""
    return graph.staged if op.path.is_staged else graph.host_slots


def _tokens(table: UnitTable, rows: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return the first token of each unit that is copied in ``rows``, in their order.

    A table may have fewer rows.
    """
    units = table.array()
    found = units[[row for row in rows if row < len(units)]]
    tokens: npt.NDArray[np.int64] = found[found != SKIP] * table.unit_tokens
    return tokens


def _cut(units: npt.NDArray[np.int64], parts: int) -> npt.NDArray[np.int64]:
    """Return the units of each row, each cut into ``parts`` smaller ones."""
    if parts == 1:
        return units
    whole = units[:, :, None]
    cut = np.where(whole == SKIP, SKIP, whole * parts + np.arange(parts, dtype=np.int64))
    return cut.reshape(len(units), -1)


class TierRead:
    """Executor of reads from a backing tier into arena slots. The tier verifies each block."""

    def __init__(
        self, tiers: Mapping[str, Tier], arena: HostArena, metrics: Metrics | None = None
    ) -> None:
        self._tiers = tiers
        self._failures = Failures(metrics)
        self._arena = arena

    def run(self, graph: TransferGraph, op: TransferOp, rows: list[int]) -> dict[int, RowError]:
        requests = [
            BlockRead(
                graph.tier_slots[row],
                graph.keys[row],
                self._arena.slot_buffers(graph.host_slots[row]),
                graph.nodes,
                graph.parent_of(row),
                graph.namespace,
            )
            for row in rows
        ]
        return self._failures.of(op, rows, _tier(self._tiers, op).read(requests))


class StagedRead:
    """Executor of reads from a backing tier into the staging on the device.

    Blocks are verified there. It does not wait for the engine's compute, because it touches none of
    the engine's pages.
    """

    def __init__(
        self, tiers: Mapping[str, Tier], reads: StagedReads, sync: CopyStreams, metrics: Metrics
    ) -> None:
        self._tiers = tiers
        self._failures = Failures(metrics)
        self._reads = reads
        self._sync = sync

    def run(self, graph: TransferGraph, op: TransferOp, rows: list[int]) -> dict[int, RowError]:
        requests = [
            DeviceRead(
                graph.tier_slots[row],
                graph.keys[row],
                graph.staged[row],
                graph.parent_of(row),
                graph.namespace,
            )
            for row in rows
        ]
        with self._sync.copying() as copies:
            results = self._reads.read(op.tier, _tier(self._tiers, op), requests)
        copies.wait()
        return self._failures.of(op, rows, results)


class TierWrite:
    """Executor of writes from arena slots to a backing tier."""

    def __init__(self, tiers: Mapping[str, Tier], arena: HostArena) -> None:
        self._tiers = tiers
        self._failures = Failures()
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
        return self._failures.of(op, rows, _tier(self._tiers, op).write(requests))


def _tier(tiers: Mapping[str, Tier], op: TransferOp) -> Tier:
    return tiers.get(op.tier) or DeadTier(TierUnavailable(f"tier {op.tier!r} is not open here"))


class Failures:
    """Turns the errors of tiers into those of rows, counts refused blocks, and logs. Thread-safe.

    A medium that fails, such as a full disk, fails every block, and whoever can write to a store
    can damage all of it: the first line of a kind is written at once, the others once a minute.
    """

    def __init__(self, metrics: Metrics | None = None, limit: LogLimit | None = None) -> None:
        self._metrics = metrics or Metrics(enabled=False)
        self._limit = limit or LogLimit()

    def of(
        self, op: TransferOp, rows: Sequence[int], results: Sequence[TierError | None]
    ) -> dict[int, RowError]:
        """Return the rows that failed."""
        failed: dict[int, RowError] = {}
        for row, error in zip(rows, results, strict=True):
            if error is None:
                continue
            failed[row] = _row_error(error)
            kind = type(error).__name__
            if isinstance(error, CorruptBlock):
                kind = error.mismatch.value
                self._metrics.refused_block(op.tier, kind)
            left_out = self._limit.admit((op.path, op.tier, kind))
            if left_out is not None:
                more = f" ({left_out} more failed since the last line)" if left_out else ""
                _log.warning("%s tier=%s failed: %s", op.path.value, op.tier, f"{error}{more}")
        return failed


def _row_error(error: TierError) -> RowError:
    if isinstance(error, CorruptBlock):
        return RowError.CORRUPT
    return RowError.MISSING if isinstance(error, BlockMissing) else RowError.IO


def _positions(layers: Sequence[int], op: TransferOp) -> list[int]:
    """Return the positions, within a group, of the layers that ``op`` carries."""
    span = op.layers
    return [i for i, layer in enumerate(layers) if span is None or span.covers(layer)]
