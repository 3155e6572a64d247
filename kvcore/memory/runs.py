"""An engine's pages and an arena's slots as runs of bytes.

A page that kvcore does not look into is described as a plane of uint8 with one head and one token,
so that `copy_blocks` copies it like KV.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kvcore.errors import LayoutError
from kvcore.memory.layout import Axis, KVLayout, KVView, Plane

if TYPE_CHECKING:
    import torch

    from kvcore.model.packed import PackedPages

__all__ = [
    "BYTES",
    "NO_PLACE",
    "ONE",
    "PagesInBlock",
    "SlotPlace",
    "byte_pages",
    "unlike",
    "whole_pages",
]

BYTES, ONE = "uint8", Axis(1)


class SlotPlace(NamedTuple):
    """Where a rank's bytes lie in an arena: slots of so many bytes, from ``at`` on each.

    In an arena of its own that is the slot's first byte. A server's slots have a whole block. Of
    what is not cut by heads, it has the parts of all ranks one by one.
    """

    slot_nbytes: int
    at: int = 0

    def bytes_of(self, arena: KVView) -> torch.Tensor:
        """Return an arena's memory as bytes, from this rank's bytes of the first slot on."""
        import torch

        [tensor] = arena.tensors
        return tensor.view(torch.uint8)[self.at :]


NO_PLACE = SlotPlace(0)
"""The place in an arena of which nobody asks for bytes."""


@dataclass(frozen=True)
class PagesInBlock:
    """Where the pages of some caches lie in a rank's part of a block. See `kvcore.model.packed`.

    Each cache has ``pages`` pages, one after another: cache ``i`` from byte ``offsets[i]`` on, of
    ``nbytes[i]`` bytes each.
    """

    pages: int
    offsets: tuple[int, ...]
    nbytes: tuple[int, ...]

    @classmethod
    def of(
        cls, packed: PackedPages, block_tokens: int, layers: Sequence[int], first: int = 0
    ) -> PagesInBlock:
        """Return the places of the caches that ``layers`` number, in a part from ``first`` on."""
        offsets = packed.offsets(block_tokens)
        return cls(
            block_tokens // packed.page_tokens,
            tuple(offsets[layer] - offsets[first] for layer in layers),
            tuple(packed.page_nbytes[layer] for layer in layers),
        )

    def memory(self, arena: KVView, place: SlotPlace) -> KVView:
        """Return these pages in the slots of ``arena``. A token of the view is a page.

        Raises LayoutError if a slot is not one run of bytes.
        """
        [first, *_] = arena.layout.planes
        if first[0].page * arena.layout.itemsize != place.slot_nbytes:
            raise LayoutError(
                "pages of the engine's own format need slots in one piece: set host.arrangement to "
                "'blockwise'"
            )
        planes = tuple(
            (Plane(0, offset, place.slot_nbytes, 0, Axis(nbytes), ONE, nbytes),)
            for offset, nbytes in zip(self.offsets, self.nbytes, strict=True)
        )
        layout = KVLayout(BYTES, arena.layout.num_pages, self.pages, 1, planes)
        return KVView(layout, [place.bytes_of(arena)])


def whole_pages(pages: Sequence[torch.Tensor]) -> KVView:
    """Return the view of caches whose pages are runs of bytes, as `byte_pages` returns them.

    A token of the view is a page.
    """
    planes = tuple(
        (Plane(i, 0, raw.stride(0), 0, Axis(0), ONE, raw.shape[1]),) for i, raw in enumerate(pages)
    )
    view = KVView(KVLayout(BYTES, len(pages[0]), 1, 1, planes), pages)
    view.check()
    return view


def byte_pages(tensor: torch.Tensor, nbytes: int, name: str, parts: int = 1) -> torch.Tensor:
    """Return the pages of a cache as bytes, [pages, nbytes]; shares memory.

    ``tensor`` is [pages, ...]. The elements of a page fill one run of ``nbytes`` bytes, in any
    order; filler may follow them. A page may be cut into ``parts`` that follow each other, which
    are the pages of ``tensor``. Raises LayoutError if it is otherwise.
    """
    import torch

    if not isinstance(tensor, torch.Tensor) or tensor.dim() < 2 or not len(tensor):
        raise LayoutError(f"the cache of {name} is not one tensor of pages")
    size, run, distance = tensor.element_size(), tensor[0].numel(), tensor.stride(0) * parts
    pages, rest = divmod(len(tensor), parts)
    adjacent = parts == 1 or tensor.stride(0) == run
    fits = run * size * parts <= nbytes <= distance * size and nbytes % size == 0
    end = tensor.storage_offset() + (pages - 1) * distance + nbytes // size
    inside = end * size <= tensor.untyped_storage().nbytes()
    if rest or not (_in_one_run(tensor[0]) and adjacent and fits and inside):
        raise unlike(tensor, nbytes, name)
    return tensor.as_strided((pages, nbytes // size), (distance, 1)).view(torch.uint8)


def unlike(tensor: torch.Tensor, nbytes: int, name: str) -> LayoutError:
    """Return the error for a cache whose pages are not runs of ``nbytes`` bytes."""
    return LayoutError(
        f"the cache of {name} has pages of shape {tuple(tensor.shape)}, strides "
        f"{tensor.stride()} and type {tensor.dtype}; kvcore expects {nbytes} bytes in one run"
    )


def _in_one_run(page: torch.Tensor) -> bool:
    """Return True if the elements of a page fill one run of memory, in any order."""
    expected = 1
    for stride, size in sorted(zip(page.stride(), page.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= max(1, size)
    return True
