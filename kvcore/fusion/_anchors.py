"""Hashes of token windows, and the table that maps them to places.

Equal hashes only suggest equal tokens. The finder compares the tokens before it reports a match.
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
_TAIL = 64  # initial number of slots after the last home, so that probing need not wrap around
_LEAST = 6  # bits of the smallest table


def window_tags(tokens: Tokens, window: int, salt: int, bits: int = TAG_BITS) -> Tags:
    """Return a non-zero tag for every window of ``window`` tokens: [tokens - window + 1].

    A window of 2, 4, 8, ... tokens is hashed from its two halves, at all offsets at once. For a
    length between two powers of two, two overlapping windows are joined. ``salt`` (64 bits)
    prevents prepared collisions. ``bits`` limits the significant bits of a tag, so that tests can
    provoke collisions. Arithmetic is modulo 2^64, which numpy does silently on arrays.
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
    """A map from 32-bit tags to the places of their windows. A tag may have several places.

    The table uses open addressing in two numpy arrays. A slot takes 12 bytes and the table is a
    quarter to a half full, so an anchor takes 24 to 48 bytes. A tag's home slot is given by its
    highest bits: doubling the table keeps the order of homes and is one vectorised pass (0.1 s per
    million anchors). Not thread-safe.
    """

    __slots__ = ("_bits", "_places", "_tags", "_tail", "count", "max_twins")

    def __init__(self, expected: int, max_twins: int) -> None:
        self.count = 0
        self.max_twins = max_twins
        self._tail = _TAIL
        self._allocate(max(_LEAST, (2 * expected - 1).bit_length()))

    @property
    def nbytes(self) -> int:
        """Size of both arrays in bytes."""
        return self._tags.nbytes + self._places.nbytes

    def put(self, tag: int, place: int) -> bool:
        """Add a place. Return False, and add nothing, if the tag has ``max_twins`` places."""
        if 2 * (self.count + 1) > 1 << self._bits:
            self._rebuild(self._bits + 1)
        tags = self._tags.data
        at, twins = tag >> (TAG_BITS - self._bits), 0
        while seen := tags[at]:
            twins += seen == tag
            at += 1
        if twins >= self.max_twins:
            return False
        if at == len(tags) - 1:  # the last slot stays empty, because it ends every search
            self._tail *= 2
            self._rebuild(self._bits)
            return self.put(tag, place)
        tags[at] = tag
        self._places[at] = place
        self.count += 1
        return True

    def remove(self, tag: int, place: int) -> bool:
        """Remove a place and close the gap. Return False if it is not there."""
        tags, places, shift = self._tags.data, self._places.data, TAG_BITS - self._bits
        gap = tag >> shift
        while tags[gap] != tag or places[gap] != place:
            if not tags[gap]:
                return False
            gap += 1
        at = gap
        while seen := tags[at := at + 1]:
            if seen >> shift <= gap:  # its home is not behind the gap, so it may move there
                tags[gap], places[gap] = seen, places[at]
                gap = at
        tags[gap] = 0
        self.count -= 1
        return True

    def lookup(self, tags: Tags) -> tuple[Offsets, Places]:
        """Return all places of all tags, in no order: indices into ``tags``, and the places."""
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
        """Assert that every entry can be reached from its home, and that the count is right."""
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
        assert bits < TAG_BITS, "more anchors than 32-bit tags can distinguish"
        self._bits = bits
        self._tags = np.zeros((1 << bits) + self._tail, dtype=np.uint32)
        self._places = np.zeros((1 << bits) + self._tail, dtype=np.uint64)

    def _rebuild(self, bits: int) -> None:
        """Add all entries again in the order of homes, each at its home or after the last one."""
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
