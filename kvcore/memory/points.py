"""Views of the states of resume points: an engine's pages of states, and rows of the arena.

A piece of a layer's state (`kvcore.model.points`) is one run of bytes on both sides. It is
described as a plane of uint8 with one token and one head, so that `copy_blocks` copies it like KV.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcore.errors import LayoutError
from kvcore.memory.layout import Axis, KVLayout, KVView, Plane
from kvcore.model.points import Piece, PointShape

if TYPE_CHECKING:
    import torch

__all__ = ["RowCopy", "StatePages", "row_copies", "row_view"]

_BYTES, _ONE = "uint8", Axis(1)

StatePages = Mapping[int, Sequence["torch.Tensor"]]
"""By group, for each of its layers, the pages of states: [pages, ...], each page one run of bytes.
"""


@dataclass(frozen=True)
class RowCopy:
    """What row ``row`` of every point holds of one group: ``pages``, and the run in the row.

    A unit of ``pages`` is a page of the engine's table ``group``. ``pieces`` are the parts of the
    row, in the order of the planes of ``pages``.
    """

    row: int
    group: int
    pages: KVView
    pieces: tuple[Piece, ...]


def row_copies(point: PointShape, pages: StatePages) -> list[RowCopy]:
    """Return what each row of a point holds, by row and group.

    Raises LayoutError if the engine's states are not as ``point`` says.
    """
    raw = {
        state.group: [
            _bytes_of(tensor, state.nbytes, name)
            for name, tensor in zip(state.names, pages[state.group], strict=True)
        ]
        for state in point.states
    }
    found: dict[tuple[int, int], list[Piece]] = {}
    for piece in point.pieces():
        found.setdefault((piece.row, piece.group), []).append(piece)
    return [
        RowCopy(row, group, _pages_view(raw[group], pieces), tuple(pieces))
        for (row, group), pieces in found.items()
    ]


def row_view(memory: KVView, slot_nbytes: int, pieces: Sequence[Piece]) -> KVView:
    """Return the same pieces in slots of ``slot_nbytes``, the pages of ``memory``.

    Slots must be runs of bytes. A unit of the view is a slot.
    """
    import torch

    [tensor] = memory.tensors
    planes = tuple(
        (Plane(0, piece.at, slot_nbytes, 0, Axis(0), _ONE, piece.nbytes),) for piece in pieces
    )
    layout = KVLayout(_BYTES, memory.layout.num_pages, 1, 1, planes)
    return KVView(layout, [tensor.view(torch.uint8)])


def _pages_view(tensors: Sequence[torch.Tensor], pieces: Sequence[Piece]) -> KVView:
    planes = tuple(
        (
            Plane(
                piece.layer,
                piece.offset,
                tensors[piece.layer].stride(0),
                0,
                Axis(0),
                _ONE,
                piece.nbytes,
            ),
        )
        for piece in pieces
    )
    view = KVView(KVLayout(_BYTES, len(tensors[0]), 1, 1, planes), tensors)
    view.check()
    return view


def _bytes_of(tensor: torch.Tensor, nbytes: int, name: str) -> torch.Tensor:
    """Return the pages of a layer's states as bytes, [pages, nbytes]; shares memory."""
    import torch

    if not isinstance(tensor, torch.Tensor) or tensor.dim() < 2 or not len(tensor):
        raise LayoutError(f"the states of {name} are not one tensor of pages")
    page = tensor[0]
    if not page.is_contiguous() or page.numel() * page.element_size() != nbytes:
        raise LayoutError(
            f"the states of {name} are pages of shape {tuple(tensor.shape)}, strides "
            f"{tensor.stride()} and type {tensor.dtype}; kvcore expects {nbytes} bytes in one run"
        )
    size = tensor.element_size()
    flat = tensor.as_strided((len(tensor), page.numel()), (tensor.stride(0), 1))
    raw = flat.view(torch.uint8)
    assert raw.stride(0) == tensor.stride(0) * size
    return raw
