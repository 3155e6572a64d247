"""A worker's copies of the ends of windows: unlike heads, part of a window, other pages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcore.connector.page_table import Paging, PointPages
from kvcore.memory.arena import HostArena
from kvcore.memory.copy import DeviceOps
from kvcore.memory.copy.native import NativeOps
from kvcore.memory.copy.reference import ReferenceOps
from kvcore.memory.device_group import DeviceGroup
from kvcore.memory.layout import KVView, from_strides
from kvcore.memory.points import point_copies
from kvcore.model.points import PointShape, StateGroup, WindowGroup
from kvcore.model.shape import BlockShape
from kvcore.model.spec import LayerGroup
from kvcore.transfer.graph import SKIP, Span, TransferGraph, UnitTable
from kvcore.transfer.plan import Chain, build_load, build_save
from kvcore.worker import EnginePages, KVWorker, WorkerLimits
from support.budget import examples

BLOCK = 8
SHAPE = BlockShape(layers=2, kv_heads=2, head_dim=4, block_tokens=BLOCK, dtype="float32")
WIDE = BlockShape(layers=1, kv_heads=1, head_dim=8, block_tokens=BLOCK, dtype="float32")
FLAT = BlockShape(layers=1, kv_heads=4, head_dim=2, block_tokens=BLOCK, dtype="float32")
GROUPS = (
    LayerGroup(0, 16, (0, 1)),
    LayerGroup(1, 8, (), of="windows"),
    LayerGroup(2, 32, (), of="windows"),
    LayerGroup(3, 16, (), of="states"),
)
POINT = PointShape(
    (StateGroup(3, ("s",), 1500),),
    SHAPE.nbytes,
    1,
    (
        WindowGroup(1, tuple("abcde"), WIDE, before=24),
        WindowGroup(2, ("f",), FLAT, before=40),
    ),
)
PAGES, SLOTS, WAIT = 12, 64, 60.0
TOKENS = 64
PAGING = Paging(GROUPS, BLOCK, no_page=-1, point=POINT)


class Rig:
    """A worker over pages of four groups, all with numbers of their own."""

    def __init__(self, ops: DeviceOps) -> None:
        torch.manual_seed(0)
        self.pages = {
            0: [torch.rand(PAGES, 2, 16, 8) for _ in range(2)],
            1: [torch.rand(PAGES, 1, 8, 16) for _ in range(5)],
            2: [torch.rand(PAGES, 4, 32, 4)],
            3: [torch.rand(PAGES, 375)],
        }
        views = {
            group: KVView(from_strides(self.pages[group], shape), self.pages[group])
            for group, shape in ((0, SHAPE), (1, WIDE), (2, FLAT))
        }
        nothing = DeviceGroup((), views[0].select_layers(()))
        arena = HostArena(SHAPE, SLOTS, huge_pages=False)
        arena.tensor().fill_(-1.0)
        self.worker = KVWorker(
            arena=arena,
            arena_view=KVView(arena.layout(), [arena.tensor()]),
            ops=ops,
            pages=EnginePages(
                [
                    DeviceGroup((0, 1), views[0], 16),
                    *(replace(nothing, page_tokens=group.page_tokens) for group in GROUPS[1:]),
                ],
                points=point_copies(POINT, {3: self.pages[3]}, {1: views[1], 2: views[2]}),
            ),
            limits=WorkerLimits(),
        )
        self.ids = iter(range(1, 10_000))

    def run(self, made: TransferGraph, units: list[UnitTable]) -> None:
        assert self.worker.submit(made.bind(units)) == []
        assert self.worker.wait_idle(WAIT)
        assert not any(report.failed for report in self.worker.poll())

    def tokens(self, group: int, table: list[int], span: range) -> torch.Tensor:
        """What the pages of a table have of some tokens: [layer and token, head, content]."""
        found = []
        for layer in self.pages[group]:
            size = layer.shape[2]
            found += [layer[table[token // size], :, token % size] for token in span]
        return torch.stack(found) if found else torch.zeros(0)


@pytest.fixture(params=[ReferenceOps, NativeOps], ids=lambda made: made.name)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    made = Rig(request.param())
    yield made
    assert made.worker.close()


def test_the_rows_are_as_the_tests_below_take_them_to_be() -> None:
    """Two layers of the wide window fit a row. Three groups have rows of their own."""
    assert POINT.state_rows == 2
    assert POINT.rows(1) == 2 + 3 + 1
    assert POINT.rows(8) == 2 + 3 * 3 + 5


@settings(
    max_examples=examples(30, 1),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    blocks=st.integers(1, TOKENS // BLOCK),
    slots=st.permutations(range(SLOTS)),
    source=st.permutations(range(PAGES)),
    target=st.permutations(range(PAGES)),
    held=st.integers(0, 3),
    lost=st.integers(0, 4),
)
def test_windows_come_back_in_other_pages(
    rig: Rig,
    blocks: int,
    slots: list[int],
    source: list[int],
    target: list[int],
    held: int,
    lost: int,
) -> None:
    """The engine has ``held`` blocks. Its source tables have no page that the window has left.

    The first ``lost`` rows were saved before, by another save. The rest of pages becomes zero: it
    may have been a state, and no number.
    """
    rows, held = POINT.rows(blocks), min(held, blocks - 1)
    lost = min(lost, rows - 1)
    keys = tuple(bytes([i]) * 16 for i in range(blocks + rows))

    def tables(pages: list[int]) -> list[list[int]]:
        return [pages[:4], pages[:8], pages[:2], []]

    kept = {1: max(blocks - 3, 0) * BLOCK, 2: max(blocks - 5, 0) * BLOCK}
    mine = tables(source)
    for group, size in ((1, 8), (2, 32)):
        mine[group] = [
            page if (i + 1) * size > kept[group] else -1 for i, page in enumerate(mine[group])
        ]
    chain = Chain.of(keys, b"n" * 16, Span(0, len(keys)))
    whole = PointPages(rows, blocks, {3: source[0]})
    first = PAGING.whole_units(mine, 0, blocks, whole)
    assert first is not None
    places = slots[: len(keys)]
    before = {0: rig.tokens(0, source[:4], range(held * BLOCK, blocks * BLOCK))}
    for group in (1, 2):
        span = range(max(kept[group], held * BLOCK), blocks * BLOCK)
        before[group] = rig.tokens(group, tables(source)[group], span)
    state = rig.pages[3][0][source[0]].clone()
    if lost:  # a save of the blocks and the first rows, and one of the rest
        cut = Span(0, blocks + lost)
        early = build_save(next(rig.ids), Chain.of(keys, b"n" * 16, cut), places[: cut.stop], None,
                           batch_rows=2, point=blocks)  # fmt: skip
        rig.run(early, [UnitTable.of(t.array()[: cut.stop], t.unit_tokens) for t in first])
        rest = Span(cut.stop, len(keys))
        late = build_save(next(rig.ids), Chain.of(keys, b"n" * 16, rest), places[cut.stop :], None,
                          batch_rows=2, point=-lost)  # fmt: skip
        left = PAGING.whole_units(
            mine, blocks, blocks, PointPages(rows - lost, blocks, {3: source[0]})
        )
        assert left is not None
        rig.run(late, left)
    else:
        rig.run(build_save(next(rig.ids), chain, places, None, batch_rows=2, point=blocks), first)
    theirs = tables(target)
    for group in (0, 1, 2):
        size = GROUPS[group].page_tokens
        for tensor in rig.pages[group]:
            for token in range(held * BLOCK, TOKENS):
                tensor[theirs[group][token // size], :, token % size] = -2.0
    rig.pages[3][0][target[0]] = -2.0
    untouched = [rig.tokens(group, theirs[group], range(held * BLOCK)) for group in (0, 1, 2)]
    wanted = Span(held, len(keys))
    graph = build_load(next(rig.ids), Chain.of(keys, b"n" * 16, wanted), places[held:], (),
                       batch_rows=2, point=blocks - held)  # fmt: skip
    pages = PointPages(rows, blocks, {3: target[0]})
    rig.run(graph, PAGING.units(theirs, held, blocks, held * BLOCK, pages))
    assert torch.equal(rig.tokens(0, theirs[0], range(held * BLOCK, blocks * BLOCK)), before[0])
    kept[0] = 0
    for group in (0, 1, 2):
        size, first_token = GROUPS[group].page_tokens, max(kept[group], held * BLOCK)
        stop = blocks * BLOCK
        found = partial(rig.tokens, group, theirs[group])
        assert torch.equal(found(range(first_token, stop)), before[group])
        begin = max(first_token // size * size, held * BLOCK)
        assert (found(range(held * BLOCK, begin)) == -2.0).all(), "pages that no window sees"
        assert not found(range(begin, first_token)).any(), "tokens that no window sees"
        end = -(-stop // size) * size
        assert not found(range(stop, end)).any(), "tokens behind the boundary"
        assert (found(range(end, TOKENS)) == -2.0).all(), "pages behind the boundary"
        assert torch.equal(found(range(held * BLOCK)), untouched[group])
    assert torch.equal(rig.pages[3][0][target[0]], state)


def test_a_row_without_places_goes_as_far_as_host_memory(rig: Rig) -> None:
    """The engine holds the first blocks of the window itself."""
    tables = PAGING.units([[0], [0, 1], [0], []], 1, 2, BLOCK, PointPages(POINT.rows(2), 2, {3: 0}))
    units = tables[1].array()
    assert (units[1 + 2 : 1 + 2 + 3] != SKIP).all(), "the last block"
    assert (units[1 + 2 + 3 + 1 :] == SKIP).all(), "the block before"
    assert np.count_nonzero(units != SKIP) == 3
