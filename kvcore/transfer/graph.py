"""Transfer graphs: which blocks move where, and in what order. A graph is a value.

    load   tier_slot ──DISK2H──▶ host_slot ──H2D──▶ device units
           tier_slot ──DISK2D──▶ staging ────D2D──▶ device units
    save   device units ──D2H──▶ host_slot ──H2DISK──▶ tier_slot
    spill                        host_slot ──H2DISK──▶ tier_slot

The blocks of a graph are its *rows*: consecutive blocks of one prefix chain, each with its key and
its place on every medium that the graph touches. An op names a path, a range of rows, a range of
layers, and the ops that must end before it starts. The leader plans graphs without a device, and
the transfer engine of each worker runs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from kvcore.errors import FormatError, TransferError
from kvcore.model.keys import ROOT_PARENT

SKIP = -1
"""In a unit table: do not copy this unit (the engine already has it, or dropped its page)."""

NO_PARENT = ROOT_PARENT
"""Parent key of the first block of a chain."""

COPY_BYTES = 128 << 20
"""Bytes of one copy from or to the device, at most, where a larger one can be cut.

An op that runs cannot be overtaken. This one takes 2.4 ms on a link of 55 GB/s, a part of a step.
The host has about 0.3 ms of work for each op, so smaller ops would cost more for little.
"""


class Path(str, Enum):
    """One direction between two media. Each path has its own queue in the transfer engine."""

    H2D = "h2d"
    D2H = "d2h"
    H2DISK = "h2disk"
    DISK2H = "disk2h"
    H2REMOTE = "h2remote"
    REMOTE2H = "remote2h"
    DISK2D = "disk2d"
    """To the worker's staging on the device, bypassing host memory. It touches no page of the
    engine: a read may hang, and by its end the pages may belong to another request."""
    D2D = "d2d"
    """From the staging on the device to the engine's pages."""

    @property
    def touches_device(self) -> bool:
        """True if the path reads or writes pages of the engine."""
        return self in (Path.H2D, Path.D2H, Path.D2D)

    @property
    def is_staged(self) -> bool:
        """True if its rows are in the worker's staging on the device, not in host memory."""
        return self in (Path.DISK2D, Path.D2D)

    @property
    def writes_tier(self) -> bool:
        """True if the path writes to a backing tier."""
        return self in (Path.H2DISK, Path.H2REMOTE)

    @property
    def reads_tier(self) -> bool:
        """True if the path reads from a backing tier."""
        return self in (Path.DISK2H, Path.REMOTE2H, Path.DISK2D)


class Priority(int, Enum):
    """Order of ready ops of one path, smallest first. A waiting request precedes a save."""

    LOAD = 0
    SAVE = 1
    SPILL = 2


class Span(NamedTuple):
    """A half-open range [start, stop) of rows or layers."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of rows or layers."""
        return self.stop - self.start

    def covers(self, position: int) -> bool:
        """Return True if ``position`` is in the range."""
        return self.start <= position < self.stop


class TransferOp(msgspec.Struct, frozen=True, array_like=True):
    """One copy of some rows along one path.

    ``tier`` names the backing tier for paths to and from one, and is empty otherwise. ``layers`` is
    None for all layers. ``deps`` are ids of ops of the same graph.
    """

    op_id: int
    path: Path
    rows: Span
    layers: Span | None = None
    tier: str = ""
    deps: tuple[int, ...] = ()


class UnitTable(msgspec.Struct, frozen=True, array_like=True):
    """Device places of a graph's rows in one group of layers.

    ``data`` holds int64 unit indices ``[rows, units_per_block]``, row-major, with ``SKIP`` for
    units not to copy. Unit ``i`` is tokens ``[i * unit_tokens, (i + 1) * unit_tokens)`` of the
    engine's slots; ``unit_tokens`` divides both the page and the token block.
    """

    unit_tokens: int
    units_per_block: int
    data: bytes

    @classmethod
    def of(cls, units: npt.NDArray[np.int64], unit_tokens: int) -> UnitTable:
        """Wrap ``units`` of shape ``[rows, units_per_block]``."""
        table = np.ascontiguousarray(units, dtype=np.int64)
        return cls(unit_tokens, table.shape[1], table.tobytes())

    def array(self) -> npt.NDArray[np.int64]:
        """Return the units as ``[rows, units_per_block]``; read-only, shares ``data``."""
        return np.frombuffer(self.data, dtype=np.int64).reshape(-1, self.units_per_block)


