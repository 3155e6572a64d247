"""Pages as device units, against one token at a time; which graphs use which page."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvcore.connector.page_table import (
    PageTables,
    PageUsers,
    Paging,
    PointPages,
    has_gap,
    of_its_group,
    of_one_pool,
    pages_of,
    unit_table,
)
from kvcore.model.points import PointShape, StateGroup, WindowGroup
from kvcore.model.shape import BlockShape
from kvcore.model.spec import LayerGroup
from kvcore.transfer.graph import (
    SKIP,
    OpReport,
    Path,
    Priority,
    Span,
    TransferGraph,
    TransferOp,
    UnitTable,
)

sizes = st.sampled_from([1, 2, 3, 8, 12, 16, 64])


def tokens_of(table: UnitTable) -> list[int]:
    """The device slot of every token, SKIP where there is none."""
    size = table.unit_tokens
    return [
        SKIP if unit == SKIP else unit * size + inside
        for unit in table.array().reshape(-1).tolist()
        for inside in range(size)
    ]


def naive(
    pages: list[int], page_tokens: int, block: int, start: int, stop: int, begin: int, no_page: int
) -> list[int]:
    """Slots by token: a token at or after ``begin`` whose page there is has one."""
    slots = []
    for position in range(start * block, stop * block):
        inside = position // page_tokens
        page = pages[inside] if inside < len(pages) else no_page
        here = page != no_page and position >= begin
        slots.append(page * page_tokens + position % page_tokens if here else SKIP)
    return slots


@given(
    page_tokens=sizes,
    block=sizes,
    no_page=st.sampled_from([-1, 0]),
    pages=st.lists(st.integers(1, 40), max_size=12),
    blocks=st.tuples(st.integers(0, 6), st.integers(0, 6)),
    data=st.data(),
)
def test_units_against_one_token_at_a_time(
    page_tokens: int,
    block: int,
    no_page: int,
    pages: list[int],
    blocks: tuple[int, int],
    data: st.DataObject,
) -> None:
    dropped = data.draw(st.sets(st.integers(0, 11)), label="dropped")
    table = [no_page if i in dropped else page for i, page in enumerate(pages)]
    start, stop = sorted(blocks)
    group = LayerGroup(0, page_tokens, (0,))
    # An engine holds whole pages, or whole blocks of ours: both end at a unit.
    whole = data.draw(st.integers(0, 6), label="begin") * data.draw(
        st.sampled_from([page_tokens, block])
    )
    units = unit_table(group, table, block, start, stop, whole, no_page=no_page)
    expected = naive(table, page_tokens, block, start, stop, whole, no_page)
    assert tokens_of(units) == expected
    assert page_tokens % units.unit_tokens == block % units.unit_tokens == 0
    assert units.array().shape == (stop - start, block // units.unit_tokens)
    assert has_gap(units) == (SKIP in expected)
    used = {slot // page_tokens for slot in expected if slot != SKIP}
    assert pages_of([units], [group]) == sorted(used)


def test_the_unit_is_the_largest() -> None:
    """Fewer units are fewer copies."""
    group = LayerGroup(0, 48, (0,))
    assert unit_table(group, [0], 32, 0, 1, no_page=-1).unit_tokens == 16


def test_a_unit_that_begins_before_what_is_wanted_is_left_out() -> None:
    """A unit is copied whole or not at all: what the engine holds must not be written over."""
    table = unit_table(LayerGroup(0, 16, (0,)), [5, 6], 16, 0, 2, 4, no_page=-1)
    assert table.array().tolist() == [[SKIP], [6]]


def test_pages_of_groups_are_one_memory_or_their_own() -> None:
    groups = [LayerGroup(0, 16, (0,)), LayerGroup(1, 16, (1,))]
    units = [unit_table(group, [3, 4], 16, 0, 2, no_page=-1) for group in groups]
    assert pages_of(units, groups) == [3, 4]
    own = pages_of(units, groups, of_its_group)
    assert own == [3, 4, of_its_group(1, 3), of_its_group(1, 4)]


@given(st.sets(st.tuples(st.integers(0, 9), st.integers(0, (1 << 40) - 1)), max_size=20))
def test_pages_of_their_groups_have_numbers_of_their_own(places: set[tuple[int, int]]) -> None:
    assert len({of_its_group(*place) for place in places}) == len(places)
    assert {of_one_pool(*place) for place in places} == {page for _, page in places}


# --- over all groups --------------------------------------------------------------------------

GROUPS = (LayerGroup(0, 16, (0, 2)), LayerGroup(1, 32, (1,)))
PAGES = ([4, 5, 6, 7], [8, 9])


def paging() -> Paging:
    return Paging(GROUPS, 16, no_page=-1, place=of_its_group)


def test_units_of_all_groups() -> None:
    found = paging().units(PAGES, 1, 4, 32)
    expected = [
        unit_table(group, pages, 16, 1, 4, 32, no_page=-1)
        for group, pages in zip(GROUPS, PAGES, strict=True)
    ]
    assert found == expected
    assert paging().pages_of(found) == [6, 7, of_its_group(1, 9)]


def test_tables_are_found_by_the_index_of_their_group() -> None:
    """An engine may have tables of groups that kvcore does not serve."""
    one = Paging(GROUPS[1:], 16, no_page=-1)
    assert one.units(PAGES, 0, 2) == [unit_table(GROUPS[1], PAGES[1], 16, 0, 2, no_page=-1)]


@pytest.mark.parametrize(
    ("pages", "whole"),
    [
        (PAGES, 4),
        (([4, 5], [8, -1]), 2),
        (([4, -1, 6, 7], [8, 9]), 1),
        (([4], [8, 9]), 1),
        (([4, 5, 6, 7], [-1, 9]), 0),
    ],
)
def test_blocks_with_a_gap_are_not_whole(pages: Any, whole: int) -> None:
    for stop in range(1, 5):
        expected = paging().units(pages, 0, stop) if stop <= whole else None
        assert paging().whole_units(pages, 0, stop) == expected


# --- with states ------------------------------------------------------------------------------

STATEFUL = (
    LayerGroup(0, 16, (0, 2)),
    LayerGroup(1, 64, (), of="states"),
    LayerGroup(2, 32, (1,)),
    LayerGroup(3, 16, (), of="states"),
)


FOUR_ROWS = PointShape((StateGroup(1, ("a",), 20), StateGroup(3, ("b",), 20)), 10, 1)


def stateful(kv: PageTables, states: list[int] | None = None) -> PageTables:
    """The tables of all groups. An engine drops pages of states early: those have gaps."""
    gone = [-1, -1, -1] if states is None else states
    return (kv[0], gone, kv[1], gone)


def with_states(place: Any = of_its_group) -> Paging:
    return Paging(STATEFUL, 16, no_page=-1, place=place, point=FOUR_ROWS)


@given(
    span=st.tuples(st.integers(0, 4), st.integers(0, 4)).map(sorted),
    begin=st.sampled_from([0, 16, 32, 40]),
    rows=st.integers(1, 4),
    pages=st.tuples(st.integers(0, 30), st.integers(0, 30)),
)
def test_rows_of_a_point_follow_the_blocks(
    span: list[int], begin: int, rows: int, pages: tuple[int, int]
) -> None:
    """A block has no page of states, and a row of a point no unit of KV."""
    start, stop = span
    point = PointPages(rows, 3, {1: pages[0], 3: pages[1]})
    found = with_states().units(stateful(PAGES), start, stop, begin, point)
    plain = paging().units(PAGES, start, stop, begin)
    blocks = stop - start
    for group, table in zip(STATEFUL, found, strict=True):
        array = table.array()
        assert len(array) == blocks + rows
        if group.of == "states":
            assert table.unit_tokens == group.page_tokens, "a unit is a page"
            own = [[SKIP]] * blocks + [[point.states[group.index]]] * rows
            assert array.tolist() == own
        else:
            alone = plain[group.index // 2]
            assert (array[:blocks] == alone.array()).all()
            assert (array[blocks:] == SKIP).all()
            assert table.unit_tokens == alone.unit_tokens
    kv_pages = {of_its_group(2 * (number >> 40), number % (1 << 40))
                for number in paging().pages_of(plain)}  # fmt: skip
    states = {of_its_group(1, pages[0]), of_its_group(3, pages[1])}
    assert with_states().pages_of(found) == sorted(kv_pages | states)


def test_pages_of_states_are_of_the_one_pool_too() -> None:
    """Else a step could write to a state that is still being saved."""
    point = PointPages(2, 3, {1: 20, 3: 21})
    paging = with_states(of_one_pool)
    assert paging.pages_of(paging.units(stateful(PAGES), 0, 1, 0, point)) == [4, 8, 20, 21]


def test_without_a_point_no_page_of_states_is_used() -> None:
    found = with_states().units(stateful(PAGES, [1, 2, 3]), 0, 3)
    assert [table.array().shape[0] for table in found] == [3] * 4
    assert (found[1].array() == SKIP).all()
    assert (found[3].array() == SKIP).all()
    assert [found[0], found[2]] == paging().units(PAGES, 0, 3)


def test_dropped_states_of_blocks_are_no_gap_but_dropped_kv_is() -> None:
    point = PointPages(2, 3, {1: 20, 3: 21})
    for given_point in (None, point):
        whole = with_states().whole_units(stateful(PAGES), 0, 4, given_point)
        assert whole == with_states().units(stateful(PAGES), 0, 4, point=given_point)
        assert whole is not None
        for kv in (([4, -1, 6, 7], [8, 9]), ([4, 5, 6, 7], [8, -1]), ([4], [8, 9])):
            assert with_states().whole_units(stateful(kv), 0, 4, given_point) is None


def test_rows_behind_no_block_are_whole() -> None:
    """All blocks are held already, and only the rest of a point is saved."""
    found = with_states().whole_units(stateful(([-1], [])), 4, 4, PointPages(1, 4, {1: 20, 3: 21}))
    assert found is not None
    assert [table.array().tolist() for table in found] == [[[SKIP]], [[20]], [[SKIP]], [[21]]]


# --- with windows -----------------------------------------------------------------------------

WINDOWED = (LayerGroup(0, 16, (0,)), LayerGroup(1, 32, (), of="windows"),
            LayerGroup(2, 8, (), of="windows"))  # fmt: skip
LAYER = BlockShape(1, 1, 1, block_tokens=16, dtype="int8")
TAILS = PointShape(
    (),
    LAYER.nbytes,
    1,
    (
        WindowGroup(1, ("a", "b"), LAYER, before=40),
        WindowGroup(2, ("c",), LAYER, before=16),
    ),
)
"""Rows: a of the last block, b of it, c of it, then a and b of the block before, and so on."""


@given(
    start=st.integers(0, 4),
    stop=st.integers(1, 4),
    lost=st.integers(0, 5),
    begin=st.sampled_from([0, 16, 48]),
    gone=st.integers(0, 64),
)
def test_rows_of_windows_have_the_places_of_their_block(
    start: int, stop: int, lost: int, begin: int, gone: int
) -> None:
    """``lost`` is how many of the point's first rows are held already."""
    start, rows = min(start, stop), max(TAILS.rows(stop) - lost, 1)
    tables = ([1, 2, 3, 4], [10, 11], [20 + i for i in range(8)])
    pages = [tables[0], *([-1 if (i + 1) * size <= gone else page for i, page in enumerate(own)]
                          for own, size in zip(tables[1:], (32, 8), strict=True))]  # fmt: skip
    made = Paging(WINDOWED, 16, no_page=-1, point=TAILS)
    found = made.units(pages, start, stop, begin, PointPages(rows, stop, {}))
    first = TAILS.rows(stop) - rows
    for group, table in list(zip(WINDOWED, found, strict=True))[1:]:
        got = tokens_of(table)
        assert got[: (stop - start) * 16] == [SKIP] * (stop - start) * 16
        expected = []
        for row in TAILS.window_rows[first : TAILS.rows(stop)]:
            block = stop - 1 - row.distance
            there = naive(pages[group.index], group.page_tokens, 16, block, block + 1, begin, -1)
            expected += there if row.group == group.index else [SKIP] * 16
        assert got[(stop - start) * 16 :] == expected
    needs = {1: range(max(stop - 3, 0) * 16, stop * 16), 2: range(max(stop - 1, 0) * 16, stop * 16)}
    whole = all(
        naive(pages[group], WINDOWED[group].page_tokens, 16, 0, stop, 0, -1)[token] != SKIP
        for group, tokens in needs.items()
        for token in tokens
    )
    assert made.sees(pages, stop) == whole
    saved = made.whole_units(pages, start, stop, PointPages(rows, stop, {}))
    assert (saved is not None) == whole


