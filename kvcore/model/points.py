"""Resume points: what only the next token needs of a model's cache.

A *block* has what every later token needs of its own tokens. Some layers keep something else:

- a *state* (Mamba, gated delta net, short convolution), which each token overwrites;
- the KV of a *window*: a token sees the last W tokens, and no later one needs what is before.

The pages of a window may have a format that only the engine knows (`kvcore.model.packed`).

A *resume point* is the states and the ends of the windows at one boundary between two blocks. The
model can go on only there:

    tokens   0        16       32       48       64
    blocks   │   b0   │   b1   │   b2   │   b3 ...      kept once, used by every longer prompt
    states   ·        ·        ·        S48             kept where the engine has one: a point
    windows  ·        │  w1    │  w2    │               the last blocks of the layers with windows

A point is stored as rows behind the chain of blocks that leads to it, ``b0 b1 b2 p0 p1 .. pn``.
Rows have the size of a block, so that index, tiers, quotas and restart treat both alike. The first
rows have the states. These are one run of bytes, layer after layer, which is cut into rows:

    states   │  layer 0  │  layer 1  │  layer 2  │
    rows     │     p0      │     p1      │  p2 ░░│      the end of the last row is not used

If each state can be divided into as many shares as the model has KV heads, rows are cut among ranks
as blocks are: a row has, of each layer of blocks, the heads one after another, and in the place of
a head a run of that head's share of the states. Any number of ranks reads such a point:

    a state     │ q of heads 0 1 │ k of heads 0 1 │ v of heads 0 1 │     three sections of bytes
    a share     │ q 0 │ k 0 │ v 0 │                                     of head 0, in order
    a row       │ head 0 │ head 1 │ head 0 │ head 1 │                   of two layers
                    s0       s1       s0       s1                       parts of both shares

The rows of the other windows follow, from the boundary backwards, each with whole layers of one
block: ``w2 w1``. Such a row is the same at any boundary, and near the start of a prompt there are
fewer.

A point is found by its last row: a row can be in a tier only if all rows before it are.

In a pipeline each stage keeps the part of a point that its own layers have, in rows of its own
size. Rows are as many as the stage needs that needs most of them:

    stage 0  │  layer 0  │  layer 1  │░░░░░│      rows of one attention layer
    stage 1  │  layer 2  │░░░░░░░░░░░│░░░░░│      rows of two
    rows     │    p0     │    p1     │  p2  │
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from kvcore.errors import LayoutError
from kvcore.model.keys import KEY_BYTES
from kvcore.model.shape import BlockShape

__all__ = [
    "PageWindow",
    "Piece",
    "PointCounts",
    "PointRows",
    "PointShape",
    "RowHeads",
    "StateGroup",
    "WindowGroup",
    "WindowRow",
    "ascending",
    "has_row_among",
    "is_point_row",
    "last_point_key",
    "over_stages",
    "point_keys",
    "without_rows",
]

_MASK = int.from_bytes(b"kvcore-point-row", "big")
_KEYS = 1 << (8 * KEY_BYTES)
_HALVES = ">u8"


def point_keys(block: bytes, rows: int) -> tuple[bytes, ...]:
    """Return the keys of the rows of the point behind a block. The first is its child."""
    first = int.from_bytes(block, "big") ^ _MASK
    return tuple(_key(first + row) for row in range(rows))


def last_point_key(block: bytes, rows: int) -> bytes:
    """Return the last of `point_keys`."""
    return _key((int.from_bytes(block, "big") ^ _MASK) + rows - 1)


def ascending(keys: Iterable[bytes]) -> list[int]:
    """Return the numbers of keys for `has_row_among`."""
    return sorted(int.from_bytes(key, "big") for key in keys)


def has_row_among(block: bytes, rows: int, numbers: Sequence[int]) -> bool:
    """Return True if a row of the point behind a block is among keys, by their `ascending` numbers.

    It takes a microsecond, however many rows the point has.
    """
    first = int.from_bytes(block, "big") ^ _MASK
    at = bisect_left(numbers, first)
    if at < len(numbers) and numbers[at] < first + rows:
        return True
    return bool(numbers) and numbers[0] < first + rows - _KEYS  # they go on from zero


def is_point_row(key: bytes, parent: bytes) -> bool:
    """Return True if ``key`` names a row of a point and ``parent`` the row or block before it."""
    number, before = int.from_bytes(key, "big"), int.from_bytes(parent, "big")
    return number == before ^ _MASK or number == (before + 1) % _KEYS


def without_rows(keys: bytes, parents: bytes) -> tuple[bytes, bytes]:
    """Return packed keys and their packed parent keys, without those that are rows of points.

    The same as `is_point_row` of each pair, for many: a few million pairs a second.
    """
    import numpy as np  # few models have points

    number = np.frombuffer(keys, dtype=_HALVES).reshape(-1, 2)
    before = np.frombuffer(parents, dtype=_HALVES).reshape(-1, 2)
    mask = np.frombuffer(_key(_MASK), dtype=_HALVES)
    low = before[:, 1] + np.uint64(1)
    high = before[:, 0] + (low == 0)
    first = (number == before ^ mask).all(axis=1)
    kept = ~(first | ((number[:, 0] == high) & (number[:, 1] == low)))
    return number[kept].tobytes(), before[kept].tobytes()


def _key(number: int) -> bytes:
    return (number % _KEYS).to_bytes(KEY_BYTES, "big")


@dataclass(frozen=True)
class StateGroup:
    """Layers whose states share one page table in the engine: a page is one state of each.

    ``group`` is the position of the table among the model's groups, ``names`` are the engine's
    names of the layers, and ``nbytes`` are the bytes of one layer's state on each rank. A stage of
    a pipeline may have none of the layers of this group, or of those below.

    ``sections`` are the bytes of the runs of which a state consists, in order. Each is divided
    evenly among the rank's KV heads: the share of head h is the h-th range of every section. They
    are empty if a state is not cut by heads.
    """

    group: int
    names: tuple[str, ...]
    nbytes: int
    sections: tuple[int, ...] = ()


class RowHeads(NamedTuple):
    """What one rank has of each layer of a row that is cut by heads.

    It is ``heads`` KV heads, of ``nbytes`` bytes each.
    """

    heads: int
    nbytes: int


@dataclass(frozen=True)
class WindowGroup:
    """Layers with a window that share one page table in the engine.

    ``group`` is the position of the table among the model's groups, and ``names`` are the engine's
    names of the layers. ``shape`` is what one rank keeps of a block of tokens in one of them. A
    token needs the ``before`` tokens before it. A point holds ``spare`` tokens more, so that the
    model may go on that many tokens before the boundary. With ``by_heads`` a rank holds of each
    layer the heads that it holds of a layer of blocks: a row is then cut among ranks as a block is,
    and read at any number of ranks.
    """

    group: int
    names: tuple[str, ...]
    shape: BlockShape
    before: int
    spare: int = 0
    by_heads: bool = False

    def __post_init__(self) -> None:
        if self.shape.layers != 1 or self.before < 1 or self.spare < 0:
            raise LayoutError(f"not a group of layers with a window: {self}")

    @property
    def blocks(self) -> int:
        """The most blocks of a point: those before a boundary that the next token may see."""
        return -(-(self.before + self.spare) // self.shape.block_tokens)

    @property
    def tokens(self) -> int:
        """The most tokens of a point."""
        return self.blocks * self.shape.block_tokens


@dataclass(frozen=True)
class PageWindow:
    """Layers with a window that share one page table, in pages that only the engine can read.

    A point has their last pages before the boundary as they are. ``page_tokens`` is the size of a
    page in tokens, and ``page_nbytes`` the bytes of a page of each layer, on each rank. The other
    fields are those of `WindowGroup`.
    """

    group: int
    names: tuple[str, ...]
    page_tokens: int
    page_nbytes: tuple[int, ...]
    before: int
    spare: int = 0

    def __post_init__(self) -> None:
        sizes = (self.page_tokens, self.before, *self.page_nbytes)
        if len(self.names) != len(self.page_nbytes) or min(sizes) < 1 or self.spare < 0:
            raise LayoutError(f"not a group of layers with a window: {self}")

    @property
    def pages(self) -> int:
        """The pages of a point: those before a boundary that the next token may see."""
        return -(-(self.before + self.spare) // self.page_tokens)

    @property
    def tokens(self) -> int:
        """The most tokens of a point."""
        return self.pages * self.page_tokens


class WindowRow(NamedTuple):
    """What one row of a point has of a window: ``layers`` of one block.

    ``group`` is the position of the page table, ``distance`` the number of blocks between this one
    and the boundary, and ``layers`` [start, stop) are positions in the group's names. They are
    empty where only other stages of a pipeline have something in the row.
    """

    group: int
    distance: int
    layers: range


class Piece(NamedTuple):
    """``nbytes`` bytes of one layer's state or page, from ``offset`` on, in a row of a point.

    ``layer`` is a position in the group's names, and ``at`` the place of the bytes in the row.
    ``page`` counts the pages of a window between this one and the boundary.

    Of states that are cut by heads, a piece is of every head of the rank. ``offset`` is that of the
    first head, and the piece of the next one is ``step`` bytes behind it. ``at`` counts the bytes
    of one head in the row, layer after layer.
    """

    row: int
    group: int
    layer: int
    offset: int
    at: int
    nbytes: int
    page: int = 0
    step: int = 0


class PointRows:
    """How many rows the resume points of a model have, and where one can be.

    That is all that the tiers need to know of points. What the rows have is in `PointShape`.
    """

    every: int
    """The blocks between two boundaries at which the engine can have a point."""
    state_rows: int
    """The number of rows of the states and of pages of windows, which come first."""
    window_sizes: tuple[tuple[int, int], ...]
    """For each group with a window, the most blocks of a point, and the rows of one block."""

    @property
    def most_rows(self) -> int:
        """The number of rows of a point far from the start of a prompt."""
        return self.state_rows + sum(most * rows for most, rows in self.window_sizes)

    def rows(self, blocks: int) -> int:
        """Return the number of rows of a point behind ``blocks`` blocks."""
        return self.state_rows + sum(min(blocks, most) * rows for most, rows in self.window_sizes)

    def chain(self, keys: Sequence[bytes], blocks: int) -> tuple[bytes, ...]:
        """Return the first ``blocks`` of ``keys``, and the rows of the point behind them."""
        return (*keys[:blocks], *point_keys(keys[blocks - 1], self.rows(blocks)))

    def last_row(self, keys: Sequence[bytes], blocks: int) -> bytes:
        """Return the last of `chain`."""
        return last_point_key(keys[blocks - 1], self.rows(blocks))

    def has(self, keys: Sequence[bytes], blocks: int) -> bool:
        """Return True if the first ``blocks`` of ``keys`` end where a point can be."""
        return 0 < blocks <= len(keys) and blocks % self.every == 0

    def boundary(self, blocks: int) -> int:
        """Return the last boundary at which a point can be, at or before ``blocks``."""
        return blocks // self.every * self.every


@dataclass(frozen=True)
class PointCounts(PointRows):
    """`PointRows` as numbers, for a process that has no page of the engine."""

    every: int
    state_rows: int
    window_sizes: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        parts = [part for size in self.window_sizes for part in size]
        if self.every < 1 or min(parts, default=1) < 1 or self.state_rows < 0 or not self.most_rows:
            raise LayoutError(f"not the rows of a resume point: {self}")


@dataclass(frozen=True)
class PointShape(PointRows):
    """The resume points of a model, or what the ranks of one pipeline stage keep of them.

    ``states`` are the groups in the order of their bytes, and ``row_nbytes`` the bytes of a row on
    one rank; of the whole model, they are those of one rank of each stage together. ``windows`` are
    the groups with a window, and ``page_windows`` those of them whose pages only the engine can
    read. ``counts`` are the rows of a point if stages share it; by default, those that its own
    layers need. ``heads`` are those of a layer of blocks on one rank, if the states are cut by
    heads.
    """

    states: tuple[StateGroup, ...]
    row_nbytes: int
    every: int
    windows: tuple[WindowGroup, ...] = ()
    page_windows: tuple[PageWindow, ...] = ()
    counts: PointCounts | None = None
    heads: RowHeads | None = None
    state_rows: int = field(init=False, repr=False, compare=False)
    window_sizes: tuple[tuple[int, int], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        sizes = [self.row_nbytes, self.every, *(state.nbytes for state in self.states)]
        if not (self.states or self.seen) or min(sizes) < 1:
            raise LayoutError(f"not the shape of a resume point: {self}")
        for window in self.windows:
            if window.names and window.shape.nbytes > self.row_nbytes:
                raise LayoutError(
                    f"a layer with a window keeps {window.shape.nbytes} bytes of a block, "
                    f"more than the {self.row_nbytes} of all layers without one"
                )
        if not self._fits_heads():
            raise LayoutError(f"states that are not cut by heads as the rows are: {self}")
        state_rows = -(-self.run_nbytes // self.row_nbytes)
        window_sizes = tuple((w.blocks, len(self._own_rows(w))) for w in self.windows)
        if (counts := self.counts) is not None:
            told = (counts.every, *(most for most, _ in counts.window_sizes))
            fits = told == (self.every, *(most for most, _ in window_sizes))
            needs = (state_rows, *(rows for _, rows in window_sizes))
            has = (counts.state_rows, *(rows for _, rows in counts.window_sizes))
            if not fits or any(a > b for a, b in zip(needs, has, strict=True)):
                raise LayoutError(f"a resume point in too few rows: {self}")
            state_rows, window_sizes = counts.state_rows, counts.window_sizes
        object.__setattr__(self, "state_rows", state_rows)
        object.__setattr__(self, "window_sizes", window_sizes)

    def _fits_heads(self) -> bool:
        """Return True if all of a point is cut by heads, or no state is."""
        cut = self.heads
        if cut is None:
            return not any(state.sections for state in self.states)
        return (
            min(cut) > 0
            and self.row_nbytes % (cut.heads * cut.nbytes) == 0
            and all(sum(state.sections) == state.nbytes for state in self.states)
            and all(n > 0 and n % cut.heads == 0 for s in self.states for n in s.sections)
            and self.by_heads
        )

    @property
    def spare(self) -> int:
        """How many tokens before the boundary of a point the model may go on."""
        if self.states:
            return 0  # a state is of one token
        return min(window.tokens - window.before for window in self.seen)

    @property
    def by_heads(self) -> bool:
        """True if every row is cut among ranks as a block is."""
        apart = self.page_windows or (self.states and self.heads is None)
        return not apart and all(window.by_heads for window in self.windows)

    @property
    def run_nbytes(self) -> int:
        """Bytes of the states and pages of windows of a point on one rank."""
        return sum(nbytes for *_, nbytes in self._run())

    @property
    def seen(self) -> tuple[WindowGroup | PageWindow, ...]:
        """All groups with a window."""
        return (*self.windows, *self.page_windows)

    @cached_property
    def window_rows(self) -> tuple[WindowRow, ...]:
        """What the rows behind those of the states have, at a boundary far from the start."""
        found = []
        for distance in range(max((window.blocks for window in self.windows), default=0)):
            for window, (most, rows) in zip(self.windows, self.window_sizes, strict=True):
                if distance < most:
                    own = self._own_rows(window)
                    own += [range(0)] * (rows - len(own))
                    found += [WindowRow(window.group, distance, layers) for layers in own]
        return tuple(found)

    def _own_rows(self, window: WindowGroup) -> list[range]:
        """Return the layers in each row of one block of a window."""
        layers, most = len(window.names), max(self.row_nbytes // window.shape.nbytes, 1)
        return [range(start, min(start + most, layers)) for start in range(0, layers, most)]

    def pieces(self) -> Iterator[Piece]:
        """Yield where each byte of a point's states and pages of windows is, in order."""
        if self.heads is not None:
            yield from self._pieces_of_heads(self.heads)
            return
        place = 0
        for group, layer, page, nbytes in self._run():
            offset = 0
            while offset < nbytes:
                row, at = divmod(place, self.row_nbytes)
                size = min(nbytes - offset, self.row_nbytes - at)
                yield Piece(row, group, layer, offset, at, size, page)
                place, offset = place + size, offset + size

    def _pieces_of_heads(self, cut: RowHeads) -> Iterator[Piece]:
        """Yield where each byte of a head's share of the states is, in order.

        No piece crosses from one layer of a row into the next.
        """
        place, room = 0, self.row_nbytes // cut.heads
        for state in self.states:
            sections = state.sections if cut.heads > 1 else (state.nbytes,)
            for layer in range(len(state.names)):
                offset = 0
                for section in sections:
                    step, done = section // cut.heads, 0
                    while done < step:
                        row, at = divmod(place, room)
                        size = min(step - done, cut.nbytes - at % cut.nbytes)
                        yield Piece(row, state.group, layer, offset + done, at, size, step=step)
                        place, done = place + size, done + size
                    offset += section

    def _run(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield the group, layer, page and bytes of each part of the run that is cut into rows."""
        for state in self.states:
            for layer in range(len(state.names)):
                yield state.group, layer, 0, state.nbytes
        for window in self.page_windows:
            for page in range(window.pages):
                for layer, nbytes in enumerate(window.page_nbytes):
                    yield window.group, layer, page, nbytes


def over_stages(
    point: PointShape, names: Sequence[Collection[str]], row_nbytes: Sequence[int]
) -> tuple[PointShape, tuple[PointShape, ...]]:
    """Return the resume points of a model, and the part of them that each pipeline stage keeps.

    ``names`` are the engine's names of the layers of each stage, and ``row_nbytes`` the bytes of a
    row on each of its ranks. All have equally many rows. Raises LayoutError if a stage's rows are
    too small for one of its layers with a window.
    """
    parts = [_part(point, own, nbytes) for own, nbytes in zip(names, row_nbytes, strict=True)]
    rows = zip(*(part.window_sizes for part in parts), strict=True)
    counts = PointCounts(
        point.every,
        max(part.state_rows for part in parts),
        tuple((of_stages[0][0], max(count for _, count in of_stages)) for of_stages in rows),
    )
    whole = replace(point, row_nbytes=sum(row_nbytes), counts=counts)
    return whole, tuple(replace(part, counts=counts) for part in parts)


def _part(point: PointShape, own: Collection[str], row_nbytes: int) -> PointShape:
    """Return what the layers ``own`` have of a point, in as many rows as they need."""
    pages = []
    for window in point.page_windows:
        kept = [
            (name, nbytes)
            for name, nbytes in zip(window.names, window.page_nbytes, strict=True)
            if name in own
        ]
        names, sizes = [name for name, _ in kept], [nbytes for _, nbytes in kept]
        pages.append(replace(window, names=tuple(names), page_nbytes=tuple(sizes)))
    return PointShape(
        tuple(replace(group, names=_of(group.names, own)) for group in point.states),
        row_nbytes,
        point.every,
        tuple(replace(group, names=_of(group.names, own)) for group in point.windows),
        tuple(pages),
        heads=point.heads,
    )


def _of(names: Sequence[str], own: Collection[str]) -> tuple[str, ...]:
    return tuple(name for name in names if name in own)
