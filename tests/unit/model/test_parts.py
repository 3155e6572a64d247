"""Parts of a block against the set of cells that each is."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from kvcore.model.parts import Part, evenly
from kvcore.model.shape import BlockShape

SHAPE = BlockShape(layers=5, kv_heads=4, head_dim=8, block_tokens=16, dtype="int8")
Cells = set[tuple[int, int]]


def cells(part: Part) -> Cells:
    """Return the (head, layer) pairs of a part."""
    return set(product(range(*part.heads), range(*part.layers)))


@st.composite
def spans(draw: st.DrawFn, size: int) -> tuple[int, int]:
    start = draw(st.integers(0, size - 1))
    return start, draw(st.integers(start + 1, size))


parts = st.builds(Part, spans(SHAPE.kv_heads), spans(SHAPE.layers))


@given(parts, parts)
def test_an_overlap_is_what_both_hold(one: Part, other: Part) -> None:
    both = one.overlap(other)
    assert (set() if both is None else cells(both)) == cells(one) & cells(other)
    assert other.overlap(one) == both


@given(parts)
def test_sizes_are_those_of_the_cells(part: Part) -> None:
    assert part.size == len(cells(part))
    assert part.shape(SHAPE).nbytes * len(cells(Part.whole(SHAPE))) == SHAPE.nbytes * part.size


@given(
    st.builds(
        Part,
        st.tuples(st.integers(-1, 5), st.integers(-1, 5)),
        st.tuples(st.integers(-1, 6), st.integers(-1, 6)),
    )
)
def test_it_is_within_a_block_whose_cells_it_has(part: Part) -> None:
    inside = all(at >= 0 for at in (*part.heads, *part.layers))
    assert part.within(SHAPE) == (inside and set() < cells(part) <= cells(Part.whole(SHAPE)))


def test_the_whole_is_every_head_of_every_layer() -> None:
    assert Part.whole(SHAPE) == Part((0, 4), (0, 5))
    assert Part.whole(SHAPE).within(SHAPE)
    assert Part.whole(SHAPE).shape(SHAPE) == SHAPE


@given(st.integers(1, 100), st.integers(1, 100))
def test_pieces_are_nearly_equal_and_in_order(size: int, shares: int) -> None:
    pieces = evenly(size, shares)
    assert len(pieces) == shares
    assert [at for start, stop in pieces for at in range(start, stop)] == list(range(size))
    sizes = {stop - start for start, stop in pieces}
    assert max(sizes) - min(sizes) <= 1
