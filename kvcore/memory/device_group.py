"""An engine's layers that share a page table, and where their pages are."""

from __future__ import annotations

from dataclasses import dataclass

from kvcore.memory.layout import KVView
from kvcore.memory.runs import PagesInBlock, SlotPlace

__all__ = ["DeviceGroup"]


@dataclass(frozen=True)
class DeviceGroup:
    """Layers that share one page table in the engine.

    ``layers`` are canonical layer indices, and ``view`` has exactly their planes, in that order.
    ``page_tokens`` is the size of a page of the engine's scheduler, which may be several pages of
    the view; 0 if it is not needed. ``packed`` tells where pages of a format that only the engine
    knows lie in a block. A token of the view is then a page.
    """

    layers: tuple[int, ...]
    view: KVView
    page_tokens: int = 0
    packed: PagesInBlock | None = None

    def memory(self, arena: KVView, place: SlotPlace, first_layer: int) -> KVView:
        """Return these layers in the slots of a rank's arena, whose first is ``first_layer``."""
        if self.packed is not None:
            return self.packed.memory(arena, place)
        return arena.select_layers([layer - first_layer for layer in self.layers])

    def view_tokens(self, tokens: int) -> int:
        """Return what ``tokens`` tokens of the engine are in tokens of the view."""
        return tokens if self.packed is None else tokens // self.page_tokens
