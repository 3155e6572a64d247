"""Planning of transfer graphs from places: pure functions, tested without a device.

Rows of a load come first from host memory, then from one tier after the other. This is the order of
the prefix chain, because every tier holds a prefix-closed set:

    rows   0 ........ h ............ d1 ......... d2
           host       first tier     second tier
    ops    H2D by     DISK2H+H2D     REMOTE2H+H2D
           layer or   by batch       by batch
           by piece

A tier whose blocks bypass host memory is read by DISK2D instead, and copied on by D2D.

A planned graph has no unit tables: the engine's pages are bound to it when it is launched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvcore.transfer.graph import (
    NO_PARENT,
    Path,
    Priority,
    Span,
    TransferGraph,
    TransferOp,
)


class Chain(NamedTuple):
    """The rows of a graph: consecutive blocks of one prefix chain."""

    namespace: bytes
    parent: bytes
    keys: tuple[bytes, ...]

    @classmethod
    def of(cls, keys: Sequence[bytes], namespace: bytes, blocks: Span) -> Chain:
        """Return the rows ``blocks`` of the chain ``keys``."""
        parent = keys[blocks.start - 1] if blocks.start else NO_PARENT
        return cls(namespace, parent, tuple(keys[blocks.start : blocks.stop]))


class TierRows(NamedTuple):
    """Rows that come from, or go to, one backing tier, with one slot there per row."""

    tier: str
    path: Path
    rows: Span
    slots: Sequence[int]


def batches(rows: Span, size: int) -> list[Span]:
    """Cut ``rows`` into spans of at most ``size``."""
    return [Span(a, min(a + size, rows.stop)) for a in range(rows.start, rows.stop, size)]


def layer_steps(layers: int, growth: int = 2) -> list[Span]:
    """Cut the layers into growing steps, so that layer 0 is ready early and there are few ops.

    >>> [tuple(step) for step in layer_steps(10)]
    [(0, 1), (1, 3), (3, 7), (7, 10)]
    """
    steps, start, width = [], 0, 1
    while start < layers:
        stop = min(start + width, layers)
        steps.append(Span(start, stop))
        start, width = stop, width * growth
    return steps


class _Ops:
    """Collects ops with ascending ids."""

    def __init__(self) -> None:
        self.ops: list[TransferOp] = []

    def add(
        self,
        path: Path,
        rows: Span,
        *,
        layers: Span | None = None,
        tier: str = "",
        deps: tuple[int, ...] = (),
    ) -> int:
        op_id = len(self.ops)
        self.ops.append(TransferOp(op_id, path, rows, layers, tier, deps))
        return op_id

    def graph(
        self,
        graph_id: int,
        priority: Priority,
        chain: Chain,
        host_slots: Sequence[int],
        tier_slots: Sequence[int],
        deadline_s: float | None = None,
        nodes: tuple[str, ...] = (),
        staged: Sequence[int] = (),
        point: int | None = None,
    ) -> TransferGraph:
        """Return a graph of the ops so far, without unit tables."""
        return TransferGraph(
            graph_id,
            priority,
            chain.namespace,
            chain.parent,
            chain.keys,
            tuple(host_slots),
            tuple(tier_slots),
            (),
            tuple(self.ops),
            deadline_s,
            nodes,
            tuple(staged),
            point,
        )


def build_load(
    graph_id: int,
    chain: Chain,
    host_slots: Sequence[int],
    sources: Sequence[TierRows],
    *,
    batch_rows: int,
    copy_rows: int | None = None,
    layers: Sequence[Span] = (),
    deadline_s: float | None = None,
    nodes: tuple[str, ...] = (),
    staged: Sequence[int] = (),
    point: int | None = None,
) -> TransferGraph:
    """Plan a load of ``chain`` to the device.

    Rows in no source are already in the host arena. ``layers`` cuts their copy into layer steps.
    Without it the copy is cut into ops of ``copy_rows`` rows, so that another load can come between
    them (None: it is one op). A step waits for all rows of a layer at once: steps are not cut.
    ``host_slots`` may name one slot for several rows of the sources
    (staging): a read into a slot then waits until the copy out of it is done. The same holds for
    ``staged``, the places on the device for rows of sources that bypass host memory. ``point`` is
    the row at which a resume point begins.
    """
    ops = _Ops()
    tier_slots = [-1] * len(chain.keys)
    host_rows = Span(0, sources[0].rows.start if sources else len(chain.keys))
    if host_rows.size and layers:
        for step in layers:
            ops.add(Path.H2D, host_rows, layers=step)
    else:
        for rows in batches(host_rows, copy_rows or max(host_rows.size, 1)):
            ops.add(Path.H2D, rows)
    reader_of: dict[tuple[Path, int], int] = {}  # path and place -> the copy that last read it
    for source in sources:
        tier_slots[source.rows.start : source.rows.stop] = source.slots
        for rows in batches(source.rows, batch_rows):
            places, onward = host_slots, Path.H2D
            if source.path.is_staged:
                places, onward = staged, Path.D2D
            taken = [(onward, place) for place in places[rows.start : rows.stop]]
            after = tuple(sorted({reader_of[place] for place in taken if place in reader_of}))
            read = ops.add(source.path, rows, tier=source.tier, deps=after)
            copy = ops.add(onward, rows, deps=(read,))
            reader_of.update(dict.fromkeys(taken, copy))
    return ops.graph(
        graph_id,
        Priority.LOAD,
        chain,
        host_slots,
        tier_slots,
        deadline_s=deadline_s,
        nodes=nodes,
        staged=staged,
        point=point,
    )


def build_fetch(
    graph_id: int,
    chain: Chain,
    host_slots: Sequence[int],
    sources: Sequence[TierRows],
    *,
    batch_rows: int,
    priority: Priority = Priority.LOAD,
    deadline_s: float | None = None,
    nodes: tuple[str, ...] = (),
) -> TransferGraph:
    """Plan reads of ``chain`` into the host arena only.

    Every row is in one of the sources. See `TransferGraph` for ``nodes``.
    """
    ops = _Ops()
    tier_slots = [-1] * len(chain.keys)
    for source in sources:
        tier_slots[source.rows.start : source.rows.stop] = source.slots
        for rows in batches(source.rows, batch_rows):
            ops.add(source.path, rows, tier=source.tier)
    return ops.graph(
        graph_id,
        priority,
        chain,
        host_slots,
        tier_slots,
        deadline_s=deadline_s,
        nodes=nodes,
    )


def build_save(
    graph_id: int,
    chain: Chain,
    host_slots: Sequence[int],
    sink: TierRows | None,
    *,
    batch_rows: int,
    copy_rows: int | None = None,
    point: int | None = None,
) -> TransferGraph:
    """Plan a save of ``chain`` to the host arena and, if ``sink`` is given, on to its tier.

    The copy from the device takes all layers of a row at once, so that the engine's pages are free
    as early as possible. It is cut into ops of ``copy_rows`` rows, so that a save that somebody
    waits for can come between them (None: it is one op). Writes to the tier begin when all of them
    have ended. ``point`` is as in `TransferGraph`.
    """
    ops = _Ops()
    rows = Span(0, len(chain.keys))
    copied = tuple(ops.add(Path.D2H, part) for part in batches(rows, copy_rows or rows.size))
    return _with_sink(
        graph_id, Priority.SAVE, chain, host_slots, sink, ops, copied, batch_rows, point
    )


def build_spill(
    graph_id: int,
    chain: Chain,
    host_slots: Sequence[int],
    sink: TierRows,
    *,
    batch_rows: int,
) -> TransferGraph:
    """Plan a write of host blocks to a backing tier."""
    return _with_sink(graph_id, Priority.SPILL, chain, host_slots, sink, _Ops(), (), batch_rows)


def _with_sink(
    graph_id: int,
    priority: Priority,
    chain: Chain,
    host_slots: Sequence[int],
    sink: TierRows | None,
    ops: _Ops,
    deps: tuple[int, ...],
    batch_rows: int,
    point: int | None = None,
) -> TransferGraph:
    tier_slots = [-1] * len(chain.keys)
    if sink is not None:
        tier_slots[sink.rows.start : sink.rows.stop] = sink.slots
        for rows in batches(sink.rows, batch_rows):
            ops.add(sink.path, rows, tier=sink.tier, deps=deps)
    return ops.graph(graph_id, priority, chain, host_slots, tier_slots, point=point)
