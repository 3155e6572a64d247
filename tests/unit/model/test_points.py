"""Resume points: where the bytes of states lie in rows, how rows are named, and what fits."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvcore.errors import LayoutError
from kvcore.model.keys import KEY_BYTES
from kvcore.model.points import (
    PageWindow,
    PointCounts,
    PointShape,
    RowHeads,
    StateGroup,
    WindowGroup,
    ascending,
    has_row_among,
    is_point_row,
    last_point_key,
    over_stages,
    point_keys,
    without_rows,
)
from kvcore.model.shape import BlockShape
from kvcore.model.spec import LayerGroup, ModelDescription
from support.budget import examples

keys_ = st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES)
KINDS = ["block", "half", "other half", "first", "next"]
WRAPS = (((1 << 128) - 2) ^ int.from_bytes(b"kvcore-point-row", "big")).to_bytes(KEY_BYTES, "big")
"""A block whose second row has the largest number there is."""


@st.composite
def shapes(draw: st.DrawFn) -> PointShape:
    sizes = draw(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 50)), min_size=1, max_size=4))
    states = tuple(
        StateGroup(group, tuple(f"{group}.{layer}" for layer in range(layers)), nbytes)
        for group, (layers, nbytes) in enumerate(sizes)
    )
    return PointShape(states, draw(st.integers(1, 60)), draw(st.integers(1, 5)))


# --- where bytes are --------------------------------------------------------------------------


@given(shapes())
def test_the_pieces_are_every_byte_of_every_state_once_and_in_order(point: PointShape) -> None:
    """One byte at a time: they are one run over all rows, layer after layer."""
    expected = [
        (state.group, layer, byte)
        for state in point.states
        for layer in range(len(state.names))
        for byte in range(state.nbytes)
    ]
    pieces = list(point.pieces())
    found = [
        (piece.group, piece.layer, piece.offset + byte)
        for piece in pieces
        for byte in range(piece.nbytes)
    ]
    places = [
        piece.row * point.row_nbytes + piece.at + byte
        for piece in pieces
        for byte in range(piece.nbytes)
    ]
    assert found == expected
    assert places == list(range(point.run_nbytes))


@given(shapes())
def test_a_piece_lies_in_one_row_and_is_as_long_as_it_can_be(point: PointShape) -> None:
    pieces = list(point.pieces())
    assert all(piece.nbytes > 0 for piece in pieces)
    assert all(0 <= piece.at < piece.at + piece.nbytes <= point.row_nbytes for piece in pieces)
    for one, other in pairwise(pieces):
        if (one.group, one.layer) == (other.group, other.layer):
            assert (other.row, other.at) == (one.row + 1, 0), "a cut that no row asks for"


@given(shapes())
def test_rows_are_as_many_as_the_states_need(point: PointShape) -> None:
    assert point.run_nbytes == sum(piece.nbytes for piece in point.pieces())
    assert {piece.row for piece in point.pieces()} == set(range(point.state_rows))
    most, least = point.state_rows * point.row_nbytes, (point.state_rows - 1) * point.row_nbytes
    assert most >= point.run_nbytes > least


def test_two_groups_by_hand() -> None:
    point = PointShape((StateGroup(2, ("a", "b"), 5), StateGroup(0, ("c",), 3)), 8, every=1)
    assert (point.run_nbytes, point.state_rows) == (13, 2)
    assert [piece[:-1] for piece in point.pieces()] == [
        (0, 2, 0, 0, 0, 5, 0),
        (0, 2, 1, 0, 5, 3, 0),
        (1, 2, 1, 3, 0, 2, 0),
        (1, 0, 0, 0, 2, 3, 0),
    ]


def test_shares_of_heads_by_hand() -> None:
    """Two layers of states in rows of two layers of blocks, whose heads have five bytes."""
    state = StateGroup(1, ("a", "b"), 14, sections=(4, 10))
    point = PointShape((state,), 20, 1, heads=RowHeads(2, 5))
    assert (point.run_nbytes, point.state_rows) == (28, 2)
    assert [tuple(piece) for piece in point.pieces()] == [
        (0, 1, 0, 0, 0, 2, 0, 2),
        (0, 1, 0, 4, 2, 3, 0, 5),
        (0, 1, 0, 7, 5, 2, 0, 5),
        (0, 1, 1, 0, 7, 2, 0, 2),
        (0, 1, 1, 4, 9, 1, 0, 5),
        (1, 1, 1, 5, 0, 4, 0, 5),
    ]
    assert point.by_heads
    assert not replace(point, states=(replace(state, sections=()),), heads=None).by_heads


@given(
    st.lists(st.tuples(st.integers(1, 3), st.lists(st.integers(1, 9), min_size=1)), min_size=1),
    st.integers(1, 3),
    st.integers(1, 7),
)
@settings(max_examples=examples(30), deadline=None)
def test_a_head_has_the_same_places_of_a_row_at_any_number_of_ranks(
    groups: list[tuple[int, list[int]]], layers: int, head: int
) -> None:
    """Four heads, on one rank to four: as many rows, and in each the same bytes of a head."""

    def shares(ranks: int) -> dict[tuple[int, int, int], list[tuple[int, int, int]]]:
        """By head, row and place in its part of the row: which byte of which state it is."""
        own = 4 // ranks
        states = tuple(
            StateGroup(i, tuple(f"{i}.{n}" for n in range(names)), own * sum(share),
                       tuple(own * n for n in share))
            for i, (names, share) in enumerate(groups)
        )  # fmt: skip
        point = PointShape(states, layers * own * head, 1, heads=RowHeads(own, head))
        counts.add(point.state_rows)
        found: dict[tuple[int, int, int], list[tuple[int, int, int]]] = {}
        for rank in range(ranks):
            for piece in point.pieces():
                assert piece.at // head == (piece.at + piece.nbytes - 1) // head < layers
                for number in range(own):
                    for byte in range(piece.nbytes):
                        key = (rank * own + number, piece.row, piece.at + byte)
                        at = piece.offset + number * piece.step + byte
                        found.setdefault(key, []).append(
                            (piece.group, piece.layer, whole(states[piece.group], rank, own, at))
                        )
        return found

    def whole(state: StateGroup, rank: int, own: int, at: int) -> int:
        """The place in the model's state of a byte of a rank's."""
        start = 0
        for section in state.sections:
            if at < section:
                return start * (4 // own) + rank * section + at
            start, at = start + section, at - section
        raise AssertionError("beyond the state")

    counts: set[int] = set()
    one = shares(1)
    assert all(len(each) == 1 for each in one.values())
    places = [each for (each,) in one.values()]
    nbytes = sum(names * 4 * sum(share) for names, share in groups)
    assert len(set(places)) == len(places) == nbytes
    assert shares(2) == shares(4) == one
    assert len(counts) == 1


def test_a_point_is_cut_by_heads_as_a_whole_or_not() -> None:
    state = StateGroup(1, ("a",), 12, sections=(4, 8))
    good = PointShape((state,), 20, 1, heads=RowHeads(2, 5))
    window = PageWindow(2, ("w",), 4, (5,), before=6)
    wrong: list[dict[str, Any]] = [
        {"heads": None},
        {"heads": RowHeads(2, 4)},
        {"heads": RowHeads(0, 5)},
        {"heads": RowHeads(4, 5), "states": (replace(state, nbytes=14, sections=(6, 8)),)},
        {"states": (replace(state, sections=(4, 7)),)},
        {"states": (replace(state, sections=(3, 9)),)},
        {"states": (replace(state, sections=()),)},
        {"page_windows": (window,)},
        {"windows": (WindowGroup(2, ("w",), BlockShape(1, 2, 1, 1, "int8"), 3),)},
    ]
    for change in wrong:
        with pytest.raises(LayoutError, match="not cut by heads as the rows are"):
            replace(good, **change)


def test_pages_of_windows_lie_behind_the_states_the_last_page_first() -> None:
    window = PageWindow(2, ("a", "b"), 4, (5, 2), before=6, spare=1)
    point = PointShape((StateGroup(1, ("s",), 3),), 8, 1, page_windows=(window,))
    assert (window.pages, window.tokens) == (2, 8)
    assert (point.run_nbytes, point.state_rows, point.most_rows) == (17, 3, 3)
    assert [piece[:-1] for piece in point.pieces()] == [
        (0, 1, 0, 0, 0, 3, 0),
        (0, 2, 0, 0, 3, 5, 0),
        (1, 2, 1, 0, 0, 2, 0),
        (1, 2, 0, 0, 2, 5, 1),
        (1, 2, 1, 0, 7, 1, 1),
        (2, 2, 1, 1, 0, 1, 1),
    ]
    assert point.spare == 0, "a state is of one token"
    assert PointShape((), 8, 1, page_windows=(window,)).spare == 2


@given(shapes(), st.integers(0, 40))
def test_a_boundary_is_the_last_one_that_is_not_behind(point: PointShape, blocks: int) -> None:
    possible = range(0, blocks + 1, point.every)
    assert point.boundary(blocks) == max(possible)


@pytest.mark.parametrize(
    "wrong",
    [
        {"states": ()},
        {"states": (StateGroup(0, ("a",), 0),)},
        {"states": (StateGroup(0, ("a",), 4), StateGroup(1, ("b",), -1))},
        {"row_nbytes": 0},
        {"every": 0},
    ],
    ids=str,
)
def test_what_is_no_point_is_refused(wrong: dict[str, Any]) -> None:
    good = PointShape((StateGroup(0, ("a",), 4),), 8, 1)
    with pytest.raises(LayoutError, match="not the shape of a resume point"):
        replace(good, **wrong)


# --- how rows are named -----------------------------------------------------------------------


@given(keys_, st.integers(1, 9))
@example(bytes(KEY_BYTES), 3)
@example(b"\xff" * KEY_BYTES, 3)
@example(WRAPS, 3)
def test_rows_have_keys_of_their_own_each_after_the_one_before(block: bytes, rows: int) -> None:
    keys = point_keys(block, rows)
    chain = (block, *keys)
    assert len(set(chain)) == rows + 1
    assert {len(key) for key in chain} == {KEY_BYTES}
    assert all(is_point_row(key, parent) for parent, key in pairwise(chain))
    assert last_point_key(block, rows) == keys[-1]
    assert point_keys(block, rows + 1)[:rows] == keys, "a longer point begins with the same rows"


def test_the_keys_go_on_at_zero_behind_the_largest() -> None:
    assert point_keys(WRAPS, 4) == (
        b"\xff" * 15 + b"\xfe", b"\xff" * 16, bytes(16), bytes(15) + b"\x01",
    )  # fmt: skip
    assert last_point_key(WRAPS, 3) == bytes(16)
    assert is_point_row(bytes(16), b"\xff" * 16)


@given(
    block=st.one_of(st.binary(min_size=16, max_size=16), st.just(WRAPS)),
    rows=st.integers(1, 6),
    near=st.sets(st.integers(-3, 8), max_size=4),
    others=st.sets(st.binary(min_size=16, max_size=16), max_size=4),
)
def test_a_row_is_found_among_keys_as_by_looking_at_each(
    block: bytes, rows: int, near: set[int], others: set[bytes]
) -> None:
    first = int.from_bytes(point_keys(block, 1)[0], "big")
    keys = {((first + n) % (1 << 128)).to_bytes(16, "big") for n in near} | others
    right = not keys.isdisjoint(point_keys(block, rows))
    assert has_row_among(block, rows, ascending(keys)) == right


def test_known_answer() -> None:
    """If this fails, no point that was stored so far is found again: say so in the changelog."""
    first, second = point_keys(bytes(range(16)), 2)
    assert first.hex() == "6b77616c76602b776760647f217f6178"
    assert second.hex() == "6b77616c76602b776760647f217f6179"


@given(st.lists(st.binary(max_size=4), min_size=2, max_size=6, unique=True), st.integers(1, 9))
def test_blocks_and_rows_of_other_blocks_are_not_taken_for_rows(
    names: list[bytes], rows: int
) -> None:
    """Keys of blocks are digests, and so as far apart as random numbers."""
    blocks = [hashlib.sha256(name).digest()[:KEY_BYTES] for name in names]
    points = [point_keys(block, rows) for block in blocks]
    every = [*blocks, *(key for point in points for key in point)]
    assert len(set(every)) == len(every)
    for block, point in zip(blocks, points, strict=True):
        others = [key for key in every if key not in (block, *point)]
        assert not any(is_point_row(key, parent) for key in others for parent in (block, *point))


@given(st.lists(st.tuples(keys_, st.sampled_from(KINDS)), max_size=8))
@example([(b"\xff" * 16, "next"), (b"\x01" + b"\xff" * 15, "next"), (bytes(16), "block")])
def test_rows_are_left_out_of_many_keys_as_one_by_one(made: list[tuple[bytes, str]]) -> None:
    pairs = []
    for parent, kind in made:
        row, far = point_keys(parent, 1)[0], hashlib.sha256(parent).digest()[:KEY_BYTES]
        after = (int.from_bytes(parent, "big") + 1) % (1 << 128)
        key = {
            "block": far,
            "half": row[:8] + far[8:],
            "other half": far[:8] + row[8:],
            "first": row,
            "next": after.to_bytes(KEY_BYTES, "big"),
        }[kind]
        assert is_point_row(key, parent) == (kind in ("first", "next"))
        pairs.append((key, parent))
    kept = [pair for pair in pairs if not is_point_row(*pair)]
    packed = (b"".join(key for key, _ in pairs), b"".join(parent for _, parent in pairs))
    expected = (b"".join(key for key, _ in kept), b"".join(parent for _, parent in kept))
    assert without_rows(*packed) == expected


@given(st.lists(keys_, min_size=1, max_size=6), shapes(), st.data())
def test_a_chain_is_the_blocks_and_the_rows_behind_the_last(
    keys: list[bytes], point: PointShape, data: st.DataObject
) -> None:
    blocks = data.draw(st.integers(1, len(keys)))
    chain = point.chain(keys, blocks)
    assert list(chain[:blocks]) == keys[:blocks]
    assert chain[blocks:] == point_keys(keys[blocks - 1], point.state_rows)


@st.composite
def with_windows(draw: st.DrawFn) -> PointShape:
    """Rows of 12 bytes, and windows whose layers have 2, 4 or 8 of a block."""
    states = draw(st.sampled_from([(), (StateGroup(0, ("s",), 30),)]))
    windows = []
    for group in range(1, draw(st.integers(1, 3)) + 1):
        layers, dim = draw(st.integers(1, 7)), draw(st.sampled_from([1, 2, 4]))
        shape = BlockShape(1, 1, dim, block_tokens=1, dtype="int8")
        names = tuple(f"{group}.{layer}" for layer in range(layers))
        windows.append(WindowGroup(group, names, shape, draw(st.integers(1, 4))))
    return PointShape(states, 12, 1, tuple(windows))


@given(with_windows(), st.integers(1, 6))
def test_the_rows_of_windows_are_every_layer_of_every_block_that_is_seen(
    point: PointShape, blocks: int
) -> None:
    """From the boundary backwards, so that a row is the same at any boundary."""
    rows = point.window_rows[: point.rows(blocks) - point.state_rows]
    assert point.state_rows == (3 if point.states else 0)
    found = [(row.distance, row.group, layer) for row in rows for layer in row.layers]
    assert found == [
        (distance, window.group, layer)
        for distance in range(blocks)
        for window in point.windows
        if distance < window.before
        for layer in range(len(window.names))
    ]
    nbytes = {window.group: window.shape.nbytes for window in point.windows}
    assert all(len(row.layers) * nbytes[row.group] <= point.row_nbytes for row in rows)
    keys = [bytes([block]) * KEY_BYTES for block in range(blocks)]
    assert point.chain(keys, blocks)[-1] == point.last_row(keys, blocks)
    assert len(point.chain(keys, blocks)) == blocks + point.rows(blocks)


@pytest.mark.parametrize(
    ("before", "spare", "blocks"), [(127, 1, 8), (127, 0, 8), (128, 1, 9), (1, 0, 1), (112, 0, 7)]
)
def test_a_window_has_the_blocks_that_the_next_token_sees(
    before: int, spare: int, blocks: int
) -> None:
    shape = BlockShape(1, 1, 1, block_tokens=16, dtype="int8")
    window = WindowGroup(1, ("w",), shape, before, spare)
    point = PointShape((), 64, 1, (window,))
    assert window.blocks == blocks
    assert point.spare == 16 * blocks - before >= spare
    assert PointShape((StateGroup(0, ("s",), 9),), 64, 1, (window,)).spare == 0


def test_a_layer_of_a_window_that_fits_no_row_is_refused() -> None:
    shape = BlockShape(1, 1, 4, block_tokens=16, dtype="int8")
    with pytest.raises(LayoutError, match="keeps 128 bytes of a block, more than the 127"):
        PointShape((), 127, 1, (WindowGroup(1, ("w",), shape, 9),))


# --- what fits a model ------------------------------------------------------------------------

SHAPE = BlockShape(layers=2, kv_heads=4, head_dim=8, block_tokens=16, dtype="int8")
KV = LayerGroup(0, 16, (0, 1), ("a", "b"))
STATES = LayerGroup(1, 32, (), of="states")


def point_of(*groups: int, row_nbytes: int = SHAPE.nbytes) -> PointShape:
    states = tuple(StateGroup(group, (f"s{group}",), 100) for group in groups)
    return PointShape(states, row_nbytes, 2)


def model(point: PointShape | None, ranks: int = 1, **options: Any) -> ModelDescription:
    groups = options.pop("groups", (KV, STATES))
    return ModelDescription(SHAPE, groups, b"model", ranks, point=point, **options)


def test_a_point_whose_rows_are_blocks_of_a_rank_fits() -> None:
    assert model(point_of(1)).rank_groups(0) == (KV, STATES)
    half = SHAPE.nbytes // 2
    assert model(point_of(1, row_nbytes=half), ranks=2).rank_shape(1).nbytes == half
    three = (STATES, KV, replace(STATES, index=2))
    assert model(point_of(0, 2), groups=three).point == point_of(0, 2)


@pytest.mark.parametrize(
    ("ranks", "row_nbytes", "stages"),
    [
        (1, SHAPE.nbytes - 1, ()),
        (2, SHAPE.nbytes, ()),  # a rank's block is half of it
        (3, SHAPE.nbytes // 4, ()),  # ranks with one head and with two
        (1, SHAPE.nbytes + 4096, ()),
    ],
)
def test_rows_that_are_not_of_the_size_of_a_block_of_every_rank_are_refused(
    ranks: int, row_nbytes: int, stages: Any
) -> None:
    with pytest.raises(LayoutError, match="equal parts of a block"):
        model(point_of(1, row_nbytes=row_nbytes), ranks, stages=stages)


def test_ranks_that_share_a_part_of_a_block_have_no_points_of_their_own() -> None:
    """A store would keep the states of one of them in the place of all."""
    with pytest.raises(LayoutError, match="same part of a block"):
        model(point_of(1, row_nbytes=SHAPE.nbytes // 4), ranks=8)


@pytest.mark.parametrize(
    ("groups", "named"),
    [
        ((KV, STATES), (0,)),  # of layers with KV
        ((KV, STATES), (0, 1)),
        ((KV, STATES), (2,)),  # of no group
        ((KV, STATES, replace(STATES, index=2)), (1,)),  # one is missing
        ((KV,), (1,)),
    ],
)
def test_a_point_names_the_groups_of_states_and_no_others(
    groups: tuple[LayerGroup, ...], named: tuple[int, ...]
) -> None:
    with pytest.raises(LayoutError, match="resume points of states"):
        model(point_of(*named), groups=groups)


# --- pipeline stages ---------------------------------------------------------------------------


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[PointShape, list[list[str]], list[int]]:
    """The points of a model, the layers of each stage, and the bytes of a row there.

    States have 5 or 9 bytes, a layer with a window 2, 4 or 8 of a block.
    """
    stages = draw(st.integers(1, 3))
    rows = draw(st.lists(st.integers(8, 30), min_size=stages, max_size=stages))
    names: list[list[str]] = [[] for _ in range(stages)]

    def layers(group: int) -> tuple[str, ...]:
        split = sorted(draw(st.lists(st.integers(0, stages - 1), min_size=1, max_size=5)))
        made = tuple(f"{group}.{place}" for place in range(len(split)))
        for stage, name in zip(split, made, strict=True):
            names[stage].append(name)
        return made

    count = draw(st.integers(0, 2))
    states = tuple(
        StateGroup(group, layers(group), draw(st.sampled_from([5, 9]))) for group in range(count)
    )
    windows, pages = [], []
    for group in range(count, count + draw(st.integers(0 if count else 1, 2))):
        shape = BlockShape(1, 1, draw(st.sampled_from([1, 2, 4])), block_tokens=1, dtype="int8")
        windows.append(WindowGroup(group, layers(group), shape, draw(st.integers(1, 3))))
    if draw(st.booleans()):
        own = layers(7)
        sizes = tuple(draw(st.integers(1, 9)) for _ in own)
        pages.append(PageWindow(7, own, 4, sizes, draw(st.integers(1, 9))))
    point = PointShape(states, sum(rows), 1, tuple(windows), tuple(pages))
    return point, names, rows


@given(pipelines(), st.integers(1, 4))
def test_stages_keep_all_of_a_point_between_them_in_equally_many_rows(
    made: tuple[PointShape, list[list[str]], list[int]], blocks: int
) -> None:
    point, names, row_nbytes = made
    whole, parts = over_stages(point, names, row_nbytes)
    assert {part.rows(blocks) for part in parts} == {whole.rows(blocks)}
    assert [part.row_nbytes for part in parts] == row_nbytes
    rows = [[(row.group, row.distance) for row in part.window_rows] for part in (whole, *parts)]
    assert all(each == rows[0] for each in rows), "the leader's page tables are of all ranks"
    kept: dict[tuple[str, int], list[int]] = {}
    seen: list[tuple[int, str]] = []
    for part in parts:
        groups = {group.group: group for group in (*part.states, *part.page_windows)}
        for piece in part.pieces():
            assert piece.at + piece.nbytes <= part.row_nbytes
            assert piece.row < whole.state_rows
            name = groups[piece.group].names[piece.layer]
            kept.setdefault((name, piece.page), []).extend(
                range(piece.offset, piece.offset + piece.nbytes)
            )
        windows = {group.group: group for group in part.windows}
        for row in part.window_rows:
            own = windows[row.group]
            assert len(row.layers) * own.shape.nbytes <= part.row_nbytes
            seen += [(row.distance, own.names[layer]) for layer in row.layers]
    sizes = {(name, 0): group.nbytes for group in point.states for name in group.names} | {
        (name, page): nbytes
        for group in point.page_windows
        for name, nbytes in zip(group.names, group.page_nbytes, strict=True)
        for page in range(group.pages)
    }
    assert kept == {what: [*range(nbytes)] for what, nbytes in sizes.items()}
    assert sorted(seen) == sorted(
        (distance, name)
        for group in point.windows
        for distance in range(group.blocks)
        for name in group.names
    )


def in_stages(**changes: Any) -> ModelDescription:
    """A stage of one layer with KV and one of two, one state on each."""
    shape = SHAPE.with_layers(3)
    row = SHAPE.nbytes // 2
    point = PointShape((StateGroup(1, ("s", "t"), 100),), 3 * row, 2)
    whole, parts = over_stages(point, [{"s"}, {"t"}], [row, 2 * row])
    given_: dict[str, Any] = {
        "groups": (replace(KV, layers=(0, 1, 2), names=()), STATES),
        "stages": ((0, 1), (1, 3)), "point": whole, "stage_points": parts,
    }  # fmt: skip
    return ModelDescription(shape, fingerprint=b"model", world_size=2, **given_ | changes)


def test_unequal_stages_have_rows_of_their_own_sizes() -> None:
    found = in_stages()
    points = [found.rank_point(rank) for rank in range(2)]
    assert [point.row_nbytes for point in points if point] == [1024, 2048]
    assert [point.states[0].names for point in points if point] == [("s",), ("t",)]
    assert model(point_of(1)).rank_point(0) == point_of(1)
    assert model(None, groups=(KV,)).rank_point(0) is None


def test_stages_that_do_not_make_up_the_point_are_refused() -> None:
    first, second = in_stages().stage_points
    with pytest.raises(LayoutError, match="of 1 of 2 stages"):
        in_stages(stage_points=())
    with pytest.raises(LayoutError, match="equal parts of a block"):
        in_stages(stage_points=(second, first))
    with pytest.raises(LayoutError, match="resume points of states"):
        in_stages(stage_points=(first, replace(second, states=first.states)))
    with pytest.raises(LayoutError, match="unlike rows"):
        in_stages(stage_points=(first, replace(second, counts=None)))
    with pytest.raises(LayoutError, match="resume points of states"):
        model(PointShape((StateGroup(1, (), 100),), SHAPE.nbytes, 2))
    with pytest.raises(LayoutError, match="too few rows"):
        PointShape(first.states, 60, 2, counts=PointCounts(2, 1))
