"""A worker's copies of resume points: with their blocks, in part, and without a page."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

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
from kvcore.model.points import PointShape, StateGroup
from kvcore.model.shape import BlockShape
from kvcore.model.spec import LayerGroup
from kvcore.tiers.memory import MemoryTier
from kvcore.transfer.graph import Path, RowError, Span, TransferGraph, UnitTable
from kvcore.transfer.plan import Chain, TierRows, build_load, build_save
from kvcore.worker import EnginePages, KVWorker, WorkerLimits
from support.budget import examples

SHAPE = BlockShape(layers=2, kv_heads=2, head_dim=4, block_tokens=8, dtype="float32")
GROUPS = (
    LayerGroup(0, 16, (), of="states"),
    LayerGroup(1, 8, (0, 1)),
    LayerGroup(2, 16, (), of="states"),
)
POINT = PointShape((StateGroup(2, ("a", "b"), 1200), StateGroup(0, ("c",), 70)), SHAPE.nbytes, 2)
ROWS = 3
"""a | a b | b c: each row but the first has bytes of two layers, and the last of both groups."""
PAGES, SLOTS, WAIT = 6, 16, 60.0
PAGING = Paging(GROUPS, SHAPE.block_tokens, no_page=-1, point=POINT)


def test_the_point_is_as_the_tests_below_take_it_to_be() -> None:
    assert POINT.state_rows == ROWS
    where = [(piece.row, piece.group, piece.layer) for piece in POINT.pieces()]
    assert where == [(0, 2, 0), (1, 2, 0), (1, 2, 1), (2, 2, 1), (2, 0, 0)]


class Rig:
    """A worker over pages of KV and of states, and an arena, all with numbers of their own."""

    def __init__(self, ops: DeviceOps, page_tokens: int = 8) -> None:
        torch.manual_seed(0)
        self.kv = [torch.rand(PAGES, 2, 8, 8) for _ in range(2)]
        padded = torch.rand(PAGES, 320)
        self.states = {
            2: [torch.rand(PAGES, 3, 100), padded[:, :300]],
            0: [torch.rand(PAGES, 5, 7).to(torch.bfloat16)],
        }
        view = KVView(from_strides(self.kv, SHAPE), self.kv)
        nothing = DeviceGroup((), view.select_layers(()))
        arena = HostArena(SHAPE, SLOTS, huge_pages=False)
        arena.tensor().fill_(-1.0)
        self.worker = KVWorker(
            arena=arena,
            arena_view=KVView(arena.layout(), [arena.tensor()]),
            ops=ops,
            pages=EnginePages(
                [nothing, DeviceGroup((0, 1), view, page_tokens), nothing],
                points=point_copies(POINT, self.states, {}),
            ),
            limits=WorkerLimits(),
        )
        self.ids = iter(range(1, 10_000))

    def chain(self, rows: int) -> Chain:
        return Chain(b"n" * 16, bytes(16), tuple(bytes([row]) * 16 for row in range(rows)))

    def run(self, graph: TransferGraph, units: Sequence[UnitTable]) -> dict[int, RowError]:
        """Return the rows that failed."""
        assert self.worker.submit(graph.bind(units)) == []
        assert self.worker.wait_idle(WAIT)
        failed: dict[int, RowError] = {}
        for report in self.worker.poll():
            failed.update({row: e for row, e in report.failed.items() if row not in failed})
        return failed

    def save(self, slots: Sequence[int], units: Sequence[UnitTable], point: int | None) -> Any:
        graph = build_save(
            next(self.ids), self.chain(len(slots)), slots, None, batch_rows=2, point=point
        )
        return self.run(graph, units)

    def load(
        self,
        slots: Sequence[int],
        units: Sequence[UnitTable],
        point: int | None,
        disk: Sequence[TierRows] = (),
    ) -> Any:
        graph = build_load(
            next(self.ids), self.chain(len(slots)), slots, disk, batch_rows=2, point=point
        )
        return self.run(graph, units)

    def row(self, slot: int) -> torch.Tensor:
        return self.worker.arena.tensor().view(SLOTS, -1)[slot].clone()

    def state(self, page: dict[int, int]) -> list[torch.Tensor]:
        """The states in a page of each group, layer by layer."""
        return [t[page[group]].clone() for group, tensors in self.states.items() for t in tensors]

    def everything(self) -> list[torch.Tensor]:
        return [t.clone() for t in [*self.kv, *self.states[2], *self.states[0]]]


@pytest.fixture(params=[ReferenceOps, NativeOps], ids=lambda made: made.name)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    made = Rig(request.param())
    yield made
    assert made.worker.close()


def units(
    kv: Sequence[int], states: dict[int, int], start: int = 0, stop: int = 3, rows: int = ROWS
) -> list[UnitTable]:
    """The tables of blocks [start, stop) in pages ``kv``, and of the last rows of a point."""
    return PAGING.units(([], kv, []), start, stop, point=PointPages(rows, stop, states))


def same(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@settings(
    max_examples=examples(30, 1),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    slots=st.permutations(range(SLOTS)),
    kv=st.permutations(range(PAGES)),
    source=st.fixed_dictionaries({0: st.integers(0, 5), 2: st.integers(0, 5)}),
    target=st.fixed_dictionaries({0: st.integers(0, 5), 2: st.integers(0, 5)}),
    held=st.integers(0, 3),
)
def test_blocks_and_a_point_come_back_in_other_pages(
    rig: Rig,
    slots: list[int],
    kv: list[int],
    source: dict[int, int],
    target: dict[int, int],
    held: int,
) -> None:
    """``held`` blocks are loaded by nobody, because the engine has them."""
    places, before = slots[: 3 + ROWS], rig.state(source)
    blocks = [tensor[kv[:3]].clone() for tensor in rig.kv]
    assert rig.save(places, units(kv[:3], source), point=3) == {}
    for tensor in rig.kv:
        tensor[kv[3:6]] = -2.0
    for group, tensors in rig.states.items():
        for tensor in tensors:
            tensor[target[group]] = -2.0
    expected = rig.everything()
    for tensor, block in zip(expected, blocks, strict=False):
        tensor[kv[3 + held : 6]] = block[held:]
    for tensor, (group, state) in zip(
        expected[2:], zip((2, 2, 0), before, strict=True), strict=True
    ):
        tensor[target[group]] = state
    assert rig.load(places[held:], units(kv[3:6], target, held), point=3 - held) == {}
    assert same(rig.everything(), expected)


@pytest.mark.parametrize("left_out", [1, 2])
def test_of_a_point_the_last_rows_alone_are_copied(rig: Rig, left_out: int) -> None:
    old, new = {0: 1, 2: 2}, {0: 3, 2: 4}
    places = [4, 9, 7]
    assert rig.save(places, units([], old, 3, 3), point=0) == {}
    rows = [rig.row(slot) for slot in places]
    last = units([], new, 3, 3, ROWS - left_out)
    assert rig.save(places[left_out:], last, point=-left_out) == {}
    again = [rig.row(slot) for slot in places]
    assert same(again[:left_out], rows[:left_out])
    assert not any(map(torch.equal, again[left_out:], rows[left_out:]))

    whole = {0: 5, 2: 5}
    assert rig.load(places, units([], whole, 3, 3), point=0) == {}
    flat = [b"".join(raw(t) for t in rig.state(page)) for page in (old, new, whole)]
    cut = left_out * SHAPE.nbytes
    assert flat[2] == flat[0][:cut] + flat[1][cut:]
    rig.states[0][0][5] = rig.states[2][1][5] = 0
    before = rig.everything()
    assert rig.load(places[left_out:], last, point=-left_out) == {}
    assert same(rig.everything(), before), "what is there already was changed"


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def test_rows_of_a_graph_without_a_point_touch_no_state(rig: Rig) -> None:
    before = rig.everything()
    assert rig.load([0, 1, 2, 3, 4, 5], units([0, 1, 2], {0: 1, 2: 1}), point=None) == {}
    assert same(rig.everything()[2:], before[2:])
    assert not same(rig.everything()[:2], before[:2])


@pytest.mark.parametrize("group", [0, 2])
@pytest.mark.parametrize("save", [True, False])
def test_a_row_without_a_page_fails_and_says_so(
    rig: Rig, group: int, save: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Wrong states are never served: of a load no block is taken to be there."""
    copy = rig.save if save else rig.load
    tables = units([0, 1, 2], {0: 1, 2: 1, group: -1})
    with caplog.at_level(logging.ERROR, "kvcore.transfer"):
        failed = copy([0, 1, 2, 3, 4, 5], tables, 3)
    assert failed == dict.fromkeys(range(6), RowError.INTERNAL)
    assert "has no page of its states" in caplog.text


