"""Prompts that an operator pinned, so that no tier evicts them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvcore.admin.selection import Selection, Selections
from kvcore.errors import CapacityError
from kvcore.index import BlockIndex, Pin

__all__ = ["MAX_PINS", "Pins"]

MAX_PINS = 65_536


class _Pinned(NamedTuple):
    """A pin, and the time of the clock at which it ends; None if it has no end."""

    pin: Pin
    namespace: bytes
    until: float | None


class Pins:
    """The operator's pins on one index, by tier and last block of a prompt.

    The manager's thread only. ``clock`` returns seconds. A pin whose time is over goes on until
    `release_ended`.
    """

    def __init__(
        self, index: BlockIndex, selections: Selections, clock: Callable[[], float]
    ) -> None:
        self._index = index
        self._selections = selections
        self._clock = clock
        self._pins: dict[tuple[str, bytes], _Pinned] = {}

    def __len__(self) -> int:
        return len(self._pins)

    def __contains__(self, at: tuple[str, bytes]) -> bool:
        return at in self._pins

    def left_s(self, at: tuple[str, bytes]) -> float | None:
        """Return the seconds that a pin has left; None if it has no end, or is no pin."""
        pinned = self._pins.get(at)
        if pinned is None or pinned.until is None:
            return None
        return max(pinned.until - self._clock(), 0.0)

    def add(self, selection: Selection, ttl_s: float | None = None) -> tuple[int, int]:
        """Pin the selected prompts; return how many prompts are new, and the blocks of all.

        All of them are pinned for ``ttl_s`` seconds from now, also those that were pinned before;
        None means without an end. Raises CapacityError, and changes nothing, if there would be more
        than `MAX_PINS`.
        """
        until = None if ttl_s is None else self._clock() + ttl_s
        wanted: list[tuple[str, bytes]] = []
        known: list[tuple[str, bytes]] = []
        blocks = 0
        for tier in selection.tiers:
            ends, count = self._selections.ends(selection, tier)
            blocks += count
            for end in ends:
                (known if (tier, end) in self._pins else wanted).append((tier, end))
        if len(self._pins) + len(wanted) > MAX_PINS:
            raise CapacityError(
                f"{len(wanted)} prompts; {MAX_PINS} in all can be pinned: give less"
            )
        for tier, end in wanted:
            space = self._index.namespace_of(end)
            self._pins[tier, end] = _Pinned(self._index.pin(tier, end), space, until)
        for at in known:
            self._pins[at] = self._pins[at]._replace(until=until)
        return len(wanted), blocks

    def release(self, selection: Selection) -> int:
        """Undo the pins on selected blocks; return how many there were."""
        pins = [at for at, pinned in self._pins.items() if selection.covers(*at, pinned.namespace)]
        for at in pins:
            self._index.unpin(self._pins.pop(at).pin)
        return len(pins)

    def release_ended(self) -> None:
        """Undo the pins whose time is over."""
        now = self._clock()
        ended = [
            at
            for at, pinned in self._pins.items()
            if pinned.until is not None and pinned.until <= now
        ]
        for at in ended:
            self._index.unpin(self._pins.pop(at).pin)

    def release_dropped(self) -> None:
        """Undo the pins on blocks that were dropped: they keep slots that no lookup finds."""
        for at in [at for at, pinned in self._pins.items() if pinned.pin.doomed]:
            self._index.unpin(self._pins.pop(at).pin)

    def close(self) -> None:
        """Undo every pin."""
        for pinned in self._pins.values():
            self._index.unpin(pinned.pin)
        self._pins.clear()
