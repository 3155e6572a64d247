"""Plans are values: every property here is checked without a device."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.errors import FormatError, TransferError
from kvcore.transfer.graph import (
    Path,
    Priority,
    Span,
    TransferGraph,
    TransferOp,
    UnitTable,
    decode_graph,
    encode,
)
from kvcore.transfer.plan import (
    Chain,
    TierRows,
    batches,
    build_load,
    build_save,
    build_spill,
    layer_steps,
)


def chain(rows: int) -> Chain:
    return Chain(b"n" * 16, b"p" * 16, tuple(bytes([i % 256, i // 256]) * 8 for i in range(rows)))


def units(rows: int, width: int = 2) -> tuple[UnitTable, ...]:
    return (UnitTable.of(np.arange(rows * width, dtype=np.int64).reshape(rows, width), 8),)


def simulate(graph: TransferGraph, resident: set[int]) -> dict[int, set[int]]:
    """Run the ops in listed order over symbolic slots; returns the rows whose layers arrived.

    A host slot holds the row last read into it, so a slot reused too early shows as a wrong row.
    """
    slot_row = {graph.host_slots[row]: row for row in resident}
    arrived: dict[int, set[int]] = {}
    for op in graph.ops:
        for row in range(*op.rows):
            if op.path.reads_tier:
                slot_row[graph.host_slots[row]] = row
            elif op.path is Path.H2D:
                assert slot_row[graph.host_slots[row]] == row, "copied from a slot of another row"
                arrived.setdefault(row, set()).update(range(*(op.layers or Span(0, 10))))
    return arrived


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 20), st.integers(1, 7), st.data())
def test_a_load_brings_every_row_once_from_its_own_slot(
    host: int, disk: int, remote: int, batch: int, data: st.DataObject
) -> None:
    rows = host + disk + remote
    if rows == 0:
        return
    staging = data.draw(st.integers(batch, max(batch, disk + remote + 1)))
    slots = list(range(host)) + [1000 + i % staging for i in range(disk + remote)]
    sources = []
    if disk:
        sources.append(TierRows("disk", Path.DISK2H, Span(host, host + disk), range(disk)))
    if remote:
        span = Span(host + disk, rows)
        sources.append(TierRows("far", Path.REMOTE2H, span, range(remote)))
    graph = build_load(
        7, chain(rows), slots, sources, batch_rows=batch, layers=layer_steps(10)
    ).bind(units(rows))
    assert simulate(graph, set(range(host))) == {row: set(range(10)) for row in range(rows)}
    assert graph.priority is Priority.LOAD
    # Whoever writes a slot again waits for the copy out of it, whatever order threads run in.
    for position, op in enumerate(graph.ops):
        if not op.path.reads_tier:
            continue
        mine = set(graph.host_slots[op.rows.start : op.rows.stop])
        for earlier in graph.ops[:position]:
            theirs = set(graph.host_slots[earlier.rows.start : earlier.rows.stop])
            if earlier.path is Path.H2D and mine & theirs:
                assert reachable(graph, op.op_id, earlier.op_id)


@given(st.integers(1, 40), st.integers(0, 9), st.integers(1, 50))
def test_a_load_without_layers_is_cut_and_one_with_layers_is_not(
    host: int, disk: int, most: int
) -> None:
    rows = host + disk
    sources = [TierRows("disk", Path.DISK2H, Span(host, rows), range(disk))] if disk else []
    cut = build_load(1, chain(rows), range(rows), sources, batch_rows=3, copy_rows=most)
    assert simulate(cut, set(range(host))) == {row: set(range(10)) for row in range(rows)}
    pieces = [op.rows for op in cut.ops if op.path is Path.H2D and not op.deps]
    assert [row for piece in pieces for row in range(*piece)] == list(range(host))
    assert all(piece.size == most for piece in pieces[:-1])
    assert pieces[-1].size <= most
    whole = build_load(
        1, chain(rows), range(rows), sources, batch_rows=3, copy_rows=most, layers=layer_steps(10)
    )
    steps = [op for op in whole.ops if op.path is Path.H2D and not op.deps]
    assert [op.layers for op in steps] == layer_steps(10)
    assert {op.rows for op in steps} == {Span(0, host)}


@given(st.integers(0, 20), st.integers(1, 40), st.integers(1, 9), st.data())
def test_what_goes_past_host_memory_is_copied_out_of_its_own_place(
    host: int, disk: int, ring: int, data: st.DataObject
) -> None:
    rows, batch = host + disk, data.draw(st.integers(1, ring))
    staged = [-1] * host + [i % ring for i in range(disk)]
    source = TierRows("disk", Path.DISK2D, Span(host, rows), range(disk))
    slots = [*range(host), *[-1] * disk]
    graph = build_load(7, chain(rows), slots, [source], batch_rows=batch, staged=staged).bind(
        units(rows)
    )
    assert decode_graph(encode(graph)) == graph
    place_row: dict[int, int] = {}
    arrived = {row for op in graph.ops if op.path is Path.H2D for row in range(*op.rows)}
    for position, op in enumerate(graph.ops):
        mine = {staged[row] for row in range(*op.rows)}
        if op.path is Path.DISK2D:
            place_row.update((staged[row], row) for row in range(*op.rows))
            for earlier in graph.ops[:position]:
                theirs = {staged[row] for row in range(*earlier.rows)}
                if earlier.path is Path.D2D and mine & theirs:
                    assert reachable(graph, op.op_id, earlier.op_id)
        elif op.path is Path.D2D:
            assert op.layers is None
            assert all(place_row[staged[row]] == row for row in range(*op.rows))
            arrived |= set(range(*op.rows))
    assert arrived == set(range(rows))
    assert not any(op.path is Path.DISK2D and op.path.touches_device for op in graph.ops)


def reachable(graph: TransferGraph, start: int, goal: int) -> bool:
    deps = {op.op_id: op.deps for op in graph.ops}
    todo = list(deps[start])
    while todo:
        op = todo.pop()
        if op == goal:
            return True
        todo.extend(deps[op])
    return False


@given(st.integers(1, 50), st.integers(0, 50), st.integers(1, 9), st.none() | st.integers(1, 60))
def test_a_save_writes_a_row_to_disk_only_after_all_have_left_the_device(
    rows: int, held: int, batch: int, most: int | None
) -> None:
    held = min(held, rows)
    sink = TierRows("disk", Path.H2DISK, Span(held, rows), range(rows - held))
    graph = build_save(
        1, chain(rows), range(rows), sink if held < rows else None, batch_rows=batch, copy_rows=most
    ).bind(units(rows))
    copies = [op for op in graph.ops if op.path is Path.D2H]
    writes = [op for op in graph.ops if op.path is Path.H2DISK]
    assert [*copies, *writes] == list(graph.ops)
    assert [row for op in copies for row in range(*op.rows)] == list(range(rows))
    assert all(op.rows.size == (most or rows) for op in copies[:-1])
    assert copies[-1].rows.size <= (most or rows)
    assert all(op.layers is None and not op.deps for op in copies), "they run in any order"
    assert all(op.deps == tuple(op.op_id for op in copies) for op in writes)
    assert [r for op in writes for r in range(*op.rows)] == list(range(held, rows))


@given(
    rows=st.integers(1, 12), held=st.integers(0, 12), point=st.none() | st.integers(-5, 11),
    batch=st.integers(1, 5),
)  # fmt: skip
def test_plans_tell_where_a_resume_point_begins(
    rows: int, held: int, point: int | None, batch: int
) -> None:
    """In loads and saves, with tiers and without, and on the wire."""
    if point is not None and point >= rows:
        point = rows - 1
    below = Span(min(held, rows - 1), rows)
    slots = range(below.size)
    sink = TierRows("disk", Path.H2DISK, below, slots)
    source = TierRows("disk", Path.DISK2H, below, slots)
    graphs = [
        build_save(1, chain(rows), range(rows), None, batch_rows=batch, point=point),
        build_save(2, chain(rows), range(rows), sink, batch_rows=batch, point=point),
        build_load(3, chain(rows), range(rows), [], batch_rows=batch, point=point),
        build_load(4, chain(rows), range(rows), [source], batch_rows=batch, point=point),
    ]
    for graph in graphs:
        assert graph.point == point
        bound = graph.bind(units(rows))
        assert decode_graph(encode(bound)) == bound
        assert bound.point == point


def test_a_plan_without_a_word_about_a_point_has_none() -> None:
    assert build_save(1, chain(2), range(2), None, batch_rows=2).point is None
    assert build_load(1, chain(2), range(2), [], batch_rows=2).point is None


def test_a_load_of_a_point_layer_by_layer_is_refused() -> None:
    """A row of a point has bytes of any layer, and no layer of its own."""
    graph = build_load(1, chain(3), range(3), [], batch_rows=2, layers=layer_steps(4), point=2)
    with pytest.raises(TransferError, match="of a resume point"):
        graph.bind(units(3))


def test_a_spill_touches_no_device() -> None:
    graph = build_spill(
        1, chain(5), range(5), TierRows("disk", Path.H2DISK, Span(2, 5), [7, 8, 9]), batch_rows=2
    )
    assert [op.path for op in graph.ops] == [Path.H2DISK, Path.H2DISK]
    assert graph.tier_slots == (-1, -1, 7, 8, 9)
    assert graph.units == ()


@given(st.integers(1, 200))
def test_layer_steps_cover_every_layer_once_in_order(layers: int) -> None:
    steps = layer_steps(layers)
    assert [i for step in steps for i in range(*step)] == list(range(layers))
    assert len(steps) <= layers.bit_length()


@given(st.integers(0, 100), st.integers(0, 100), st.integers(1, 30))
def test_batches_cover_every_row_once(start: int, size: int, batch: int) -> None:
    spans = batches(Span(start, start + size), batch)
    assert [i for span in spans for i in range(*span)] == list(range(start, start + size))
    assert all(0 < span.size <= batch for span in spans)


def test_a_graph_survives_the_wire() -> None:
    graph = build_load(
        3,
        chain(6),
        [0, 1, 2, 90, 91, 92],
        [TierRows("disk", Path.DISK2H, Span(3, 6), [4, 5, (3 << 40) | 6])],
        batch_rows=2,
        layers=layer_steps(4),
        deadline_s=1.5,
    ).bind(units(6))
    back = decode_graph(encode(graph))
    assert back == graph
    assert (back.units[0].array() == graph.units[0].array()).all()
    assert back.parent_of(0) == b"p" * 16
    assert back.parent_of(4) == graph.keys[3]


@given(st.binary(max_size=200))
def test_noise_on_the_wire_is_a_format_error(data: bytes) -> None:
    with pytest.raises(FormatError):
        decode_graph(data)


@given(st.integers(0, 300), st.integers(0, 255))
def test_a_flipped_byte_never_crashes_the_decoder(position: int, value: int) -> None:
    data = bytearray(
        encode(
            build_spill(
                1,
                chain(3),
                range(3),
                TierRows("disk", Path.H2DISK, Span(0, 3), range(3)),
                batch_rows=2,
            )
        )
    )
    data[position % len(data)] = value
    with contextlib.suppress(FormatError):
        decode_graph(bytes(data)).check()


def bad(**changes: object) -> TransferGraph:
    fields: dict[str, object] = {
        "graph_id": 1,
        "priority": Priority.LOAD,
        "namespace": b"",
        "parent": b"",
        "keys": (b"a", b"b"),
        "host_slots": (0, 1),
        "tier_slots": (-1, -1),
        "units": units(2),
        "ops": (TransferOp(0, Path.H2D, Span(0, 2)),),
    }
    return TransferGraph(**(fields | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"host_slots": (0,)}, "every row needs one"),
        ({"host_slots": (0, -1)}, "without a host slot"),
        ({"units": units(3)}, "unit table"),
        ({"units": ()}, "no unit table"),
        ({"ops": (TransferOp(0, Path.H2D, Span(0, 3)),)}, r"rows 0..3 of 2"),
        ({"ops": (TransferOp(0, Path.H2D, Span(1, 1)),)}, r"rows 1..1"),
        ({"ops": (TransferOp(0, Path.H2D, Span(0, 2), deps=(1,)),)}, "not listed before"),
        ({"ops": (TransferOp(0, Path.H2D, Span(0, 2), deps=(0,)),)}, "not listed before"),
        ({"ops": (TransferOp(0, Path.H2D, Span(0, 2)),) * 2}, "used twice"),
        ({"ops": (TransferOp(0, Path.DISK2H, Span(0, 2)),)}, "names no backing tier"),
        ({"ops": (TransferOp(0, Path.DISK2H, Span(0, 2), tier="disk"),)}, "without a slot"),
        ({"ops": (TransferOp(0, Path.H2D, Span(0, 2), layers=Span(2, 2)),)}, "empty layer"),
        ({"ops": (TransferOp(0, Path.D2D, Span(0, 2)),)}, "without a place in the staging"),
        ({"ops": (TransferOp(0, Path.D2D, Span(0, 2)),), "staged": (0, -1)}, "without a place"),
        ({"staged": (0,)}, "every row needs one, or none"),
        (
            {"ops": (TransferOp(0, Path.D2D, Span(0, 2), Span(0, 1)),), "staged": (0, 1)},
            "moves all layers",
        ),
        ({"point": 2}, "a resume point from row 2 on of 2"),
        ({"point": 7}, "a resume point from row 7 on of 2"),
        (
            {"ops": (TransferOp(0, Path.H2D, Span(0, 1), layers=Span(0, 1)),), "point": 1},
            "layers .* of a resume point",
        ),
    ],
)
def test_a_malformed_graph_is_refused_by_name(changes: dict[str, object], message: str) -> None:
    with pytest.raises(TransferError, match=message):
        bad(**changes).check()
