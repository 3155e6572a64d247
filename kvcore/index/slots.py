"""Allocation of one tier's slots: a fixed byte budget cut into equal slots.

The free set is a watermark (slots never used yet) plus a stack of freed slots, so an empty tier of
ten million slots costs nothing to create. A bitmap turns a double free into an assertion.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvcore.errors import CapacityError, ConfigError

__all__ = ["SlotPool", "SlotRun", "slot_runs"]

Slots = npt.NDArray[np.int64]


class SlotRun(NamedTuple):
    """The slots [start, stop)."""

    start: int
    stop: int


def slot_runs(slots: Iterable[int]) -> list[SlotRun]:
    """Return ``slots``, in any order, as runs of consecutive slots."""
    ordered = np.unique(np.fromiter(slots, np.int64))
    if not len(ordered):
        return []
    last = np.flatnonzero(np.diff(ordered) != 1)  # last slot of every run but the last
    starts = ordered[np.concatenate(([0], last + 1))].tolist()
    stops = (ordered[np.concatenate((last, [-1]))] + 1).tolist()
    return [SlotRun(*run) for run in zip(starts, stops, strict=True)]


class SlotPool:
    """Allocator of slots 0 .. num_slots - 1. Not thread-safe: the leader owns it.

    With ``foreign`` it also tracks slots outside that range, which belong to another store. They
    can be claimed and freed, but are never allocated.
    """

    def __init__(self, num_slots: int, *, foreign: bool = False) -> None:
        if num_slots < 1:
            raise ConfigError(f"a tier needs at least 1 slot, got {num_slots}: raise its capacity")
        self.num_slots = num_slots
        self._used = bytearray(num_slots)
        self._freed = array("q")
        self._fresh = 0  # this slot and all after it were never used
        self._stale = False  # _freed and _fresh must be rebuilt from _used
        self._num_used = 0
        self._foreign: set[int] | None = set() if foreign else None

    @property
    def num_free(self) -> int:
        """Number of own slots that `allocate` can return now."""
        return self.num_slots - self._num_used

    @property
    def num_used(self) -> int:
        """Number of slots in use, foreign ones included."""
        return self._num_used + len(self._foreign or ())

    def allocate(self, count: int) -> Slots:
        """Allocate ``count`` slots, in ascending order if that costs nothing (neighbours coalesce).

        Raises `CapacityError` and allocates none if fewer are free.
        """
        if count > self.num_free:
            raise CapacityError(
                f"{count} slots asked for, {self.num_free} of {self.num_slots} free"
            )
        if self._stale:
            self._rebuild()
        reused = min(count, len(self._freed))
        fresh = np.arange(self._fresh, self._fresh + count - reused, dtype=np.int64)
        self._fresh += count - reused
        slots: Slots = fresh
        if reused:
            tail = np.array(self._freed[-reused:], dtype=np.int64)
            del self._freed[-reused:]
            slots = np.concatenate([np.sort(tail), fresh])
        np.frombuffer(self._used, dtype=np.uint8)[slots] = 1
        self._num_used += count
        return slots

    def free(self, slot: int) -> None:
        """Free one slot. Asserts that it is in use."""
        if slot >= self.num_slots:
            assert self._foreign is not None, f"slot {slot} of {self.num_slots}"
            self._foreign.remove(slot)
            return
        assert self._used[slot], f"slot {slot} freed twice"
        self._used[slot] = 0
        self._num_used -= 1
        if not self._stale:
            self._freed.append(slot)

    def free_all(self, slots: Iterable[int]) -> None:
        """Free each of ``slots``."""
        for slot in slots:
            self.free(slot)

    def claim(self, slot: int) -> bool:
        """Mark a given slot as used, after a restart; returns False if it is used already."""
        if slot >= self.num_slots:
            if self._foreign is None or slot in self._foreign:
                return False
            self._foreign.add(slot)
            return True
        if slot < 0 or self._used[slot]:
            return False
        self._used[slot] = 1
        self._num_used += 1
        self._stale = True
        return True

    def free_slots(self) -> list[int]:
        """Return the own slots that are not in use, in ascending order."""
        found: list[int] = np.flatnonzero(np.frombuffer(self._used, dtype=np.uint8) == 0).tolist()
        return found

    def check_integrity(self, in_use: Sequence[int]) -> None:
        """Assert that exactly ``in_use`` are used, and that the rest is free once each."""
        assert len(set(in_use)) == len(in_use), "one slot holds two blocks"
        own = {slot for slot in in_use if slot < self.num_slots}
        assert own == {slot for slot, used in enumerate(self._used) if used}, "bitmap"
        assert set(in_use) - own == (self._foreign or set()), "foreign slots"
        assert self._num_used == len(own)
        if not self._stale:
            freed = [*self._freed, *range(self._fresh, self.num_slots)]
            assert len(freed) == len(set(freed)) == self.num_free
            assert not own & set(freed)

    def _rebuild(self) -> None:
        free = np.flatnonzero(np.frombuffer(self._used, dtype=np.uint8) == 0)
        self._freed = array("q", free[::-1].astype(np.int64).tobytes())
        self._fresh = self.num_slots
        self._stale = False
