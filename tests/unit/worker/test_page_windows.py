"""A worker's copies of the last pages of windows, in a format that only the engine can read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcore.connector.page_table import Paging, PointPages
from kvcore.errors import LayoutError
from kvcore.memory.arena import Arrangement, HostArena
from kvcore.memory.copy import DeviceOps
from kvcore.memory.copy.native import NativeOps
from kvcore.memory.copy.reference import ReferenceOps
from kvcore.memory.device_group import DeviceGroup
from kvcore.memory.layout import KVView
from kvcore.memory.points import point_copies
from kvcore.memory.runs import PagesInBlock, whole_pages
from kvcore.model.packed import PackedPages
from kvcore.model.points import PageWindow, PointShape, StateGroup, over_stages
from kvcore.model.spec import LayerGroup, ModelDescription
from kvcore.transfer.graph import SKIP, Span, TransferGraph, UnitTable
from kvcore.transfer.plan import Chain, build_load, build_save
from kvcore.worker import EnginePages, KVWorker, WorkerLimits
from support.budget import examples

BLOCK = 16
PACKED = PackedPages(BLOCK, (50, 7))
SHAPE = PACKED.shape(BLOCK, 1)
GROUPS = (
    LayerGroup(0, 8, (), of="windows"),
    LayerGroup(1, BLOCK, (0, 1)),
    LayerGroup(2, 4, (), of="windows"),
)
WINDOWS = (
    PageWindow(0, ("a", "b"), 8, (90, 33), before=19, spare=1),
    PageWindow(2, ("c",), 4, (41,), before=6, spare=1),
)
POINT = PointShape((), SHAPE.nbytes, 1, page_windows=WINDOWS)
SIZES = {0: (90, 33), 1: PACKED.page_nbytes, 2: (41,)}
TOKENS, PAGES, SLOTS, WAIT = 64, 20, 32, 60.0
PAGING = Paging(GROUPS, BLOCK, no_page=-1, point=POINT)
STAGES = ((0, 1), (1, 2))
STAGED = PACKED.shape(BLOCK, 1, STAGES)
"""A block is as wide as the first of two stages needs it, whose cache is the larger one."""
IN_STAGES = over_stages(POINT, [{"a"}, {"b", "c"}], [STAGED.nbytes // 2] * 2)


def test_the_point_is_as_the_tests_below_take_it_to_be() -> None:
    """Rows end inside pages. The first window reaches over two blocks, and three of its pages."""
    assert [window.pages for window in WINDOWS] == [3, 2]
    assert POINT.run_nbytes == 3 * 123 + 2 * 41
    assert POINT.state_rows == POINT.rows(1) == POINT.most_rows == 8
    assert POINT.spare == 2
    places = [(piece.row, piece.group, piece.page, piece.layer) for piece in POINT.pieces()]
    assert places[:3] == [(0, 0, 0, 0), (1, 0, 0, 0), (1, 0, 0, 1)]


class Rig:
    """Workers over pages of three groups, all with numbers of their own: one, or two stages."""

    def __init__(self, ops: DeviceOps, *, stages: bool) -> None:
        torch.manual_seed(0)
        one: dict[str, Any] = {"shape": SHAPE, "point": POINT, "world_size": 1}
        two = {"shape": STAGED, "point": IN_STAGES[0], "world_size": 2}
        two |= {"stages": STAGES, "stage_points": IN_STAGES[1]}
        model = described(**(two if stages else one))
        assert model.point is not None
        self.point = model.point
        self.paging = Paging(GROUPS, BLOCK, no_page=-1, point=self.point)
        self.pages = {
            group: [
                torch.randint(0, 256, (PAGES, size + 5), dtype=torch.uint8)[:, :size]
                for size in sizes
            ]
            for group, sizes in SIZES.items()
        }
        self.workers = [self._worker(ops, model, rank) for rank in range(model.world_size)]
        self.ids = iter(range(1, 10_000))

    def _worker(self, ops: DeviceOps, model: ModelDescription, rank: int) -> KVWorker:
        own, point = model.rank_groups(rank)[1], model.rank_point(rank)
        assert point is not None
        view = whole_pages([self.pages[1][layer] for layer in own.layers])
        nothing = DeviceGroup((), view.select_layers(()))
        shape = model.rank_shape(rank)
        arena = HostArena(shape, SLOTS, arrangement=Arrangement.BLOCKWISE, huge_pages=False)
        arena.tensor().fill_(0)
        of = PagesInBlock.of(PACKED, BLOCK, own.layers, first := model.layer_range(rank)[0])
        named = {"a": self.pages[0][0], "b": self.pages[0][1], "c": self.pages[2][0]}
        raw = {seen.group: [named[name] for name in seen.names] for seen in point.page_windows}
        return KVWorker(
            arena=arena,
            arena_view=KVView(arena.layout(), [arena.tensor()]),
            ops=ops,
            pages=EnginePages(
                [nothing, DeviceGroup(own.layers, view, BLOCK, of), nothing],
                first,
                points=point_copies(point, {}, {}, raw),
            ),
            limits=WorkerLimits(),
        )

    def run(self, made: TransferGraph, units: Sequence[UnitTable]) -> None:
        for worker in self.workers:
            assert worker.submit(made.bind(units)) == []
            assert worker.wait_idle(WAIT)
            assert not any(report.failed for report in worker.poll())

    def content(self, group: int, page: int) -> bytes:
        return b"".join(bytes(layer[page].numpy()) for layer in self.pages[group])

    def shuffle(self) -> None:
        for layers in self.pages.values():
            for layer in layers:
                layer.copy_(torch.randint(0, 256, layer.shape, dtype=torch.uint8))


@pytest.fixture(
    params=[(ReferenceOps, False), (NativeOps, False), (NativeOps, True)],
    ids=["reference", "native", "native in stages"],
)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    ops, stages = request.param
    made = Rig(ops(), stages=stages)
    yield made
    assert all(worker.close() for worker in made.workers)


def tables(pages: Sequence[int], left: int = 0) -> list[list[int]]:
    """The page tables of a request; layers of unlike groups have memory of their own here.

    Windows have left all pages that end at or before token ``left``.
    """
    made = [list(pages[: TOKENS // group.page_tokens]) for group in GROUPS]
    for group, own in zip(GROUPS, made, strict=True):
        for number in range(len(own) if group.of == "windows" else 0):
            if (number + 1) * group.page_tokens <= left:
                own[number] = -1
    return made


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
    lost=st.integers(0, 7),
)
def test_pages_of_windows_come_back_in_other_pages(
    rig: Rig,
    blocks: int,
    slots: list[int],
    source: list[int],
    target: list[int],
    held: int,
    lost: int,
) -> None:
    """The engine has ``held`` blocks. The first ``lost`` rows were saved before, by another save.

    Near the start of a prompt a window has fewer pages than a point has room for.
    """
    rows, held = rig.point.rows(blocks), min(held, blocks - 1)
    lost = min(lost, rows - 1)
    keys = tuple(bytes([i]) * 16 for i in range(blocks + rows))
    places, mine = slots[: len(keys)], tables(source, left=max(blocks * BLOCK - 20, 0))
    rig.shuffle()
    saved = {
        (group.index, number): rig.content(group.index, page)
        for group in GROUPS
        for number, page in enumerate(mine[group.index])
        if page >= 0
    }
    whole = rig.paging.whole_units(mine, 0, blocks, PointPages(rows, blocks, {}))
    assert whole is not None
    for part in (range(blocks + lost), range(blocks + lost, len(keys))):
        chain = Chain.of(keys, b"n" * 16, Span(part.start, part.stop))
        units = [UnitTable.of(t.array()[part.start : part.stop], t.unit_tokens) for t in whole]
        if part.start:
            late = rig.paging.whole_units(mine, blocks, blocks, PointPages(rows - lost, blocks, {}))
            assert late is not None
            assert [t.array().tolist() for t in late] == [t.array().tolist() for t in units]
        made = build_save(
            next(rig.ids), chain, places[part.start : part.stop], None,
            batch_rows=2, point=blocks - part.start if part.stop > blocks else None,
        )  # fmt: skip
        rig.run(made, units)
    rig.shuffle()
    expected = {(group, page): rig.content(group, page) for group in SIZES for page in range(PAGES)}
    wanted = tables(target)
    made = build_load(
        next(rig.ids), Chain.of(keys, b"n" * 16, Span(held, len(keys))), places[held:], (),
        batch_rows=2, point=blocks - held,
    )  # fmt: skip
    rig.run(
        made, rig.paging.units(wanted, held, blocks, held * BLOCK, PointPages(rows, blocks, {}))
    )
    for number in range(held, blocks):
        expected[1, wanted[1][number]] = saved[1, number]
    for window in WINDOWS:
        end = blocks * BLOCK // window.page_tokens
        for number in range(max(end - window.pages, 0), end):
            if number * window.page_tokens >= held * BLOCK:
                page = wanted[window.group][number]
                expected[window.group, page] = saved[window.group, number]
    assert {place: rig.content(*place) for place in expected} == expected


def test_each_row_of_the_run_has_all_last_pages() -> None:
    """The last page comes first. Pages that the engine has, or never had, have no place."""
    pages = [[1, 2, 3, 4], [5, 6], [*range(10, 18)]]
    first, _, last = PAGING.units(pages, 1, 2, 16, PointPages(3, 2, {}))
    assert first.array().tolist() == [[SKIP] * 3, *([[4, 3, SKIP]] * 3)]
    assert last.array().tolist() == [[SKIP] * 2, *([[17, 16]] * 3)]
    assert (first.unit_tokens, last.unit_tokens) == (8, 4)
    start, _, _ = PAGING.units(pages, 0, 1, 0, PointPages(8, 1, {}))
    assert start.array().tolist() == [[SKIP] * 3, *([[2, 1, SKIP]] * 8)]


@pytest.mark.parametrize(
    ("gone", "stop", "sees"),
    [
        ((), None, True),
        ((0,), None, True),  # 32 - 24 = 8: the first page is not of the point
        ((1,), None, False),
        ((1,), 31, False),  # 31 - 19 = 12 is in the second page
        ((2,), 31, False),
        ((3,), 31, False),
    ],
)
def test_a_point_needs_the_pages_that_its_windows_see(
    gone: Sequence[int], stop: int | None, sees: bool
) -> None:
    own = [-1 if i in gone else i for i in range(4)]
    assert PAGING.sees([own, [5, 6], [*range(8)]], 2, 0, stop) is sees


def described(**other: object) -> ModelDescription:
    given_: dict[str, Any] = {"point": POINT, "packed": PACKED, "shape": SHAPE, "world_size": 1}
    return ModelDescription(groups=GROUPS, fingerprint=b"f", **given_ | other)


def test_packed_pages_are_beside_windows_of_their_own_kind_only() -> None:
    assert described().point == POINT
    states = PointShape((StateGroup(0, ("s",), 4),), SHAPE.nbytes, 1, page_windows=WINDOWS[1:])
    with pytest.raises(LayoutError):
        described(point=states)
    with pytest.raises(LayoutError, match="resume points of windows"):
        described(point=PointShape((), SHAPE.nbytes, 1, page_windows=WINDOWS[:1]))


@pytest.mark.parametrize(
    "wrong",
    [{"before": 0}, {"spare": -1}, {"page_nbytes": (1,)}, {"names": ()}, {"page_tokens": 0}],
)
def test_what_is_no_window_of_pages_is_refused(wrong: dict[str, object]) -> None:
    good = {"group": 0, "names": ("a", "b"), "page_tokens": 8, "page_nbytes": (1, 2), "before": 4}
    with pytest.raises(LayoutError, match="not a group of layers with a window"):
        PageWindow(**{**good, **wrong})  # type: ignore[arg-type]
