"""Search for stored segments anywhere in a prompt that does not mark them.

    stored    [====]     [====]     [====]     [=       an anchor: a window at every ``stride``
                   |<-   a match  ->|
    prompt    .....|................|............       a window is looked up at every offset

``window + stride - 1 = min_tokens``, so any run of ``min_tokens`` tokens of a segment contains a
whole anchor, and every match of that length is found. Each place that a hash leads to is compared
token by token, and extended in both directions as far as the tokens are equal.

The prompt is covered with matches from the left. At the first position where a match of at least
``min_tokens`` begins, the longest match that begins there is taken (then the smallest segment id,
then the smallest start). The search continues after it. The uncovered parts contain no further
match. `NaiveSegmentIndex` defines the same result in a few lines.

Memory: 4 bytes per token for the comparison (KV takes thousands of times as much), 24 to 48 bytes
per anchor, and about 400 bytes per segment.
"""

from __future__ import annotations

import secrets
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from kvcore.errors import ConfigError
from kvcore.fusion._anchors import TAG_BITS, AnchorTable, Tokens, window_tags
from kvcore.model.keys import TOKEN_BYTES, pack_tokens

__all__ = [
    "NaiveSegmentIndex",
    "SegmentIndex",
    "SegmentMatch",
    "SegmentSearch",
    "as_array",
    "common",
]

MAX_TWINS = 4
MAX_CHECKS = 2048


class SegmentMatch(NamedTuple):
    """prompt[prompt_start:][:length] equals segment[segment_start:][:length]."""

    segment_id: bytes
    prompt_start: int
    segment_start: int
    length: int


class _MatchRun(NamedTuple):
    """A match, extended as far as possible; ``start`` and ``stop`` are in the prompt."""

    number: int
    start: int
    stop: int
    segment_start: int


