"""Prompts that an operator pinned, so that no tier evicts them."""

from __future__ import annotations

from typing import NamedTuple

from kvcore.admin.selection import Selection, Selections
from kvcore.errors import CapacityError
from kvcore.index import BlockIndex, Pin

__all__ = ["MAX_PINS", "Pins"]

MAX_PINS = 65_536


class _Pinned(NamedTuple):
    pin: Pin
    namespace: bytes


class Pins:
    """The operator's pins on one index, by tier and last block of a prompt.

    The manager's thread only.
    """

    def __init__(self, index: BlockIndex, selections: Selections) -> None:
        self._index = index
        self._selections = selections
        self._pins: dict[tuple[str, bytes], _Pinned] = {}

    def __len__(self) -> int:
        return len(self._pins)

    def __contains__(self, at: tuple[str, bytes]) -> bool:
        return at in self._pins

    def add(self, selection: Selection) -> tuple[int, int]:
        """Pin the selected prompts; return how many prompts are new, and the blocks of all.

        Raises CapacityError, and pins none, if there would be more than `MAX_PINS`.
        """
        wanted, blocks = [], 0
        for tier in selection.tiers:
            ends, count = self._selections.ends(selection, tier)
            blocks += count
            wanted += [(tier, end) for end in ends if (tier, end) not in self._pins]
        if len(self._pins) + len(wanted) > MAX_PINS:
            raise CapacityError(
                f"{len(wanted)} prompts; {MAX_PINS} in all can be pinned: give less"
            )
        for tier, end in wanted:
            space = self._index.namespace_of(end)
            self._pins[tier, end] = _Pinned(self._index.pin(tier, end), space)
        return len(wanted), blocks

    def release(self, selection: Selection) -> int:
        """Undo the pins on selected blocks; return how many there were."""
        pins = [at for at, pinned in self._pins.items() if selection.covers(*at, pinned.namespace)]
        for at in pins:
            self._index.unpin(self._pins.pop(at).pin)
        return len(pins)

    def release_dropped(self) -> None:
        """Undo the pins on blocks that were dropped: they keep slots that no lookup finds."""
        for at in [at for at, pinned in self._pins.items() if pinned.pin.doomed]:
            self._index.unpin(self._pins.pop(at).pin)

    def close(self) -> None:
        """Undo every pin."""
        for pinned in self._pins.values():
            self._index.unpin(pinned.pin)
        self._pins.clear()