def test_rows_that_a_tier_does_not_have_leave_the_rest_of_the_state_alone(rig: Rig) -> None:
    """They are reported; the engine computes the states anew."""
    rig.worker.open_tier("disk", MemoryTier(SLOTS, rig.worker.arena.slot_nbytes))
    source, target = {0: 1, 2: 1}, {0: 4, 2: 4}
    assert rig.save([0, 1, 2, 3, 4, 5], units([0, 1, 2], source), point=3) == {}
    before = rig.state(target)
    disk = TierRows("disk", Path.DISK2H, Span(4, 6), [7, 8])
    failed = rig.load([0, 1, 2, 3, 4, 5], units([3, 4, 5], target), 3, [disk])
    assert failed == dict.fromkeys((4, 5), RowError.CORRUPT)
    first, now = SHAPE.nbytes // 4, rig.state(target)
    assert torch.equal(now[0].view(-1)[:first], rig.state(source)[0].view(-1)[:first])
    assert torch.equal(now[0].view(-1)[first:], before[0].view(-1)[first:])
    assert same(now[1:], before[1:])


@pytest.mark.parametrize("whole", [False, True])
def test_what_a_page_has_behind_a_point_becomes_zero(whole: bool) -> None:
    """It may have been a state, and no number. The engine's pages are two of the view's."""
    rig, place = Rig(ReferenceOps(), page_tokens=16), {0: 1, 2: 1}
    paging = Paging([GROUPS[0], LayerGroup(1, 16, (0, 1)), GROUPS[2]], 8, no_page=-1, point=POINT)
    blocks = 4 if whole else 3
    slots = list(range(blocks + ROWS))
    tables = paging.units(([], [0, 1], []), 0, blocks, point=PointPages(ROWS, blocks, place))
    assert rig.save(slots, tables, point=blocks) == {}
    saved = [tensor[:blocks].clone() for tensor in rig.kv]
    for tensor in rig.kv:
        tensor.fill_(torch.nan)
    tables = paging.units(([], [1, 2], []), 0, blocks, point=PointPages(ROWS, blocks, place))
    assert rig.load(slots, tables, point=blocks) == {}
    for tensor, right in zip(rig.kv, saved, strict=True):
        assert tensor[:2].isnan().all(), "pages of others"
        assert torch.equal(tensor[2 : 2 + blocks], right)
        assert whole or not tensor[5].any()
    assert rig.worker.close()