@given(stop=st.integers(33, 64), start=st.integers(0, 32), gone=st.integers(0, 64))
def test_windows_that_go_on_before_the_boundary_need_what_is_seen_there(
    stop: int, start: int, gone: int
) -> None:
    blocks = -(-stop // 16)
    pages = [[1, 2, 3, 4], [-1 if 32 * (i + 1) <= gone else 10 + i for i in range(2)], [20] * 8]
    made = Paging(WINDOWED, 16, no_page=-1, point=TAILS)
    seen = range(max(stop - 40, start) // 16 * 16, stop)
    there = naive(pages[1], 32, 16, 0, blocks, 0, -1)
    assert made.sees(pages, blocks, start, stop) == all(there[token] != SKIP for token in seen)


# --- users of pages ---------------------------------------------------------------------------


def graph_of(graph_id: int, device_ops: int, others: int) -> TransferGraph:
    """A graph whose first ops touch the device and whose last do not."""
    paths = [Path.H2D] * device_ops + [Path.H2DISK] * others
    ops = tuple(TransferOp(n, path, Span(0, 1)) for n, path in enumerate(paths))
    return TransferGraph(graph_id, Priority.LOAD, b"", b"", (), (), (), (), ops)


class PageUsersMachine(RuleBasedStateMachine):
    """Against a dictionary of each graph's pages and ops on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.users = PageUsers()
        self.known: dict[int, tuple[set[int], set[int]]] = {}
        self.next = 0

    @rule(pages=st.sets(st.integers(0, 9)), device_ops=st.integers(0, 3), others=st.integers(0, 2))
    def add(self, pages: set[int], device_ops: int, others: int) -> None:
        self.users.add(graph_of(self.next, device_ops, others), sorted(pages))
        if device_ops:
            self.known[self.next] = (pages, set(range(device_ops)))
        self.next += 1

    @rule(graph=st.integers(0, 20), op=st.integers(0, 4))
    def ended(self, graph: int, op: int) -> None:
        """Reports come in any order, of ops that are known or not, and may come twice."""
        _, left = self.known.get(graph, (set(), set()))
        last = left == {op}
        left.discard(op)
        if last:
            del self.known[graph]
        assert self.users.ended(OpReport(graph, op, {})) == last

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def ends(self, data: st.DataObject) -> None:
        """An op that runs ends. By chance, graphs that share a page hardly ever end one by one."""
        graph = data.draw(st.sampled_from(sorted(self.known)))
        self.ended(graph, data.draw(st.sampled_from(sorted(self.known[graph][1]))))

    @invariant()
    def in_use(self) -> None:
        assert self.users.graphs == self.known.keys()

    @rule(asked=st.sets(st.integers(0, 12)))
    def among(self, asked: set[int]) -> None:
        expected = {
            page: {graph for graph, (pages, _) in self.known.items() if page in pages}
            for page in asked
        }
        found = {page: set(graphs) for page, graphs in self.users.among(asked)}
        assert found == {page: graphs for page, graphs in expected.items() if graphs}

    @invariant()
    def sound(self) -> None:
        self.users.check_integrity()
        assert set(self.users.graphs) == set(self.known)


TestPageUsers = PageUsersMachine.TestCase


def test_integrity_is_really_checked() -> None:
    users = PageUsers()
    users.add(graph_of(1, 1, 0), [2, 3])
    del users._users[3]
    with pytest.raises(AssertionError, match="differ"):
        users.check_integrity()
