"""Views of resume points: an engine's pages of states and windows, and rows of the arena.

A piece of a layer's state or page (`kvcore.model.points`) is one run of bytes on both sides, or one
for each KV head. It is described as a plane of uint8 with one token, so that `copy_blocks` copies
it like KV. A row of a window is a block of some layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcore.memory.layout import Axis, KVLayout, KVView, Plane, arena_layout
from kvcore.memory.runs import BYTES, ONE, SlotPlace, byte_pages, unlike
from kvcore.model.points import Piece, PointShape, RowHeads
from kvcore.model.shape import BlockShape

if TYPE_CHECKING:
    import torch

__all__ = [
    "NO_POINTS",
    "PointCopies",
    "PointMemory",
    "RawPages",
    "RowCopy",
    "StatePages",
    "WindowCopy",
    "WindowPages",
    "point_copies",
]

StatePages = Mapping[int, Sequence["torch.Tensor"]]
"""By group, for each of its layers, the pages of states: [pages, ...], each page one run of bytes.
"""

WindowPages = Mapping[int, KVView]
"""By group, the pages of its layers with a window."""

RawPages = Mapping[int, Sequence["torch.Tensor"]]
"""By group of `PageWindow`, for each of its layers, the pages as bytes, [pages, bytes of a page].

They are as `kvcore.memory.runs.byte_pages` returns them.
"""


@dataclass(frozen=True)
class RowCopy:
    """What row ``row`` of every point holds of one group: ``pages``, and the run in the row.

    A unit of ``pages`` is a page of the engine's table ``group``. ``pieces`` are the parts of the
    row, in the order of the planes of ``pages``. All are of the page that is ``page`` pages before
    the last one of a window. ``heads`` is that of `PointShape`.
    """

    row: int
    group: int
    pages: KVView
    pieces: tuple[Piece, ...]
    page: int = 0
    heads: RowHeads | None = None

    def memory(self, arena: KVView, place: SlotPlace) -> KVView:
        """Return the same pieces in slots, the pages of ``arena``.

        Slots must be runs of bytes. A unit of the view is a slot.
        """
        import torch

        if self.heads is None:
            raw, heads = place.bytes_of(arena), 1
            planes = [
                Plane(0, piece.at, place.slot_nbytes, 0, Axis(0), ONE, piece.nbytes)
                for piece in self.pieces
            ]
        else:  # in place of the heads of a block's layers, where other ranks find theirs
            raw, heads = arena.tensors[0].view(torch.uint8), self.heads.heads
            planes = [self._in_a_head(arena.layout, piece, self.heads) for piece in self.pieces]
        layout = KVLayout(BYTES, arena.layout.num_pages, 1, heads, tuple((p,) for p in planes))
        return KVView(layout, [raw])

    def _in_a_head(self, arena: KVLayout, piece: Piece, heads: RowHeads) -> Plane:
        layer, at = divmod(piece.at, heads.nbytes)
        first, *_ = arena.planes[layer]
        offset, page, head = (n * arena.itemsize for n in (first.offset, first.page, first.head))
        return Plane(0, offset + at, page, head, Axis(0), ONE, piece.nbytes)


@dataclass(frozen=True)
class WindowCopy:
    """What rows ``rows`` of a point hold of one group's windows: ``pages`` of some of its layers.

    The rows are of blocks at rising distances from the boundary. ``shape`` is the part of a block
    that each of them has. ``by_heads`` is that of `WindowGroup`.
    """

    rows: tuple[int, ...]
    group: int
    pages: KVView
    shape: BlockShape
    by_heads: bool = False

    def memory(self, arena: KVView, place: SlotPlace) -> KVView:
        """Return the same part of a block in slots, the pages of ``arena``.

        Slots must be runs of bytes. A unit of the view is a block.
        """
        import torch

        if self.by_heads:  # in place of a block's first layers, whose heads other ranks find there
            return arena.select_layers(range(self.shape.layers))
        layout = arena_layout(self.shape, arena.layout.num_pages, slot_nbytes=place.slot_nbytes)
        return KVView(layout, [place.bytes_of(arena).view(getattr(torch, self.shape.dtype))])


@dataclass(frozen=True)
class PointCopies:
    """All that a rank copies of a resume point. ``pages`` are those of each `PageWindow`."""

    states: Sequence[RowCopy] = ()
    windows: Sequence[WindowCopy] = ()
    pages: Sequence[RowCopy] = ()

    def in_memory(self, arena: KVView, place: SlotPlace) -> PointMemory:
        """Return the views of an arena that belong to these copies, in the same order."""
        return PointMemory(
            [part.memory(arena, place) for part in self.states],
            [part.memory(arena, place) for part in self.windows],
            [part.memory(arena, place) for part in self.pages],
        )


NO_POINTS = PointCopies()
"""The copies of a model that keeps blocks only."""


@dataclass(frozen=True)
class PointMemory:
    """The rows of an arena, as each of `PointCopies` sees them."""

    states: Sequence[KVView]
    windows: Sequence[KVView]
    pages: Sequence[KVView] = ()


def point_copies(
    point: PointShape, states: StatePages, windows: WindowPages, pages: RawPages | None = None
) -> PointCopies:
    """Return what a rank copies of each point. ``point`` is that of its stage.

    Raises LayoutError if the engine's states are not as ``point`` says.
    """
    rows, own = row_copies(point, states, pages), {state.group for state in point.states}
    return PointCopies(
        [part for part in rows if part.group in own],
        _window_copies(point, windows),
        [part for part in rows if part.group not in own],
    )


def _window_copies(point: PointShape, pages: WindowPages) -> list[WindowCopy]:
    rows: dict[tuple[int, range], list[int]] = {}
    for row, part in enumerate(point.window_rows, point.state_rows):
        if not part.layers:
            continue  # of another stage
        rows.setdefault((part.group, part.layers), []).append(row)
    windows = {window.group: window for window in point.windows}
    return [
        WindowCopy(
            tuple(numbers),
            group,
            pages[group].select_layers(layers),
            windows[group].shape.with_layers(len(layers)),
            windows[group].by_heads,
        )
        for (group, layers), numbers in rows.items()
    ]


def row_copies(
    point: PointShape, states: StatePages, pages: RawPages | None = None
) -> list[RowCopy]:
    """Return what each row of a point holds of states and page windows, by row, group and page.

    Raises LayoutError if the engine's states are not as ``point`` says.
    """
    raw = {
        state.group: [
            _bytes_of(tensor, state.nbytes, name)
            for name, tensor in zip(state.names, states[state.group], strict=True)
        ]
        for state in point.states
    }
    raw |= {window.group: list((pages or {})[window.group]) for window in point.page_windows}
    found: dict[tuple[int, int, int], list[Piece]] = {}
    for piece in point.pieces():
        found.setdefault((piece.row, piece.group, piece.page), []).append(piece)
    return [
        RowCopy(
            row,
            group,
            _pages_view(raw[group], pieces, 1 if point.heads is None else point.heads.heads),
            tuple(pieces),
            page,
            point.heads,
        )
        for (row, group, page), pieces in found.items()
    ]


def _pages_view(tensors: Sequence[torch.Tensor], pieces: Sequence[Piece], heads: int) -> KVView:
    planes = tuple(
        (
            Plane(
                piece.layer,
                piece.offset,
                tensors[piece.layer].stride(0),
                piece.step,
                Axis(0),
                ONE,
                piece.nbytes,
            ),
        )
        for piece in pieces
    )
    view = KVView(KVLayout(BYTES, len(tensors[0]), 1, heads, planes), tensors)
    view.check()
    return view


def _bytes_of(tensor: torch.Tensor, nbytes: int, name: str) -> torch.Tensor:
    """Return the pages of a layer's states as bytes. A state fills its page, in its own order."""
    raw = byte_pages(tensor, nbytes, name)
    if tensor[0].numel() * tensor.element_size() != nbytes or not tensor[0].is_contiguous():
        raise unlike(tensor, nbytes, name)
    return raw
