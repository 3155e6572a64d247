"""Hashes of token windows, and the table in which the finder looks them up.

A hash leads to places that may hold the same tokens; it never decides that they do.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["AnchorTable", "Tokens", "window_tags"]

Tokens = npt.NDArray[np.uint32]
Tags = npt.NDArray[np.uint32]
Hashes = npt.NDArray[np.uint64]
Places = npt.NDArray[np.uint64]
Offsets = npt.NDArray[np.int64]

TAG_BITS = 32
_SPREAD = np.uint64(0x9E3779B97F4A7C15)  # odd, with its bits well mixed (2^64 / golden ratio)
_FOLD = np.uint64(29)
_TAIL = 64  # slots after the last home, at first, so that probing need not wrap around
_LEAST = 6  # bits of the smallest table


def window_tags(tokens: Tokens, window: int, salt: int, bits: int = TAG_BITS) -> Tags:
    """A non-zero tag for every window of ``window`` tokens: [tokens - window + 1].

    Windows of 1, 2, 4, ... tokens are hashed from two of half the length, at all offsets at once;
    a length between powers of two is two overlapping ones. ``salt`` (64 bits) keeps others from
    preparing collisions; ``bits`` keeps only so many bits of a tag, to provoke them in tests.
    Arithmetic is modulo 2^64, which numpy does silently on arrays.
    """
    if len(tokens) < window:
        return np.empty(0, dtype=np.uint32)
    mixed = (tokens.astype(np.uint64) ^ np.uint64(salt)) * _SPREAD
    mixed ^= mixed >> _FOLD
    length = 1
    while 2 * length <= window:
        mixed = _join(mixed[:-length], mixed[length:])
        length *= 2
    if length < window:
        mixed = _join(mixed[: length - window], mixed[window - length :])
    kept = mixed >> np.uint64(64 - bits) << np.uint64(TAG_BITS - bits)
    tags: Tags = np.maximum(kept, np.uint64(1)).astype(np.uint32)
    return tags


def _join(left: Hashes, right: Hashes) -> Hashes:
    joined: Hashes = (left * _SPREAD + right) * _SPREAD
    joined ^= joined >> _FOLD
    return joined


class AnchorTable:
    """Maps 32-bit tags to the places where their windows stand. A tag may have several places.

    Open addressing in two numpy arrays, 12 bytes a slot, a quarter to a half full: 24 to 48 bytes
    an anchor. A tag's home is its highest bits, so that doubling keeps the order of homes and is
    one vectorised pass (0.1 s a million anchors). Not thread-safe.
    """

    __slots__ = ("_bits", "_places", "_tags", "_tail", "count", "max_twins")

    def __init__(self, expected: int, max_twins: int) -> None:
        self.count = 0
        self.max_twins = max_twins
        self._tail = _TAIL
        self._allocate(max(_LEAST, (2 * expected - 1).bit_length()))

    @property
    def nbytes(self) -> int:
        """Bytes of both arrays."""
        return self._tags.nbytes + self._places.nbytes

    def put(self, tag: int, place: int) -> bool:
        """Enter a place. False, and nothing done, if ``max_twins`` places have that tag already."""
        if 2 * (self.count + 1) > 1 << self._bits:
            self._rebuild(self._bits + 1)
        tags = self._tags.data
        at, twins = tag >> (TAG_BITS - self._bits), 0
        while seen := tags[at]:
            twins += seen == tag
            at += 1
        if twins >= self.max_twins:
            return False
        if at == len(tags) - 1:  # the last one stays empty: it ends every search
            self._tail *= 2
            self._rebuild(self._bits)
            return self.put(tag, place)
        tags[at] = tag
        self._places[at] = place
        self.count += 1
        return True

    def remove(self, tag: int, place: int) -> bool:
        """Take a place out and close the gap. False if it is not there."""
        tags, places, shift = self._tags.data, self._places.data, TAG_BITS - self._bits
        gap = tag >> shift
        while tags[gap] != tag or places[gap] != place:
            if not tags[gap]:
                return False
            gap += 1
        at = gap
        while seen := tags[at := at + 1]:
            if seen >> shift <= gap:  # its home is not past the gap: it may move there
                tags[gap], places[gap] = seen, places[at]
                gap = at
        tags[gap] = 0
        self.count -= 1
        return True

    def lookup(self, tags: Tags) -> tuple[Offsets, Places]:
        """All places of all tags: indices into ``tags`` and, beside them, places. In no order."""
        queries: list[Offsets] = []
        places: list[Places] = []
        query = np.arange(len(tags))
        at = (tags >> np.uint32(TAG_BITS - self._bits)).astype(np.int64)
        while query.size:
            seen = self._tags[at]
            same = np.flatnonzero(seen == tags)
            queries.append(query[same])
            places.append(self._places[at[same]])
            going = np.flatnonzero(seen)
            query, tags, at = query[going], tags[going], at[going] + 1
        if not queries:
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.uint64)
        return np.concatenate(queries), np.concatenate(places)

    def check_integrity(self) -> None:
        """Assert that every entry can be reached from its home, and the count."""
        filled = np.flatnonzero(self._tags)
        assert len(filled) == self.count <= 1 << self._bits >> 1
        assert not self._tags[-1]
        homes = (self._tags[filled] >> np.uint32(TAG_BITS - self._bits)).astype(np.int64)
        empty = np.flatnonzero(self._tags == 0)
        before = np.searchsorted(empty, filled)
        last_empty = np.where(before > 0, empty[np.maximum(before - 1, 0)], -1)
        assert (last_empty < homes).all()
        assert (homes <= filled).all()

    def _allocate(self, bits: int) -> None:
        assert bits < TAG_BITS, "more anchors than 32-bit tags can tell apart"
        self._bits = bits
        self._tags = np.zeros((1 << bits) + self._tail, dtype=np.uint32)
        self._places = np.zeros((1 << bits) + self._tail, dtype=np.uint64)

    def _rebuild(self, bits: int) -> None:
        """Enter all anew, in order of homes: each at its home, or right after the one before."""
        filled = np.flatnonzero(self._tags)
        filled = filled[np.argsort(self._tags[filled], kind="stable")]
        tags, places = self._tags[filled], self._places[filled]
        homes = (tags >> np.uint32(TAG_BITS - bits)).astype(np.int64)
        rank = np.arange(len(tags))
        at = np.maximum.accumulate(homes - rank) + rank
        while at.size and at[-1] >= (1 << bits) + self._tail - 1:
            self._tail *= 2
        self._allocate(bits)
        self._tags[at] = tags
        self._places[at] = places