class TransferGraph(msgspec.Struct, frozen=True, array_like=True):
    """A frozen, acyclic set of copies over the rows of one prefix chain.

    ``keys[i]`` is the prefix key of row i and ``parent`` the key before the first row
    (``NO_PARENT`` at the root). ``host_slots`` and ``tier_slots`` are slots of the host arena and
    of the backing tier (-1 if the row does not use it). ``staged`` are slots of the worker's
    staging on the device, likewise, and empty if no row is read into it. ``units`` has one table
    per group of layers, in the order in which the worker registered its groups; a graph that does
    not touch the device has none. ``deadline_s`` is in seconds from submission; None waits for
    ever. ``nodes`` are the peer nodes that announced the blocks read from a store. ``point`` is the
    row at which the chain's resume point begins (`kvcore.model.points`); None without one. It is
    negative if the first rows of the point are not among the graph's.
    """

    graph_id: int
    priority: Priority
    namespace: bytes
    parent: bytes
    keys: tuple[bytes, ...]
    host_slots: tuple[int, ...]
    tier_slots: tuple[int, ...]
    units: tuple[UnitTable, ...]
    ops: tuple[TransferOp, ...]
    deadline_s: float | None = None
    nodes: tuple[str, ...] = ()
    staged: tuple[int, ...] = ()
    point: int | None = None

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.keys)

    @property
    def uses_units(self) -> bool:
        """True if a unit is copied: ops may touch the device with units that are all `SKIP`."""
        return any((table.array() != SKIP).any() for table in self.units)

    @property
    def touches_device(self) -> bool:
        """True if an op copies to or from the device."""
        return any(op.path.touches_device for op in self.ops)

    def bind(self, units: Sequence[UnitTable]) -> TransferGraph:
        """Return the graph with device places for its rows: a table for each group of layers.

        Raises TransferError unless the result is well formed; see `check`.
        """
        bound = msgspec.structs.replace(self, units=tuple(units))
        bound.check()
        return bound

    def parent_of(self, row: int) -> bytes:
        """Return the key of the block before ``row``."""
        return self.keys[row - 1] if row else self.parent

    def check(self) -> None:
        """Raise TransferError unless the graph is well formed and acyclic.

        Ops may depend only on ops listed before them. This makes cycles impossible, and any order
        of execution that respects ``deps`` valid.

        A graph is checked twice on purpose. The leader checks it when it binds unit tables, which
        come from an adapter: the adapter's call then fails, and nothing is sent. Each worker's
        engine checks it because it came from another process, and a bad slot would overwrite
        memory.
        """
        rows = self.num_rows
        if not (len(self.host_slots) == len(self.tier_slots) == rows):
            raise TransferError(
                f"graph {self.graph_id}: {rows} keys but {len(self.host_slots)} host slots "
                f"and {len(self.tier_slots)} tier slots; every row needs one of each"
            )
        if len(self.staged) not in (0, rows):
            raise TransferError(
                f"graph {self.graph_id}: {rows} keys but {len(self.staged)} places in the staging; "
                "every row needs one, or none"
            )
        for table in self.units:
            sized = table.unit_tokens > 0 and table.units_per_block > 0
            if not sized or len(table.data) != rows * table.units_per_block * 8:
                raise TransferError(
                    f"graph {self.graph_id}: unit table of {len(table.data)} bytes for {rows} rows"
                    f" of {table.units_per_block} units of {table.unit_tokens} tokens"
                )
        if self.point is not None and self.point >= rows:
            raise TransferError(
                f"graph {self.graph_id}: a resume point from row {self.point} on of {rows}"
            )
        seen: set[int] = set()
        for op in self.ops:
            self._check_op(op, seen)
            seen.add(op.op_id)

    def _check_op(self, op: TransferOp, seen: set[int]) -> None:
        where = f"graph {self.graph_id}, op {op.op_id} ({op.path.value})"
        if op.op_id in seen:
            raise TransferError(f"{where}: the op id is used twice")
        if missing := [d for d in op.deps if d not in seen]:
            raise TransferError(f"{where}: depends on {missing}, not listed before it")
        start, stop = op.rows
        if not 0 <= start < stop <= self.num_rows:
            raise TransferError(f"{where}: rows {start}..{stop} of {self.num_rows}")
        if op.layers is not None and not 0 <= op.layers[0] < op.layers[1]:
            raise TransferError(f"{where}: empty layer range {op.layers}")
        if op.layers is not None and self.point is not None:
            raise TransferError(f"{where}: given layers {op.layers} of a resume point")
        if op.path.touches_device and not self.units:
            raise TransferError(f"{where}: touches the device but the graph has no unit table")
        if (op.path.writes_tier or op.path.reads_tier) and not op.tier:
            raise TransferError(f"{where}: names no backing tier")
        self._check_places(op, where)

    def _check_places(self, op: TransferOp, where: str) -> None:
        slots, medium = self.host_slots, "a host slot"
        if op.path.is_staged:
            slots, medium = self.staged or (-1,) * self.num_rows, "a place in the staging"
        if any(slots[row] < 0 for row in range(*op.rows)):
            raise TransferError(f"{where}: a row without {medium}")
        if op.path.is_staged and op.layers is not None:
            raise TransferError(
                f"{where}: given layers {op.layers}, but it moves all layers at once"
            )
        if op.tier and any(self.tier_slots[row] < 0 for row in range(*op.rows)):
            raise TransferError(f"{where}: a row without a slot in tier {op.tier!r}")


class RowError(str, Enum):
    """Why a row of an op was not copied."""

    CORRUPT = "corrupt"
    MISSING = "missing"
    """The tier held the block at the lookup, but no longer does."""
    IO = "io"
    UPSTREAM = "upstream"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    INTERNAL = "internal"
    NOT_READY = "not_ready"
    """The worker cannot reach host memory yet; it can soon."""
    REFUSED = "refused"
    """The worker does not support this model."""


class OpReport(msgspec.Struct, array_like=True):
    """Outcome of one op on one worker. ``failed`` maps rows to reasons; empty if all moved."""

    graph_id: int
    op_id: int
    failed: dict[int, RowError] = {}


_encoder = msgspec.msgpack.Encoder()
_graph_decoder = msgspec.msgpack.Decoder(TransferGraph)


def encode(value: Any) -> bytes:
    """Encode a graph, a report, or any message made of them, as msgpack."""
    return _encoder.encode(value)


def decode_graph(data: bytes) -> TransferGraph:
    """Decode and check a graph; raises FormatError on malformed input."""
    try:
        graph = _graph_decoder.decode(data)
        graph.check()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TransferError) as error:
        raise FormatError(f"not a transfer graph: {error}") from error
    return graph
