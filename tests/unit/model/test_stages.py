"""Which layers a rank holds, with pipeline stages and groups of layers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvcore.errors import LayoutError
from kvcore.model.packed import PackedPages
from kvcore.model.parts import Part
from kvcore.model.points import PointShape, StateGroup, WindowGroup
from kvcore.model.shape import BlockShape
from kvcore.model.spec import LayerGroup, ModelDescription, even_stages

SHAPE = BlockShape(layers=6, kv_heads=4, head_dim=8, block_tokens=16, dtype="int8")
EVEN = LayerGroup(0, 16, (0, 2, 4), ("a", "c", "e"))
ODD = LayerGroup(1, 32, (5, 3, 1))


def model(ranks: int, **options: Any) -> ModelDescription:
    return ModelDescription(SHAPE, (EVEN, ODD), b"model", ranks, **options)


def test_without_stages_every_rank_holds_every_layer() -> None:
    made = model(2)
    assert made.stages == ((0, 6),)
    assert made.tensor_ranks == 2
    assert [made.part(rank) for rank in range(2)] == [Part((0, 2), (0, 6)), Part((2, 4), (0, 6))]
    assert made.rank_groups(1) == (EVEN, ODD)


def test_ranks_of_a_stage_are_consecutive_and_share_its_heads() -> None:
    made = model(4, stages=((0, 2), (2, 6)))
    assert made.tensor_ranks == 2
    assert [made.part(rank) for rank in range(4)] == [
        Part((0, 2), (0, 2)), Part((2, 4), (0, 2)), Part((0, 2), (2, 6)), Part((2, 4), (2, 6)),
    ]  # fmt: skip
    assert made.rank_shape(3) == SHAPE.with_heads(2).with_layers(4)


def test_a_rank_has_the_layers_of_each_group_that_are_its_stages() -> None:
    """In the group's own order, with their names; a group may be empty."""
    made = model(3, stages=((0, 1), (1, 4), (4, 6)))
    assert made.rank_groups(0) == (LayerGroup(0, 16, (0,), ("a",)), LayerGroup(1, 32, ()))
    assert made.rank_groups(1) == (LayerGroup(0, 16, (2,), ("c",)), LayerGroup(1, 32, (3, 1)))
    assert made.rank_groups(2) == (LayerGroup(0, 16, (4,), ("e",)), LayerGroup(1, 32, (5,)))


@pytest.mark.parametrize(
    ("ranks", "stages"),
    [
        (2, ((0, 3), (4, 6))),  # a layer is nowhere
        (2, ((0, 4), (3, 6))),  # a layer is twice
        (2, ((1, 3), (3, 6))),  # the first is nowhere
        (2, ((0, 3), (3, 5))),  # the last is nowhere
        (2, ((0, 3), (3, 7))),  # there are no more
        (3, ((0, 3), (3, 3), (3, 6))),  # an empty one
        (2, ((3, 6), (0, 3))),  # in another order
        (3, ((0, 3), (3, 6))),  # with one and with two ranks
    ],
)
def test_stages_that_do_not_split_the_layers_are_refused(ranks: int, stages: Any) -> None:
    with pytest.raises(LayoutError, match="must split 6 layers in order"):
        model(ranks, stages=stages)


def test_even_stages_split_the_layers() -> None:
    assert even_stages(7, 3) == ((0, 2), (2, 4), (4, 7))
    assert model(3, stages=even_stages(6, 3)).stages == ((0, 2), (2, 4), (4, 6))


@given(
    st.integers(1, 6), st.integers(1, 8), st.integers(1, 6), st.integers(1, 4), st.integers(1, 8)
)
def test_parts_one_by_one_fill_what_their_machine_holds(
    heads: int, ranks: int, layers: int, stages: int, machines: int
) -> None:
    """Ranks that hold the same have it in one place. One machine holds whole blocks."""
    shape = BlockShape(layers, heads, head_dim=4, block_tokens=16, dtype="int8")
    stages = min(stages, layers)
    group = LayerGroup(0, 16, tuple(range(layers)))
    assume(ranks * stages % machines == 0)
    made = ModelDescription(
        shape,
        (group,),
        b"model",
        ranks * stages,
        stages=even_stages(layers, stages),
        machines=machines,
    )
    step = ranks * stages // machines
    split = step % ranks and ranks % step
    uneven = heads < ranks and not split and step < ranks and heads % (ranks // step)
    try:
        shared = made.by_machine()
    except LayoutError:
        assert split or uneven
        return
    assert not split
    for machine, first in enumerate(made.firsts):
        mine, whole = made.beside(first), shared.part(machine)
        cells = {cell for rank in mine for cell in _cells(made.part(rank))}
        assert cells == set(_cells(whole))
        spans = {
            made.part(rank): (made.part_on_machine(rank)[1], made.rank_shape(rank).nbytes)
            for rank in mine
        }
        assert len({made.part_on_machine(rank)[1] for rank in mine}) == len(spans)
        at = 0
        for start, nbytes in sorted(spans.values()):
            assert start == at
            at += nbytes
        assert at == shared.rank_shape(machine).nbytes
        for rank in mine:
            part = made.part_on_machine(rank)[0]
            moved = {(h + whole.heads[0], n + whole.layers[0]) for h, n in _cells(part)}
            assert moved == set(_cells(made.part(rank)))


def _cells(part: Part) -> Iterator[tuple[int, int]]:
    """Yield each head of each layer."""
    return product(range(*part.heads), range(*part.layers))


def kept(ranks: int, windows: bool, by_heads: bool, heads: int = 2) -> ModelDescription:
    """Describe a model that keeps states, or windows, beside blocks."""
    shape = BlockShape(2, heads, 8, 16, "float32")
    of = "windows" if windows else "states"
    groups = LayerGroup(0, 16, (0, 1)), LayerGroup(1, 16, (), of=of)  # type: ignore[arg-type]
    row = shape.nbytes // min(ranks, heads)
    own = shape.with_heads(heads // min(ranks, heads)).with_layers(1)
    seen = WindowGroup(1, ("w",), own, before=20, by_heads=by_heads)
    state = StateGroup(1, ("s",), 100)
    point = PointShape(() if windows else (state,), row, 1, (seen,) if windows else ())
    return ModelDescription(shape, groups, b"0123456789abcdef", ranks, point=point)


def test_what_a_server_has_in_an_order_of_its_own_has_a_name_of_its_own() -> None:
    """Only that: all else is found by engines with and without a server."""
    apart = [kept(2, windows=False, by_heads=False), kept(2, windows=True, by_heads=False)]
    packed = PackedPages(16, (40, 9))
    of_ranks = packed.shape(16, 2)
    group = (LayerGroup(0, 16, (0, 1)),)
    apart.append(ModelDescription(of_ranks, group, b"0123456789abcdef", 2, packed=packed))
    for one in apart:
        named = one.behind("ipc://somewhere")
        assert (len(named.fingerprint), named.fingerprint == one.fingerprint) == (16, False)
        assert named == one.behind("ipc://elsewhere")
        assert one.behind(None) == one
    alike = [
        model(2),
        kept(1, windows=False, by_heads=False),
        kept(2, windows=True, by_heads=True),
        ModelDescription(packed.shape(16, 1), group, b"model", 2, packed=packed),
    ]
    for one in alike:
        assert one.behind("ipc://somewhere") == one
