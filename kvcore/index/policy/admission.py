"""Admission: which blocks are worth a write to a medium that wears out."""

from __future__ import annotations

from abc import ABC, abstractmethod

from kvcore.errors import ConfigError

__all__ = ["AdmissionFilter", "Always", "OnNthUse"]


class AdmissionFilter(ABC):
    """Decides on each use of a block that is not in the tier yet. Leader thread only."""

    @abstractmethod
    def admit(self, key: bytes) -> bool:
        """Count one use, and return True if the block should be stored now."""


class Always(AdmissionFilter):
    """Stores everything."""

    def admit(self, key: bytes) -> bool:
        return True


class OnNthUse(AdmissionFilter):
    """Stores a block at its ``n``-th use.

    Counts are kept in a count-min sketch of four rows of one-byte counters, ``width`` each (a power
    of two; 4 * width bytes in total). They are halved after every 8 * width uses, so that old uses
    fade and memory never grows. Collisions can only admit a block early; apart from fading, no
    block is admitted late. Keys are hashes already, so their bytes index the rows.
    """

    def __init__(self, n: int = 2, width: int = 1 << 20) -> None:
        if not 1 <= n <= 255:
            raise ConfigError(f"n must be 1 to 255, got {n}")
        if width < 1 or width & (width - 1) or width > 1 << 32:
            raise ConfigError(f"width must be a power of two up to 2**32, got {width}")
        self.n = n
        self.width = width
        self._rows = [bytearray(width) for _ in range(4)]
        self._fade_after = self._until_fade = 8 * width

    def admit(self, key: bytes) -> bool:
        number = int.from_bytes(key, "little")
        cells = [(number >> 32 * i) & (self.width - 1) for i in range(4)]
        count = min(row[cell] for row, cell in zip(self._rows, cells, strict=True)) + 1
        for row, cell in zip(self._rows, cells, strict=True):
            if row[cell] < count <= 255:  # conservative update: raise only the smallest
                row[cell] = count
        self._until_fade -= 1
        if not self._until_fade:
            self._fade()
        return count >= self.n

    def _fade(self) -> None:
        halved = bytes(value // 2 for value in range(256))
        self._rows = [row.translate(halved) for row in self._rows]
        self._until_fade = self._fade_after