class SegmentIndex:
    """An index of stored segments, which finds them in prompts. Not thread-safe; nothing blocks.

    ``min_tokens`` is the shortest match that counts. ``expected_tokens`` is the total size of all
    segments. The table is sized for it from the start. Beyond that size it doubles when it is full,
    which takes 0.1 s per million anchors. Two bounds limit the memory and time that repetitive text
    can cost:

    - At most ``max_twins`` places are kept for windows with equal hashes. Segments that begin alike
      are still found, by the windows in which they differ. A window that was not kept is not added
      until its segment is removed and added again.
    - `find` compares tokens at no more than ``max_checks`` places (about 5 us each). Then it
      returns what it has found so far, and counts that in `cut_short`.

    ``tag_bits`` below 32 makes hashes collide, for tests.
    """

    def __init__(
        self,
        min_tokens: int = 64,
        *,
        expected_tokens: int = 0,
        max_twins: int = MAX_TWINS,
        max_checks: int = MAX_CHECKS,
        tag_bits: int = TAG_BITS,
    ) -> None:
        bounds = {"min_tokens": min_tokens, "max_twins": max_twins, "max_checks": max_checks}
        for name, value in bounds.items():
            if value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")
        if not 1 <= tag_bits <= TAG_BITS:
            raise ConfigError(f"tag_bits is {tag_bits}; it must be from 1 to {TAG_BITS}")
        self.min_tokens = min_tokens
        self.max_checks = max_checks
        self.cut_short = 0
        self._window = (min_tokens + 1) // 2
        self._stride = min_tokens - self._window + 1
        self._tag_bits = tag_bits
        self._salt = secrets.randbits(64)
        self._table = AnchorTable(expected_tokens // self._stride, max_twins)
        self._numbers: dict[bytes, int] = {}
        self._ids: list[bytes] = []
        self._tokens: list[Tokens] = []
        self._free: list[int] = []
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, segment_id: bytes) -> bool:
        return segment_id in self._numbers

    @property
    def nbytes(self) -> int:
        """Bytes of tokens and anchors, without Python objects (about 400 per segment). O(1)."""
        return self._table.nbytes + self._num_tokens * TOKEN_BYTES

    def tokens(self, segment_id: bytes) -> Tokens:
        """Return the tokens of a held segment. The caller must not write to them."""
        return self._tokens[self._numbers[segment_id]]

    def add(self, segment_id: bytes, tokens: Iterable[int]) -> bool:
        """Add a segment. Return False, and add nothing, if it is too short to be found.

        A held segment may be added again with the same tokens. With other tokens, a `ConfigError`
        is raised, because one of the two does not belong to the id. O(tokens).
        """
        segment = as_array(tokens)
        held = self._numbers.get(segment_id)
        if held is not None:
            if not np.array_equal(self._tokens[held], segment):
                raise ConfigError(
                    f"segment {segment_id.hex()} is held with other tokens; "
                    "give every segment its own id, or remove it first"
                )
            return True
        if len(segment) < self.min_tokens:
            return False
        number = self._number_for(segment_id, segment)
        for tag, place in self._anchors(number, 0):
            self._table.put(tag, place)
        return True

    def extend(self, segment_id: bytes, tokens: Iterable[int]) -> None:
        """Append tokens to a held segment. O(tokens) in Python; the segment is copied."""
        number = self._numbers[segment_id]
        known = self._tokens[number]
        self._hold(number, np.concatenate((known, as_array(tokens))))
        for tag, place in self._anchors(number, self._count_anchors(len(known))):
            self._table.put(tag, place)

    def cut(self, segment_id: bytes, length: int) -> bool:
        """Forget all but the first ``length`` tokens of a held segment.

        Return False if the rest is too short, so that the segment is removed. O(tokens forgotten)
        in Python; the rest is copied.
        """
        if length < self.min_tokens:
            self.remove(segment_id)
            return False
        number = self._numbers[segment_id]
        for tag, place in self._anchors(number, self._count_anchors(length)):
            self._table.remove(tag, place)
        self._hold(number, self._tokens[number][:length].copy())
        return True

    def remove(self, segment_id: bytes) -> bool:
        """Forget a segment. Return False if it is not held. O(tokens)."""
        number = self._numbers.pop(segment_id, None)
        if number is None:
            return False
        for tag, place in self._anchors(number, 0):
            self._table.remove(tag, place)
        self._ids[number] = b""
        self._hold(number, _NO_TOKENS)
        self._free.append(number)
        return True

    def find(self, tokens: Iterable[int]) -> list[SegmentMatch]:
        """Return the stored parts of the prompt, in its order and without overlaps."""
        return self.search(tokens).cover()

    def search(self, tokens: Iterable[int]) -> SegmentSearch:
        """Start a `find` in two steps.

        Before the second step the caller may `remove` or `cut` candidates.
        """
        prompt = as_array(tokens)
        if not self._numbers or len(prompt) < self.min_tokens:
            return SegmentSearch(self, prompt, [], [])
        tags = window_tags(prompt, self._window, self._salt, self._tag_bits)
        offsets, places = self._table.lookup(tags)
        order = np.argsort(offsets, kind="stable")
        return SegmentSearch(self, prompt, offsets[order].tolist(), places[order].tolist())

    def check_integrity(self) -> None:
        """Assert that table, numbers and segments agree."""
        self._table.check_integrity()
        assert sorted([*self._numbers.values(), *self._free]) == list(range(len(self._ids)))
        assert all(self._ids[number] == name for name, number in self._numbers.items())
        for number in self._free:
            assert not len(self._tokens[number])
        assert self._num_tokens == sum(map(len, self._tokens))
        assert self._table.count <= sum(self._count_anchors(len(held)) for held in self._tokens)

    def _number_for(self, segment_id: bytes, segment: Tokens) -> int:
        if self._free:
            number = self._free.pop()
        else:
            number = len(self._ids)
            self._ids.append(b"")
            self._tokens.append(_NO_TOKENS)
        self._ids[number] = segment_id
        self._hold(number, segment)
        self._numbers[segment_id] = number
        return number

    def _hold(self, number: int, tokens: Tokens) -> None:
        self._num_tokens += len(tokens) - len(self._tokens[number])
        self._tokens[number] = tokens

    def _count_anchors(self, length: int) -> int:
        """Return how many anchors ``length`` tokens have."""
        return max(0, -(-(length - self._window + 1) // self._stride))

    def _anchors(self, number: int, begin: int) -> Iterable[tuple[int, int]]:
        """Return tag and place of a segment's anchors from number ``begin`` on."""
        start = begin * self._stride
        rest = self._tokens[number][start:]
        tags = window_tags(rest, self._window, self._salt, self._tag_bits)
        first = (number << 32) + start
        anchored = tags[:: self._stride].tolist()
        places = range(first, first + len(tags), self._stride)
        return zip(anchored, places, strict=True)


class SegmentSearch:
    """The search in one prompt. Hashes are equal at ``offsets`` (ascending) and ``places``.

    Before `cover` is called, segments may be removed and cut, but not added or extended.
    """

    def __init__(
        self, index: SegmentIndex, prompt: Tokens, offsets: list[int], places: list[int]
    ) -> None:
        self._index = index
        self.prompt = prompt
        self._offsets = offsets
        self._places = places
        self._runs: dict[tuple[int, int], _MatchRun] = {}  # the last run by (segment, diagonal)
        self._checks = index.max_checks

    @property
    def candidates(self) -> list[bytes]:
        """Ids of held segments, including all that `cover` may find."""
        numbers = sorted({place >> 32 for place in self._places})
        return [self._index._ids[number] for number in numbers if self._index._ids[number]]

    def cover(self) -> list[SegmentMatch]:
        """Return matches that cover the prompt from the left: see the module's docstring."""
        covered, done = [], 0
        while self._checks and (found := self._next(done)) is not None:
            covered.append(found)
            done = found.prompt_start + found.length
        self._index.cut_short += not self._checks
        return covered

    def _next(self, done: int) -> SegmentMatch | None:
        """Return the first match at or after ``done``; of several, the longest."""
        best: SegmentMatch | None = None
        hit = bisect_left(self._offsets, done)
        while self._checks and (hit := self._worth(hit, best)) < len(self._offsets):
            if best is None or self._may_beat(hit, done, best):
                found = self._found(hit, done)
                if found is not None and (best is None or _rank(found) < _rank(best)):
                    best = found
            hit += 1
        return best

    def _worth(self, hit: int, best: SegmentMatch | None) -> int:
        """Return the next hit, from ``hit`` on, that may lead to a better match than ``best``.

        A match that begins no later has an anchor in the first stride. If that anchor was one of
        too many twins and was not kept, a longer match has an anchor that reaches past the best.
        """
        offsets, stride = self._offsets, self._index._stride
        if best is None or hit == len(offsets) or offsets[hit] < best.prompt_start + stride:
            return hit
        past = best.prompt_start + best.length - self._index._window
        hit = bisect_right(offsets, past, hit)
        return hit if hit < len(offsets) and offsets[hit] <= past + stride else len(offsets)

    def _may_beat(self, hit: int, done: int, best: SegmentMatch) -> bool:
        """Return True if the segment, aligned at the hit, starts earlier or reaches as far."""
        number, start = self._place(hit)
        first = self._offsets[hit] - start
        start, stop = max(first, done), first + len(self._index._tokens[number])
        return start < best.prompt_start or (
            start == best.prompt_start and stop >= best.prompt_start + best.length
        )

    def _place(self, hit: int) -> tuple[int, int]:
        """Return the segment's number and the window's position in it."""
        place = self._places[hit]
        return place >> 32, place & 0xFFFFFFFF

    def _found(self, hit: int, done: int) -> SegmentMatch | None:
        """Return the uncovered rest of the match at a hit; None if that is too short."""
        run = self._run(hit)
        if run is None:
            return None
        start = max(run.start, done)
        if run.stop - start < self._index.min_tokens:
            return None
        segment_start = run.segment_start + start - run.start
        return SegmentMatch(self._index._ids[run.number], start, segment_start, run.stop - start)

    def _run(self, hit: int) -> _MatchRun | None:
        """Return the run of equal tokens around a hit; None if only the hashes are equal."""
        at, (number, start) = self._offsets[hit], self._place(hit)
        known = self._runs.get((number, start - at))
        if known is not None and known.start <= at < known.stop:
            return known
        self._checks -= 1
        prompt, segment = self.prompt, self._index._tokens[number]
        ahead = common(prompt[at:], segment[start:])
        if ahead < self._index._window:
            return None
        behind = common(prompt[:at][::-1], segment[:start][::-1])
        run = _MatchRun(number, at - behind, at + ahead, start - behind)
        self._runs[number, start - at] = run
        return run


def _rank(found: SegmentMatch) -> tuple[int, int, bytes, int]:
    """Return the sort key of a match; smaller is better."""
    return found.prompt_start, -found.length, found.segment_id, found.segment_start


def common(left: Tokens, right: Tokens) -> int:
    """Return the length of the common prefix. Reads little more than that."""
    stop, done, step = min(len(left), len(right)), 0, 256
    while done < stop:
        ahead = slice(done, min(done + step, stop))
        differs = left[ahead] != right[ahead]
        first = int(differs.argmax())
        if differs[first]:
            return done + first
        done, step = ahead.stop, 4 * step
    return stop


def as_array(tokens: Iterable[int]) -> Tokens:
    """Return token ids, of any kind that `pack_tokens` accepts, as a new array."""
    return np.frombuffer(pack_tokens(tokens), dtype="<u4")


_NO_TOKENS = as_array(())


class NaiveSegmentIndex:
    """A reference for `SegmentIndex` that compares everything with everything."""

    def __init__(self, min_tokens: int = 64) -> None:
        self.min_tokens = min_tokens
        self._segments: dict[bytes, list[int]] = {}

    def add(self, segment_id: bytes, tokens: Iterable[int]) -> bool:
        """See `SegmentIndex.add`."""
        segment = list(tokens)
        if len(segment) < self.min_tokens:
            return False
        self._segments[segment_id] = segment
        return True

    def extend(self, segment_id: bytes, tokens: Iterable[int]) -> None:
        """See `SegmentIndex.extend`."""
        self._segments[segment_id] = [*self._segments[segment_id], *tokens]

    def cut(self, segment_id: bytes, length: int) -> bool:
        """See `SegmentIndex.cut`."""
        return self.add(segment_id, self._segments.pop(segment_id)[:length])

    def remove(self, segment_id: bytes) -> bool:
        """See `SegmentIndex.remove`."""
        return self._segments.pop(segment_id, None) is not None

    def find(self, tokens: Iterable[int]) -> list[SegmentMatch]:
        """See `SegmentIndex.find`. O(tokens of the prompt x tokens stored x length)."""
        prompt, covered, at = list(tokens), [], 0
        while at < len(prompt):
            best = max(self._matches(prompt, at), key=lambda found: found.length, default=None)
            if best is None:
                at += 1
            else:
                covered.append(best)
                at += best.length
        return covered

    def _matches(self, prompt: list[int], at: int) -> Iterable[SegmentMatch]:
        """Yield matches that begin at ``at`` and are long enough, by segment id and start."""
        for segment_id in sorted(self._segments):
            segment = self._segments[segment_id]
            for start in range(len(segment)):
                length = 0
                for ours, theirs in zip(prompt[at:], segment[start:], strict=False):
                    if ours != theirs:
                        break
                    length += 1
                if length >= self.min_tokens:
                    yield SegmentMatch(segment_id, at, start, length)
